"""Keys sorted into numbered buckets, each a stack; the lowest is found in constant time, amortised."""

from collections.abc import Callable


class BucketQueue:
    """A priority queue for keys whose priority is a small range of integers that drifts upward with time.

    A pointer stands at or below the lowest bucket that holds a key and walks up when asked. All walks together are no
    longer than the drift plus what `put` moves the pointer back. `steps` counts them, and the busy keys passed over.
    """

    def __init__(self):
        self.steps = 0
        self._bucket_of: dict[int, int] = {}
        self._buckets: dict[int, dict[int, None]] = {}  # in the order of filing
        self._pointer = 0

    def __len__(self) -> int:
        return len(self._bucket_of)

    def __contains__(self, key: int) -> bool:
        return key in self._bucket_of

    def put(self, key: int, bucket: int) -> None:
        """File a key that is not in the queue."""
        self._bucket_of[key] = bucket
        self._buckets.setdefault(bucket, {})[key] = None
        if bucket < self._pointer or len(self._bucket_of) == 1:
            self._pointer = bucket

    def take(self, key: int) -> None:
        """Raises KeyError when the key is not in the queue."""
        bucket = self._bucket_of.pop(key)
        queue = self._buckets[bucket]
        del queue[key]
        if not queue:
            del self._buckets[bucket]

    def lowest(self, is_busy: Callable[[int], bool]) -> int | None:
        """The key filed last in the lowest bucket, busy ones passed over; None when there is no other.

        Layers take turns, so of equals the one filed last has the longest to go until its layer's next turn.
        """
        if not self._bucket_of:
            return None
        while self._pointer not in self._buckets:
            self._pointer += 1
            self.steps += 1
        bucket, seen = self._pointer, 0
        while seen < len(self._bucket_of):
            for key in reversed(self._buckets.get(bucket, {})):
                self.steps += 1
                if not is_busy(key):
                    return key
                seen += 1
            bucket += 1
            self.steps += 1
        return None
