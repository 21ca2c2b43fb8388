"""Which expert leaves the cache: what a policy answers.

A policy knows integer keys (layer * num_experts + expert) and nothing of slots, files or threads. It holds the keys
that were admitted and not yet removed; pinned experts are never admitted, so they are never offered.
"""

from collections.abc import Callable, Container, Iterable


class Policy:
    """Base: what a policy answers. `steps` counts loop iterations inside `victim`, for tests."""

    name = ""
    steps = 0

    def __init__(self, capacity: int, num_keys: int):
        self.capacity, self.num_keys = capacity, num_keys

    def touch(self, keys: Iterable[int], weights: Iterable[float]) -> None:
        """Note the use of distinct keys, held or not: once per layer and forward call.

        weights: router weight of each key, summed over the tokens of the call.
        """
        raise NotImplementedError

    def admit(self, key: int) -> None:
        """Hold a key that is not held. It counts as used when `touch` was told so; a speculative read is not."""
        raise NotImplementedError

    def remove(self, key: int) -> None:
        """Forget that a key is held; what is known of its use stays. Raises KeyError when it is not held."""
        raise NotImplementedError

    def victim(self, busy: Container[int] | Callable[[int], bool] = ()) -> int | None:
        """Return the held key that should go, not one of busy; None when all are busy. It stays held until `remove`.

        Constant number of steps (amortised) plus one per busy key that stands in the way.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        """Number of keys held."""
        raise NotImplementedError


def blocked(busy: Container[int] | Callable[[int], bool]) -> Callable[[int], bool]:
    return busy if callable(busy) else busy.__contains__
