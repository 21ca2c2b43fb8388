"""Shortens a window in the middle of its forward pass: a draft whose experts would have to be read from disk, and that
is not likely enough to be worth the reads, is dropped with those behind it.

Rows are independent, so what the rows before it give does not change by a bit. What is read for a draft that turns out
right would have been read by its own step anyway; only reads for drafts that are wrong are lost.
"""

import numpy as np

from .acceptance import Acceptance
from .drafts import MAX_ROWS

ROW_SHARE = 0.15  # of a plain step's time without waiting, for a further row whose experts are all there
PRIOR_LAYERS = 2.0  # layers' worth of weight that the usual number of missing experts has in a window's estimate
DECAY = 0.95  # of the measured times, per round
PROBE = 32  # windows of which one keeps a draft whatever it costs: what is never verified is never found to be right


class DraftCut:
    """Decides for the windows of one generation. cache: an ExpertCache; num_layers: those with streamed experts."""

    def __init__(self, cache, num_layers: int):
        self._cache, self._num_layers = cache, num_layers
        self._acceptance: dict = {}
        self._weight = self._step_ms = self._wait_ms = self._misses = 0.0
        self._usual = 0.0  # missing experts that a draft adds to a layer
        self.windows = self.drafts = 0  # cut short; dropped
        self._alone = 0  # windows since one had a draft verified that was wrong
        self._begin_counts = (0.0, 0)

    @classmethod
    def of_stream(cls, stream) -> "DraftCut | None":
        """For an open ExpertStream; None when its cache holds every expert."""
        cache = stream.cache
        return cls(cache, len(stream.layers) - stream.options.mtp) if cache.num_slots < len(cache.places.keys) else None

    def start(self) -> None:
        """The prefill is over: what it read says nothing about windows."""
        self._begin_counts = self._counts()

    def begin(self, key, chance: float) -> None:
        """A window of drafts of this source and confidence is about to be verified; chance: see Offer."""
        self._tokens = self._acceptance.setdefault(key, Acceptance(chance)).tokens
        self._missed, self._layers_seen = [0] * MAX_ROWS, 0
        self._least = 2 if self._alone >= PROBE else 1

    def keep_rows(self, block, ids: np.ndarray) -> int:
        """How many rows go on; asked layer by layer. block: a MoeBlock of streamed experts; ids [T, A]: its routing."""
        rows = len(ids)
        if rows < 2 or not self._weight or not self._misses:
            return rows
        self._layers_seen += 1
        left = self._num_layers - self._layers_seen
        step, read = self._step_ms / self._weight, self._wait_ms / self._misses
        row_ms = ROW_SHARE * step * (left + 1) / self._num_layers
        kept, best, value = self._least, 0.0, 0.0
        for r, new in enumerate(self._new_misses(block.experts.first_key, ids.tolist())[1:], start=1):
            self._missed[r] += new
            per_layer = (self._missed[r] + PRIOR_LAYERS * self._usual) / (self._layers_seen + PRIOR_LAYERS)
            chance = self._tokens[r + 1] - self._tokens[r]
            value += chance * step - row_ms - (1 - chance) * (new + left * per_layer) * read
            if value > best:
                kept, best = r + 1, value
        return kept

    def _new_misses(self, first_key: int, routing: list[list[int]]) -> list[int]:
        """By row: experts that have to be read for it and for no row before it."""
        slot_of, lookahead = self._cache.slot_of, self._cache.lookahead
        coming = lookahead.coming if lookahead else ()
        seen, found = set(), []
        for row in routing:
            missing = {first_key + e for e in row if slot_of[first_key + e] < 0} - seen
            found.append(sum(key not in coming for key in missing))
            seen |= missing
        return found

    def end(self, key, asked: int, rows: int, num_accepted: int, ms: float) -> None:
        """A window of `asked` rows (1: a plain step) went on with `rows`, took `ms` and had so many drafts right."""
        before, now = self._begin_counts, self._counts()
        self._begin_counts = now
        waited = now[0] - before[0]
        self._weight = DECAY * self._weight + 1
        self._step_ms = DECAY * self._step_ms + max(ms - waited, 0.0) / (1 + ROW_SHARE * (rows - 1))
        self._wait_ms = DECAY * self._wait_ms + waited
        self._misses = DECAY * self._misses + now[1] - before[1]
        if asked < 2:
            return
        if not num_accepted:  # a hit is followed up at once: one alone would be forgotten before the next
            self._alone = 0 if rows > 1 else self._alone + 1
        self._acceptance[key].update(rows - 1, num_accepted)
        if self._layers_seen:
            added = sum(self._missed[1:asked]) / (self._layers_seen * (asked - 1))
            self._usual = added if not self._usual else DECAY * self._usual + (1 - DECAY) * added
        self.windows += rows < asked
        self.drafts += asked - rows

    def _counts(self) -> tuple[float, int]:
        """Milliseconds waited for reads and missing experts so far."""
        return self._cache.wait_ms(), self._cache.counters.misses
