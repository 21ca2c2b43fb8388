"""Look-ahead: the next layer's router, asked about the present hidden state, says which experts will be wanted soon.

Guessed experts are read while the disk has nothing else to do, into a few slots, and are the first to go. Whether that
pays is measured. In auto mode only guesses that are nearly always right (by layer and by rank in the prediction) are
read, so that few bytes are wasted, and stretches of decode steps with and without them are timed against each other.
"""

import time
from itertools import pairwise
from statistics import median

import numpy as np

from ..kernels import check, ffi, lib
from ..layers import Buffer

MAX_ROWS = 8  # rows of a decode step; a longer call is a prompt, which reads nearly everything anyway
STRETCH = 12  # decode steps of one arm of the comparison
STRETCHES = 4  # two of each arm
SETTLED_STEPS = 240  # then it is measured again
MIN_GAIN = 0.03
CONFIDENCE = 0.9  # in auto mode a guess is read when guesses of its layer and rank were right that often


class Trial:
    """Decides whether look-ahead is on, from the time between decode steps."""

    def __init__(self, mode: str):
        self.mode, self.on = mode, mode == "on"
        self.verdict = mode
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._step, self._last = 0, None

    @property
    def learning(self) -> bool:
        """Whether predictions are made: while they are used, and while it is not decided whether they will be."""
        return self.on or (self.mode == "auto" and self._step < STRETCH * STRETCHES)

    def tick(self, now: float) -> None:
        """Called once per decode step, when it begins; now: seconds."""
        last, self._last = self._last, now
        if self.mode != "auto" or last is None:
            return
        position, self._step = self._step, self._step + 1
        if position < STRETCH * STRETCHES:
            if position % STRETCH:  # the first step of a stretch still pays for the other arm's reads
                self._times[self.on].append(now - last)
            self.on = (position + 1) // STRETCH % 2 == 1
            if position == STRETCH * STRETCHES - 1:
                self._decide()
        elif position >= STRETCH * STRETCHES + SETTLED_STEPS:
            self._step, self._times = 0, {True: [], False: []}
            self.on = False

    def _decide(self) -> None:
        with_it, without = median(self._times[True]), median(self._times[False])
        self.on = with_it < without * (1 - MIN_GAIN)
        self.verdict = (
            f"auto: {'on' if self.on else 'off'}, {with_it * 1e3:.1f} ms/step with, {without * 1e3:.1f} without"
        )


class LookAhead:
    """Guesses of one cache. blocks: layer -> MoeBlock with streamed experts."""

    def __init__(self, cache, blocks: dict, mode: str):
        self.cache, self.blocks, self.trial = cache, blocks, Trial(mode)
        order = sorted(blocks)
        self._next = dict(pairwise(order))
        self._first = order[0]
        block = blocks[order[0]]
        top, num_experts = block.num_experts_per_tok, block.num_experts
        # The rest holds what a layer needs, so that a wanted read always finds a slot.
        self.max_guesses = min(top, max(0, cache.num_slots - len(cache.pinned) - top) // 2)
        self._logits, self._weights = Buffer(MAX_ROWS, num_experts), Buffer(MAX_ROWS, top)
        self._ids = Buffer(MAX_ROWS, top, np.int32)
        self.coming: dict[int, int] = {}  # key -> slot, being read as a guess
        self.unused: dict[int, None] = {}  # guesses that arrived and were not wanted yet, oldest first
        self._predicted: tuple[int, dict[int, int]] | None = None  # layer, key -> rank
        # Predictions by layer and rank, and those that were right; the extra counts stand for what is not known yet.
        self._seen = np.full((1 + max(order), top), 2, np.int64)
        self._right = np.full((1 + max(order), top), 1, np.int64)
        self._events = ffi.new("struct moe_stream_event[]", 64)
        self.right = self.wanted = 0
        self.used = self.wasted = 0

    def begin(self, layer: int, keys: list[int], num_rows: int) -> None:
        """Before a layer's misses are counted: take in what has arrived, score the prediction, drop what is stale."""
        if layer == self._first and num_rows <= MAX_ROWS:
            self.trial.tick(time.perf_counter())
        self._take_in()
        if self._predicted is not None:
            predicted_layer, predicted = self._predicted
            if predicted_layer == layer:
                self._score(layer, predicted, keys)
            self._predicted = None
        if self.unused:
            for key in keys:
                if key in self.unused:
                    del self.unused[key]
                    self.used += 1

    def _score(self, layer: int, predicted: dict[int, int], keys: list[int]) -> None:
        self.wanted += len(keys)
        wanted, seen, right = set(keys), self._seen[layer], self._right[layer]
        for key, rank in predicted.items():
            seen[rank] += 1
            if key in wanted:
                right[rank] += 1
                self.right += 1

    def claim(self, missing: list[int]) -> set[int]:
        """Make guesses that are on their way and wanted now into wanted reads. Returns their keys; drops the others
        that have not begun."""
        claimed = {key for key in missing if key in self.coming}
        for key in claimed:
            check(lib.moe_streamer_promote(self.cache.handle, self.coming.pop(key)), "promote")
            self.used += 1
        if self.coming:
            lib.moe_streamer_drop_speculative(self.cache.handle)
        return claimed

    def ask(self, layers, layer: int, x, num_rows: int, busy) -> None:
        """Predict the next layer's experts from x [T, H] and ask for those that are not here."""
        following = self._next.get(layer)
        if following is None or num_rows > MAX_ROWS or not self.trial.learning or self.max_guesses < 1:
            return
        block = self.blocks[following]
        top = block.num_experts_per_tok
        block.router_linear(layers, x, (self._logits,), num_rows)
        args = (self._ids.ptr, self._weights.ptr, self._logits.ptr, num_rows, block.num_experts, top, block.router.rule)
        if lib.moe_route(layers.ctx, *args) != lib.MOE_OK:
            return
        first, ranks = following * block.num_experts, {}
        for rank, column in enumerate(self._ids.array[:num_rows].T.tolist()):  # best first
            for expert in column:
                ranks.setdefault(first + expert, rank)
        self._predicted = following, ranks
        if not self.trial.on:
            return
        slot_of, sure = self.cache.slot_of, self._sure(following)
        guesses = [key for key, rank in ranks.items() if sure[rank] and slot_of[key] < 0 and key not in self.coming]
        if guesses:
            self._request(guesses[: self.max_guesses - len(self.coming)], busy.union(ranks))

    def _sure(self, layer: int) -> list[bool]:
        """By rank: whether guesses of this layer are right often enough to be read."""
        if self.trial.mode == "on":
            return [True] * self._seen.shape[1]
        return (self._right[layer] >= CONFIDENCE * self._seen[layer]).tolist()

    def _request(self, keys: list[int], busy) -> None:
        for key in keys:
            slot = self.cache.take_slot(busy)
            if slot is None:
                return
            self.cache.send([key], [slot], speculative=True)
            self.coming[key] = slot

    def _take_in(self) -> None:
        if not self.coming:
            return
        count = lib.moe_streamer_poll_speculative(self.cache.handle, self._events, 64)
        for event in self._events[0:count]:
            del self.coming[event.key]
            if event.error:  # dropped, or unreadable: then the wanted read will say so
                self.cache.give_back(event.slot)
            else:
                self.cache.publish(event.key, event.slot)
                self.unused[event.key] = None

    def forget(self) -> None:
        """After an interruption: nothing is on its way, and what came is an expert like any other."""
        self.coming.clear()
        self.unused.clear()
        self._predicted = None

    def stale(self, busy) -> int | None:
        """A guess that arrived and was not wanted, to be evicted before anything else."""
        key = next((key for key in self.unused if key not in busy), None)
        if key is not None:
            del self.unused[key]
            self.wasted += 1
        return key

    def evicted(self, key: int) -> None:
        """The policy chose to evict this key."""
        if key in self.unused:
            del self.unused[key]
            self.wasted += 1

    def stats(self) -> dict:
        size = self.cache.places.expert_bytes
        return {
            "lookahead": self.trial.verdict,
            "lookahead_recall": self.right / self.wanted if self.wanted else 0.0,
            "lookahead_used_bytes": self.used * size,
            "lookahead_wasted_bytes": self.wasted * size,
        }
