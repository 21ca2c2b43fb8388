"""How many rows the next window gets. The automatic policy compares measured milliseconds per emitted token.

It has a budget: what speculation has cost beyond plain decode may not exceed a small share of the time so far, so a
text whose drafts never hit cannot lose more than that share, whatever the estimates say.
"""

from .acceptance import Acceptance
from .drafts import MAX_ROWS
from .window_costs import WindowCosts

MAX_LOSS = 0.02  # share of the decode time that failed windows may cost
STARTING_LOSS_TOKENS = 2.0  # plain decode steps' worth of loss allowed before any time has passed
MIN_GAIN = 1.03  # a gain below this is noise
PLAIN_REFRESH = 256  # rounds after which plain decode is measured again
MIN_PLAIN = 3  # plain steps before anything else: the first after a prefill is slow and must not be the yardstick
MAX_CREDIT_TOKENS = 16.0  # what was gained, or not spent of that share, pays for at most so many steps of loss
MAX_CHARGE = 1.5  # a window costs the budget at once at most so many times what its length costs otherwise
TRYING, NOTHING_PAYS = "trying again", "no window length pays"
BETWEEN_TRIALS = 32  # rounds, at least, unless the draft was right; twice as many after every trial that failed ...
MAX_BETWEEN_TRIALS = 64  # ... up to these
MISSES = 16  # windows in a row without a hit that cast doubt on the yardstick: plain decode is measured anew
REFUSED = 8  # rounds that a refusal holds: nothing changes so fast, and asking costs a share of a small model's step
AWAKE = 16  # plain rounds after which sources are not asked every round any more
REST = 3  # rounds between two that ask, then: asking costs a share of a small model's step
# Learning from every window at once would take 3 % of a small model's window.
BATCH = 6  # windows that are learned from together
PLAIN_BATCH = 16  # the same of plain steps
SETTLED = 4  # windows of a source (and confidence) after which its length is chosen for a batch, not for each window
CALM_TOKENS = 4.0  # plain steps' worth of budget with which a window without a hit need not be learned from at once


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
        self._costs = WindowCosts()
        self._acceptance: dict = {}
        self._refused: dict = {}  # key: (round until which the answer is known to be 1, why)
        self._between: dict = {}  # key: rounds from its last failed trial to the next
        self._new: list[tuple] = []  # windows that nothing was learned from yet: arguments of record
        self._plain_steps = 0  # the same of plain steps
        self._due = True  # plain decode is being measured: its steps are to be learned from as soon as they are there
        self._held: dict = {}  # key: (drafts offered, rows, why), until more is learned about it
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

    def _choose(self, key, count: int, ms_per_draft: float, chance: float) -> tuple[int, str]:
        if self._since_plain >= PLAIN_REFRESH or self._misses >= MISSES:
            self._costs.forget_plain()
            self._since_plain = self._misses = 0
        if self._costs.plain_samples < MIN_PLAIN:
            self._due = True
            return 1, "measuring plain decode"
        plain = self._costs[1]
        acceptance = self._acceptance.get(key)
        if acceptance is None:
            acceptance = self._acceptance[key] = Acceptance(chance)
        best, best_rate, over_budget = 1, plain, False
        room = STARTING_LOSS_TOKENS * plain - self._loss  # ms that the window may cost beyond a plain step
        for rows, tokens in zip(range(2, min(count + 1, self._max_rows) + 1), acceptance.tokens[2:], strict=False):
            cost = self._costs[rows] + ms_per_draft * (rows - 1)
            if cost < best_rate * tokens:
                if cost - plain > room:  # a shorter one, if that pays, which may earn the room
                    over_budget = True
                    break
                best, best_rate = rows, cost / tokens
        gain = plain / best_rate
        # Staying as it is needs no margin, changing between plain and speculative does.
        if best > 1 and gain >= (MIN_GAIN if self._last == 1 else 1.0):
            return best, f"{gain:.2f} x plain decode expected"
        return (1, f"loss budget of {MAX_LOSS:.0%} used up") if over_budget else self._probe(count, ms_per_draft)

    def _probe(self, count: int, ms_per_draft: float) -> tuple[int, str]:
        """Nothing pays now; try the shortest window again when the budget has room for it twice over."""
        plain = self._costs[1]
        worst = max(self._costs[2] + ms_per_draft - plain, 0.1 * plain)
        if count and self._loss + 2 * worst < 0:
            return 2, TRYING
        return 1, NOTHING_PAYS

    def rows(self, key, count: int, ms_per_draft: float, chance: float = 0.5) -> int:
        """Rows for the next window when a source offers `count` drafts; 1: plain decode, or another source."""
        refused, held = self._refused.get(key), self._held.get(key)
        if refused is not None and refused[0] > self._rounds:
            self.reason = refused[1]
            return 1
        if held is not None and held[0] == count:
            self.reason = held[2]
            return held[1]
        if self._due or self._plain_steps >= PLAIN_BATCH or (self._new and not self._is_settled(key)):
            self._learn()
        rows, self.reason = self._choose(key, count, ms_per_draft, chance)
        if self.reason == TRYING:
            between = self._between.get(key, BETWEEN_TRIALS)
            self._refused[key] = self._rounds + between, NOTHING_PAYS
            self._between[key] = min(2 * between, MAX_BETWEEN_TRIALS)
        elif rows == 1:
            if not self._due:
                self._refused[key] = self._rounds + REFUSED, self.reason
        elif self._is_settled(key):
            self._held[key] = count, rows, self.reason
        return rows

    def _is_settled(self, key) -> bool:
        acceptance = self._acceptance.get(key)
        return acceptance is not None and acceptance.windows >= SETTLED

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
        self._plain_steps += 1
        self._costs.add_plain(ms)
        self._plain_ms += ms
        self._since_plain = self._misses = 0

    def record(self, key, rows: int, num_accepted: int, ms: float, num_verified: int, draft_ms: float = 0.0) -> None:
        """A window of rows >= 2 took `ms`, draft_ms of it for drafting, and emitted num_accepted + 1 tokens;
        num_verified: of its drafts, how many were not dropped on the way."""
        self._rounds += 1
        self._since_plain += 1
        self._windows_until = self._rounds
        self._new.append((key, rows, num_accepted, ms, num_verified, draft_ms))
        if num_accepted:
            self._misses = 0
            self._refused.pop(key, None)
            self._between.pop(key, None)
        else:
            self._misses += 1
        urgent = not num_accepted and self._loss > -CALM_TOKENS * self._costs[1]
        if urgent or len(self._new) >= BATCH or ms - draft_ms > MAX_CHARGE * self._costs[rows]:
            self._learn()

    def _learn(self) -> None:
        """Take in the windows and plain steps since the last time. Their code is in the processor's caches after the
        first of them; between the steps of a model it never is."""
        if not self._new and not self._plain_steps:
            return
        self._due = False
        for _, rows, _, ms, _, draft_ms in self._new:
            self._costs.add(rows, ms - draft_ms, self._rounds)  # other drafts cost something else: see ms_per_draft
        self._costs.update(self._rounds)
        if self._plain_ms:
            self._earn(self._plain_ms, 0.0)
            self._plain_ms, self._plain_steps = 0.0, 0
        for key, rows, num_accepted, ms, num_verified, draft_ms in self._new:
            if key in self._acceptance:
                self._acceptance[key].update(num_verified, num_accepted)
            self._held.pop(key, None)
            if self._costs.plain_samples:
                plain = self._costs[1]
                # A window that took far longer than usual may have been held up by something else: that part is paid
                # for out of the share, but does not use up the budget at once, which would end windows that pay.
                late = max(ms - draft_ms - MAX_CHARGE * self._costs[rows], 0.0)
                self._late += late
                self._earn(ms, ms - late - plain * (num_accepted + 1))
        self._new.clear()

    def _earn(self, ms: float, lost: float) -> None:
        """A round took `ms`, of which `lost` counts as loss; its share of the time adds to the budget."""
        share = MAX_LOSS * ms
        if self._late:
            paid = min(self._late, share)
            self._late -= paid
            share -= paid
        self._loss = max(self._loss + lost - share, -MAX_CREDIT_TOKENS * self._costs[1])
