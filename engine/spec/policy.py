"""How many rows the next window gets. The automatic policy compares measured milliseconds per emitted token.

It has a budget: what speculation has cost beyond plain decode may not exceed a small share of the time so far, so a
text whose drafts never hit cannot lose more than that share, whatever the estimates say.
"""

from collections import deque
from statistics import median

from .acceptance import Acceptance
from .drafts import MAX_ROWS

MAX_LOSS = 0.02  # share of the decode time that failed windows may cost
STARTING_LOSS_TOKENS = 2.0  # plain decode steps' worth of loss allowed before any time has passed
MIN_GAIN = 1.03  # a gain below this is noise
PLAIN_REFRESH = 256  # rounds after which plain decode is measured again
MIN_PLAIN = 3  # plain steps before anything else: the first after a prefill is slow and must not be the yardstick
MAX_CREDIT_TOKENS = 4.0  # a gain of the past pays for at most so many steps of loss
MIN_ROW = 0.03  # a further row costs at least this share of a plain step
SAMPLES = 15
PLAIN_UPDATE = 8  # plain steps after which their median is computed anew
UNKNOWN_ROW = 1 / 3  # assumed cost of a second row before one was tried, in plain steps


class FixedPolicy:
    """Always the same number of rows, as far as drafts are offered."""

    name = "fixed"
    reason = "as asked"
    switches = ()

    def __init__(self, rows: int):
        self._rows = rows

    def max_rows(self) -> int:
        return self._rows

    def rows(self, key, count: int, ms_per_draft: float, chance: float) -> int:
        return min(self._rows, count + 1)

    def use(self, rows: int) -> None:
        """Nothing to note."""

    def record_plain(self, ms: float) -> None:
        """Nothing to learn."""

    def record(self, key, rows: int, num_accepted: int, ms: float, num_verified: int) -> None:
        """Nothing to learn."""


class AutoPolicy:
    """Chooses by measured cost per window length and by acceptance per source and confidence.

    key: (source name, bucket). Times in milliseconds. switches: (round, rows before, rows after, why), for the report.
    """

    name = "auto"

    def __init__(self, max_rows: int = MAX_ROWS):
        self._max_rows = max_rows
        self._samples: list[deque] = [deque(maxlen=SAMPLES) for _ in range(MAX_ROWS + 1)]
        self._costs = [0.0] * (MAX_ROWS + 1)  # medians of the samples, filled in between; 0.0 until plain is known
        self._acceptance: dict = {}
        self._elapsed = self._loss = 0.0
        self._rounds = self._since_plain = 0
        self._last = 1
        self.reason = "nothing measured yet"
        self.switches: list[tuple[int, int, int, str]] = []

    def max_rows(self) -> int:
        return self._max_rows

    def _update_costs(self) -> None:
        """Median milliseconds of a window by rows; between and beyond measured lengths, along a straight line."""
        known = [(n, median(samples)) for n, samples in enumerate(self._samples) if samples]
        (last, cost), later = known[0], known[1:]
        self._costs[: last + 1] = [cost] * (last + 1)
        for n, next_cost in later:
            for between in range(last + 1, n + 1):
                self._costs[between] = cost + (next_cost - cost) * (between - last) / (n - last)
            last, cost = n, next_cost
        # Rows more than were ever tried cost what the last ones did; without a window of two, an assumed share.
        slope = (cost - self._costs[1]) / (last - 1) if last > 1 else UNKNOWN_ROW * cost
        for n in range(last + 1, MAX_ROWS + 1):
            self._costs[n] = cost + slope * (n - last)
        # Lengths are not measured at the same time: a longer window that looks cheaper than a shorter one only shows
        # that the machine was busy, and would make windows pay that never emit more than one token.
        for n in range(MAX_ROWS - 1, 0, -1):
            self._costs[n] = min(self._costs[n], self._costs[n + 1])
        for n in range(2, MAX_ROWS + 1):
            self._costs[n] = max(self._costs[n], self._costs[1] * (1 + MIN_ROW * (n - 1)))

    def _choose(self, key, count: int, ms_per_draft: float, chance: float) -> tuple[int, str]:
        if len(self._samples[1]) < MIN_PLAIN or self._since_plain >= PLAIN_REFRESH:
            return 1, "measuring plain decode"
        plain = self._costs[1]
        acceptance = self._acceptance.get(key)
        if acceptance is None:
            acceptance = self._acceptance[key] = Acceptance(chance)
        best, best_rate = 1, plain
        for rows, tokens in zip(range(2, min(count + 1, self._max_rows) + 1), acceptance.tokens[2:], strict=False):
            rate = (self._costs[rows] + ms_per_draft * (rows - 1)) / tokens
            if rate < best_rate:
                best, best_rate = rows, rate
        gain = plain / best_rate
        # Staying as it is needs no margin, changing between plain and speculative does.
        if best > 1 and gain < (MIN_GAIN if self._last == 1 else 1.0):
            best = 1
        if best == 1:
            return self._probe(count, ms_per_draft)
        worst = self._costs[best] + ms_per_draft * (best - 1) - plain
        if self._loss + worst > self._allowed(plain):
            return 1, f"loss budget of {MAX_LOSS:.0%} used up"
        return best, f"{gain:.2f} x plain decode expected"

    def _allowed(self, plain: float) -> float:
        return MAX_LOSS * self._elapsed + STARTING_LOSS_TOKENS * plain

    def _probe(self, count: int, ms_per_draft: float) -> tuple[int, str]:
        """Nothing pays now; try the shortest window again when the budget has room for it twice over."""
        plain = self._costs[1]
        worst = max(self._costs[2] + ms_per_draft - plain, 0.1 * plain)
        if count and self._loss + 2 * worst < MAX_LOSS * self._elapsed:
            return 2, "trying again"
        return 1, "no window length pays"

    def rows(self, key, count: int, ms_per_draft: float, chance: float = 0.5) -> int:
        """Rows for the next window when a source offers `count` drafts; 1: plain decode, or another source."""
        rows, self.reason = self._choose(key, count, ms_per_draft, chance)
        return rows

    def use(self, rows: int) -> None:
        """The window gets this many rows; called once for the answers that `rows` gave about all sources."""
        if (rows > 1) != (self._last > 1):
            self.switches.append((self._rounds, self._last, rows, self.reason))
        self._last = rows

    def record_plain(self, ms: float) -> None:
        """A plain step took `ms`. Runs beside every step of a text without drafts, so it does little."""
        self._rounds += 1
        self._since_plain = 0
        self._elapsed += ms
        self._samples[1].append(ms)
        if self._rounds <= MIN_PLAIN or self._rounds % PLAIN_UPDATE == 0:
            self._update_costs()

    def record(self, key, rows: int, num_accepted: int, ms: float, num_verified: int) -> None:
        """A window of rows >= 2 took `ms`, drafting included, and emitted num_accepted + 1 tokens; num_verified: of its
        drafts, how many were not dropped on the way."""
        self._rounds += 1
        self._since_plain += 1
        self._elapsed += ms
        self._samples[rows].append(ms)
        self._update_costs()
        if key in self._acceptance:
            self._acceptance[key].update(num_verified, num_accepted)
        if self._samples[1]:
            plain = self._costs[1]
            self._loss = max(self._loss + ms - plain * (num_accepted + 1), -MAX_CREDIT_TOKENS * plain)
