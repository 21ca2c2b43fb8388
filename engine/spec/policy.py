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
MAX_CREDIT_TOKENS = 16.0  # what was gained, or not spent of that share, pays for at most so many steps of loss
MAX_CHARGE = 1.5  # a window costs the budget at once at most so many times what its length costs otherwise
MIN_ROW = 0.03  # a further row costs at least this share of a plain step
SAMPLES = 15
TRYING = "trying again"
BETWEEN_TRIALS = 32  # rounds, at least, unless the draft was right; twice as many after every trial that failed ...
MAX_BETWEEN_TRIALS = 64  # ... up to these
MISSES = 16  # windows in a row without a hit that cast doubt on the yardstick: plain decode is measured anew
REFUSED = 8  # rounds that a refusal holds: nothing changes so fast, and asking costs a share of a small model's step
UNKNOWN_ROW = 1 / 3  # assumed cost of a further row before any was tried, in plain steps
LINE_PRIOR = 4.0  # further rows' worth of measurements that this assumption weighs
LENGTH_PRIOR = 4.0  # samples' worth that the line of all lengths weighs against one length's own
AWAKE = 16  # plain rounds after which sources are not asked every round any more
REST = 3  # rounds between two that ask, then: asking costs a share of a small model's step
STALE = 48  # rounds after which the samples of a length are not believed any more


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

    def rest(self) -> int:
        """Plain rounds that may follow before sources are asked again."""
        return 0

    def record_plain(self, ms: float) -> None:
        """Nothing to learn."""

    def record(self, key, rows: int, num_accepted: int, ms: float, num_verified: int, draft_ms: float = 0.0) -> None:
        """Nothing to learn."""


class AutoPolicy:
    """Chooses by measured cost per window length and by acceptance per source and confidence.

    key: (source name, bucket). Times in milliseconds. switches: (round, rows before, rows after, why), for the report.
    """

    name = "auto"

    def __init__(self, max_rows: int = MAX_ROWS):
        self._max_rows = max_rows
        self._samples: list[deque] = [deque(maxlen=SAMPLES) for _ in range(MAX_ROWS + 1)]
        self._medians = [0.0] * (MAX_ROWS + 1)  # of the samples
        self._measured_at = [0] * (MAX_ROWS + 1)  # round of the latest sample
        self._costs = [0.0] * (MAX_ROWS + 1)  # of windows by rows; 0.0 until anything is known
        self._acceptance: dict = {}
        self._refused: dict = {}  # key: round until which the answer is known to be 1
        self._between: dict = {}  # key: rounds from its last failed trial to the next
        self._loss = 0.0  # ms that windows have cost beyond plain decode, less what they may cost
        self._plain_ms = 0.0  # of plain steps that are not accounted for yet
        self._late = 0.0  # ms of windows that took far longer than usual, not charged yet
        self._rounds = self._since_plain = self._misses = 0
        self._windows_until = 0  # round of the last window
        self._last = 1
        self.reason = "nothing measured yet"
        self.switches: list[tuple[int, int, int, str]] = []

    def max_rows(self) -> int:
        return self._max_rows

    def _update_costs(self, rows: int) -> None:
        """The samples of windows of `rows` have changed: milliseconds of windows of every length.

        A line through plain decode, and each length's median as far as there are samples to believe it: one slow window
        says little, and a length that was found slow is not passed over for ever.
        """
        self._medians[rows] = median(self._samples[rows])
        self._measured_at[rows] = self._rounds
        plain = self._medians[1] or min(filter(None, self._medians))
        # No window costs more than as many plain steps; one that took longer was held up.
        known = [
            (n, len(self._samples[n]), min(self._medians[n], n * plain))
            for n in range(2, MAX_ROWS + 1)
            if self._samples[n]
        ]
        fresh = [row for row in known if self._rounds - self._measured_at[row[0]] <= STALE]
        extra, further_rows = LINE_PRIOR * UNKNOWN_ROW * plain, LINE_PRIOR
        for n, count, ms in fresh or known:
            extra += count * (ms - plain)
            further_rows += count * (n - 1)
        slope = max(extra / further_rows, MIN_ROW * plain)
        self._costs = [plain + slope * max(n - 1, 0) for n in range(MAX_ROWS + 1)]
        for n, count, ms in fresh or known:
            cost = (count * ms + LENGTH_PRIOR * self._costs[n]) / (count + LENGTH_PRIOR)
            self._costs[n] = max(cost, plain * (1 + MIN_ROW * (n - 1)))

    def _choose(self, key, count: int, ms_per_draft: float, chance: float) -> tuple[int, str]:
        self._account_plain()
        if self._since_plain >= PLAIN_REFRESH or self._misses >= MISSES:
            self._samples[1].clear()
            self._since_plain = self._misses = 0
        if len(self._samples[1]) < MIN_PLAIN:
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
        if self._loss + worst > STARTING_LOSS_TOKENS * plain:
            return 1, f"loss budget of {MAX_LOSS:.0%} used up"
        return best, f"{gain:.2f} x plain decode expected"

    def _probe(self, count: int, ms_per_draft: float) -> tuple[int, str]:
        """Nothing pays now; try the shortest window again when the budget has room for it twice over."""
        plain = self._costs[1]
        worst = max(self._costs[2] + ms_per_draft - plain, 0.1 * plain)
        if count and self._loss + 2 * worst < 0:
            return 2, TRYING
        return 1, "no window length pays"

    def rows(self, key, count: int, ms_per_draft: float, chance: float = 0.5) -> int:
        """Rows for the next window when a source offers `count` drafts; 1: plain decode, or another source."""
        if self._refused.get(key, 0) > self._rounds:
            return 1
        rows, self.reason = self._choose(key, count, ms_per_draft, chance)
        if self.reason == TRYING:
            between = self._between.get(key, BETWEEN_TRIALS)
            self._refused[key] = self._rounds + between
            self._between[key] = min(2 * between, MAX_BETWEEN_TRIALS)
        elif rows == 1 and len(self._samples[1]) >= MIN_PLAIN:
            self._refused[key] = self._rounds + REFUSED
        return rows

    def use(self, rows: int) -> None:
        """The window gets this many rows; called once for the answers that `rows` gave about all sources."""
        if (rows > 1) != (self._last > 1):
            self.switches.append((self._rounds, self._last, rows, self.reason))
        self._last = rows

    def rest(self) -> int:
        """Plain rounds that may follow before sources are asked again; to be heard after a round without a window."""
        return REST if self._rounds - self._windows_until >= AWAKE else 0

    def record_plain(self, ms: float) -> None:
        """A plain step took `ms`. Runs beside every step of a text without drafts, so it only takes notes."""
        self._rounds += 1
        self._samples[1].append(ms)
        self._plain_ms += ms

    def _account_plain(self) -> None:
        """Take in the plain steps since the last choice."""
        if self._plain_ms:
            self._since_plain = self._misses = 0
            self._update_costs(1)
            self._earn(self._plain_ms, 0.0)
            self._plain_ms = 0.0

    def record(self, key, rows: int, num_accepted: int, ms: float, num_verified: int, draft_ms: float = 0.0) -> None:
        """A window of rows >= 2 took `ms`, draft_ms of it for drafting, and emitted num_accepted + 1 tokens;
        num_verified: of its drafts, how many were not dropped on the way."""
        self._account_plain()
        self._rounds += 1
        self._since_plain += 1
        self._misses = 0 if num_accepted else self._misses + 1
        self._windows_until = self._rounds
        if num_accepted:
            self._refused.pop(key, None)
            self._between.pop(key, None)
        if self._rounds - self._measured_at[rows] > STALE:
            self._samples[rows].clear()
        self._samples[rows].append(ms - draft_ms)  # other drafts cost something else: see ms_per_draft
        self._update_costs(rows)
        if key in self._acceptance:
            self._acceptance[key].update(num_verified, num_accepted)
        if self._samples[1]:
            plain = self._costs[1]
            # A window that took far longer than usual may have been held up by something else: that part is paid for
            # out of the share, but does not use up the budget at once, which would end windows that pay.
            late = max(ms - draft_ms - MAX_CHARGE * self._costs[rows], 0.0)
            self._late += late
            self._earn(ms, ms - late - plain * (num_accepted + 1))

    def _earn(self, ms: float, lost: float) -> None:
        """A round took `ms`, of which `lost` counts as loss; its share of the time adds to the budget."""
        share = MAX_LOSS * ms
        if self._late:
            paid = min(self._late, share)
            self._late -= paid
            share -= paid
        self._loss = max(self._loss + lost - share, -MAX_CREDIT_TOKENS * self._costs[1])
