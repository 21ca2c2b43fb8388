"""Replay of routing through an expert cache: the engine's order of accesses, a policy or Belady's bound, counts.

An access list has one entry per forward call and layer: the distinct experts of the call with the sum of their
weights. As in the engine: what is resident is used first, misses are read in file order, and when a call needs more
experts than there are slots (prefill) it goes in waves, so that each distinct expert is read once.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

PREFILL_TOKENS = 512  # tokens of one forward call, as in engine/runtime.py


@dataclass
class Access:
    """One layer of one forward call: distinct keys (layer * num_experts + expert), ascending, and summed weights."""

    keys: list[int]
    weights: list[float]
    is_decode: bool


def merge(layer: int, num_experts: int, ids: np.ndarray, weights: np.ndarray) -> Access:
    """ids, weights [T, A] of one layer -> Access."""
    used, inverse = np.unique(ids, return_inverse=True)
    sums = np.bincount(inverse.ravel(), weights.ravel().astype(np.float64))
    return Access((used + layer * num_experts).tolist(), sums.tolist(), len(ids) == 1)


def schedule(ids: np.ndarray, weights: np.ndarray, num_experts: int, prompt_tokens: int) -> Iterator[Access]:
    """ids, weights [L, T, A]: prefill in blocks, then one token at a time; layers in order within each call."""
    starts = [*range(0, prompt_tokens, PREFILL_TOKENS), *range(prompt_tokens, ids.shape[1])]
    for start, end in zip(starts, [*starts[1:], ids.shape[1]], strict=True):
        for layer in range(len(ids)):
            yield merge(layer, num_experts, ids[layer, start:end], weights[layer, start:end])


@dataclass
class Counts:
    """Decode and prefill apart; look-ahead reads that were used before they left, or not."""

    decode_uses: int = 0
    decode_misses: int = 0
    prefill_uses: int = 0
    prefill_misses: int = 0
    ahead_used: int = 0
    ahead_wasted: int = 0

    @property
    def hit_rate(self) -> float:
        return 1 - self.decode_misses / max(1, self.decode_uses)

    def add(self, access: Access, misses: int) -> None:
        if access.is_decode:
            self.decode_uses += len(access.keys)
            self.decode_misses += misses
        else:
            self.prefill_uses += len(access.keys)
            self.prefill_misses += misses


class Belady:
    """The bound: evicts what is needed furthest in the future. Answers like a policy, but must see the whole list."""

    name = "belady"

    def __init__(self, accesses: list[Access]):
        last: dict[int, int] = {}
        self._next_of: list[list[int]] = []
        for at in range(len(accesses) - 1, -1, -1):
            self._next_of.append([last.get(key, len(accesses)) for key in accesses[at].keys])
            last.update(dict.fromkeys(accesses[at].keys, at))
        self._next: dict[int, int] = {}
        self._held: set[int] = set()
        self._heap: list[tuple[int, int]] = []

    def touch(self, keys, weights) -> None:
        for key, following in zip(keys, self._next_of.pop(), strict=True):
            self._next[key] = following
            if key in self._held:
                heappush(self._heap, (-following, key))

    def admit(self, key: int) -> None:
        self._held.add(key)
        heappush(self._heap, (-self._next.get(key, 1 << 60), key))

    def remove(self, key: int) -> None:
        self._held.remove(key)

    def victim(self, busy=()) -> int | None:
        aside = []
        chosen = None
        while self._heap and chosen is None:
            following, key = entry = heappop(self._heap)
            if key in self._held and self._next.get(key) == -following:
                if key in busy:
                    aside.append(entry)
                else:
                    chosen = key
                    aside.append(entry)
        for entry in aside:
            heappush(self._heap, entry)
        return chosen


class LookAhead:
    """Guesses the next layer's experts with a given recall, and reads up to `reads` missing ones while a layer runs.

    recall: share of the true experts among the guesses; the rest are wrong ones of the same layer.
    """

    def __init__(self, recall: float, reads: int, num_experts: int, seed: int = 0):
        self.recall, self.reads, self.num_experts = recall, reads, num_experts
        self._random = random.Random(seed)

    def guess(self, access: Access) -> list[int]:
        base = access.keys[0] // self.num_experts * self.num_experts
        true = set(access.keys)
        right = [key for key in access.keys if self._random.random() < self.recall]
        wrong = [base + self._random.randrange(self.num_experts) for _ in range(len(true) - len(right))]
        return right + [key for key in dict.fromkeys(wrong) if key not in true]


class Replay:
    """One cache of `capacity` slots under one policy."""

    def __init__(self, policy, capacity: int, pinned: Iterable[int] = (), ahead: LookAhead | None = None):
        self.policy, self.pinned, self.ahead = policy, frozenset(pinned), ahead
        self.slots = capacity - len(self.pinned)  # pinned experts hold their slots for good
        if self.slots < 1:
            raise ValueError("pinned experts leave no slot")
        self.resident: set[int] = set()
        self.unused_guesses: set[int] = set()
        self.counts = Counts()

    def run(self, accesses: list[Access]) -> Counts:
        for at, access in enumerate(accesses):
            self._use(access)
            if self.ahead is not None and access.is_decode and at + 1 < len(accesses):
                self._read_ahead(access, accesses[at + 1])
        self.counts.ahead_wasted += len(self.unused_guesses)
        return self.counts

    def _use(self, access: Access) -> None:
        resident, pinned = self.resident, self.pinned
        self.policy.touch(access.keys, access.weights)
        missing = [key for key in access.keys if key not in resident and key not in pinned]
        self.counts.add(access, len(missing))
        if self.unused_guesses:
            used = self.unused_guesses.intersection(access.keys)
            self.counts.ahead_used += len(used)
            self.unused_guesses -= used
        busy = set(access.keys)
        for key in missing:
            if len(resident) >= self.slots and not self._evict(busy):
                busy = set()  # all slots belong to this call: the wave is computed, its slots serve the next one
                self._evict(busy)
            self._admit(key)
            busy.add(key)

    def _read_ahead(self, access: Access, following: Access) -> None:
        guesses = self.ahead.guess(following)
        busy = {*access.keys, *guesses}
        absent = [key for key in guesses if key not in self.resident and key not in self.pinned]
        for key in absent[: self.ahead.reads]:
            if len(self.resident) >= self.slots and not self._evict(busy):
                return
            self._admit(key)
            self.unused_guesses.add(key)

    def _admit(self, key: int) -> None:
        self.policy.admit(key)
        self.resident.add(key)

    def _evict(self, busy: set[int]) -> bool:
        gone = self.policy.victim(busy)
        if gone is None:
            return False
        self.policy.remove(gone)
        self.resident.remove(gone)
        if gone in self.unused_guesses:
            self.unused_guesses.remove(gone)
            self.counts.ahead_wasted += 1
        return True
