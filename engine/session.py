"""A KV cache together with the tokens that are in it, so that a prompt only costs what it does not share with them.

Owns which leading tokens need not be run again; knows nothing of text, chats or files.
"""

import numpy as np

from .errors import ConfigError


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading elements that two id arrays share."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter


class Session:
    """One sequence at a time: what a generation leaves in the cache, the next one on the same session starts from.

    capacity: positions; None = the engine's whole context. kv: the cache. ids: int32, the tokens whose keys and values
    it holds for certain, also after an interruption in the middle of a forward pass.
    """

    def __init__(self, engine, capacity: int | None = None):
        self.kv = engine.new_kv(capacity)
        self._sequence, self.length = np.empty(0, np.int32), 0

    @property
    def ids(self) -> np.ndarray:
        return self._sequence[: self.length]

    def begin(self, sequence: np.ndarray, num_prompt: int) -> int:
        """Make `sequence` int32 [N], whose first num_prompt tokens are a prompt, the session's own.

        Returns how many of them are in the cache already: fewer than num_prompt, since the last one must be run for
        its logits. Whoever runs tokens sets `length` afterwards. Raises ConfigError when N exceeds the capacity.
        """
        if len(sequence) > self.kv.capacity:
            raise ConfigError(f"{len(sequence)} positions are needed, this session holds {self.kv.capacity}")
        self.length = self.kv.truncate(common_prefix(self.ids, sequence[: num_prompt - 1]))
        self._sequence = sequence
        return self.length

    def end(self, sequence: np.ndarray, length: int) -> None:
        """A run of `sequence` ends here: keep its first `length` tokens. Does nothing when another run has begun."""
        if self._sequence is sequence:
            self.length = self.kv.truncate(min(length, self.length))

    def restore(self, ids: np.ndarray) -> None:
        """Say that the cache now holds these tokens (its regions were filled from elsewhere)."""
        self.kv.restore(len(ids))
        self._sequence, self.length = np.ascontiguousarray(ids, np.int32), len(ids)

    def clear(self) -> None:
        """Forget everything."""
        self._sequence, self.length = np.empty(0, np.int32), self.kv.truncate(0)
