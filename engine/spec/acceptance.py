"""How often drafts are right, by position in the window."""

from .drafts import MAX_ROWS

DECAY = 0.95  # of the counts, per window
PRIOR = 2.0  # tries that the first belief is worth
MAX_WEIGHT = 1e100


class Acceptance:
    """Chance that draft i is right when those before it were, by exponentially decaying counts."""

    def __init__(self, chance: float):
        self._chance = chance  # of the first draft, before anything is counted
        self._hits, self._tries = [0.0] * MAX_ROWS, [0.0] * MAX_ROWS
        self._weight = 1.0  # of the latest window: new counts grow instead of old ones shrinking, which is less work
        self._tokens: list[float] = []  # none: to be worked out anew
        self.windows = 0  # counted

    def update(self, num_drafts: int, num_accepted: int) -> None:
        """A window had so many drafts verified and accepted."""
        # Positions that were not reached forget too: what is not tried drifts back to the belief below and is tried.
        weight = self._weight = self._weight / DECAY
        reached = num_accepted + 1 if num_accepted < num_drafts else num_drafts
        hits, tries = self._hits, self._tries
        for i in range(reached):
            tries[i] += weight
            hits[i] += weight
        if num_accepted < reached:
            hits[num_accepted] -= weight
        if weight > MAX_WEIGHT:
            self._hits, self._tries = [h / weight for h in hits], [t / weight for t in tries]
            self._weight = 1.0
        self.windows += 1
        self._tokens = []

    @property
    def tokens(self) -> list[float]:
        """Index: rows of a window; value: tokens it emits on average."""
        if not self._tokens:
            # Belief, worth PRIOR tries: a position fares like the one before it, and the first as the source says.
            prior, chance, all_right, total = PRIOR * self._weight, self._chance, 1.0, 1.0
            found = [1.0, 1.0]
            for hits, tries in zip(self._hits, self._tries[: MAX_ROWS - 1], strict=False):
                chance = (hits + prior * chance) / (tries + prior)
                all_right *= chance
                total += all_right
                found.append(total)
            self._tokens = found
        return self._tokens
