"""What windows of every length cost, from measured times."""

from collections import deque
from statistics import median

from .drafts import MAX_ROWS

SAMPLES = 15
MIN_ROW = 0.03  # a further row costs at least this share of a plain step
UNKNOWN_ROW = 1 / 3  # assumed cost of a further row before any was tried, in plain steps
LINE_PRIOR = 4.0  # further rows' worth of measurements that this assumption weighs
LENGTH_PRIOR = 4.0  # samples' worth that the line of all lengths weighs against one length's own
STALE = 48  # rounds after which the samples of a length are not believed any more


class WindowCosts:
    """costs[rows]: milliseconds of a window of that many rows, 1: of a plain step; 0.0 until anything is known.

    A line through plain decode, and each length's median as far as there are samples to believe it: one slow window
    says little, and a length that was found slow is not passed over for ever.
    """

    def __init__(self):
        self._samples: list[deque] = [deque(maxlen=SAMPLES) for _ in range(MAX_ROWS + 1)]
        self._medians = [0.0] * (MAX_ROWS + 1)  # of the samples
        self._measured_at = [0] * (MAX_ROWS + 1)  # round of the latest sample
        self._costs = [0.0] * (MAX_ROWS + 1)
        self._changed: set[int] = set()  # lengths with samples that are not in the costs
        self.add_plain = self._samples[1].append  # runs beside every step of a text without drafts

    def __getitem__(self, rows: int) -> float:
        return self._costs[rows]

    @property
    def plain_samples(self) -> int:
        """Plain steps since the last forget_plain, up to SAMPLES."""
        return len(self._samples[1])

    def forget_plain(self) -> None:
        """Plain decode is to be measured anew; until it is, its cost stays what it was."""
        self._samples[1].clear()

    def add(self, rows: int, ms: float, now: int) -> None:
        """A window of rows >= 2 took so long; now: the round."""
        if now - self._measured_at[rows] > STALE:
            self._samples[rows].clear()
        self._samples[rows].append(ms)
        self._measured_at[rows] = now
        self._changed.add(rows)

    def update(self, now: int) -> None:
        """Take the new samples in."""
        for rows in self._changed:
            self._medians[rows] = median(self._samples[rows])
        self._changed.clear()
        if self._samples[1]:
            self._medians[1] = median(self._samples[1])
        plain = self._medians[1] or min(filter(None, self._medians))
        # No window costs more than as many plain steps; one that took longer was held up.
        known = [
            (n, len(samples), min(self._medians[n], n * plain))
            for n, samples in enumerate(self._samples)
            if n > 1 and samples
        ]
        fresh = [row for row in known if now - self._measured_at[row[0]] <= STALE] or known
        extra, further_rows = LINE_PRIOR * UNKNOWN_ROW * plain, LINE_PRIOR
        for n, count, ms in fresh:
            extra += count * (ms - plain)
            further_rows += count * (n - 1)
        slope = max(extra / further_rows, MIN_ROW * plain)
        costs = self._costs = [plain + slope * (n - 1) for n in range(MAX_ROWS + 1)]
        for n, count, ms in fresh:
            cost = (count * ms + LENGTH_PRIOR * costs[n]) / (count + LENGTH_PRIOR)
            costs[n] = max(cost, plain * (1 + MIN_ROW * (n - 1)))
