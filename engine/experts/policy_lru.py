"""Least recently used: one ordered map, oldest first."""

from collections import OrderedDict

from .policy_base import Policy, blocked


class LRU(Policy):
    """Least recently used first. Below one token's demand (layers * top-k) it never hits: each pass evicts the next."""

    name = "lru"

    def __init__(self, capacity: int, num_keys: int):
        super().__init__(capacity, num_keys)
        self._order: OrderedDict[int, None] = OrderedDict()  # oldest first

    def touch(self, keys, weights) -> None:
        order = self._order
        for key in keys:
            if key in order:
                order.move_to_end(key)

    def admit(self, key: int) -> None:
        self._order[key] = None

    def remove(self, key: int) -> None:
        del self._order[key]

    def victim(self, busy=()) -> int | None:
        is_busy = blocked(busy)
        for key in self._order:
            self.steps += 1
            if not is_busy(key):
                return key
        return None

    def __len__(self) -> int:
        return len(self._order)
