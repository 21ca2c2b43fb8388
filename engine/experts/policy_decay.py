"""Policies by decayed use: each use adds to a key's score, and all scores halve every `half_life`.

Decay never changes the order of two keys that are not used, so a key moves only when it is used. Scores are kept as
log2(score) + clock / half_life, which grows without overflow, and are sorted into buckets of 1/RESOLUTION octave, each
a queue in order of use. A pointer walks up to the lowest bucket that holds a key. Nothing is filed more than SPAN
buckets below a use of this moment, so an admission moves the pointer back by no more: constant work, amortised.

The clock counts uses of the average key: it advances by len(keys) / num_keys per call. So a half-life means the same
statistical weight for 8 of 64 experts as for 10 of 512.
"""

from math import floor, log2

from .policy_base import Policy, blocked

RESOLUTION = 4  # buckets per factor of two in score
SPAN = 64  # buckets below a use of weight 1 that are told apart; 2^-16 of such a use is as good as none


class DecayedUse(Policy):
    """Base of the two: `gain(weight, mean)` is what one use adds, half_life is in uses of the average key."""

    half_life = 1.0

    def __init__(self, capacity: int, num_keys: int):
        super().__init__(capacity, num_keys)
        self._clock = 0.0  # in half-lives
        self._score = [float("-inf")] * num_keys
        self._bucket_of: dict[int, int] = {}
        self._buckets: dict[int, dict[int, None]] = {}
        self._lowest = 0  # no bucket below holds a key

    def gain(self, weight: float, mean: float) -> float:
        raise NotImplementedError

    def touch(self, keys, weights) -> None:
        keys, weights = list(keys), list(weights)
        if not keys:
            return
        self._clock += len(keys) / (self.num_keys * self.half_life)
        clock, score, held, mean = self._clock, self._score, self._bucket_of, sum(weights) / len(keys)
        for key, weight in zip(keys, weights, strict=True):
            score[key] = clock + log2(2.0 ** (score[key] - clock) + self.gain(weight, mean))
            if key in held:
                self._take(key)
                self._put(key)

    def admit(self, key: int) -> None:
        self._put(key)

    def remove(self, key: int) -> None:
        self._take(key)

    def victim(self, busy=()) -> int | None:
        if not self._bucket_of:
            return None
        while self._lowest not in self._buckets:
            self._lowest += 1
            self.steps += 1
        is_busy, bucket, seen = blocked(busy), self._lowest, 0
        while seen < len(self._bucket_of):
            for key in self._buckets.get(bucket, ()):
                self.steps += 1
                if not is_busy(key):
                    return key
                seen += 1
            bucket += 1
            self.steps += 1
        return None

    def _put(self, key: int) -> None:
        bucket = floor(max(self._score[key], self._clock - SPAN / RESOLUTION) * RESOLUTION)
        self._bucket_of[key] = bucket
        self._buckets.setdefault(bucket, {})[key] = None
        self._lowest = min(self._lowest, bucket)

    def _take(self, key: int) -> None:
        bucket = self._bucket_of.pop(key)
        queue = self._buckets[bucket]
        del queue[key]
        if not queue:
            del self._buckets[bucket]

    def __len__(self) -> int:
        return len(self._bucket_of)


class LFU(DecayedUse):
    """Least frequently used first; every use counts the same."""

    name = "lfu"
    half_life = 8.0

    def gain(self, weight: float, mean: float) -> float:
        return 1.0


class Score(DecayedUse):
    """Frequency, recency and router weight in one score: a use counts more the more the router wanted the expert."""

    name = "score"
    half_life = 2.0

    def gain(self, weight: float, mean: float) -> float:
        return 0.5 + 0.5 * max(weight, 0.0) / mean if mean > 0 else 1.0
