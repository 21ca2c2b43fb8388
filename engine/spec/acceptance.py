"""How often drafts are right, by position in the window."""

from .drafts import MAX_ROWS

DECAY = 0.95  # of the counts, per window
PRIOR = 2.0  # tries that the first belief is worth


class Acceptance:
    """Chance that draft i is right when those before it were, by exponentially decaying counts."""

    def __init__(self, chance: float):
        self._chance = chance  # of the first draft, before anything is counted
        self._hits, self._tries = [0.0] * MAX_ROWS, [0.0] * MAX_ROWS
        self.windows = 0  # counted
        self.tokens = [1.0] * (MAX_ROWS + 1)  # index: rows of a window; value: tokens it emits on average
        self._expect()

    def update(self, num_drafts: int, num_accepted: int) -> None:
        # Positions that were not reached forget too: what is not tried drifts back to the belief below and is tried.
        self.windows += 1
        self._hits, self._tries = [DECAY * h for h in self._hits], [DECAY * t for t in self._tries]
        for i in range(min(num_accepted + 1, num_drafts)):
            self._hits[i] += i < num_accepted
            self._tries[i] += 1
        self._expect()

    def _expect(self) -> None:
        # Belief, worth PRIOR tries: a position fares like the one before it, and the first as the source says.
        total, all_right, chance = 1.0, 1.0, self._chance
        for i in range(MAX_ROWS - 1):
            chance = (self._hits[i] + PRIOR * chance) / (self._tries[i] + PRIOR)
            all_right *= chance
            total += all_right
            self.tokens[i + 2] = total
