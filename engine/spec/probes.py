"""Draft sources for tests and benchmarks: always right, always wrong, random, and spoiled."""

from collections.abc import Sequence

import numpy as np

from .drafts import DraftSource, Offer


class OracleSource(DraftSource):
    """Knows the text: tokens = prompt and output of a plain run. The upper bound of what speculation can give."""

    name = "oracle"
    ms_per_draft = 0.0

    def __init__(self, tokens: Sequence[int]):
        self._tokens, self._at = list(tokens), 0

    def offer(self, text: np.ndarray, limit: int) -> Offer | None:
        self._at = len(text)
        count = min(limit, len(self._tokens) - self._at)
        return Offer(count, 0) if count > 0 else None

    def draft(self, count: int) -> list[int]:
        return self._tokens[self._at : self._at + count]


class RandomSource(DraftSource):
    """Uniformly random tokens: practically never right."""

    name = "random"
    ms_per_draft = 0.0

    def __init__(self, vocab_size: int, seed: int = 0):
        self._vocab_size, self._random = vocab_size, np.random.default_rng(seed)

    def offer(self, text: np.ndarray, limit: int) -> Offer | None:
        return Offer(limit, 0)

    def draft(self, count: int) -> list[int]:
        return self._random.integers(0, self._vocab_size, count).tolist()


class SpoiledSource(DraftSource):
    """Another source with every k-th draft replaced by a wrong token."""

    ms_per_draft = 0.0

    def __init__(self, inner: DraftSource, every: int, vocab_size: int):
        self.name = f"{inner.name}, every {every}. spoiled"
        self._inner, self._every, self._vocab_size, self._count = inner, every, vocab_size, 0

    def follow(self, kv) -> None:
        self._inner.follow(kv)

    def offer(self, text: np.ndarray, limit: int) -> Offer | None:
        return self._inner.offer(text, limit)

    def draft(self, count: int) -> list[int]:
        drafts = self._inner.draft(count)
        for i, token in enumerate(drafts):
            self._count += 1
            if self._count % self._every == 0:
                drafts[i] = (token + 1) % self._vocab_size
        return drafts
