"""Policies by decayed use: each use adds to a key's score, and all scores halve every `half_life` forward calls.

Decay never changes the order of two keys that are not used, so a key moves only when it is used. Scores are kept as
log2(score) + clock, the clock in half-lives, which grows without overflow, and are sorted into buckets of 1/RESOLUTION
octave. Nothing is filed more than SPAN buckets below a use of this moment, so an admission moves the queue's pointer
back by no more: constant work, amortised.
"""

from collections import deque
from math import floor, log2

from .policy_base import Policy, blocked
from .policy_queue import BucketQueue

RESOLUTION = 4  # buckets per factor of two in score
SPAN = 64  # buckets below a use of weight 1 that are told apart; 2^-16 of such a use is as good as none


class DecayedUse(Policy):
    """Base: scores by key, held or not, and the count of forward calls, which begin again at a lower layer."""

    half_life = 16.0  # forward calls; while decoding, tokens

    def __init__(self, capacity: int, num_keys: int):
        super().__init__(capacity, num_keys)
        self._calls, self._last_key = 0, -1
        self._clock = 0.0
        self._score = [float("-inf")] * num_keys

    def gain(self, weight: float, mean: float) -> float:
        """What one use adds; mean: of the weights of this layer and call."""
        raise NotImplementedError

    def _note(self, keys: list[int], weights: list[float]) -> None:
        if min(keys) <= self._last_key:
            self._calls += 1
            self._clock = self._calls / self.half_life
        self._last_key = max(keys)
        clock, score, mean = self._clock, self._score, sum(weights) / len(keys)
        for key, weight in zip(keys, weights, strict=True):
            score[key] = clock + log2(2.0 ** (score[key] - clock) + self.gain(weight, mean))

    def _bucket(self, key: int) -> int:
        return floor(max(self._score[key], self._clock - SPAN / RESOLUTION) * RESOLUTION)


class LFU(DecayedUse):
    """Least frequently used first; every use counts the same."""

    name = "lfu"

    def __init__(self, capacity: int, num_keys: int):
        super().__init__(capacity, num_keys)
        self._queue = BucketQueue()

    @property
    def steps(self) -> int:
        return self._queue.steps

    def gain(self, weight: float, mean: float) -> float:
        return 1.0

    def touch(self, keys, weights) -> None:
        keys, queue = list(keys), self._queue
        if not keys:
            return
        self._note(keys, list(weights))
        for key in keys:
            if key in queue:
                queue.take(key)
                queue.put(key, self._bucket(key))

    def admit(self, key: int) -> None:
        self._queue.put(key, self._bucket(key))

    def remove(self, key: int) -> None:
        self._queue.take(key)

    def victim(self, busy=()) -> int | None:
        return self._queue.lowest(blocked(busy))

    def __len__(self) -> int:
        return len(self._queue)


class Score(DecayedUse):
    """Frequency, router weight and recency: decayed use as a probability, plus a bonus for what was used just now.

    The decayed use, times (1 - 2^(-1/half_life)), is how likely an expert is to be used by the next token, as far as
    frequency tells. Routers repeat themselves, so what its layer used `recent_calls` turns ago or since is likelier by
    `recent_bonus`. Recent and other keys are two queues in the same order; the victim is the lesser of their lowest.
    """

    name = "score"
    half_life = 32.0
    weight_share = 0.25  # how much of a use is the router's weight over the mean weight, how much is one
    recent_calls = 0
    recent_bonus = 0.3

    def __init__(self, capacity: int, num_keys: int):
        super().__init__(capacity, num_keys)
        self._recent, self._others = BucketQueue(), BucketQueue()
        self._last_use = [(-1, -1)] * num_keys  # (call, highest key of the layer's touch)
        self._uses: deque[tuple[tuple[int, int], list[int]]] = deque()  # the same with its keys, while recent
        self._norm = 1 - 2.0 ** (-1 / self.half_life)

    @property
    def steps(self) -> int:
        return self._recent.steps + self._others.steps

    def gain(self, weight: float, mean: float) -> float:
        share = self.weight_share
        return 1 - share + share * max(weight, 0.0) / mean if mean > 0 else 1.0

    def touch(self, keys, weights) -> None:
        keys = list(keys)
        if not keys:
            return
        self._note(keys, list(weights))
        now = (self._calls, self._last_key)
        for key in keys:
            self._last_use[key] = now
            queue = self._queue_of(key)
            if queue is not None:
                queue.take(key)
                self._recent.put(key, self._bucket(key))
        self._uses.append((now, keys))
        self._age()

    def _oldest_recent(self) -> tuple[int, int]:
        """What was used up to here lies recent_calls turns of its layer back."""
        return self._calls - self.recent_calls - 1, self._last_key

    def _age(self) -> None:
        """Refile what is recent no more: one move per use at most."""
        uses, oldest = self._uses, self._oldest_recent()
        while uses and uses[0][0] <= oldest:
            used, keys = uses.popleft()
            for key in keys:
                if self._last_use[key] == used and key in self._recent:
                    self._recent.take(key)
                    self._others.put(key, self._bucket(key))

    def _queue_of(self, key: int) -> BucketQueue | None:
        return self._recent if key in self._recent else self._others if key in self._others else None

    def admit(self, key: int) -> None:
        recent = self._last_use[key] > self._oldest_recent() and self._last_use[key][0] >= 0
        (self._recent if recent else self._others).put(key, self._bucket(key))

    def remove(self, key: int) -> None:
        (self._recent if key in self._recent else self._others).take(key)

    def victim(self, busy=()) -> int | None:
        is_busy = blocked(busy)
        recent, other = self._recent.lowest(is_busy), self._others.lowest(is_busy)
        if recent is None or other is None:
            return other if recent is None else recent
        return recent if self._value(recent) + self.recent_bonus < self._value(other) else other

    def _value(self, key: int) -> float:
        return self._norm * 2.0 ** (self._score[key] - self._clock)

    def __len__(self) -> int:
        return len(self._recent) + len(self._others)
