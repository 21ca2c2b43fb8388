"""Keys and values of every layer. Owns the memory and how many positions are filled; knows no model.

A layer with a sliding window keeps a ring: position p lies in slot p % slots, and there are slots enough for the
window, the largest block of one forward call, and SLACK positions that may be taken back (drafts that were refused).
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from .errors import ConfigError
from .kernels import address, aligned_empty, ffi

CHUNK_POSITIONS = 64  # MOE_ATTENTION_CHUNK: a chunk of positions never wraps around the end of a cache
SLACK = 8  # positions that `truncate` can always take back


@dataclass(frozen=True)
class KVShape:
    """What one layer keeps per position: keys [num_heads, head_dim] and values [num_heads, value_dim].

    value_dim: None = head_dim. latent: a value is the first value_dim numbers of its key, so only keys are stored.
    window: positions a query sees, its own included; 0 = all.
    """

    num_heads: int
    head_dim: int
    value_dim: int | None = None
    latent: bool = False
    window: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of a head's row in each array: keys, and values where they are stored."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.value_dim or self.head_dim)

    def num_seen(self, length: int) -> int:
        """Of the positions before `length`, how many the next query looks back at."""
        return min(length, self.window - 1) if self.window else length

    def num_kept(self, length: int) -> int:
        """How many must be there to go on from `length` or up to SLACK positions earlier."""
        return min(length, self.window - 1 + SLACK) if self.window else length

    def num_slots(self, capacity: int, max_tokens: int) -> int:
        needed = min(capacity, self.window + max(max_tokens, SLACK) + SLACK) if self.window else capacity
        return -(-needed // CHUNK_POSITIONS) * CHUNK_POSITIONS

    def num_bytes(self, capacity: int, kind: str, max_tokens: int) -> int:
        item_bytes = 4 if kind == "f32" else 2
        return self.num_heads * sum(self.widths) * self.num_slots(capacity, max_tokens) * item_bytes


class KVCache:
    """KV cache of layers of the given shapes in float16 or float32; `layers[n]` is the struct moe_kv of layer n.

    `capacity` positions can be stored, at most max_tokens in one forward call; memory is committed by the system as
    positions are first written. num_bytes: all of it. follower: None, or who is told of every forward pass (spec.mtp).
    """

    def __init__(self, shapes: Sequence[KVShape], capacity: int, kind: str = "f16", max_tokens: int = 512):
        self.capacity, self.length, self.kind, self.max_tokens = capacity, 0, kind, max_tokens
        self.follower = None
        self.shapes, self._item_bytes = tuple(shapes), 4 if kind == "f32" else 2
        self._oldest = [0] * len(self.shapes)  # per layer: positions below were overwritten
        self._structs = ffi.new("struct moe_kv[]", len(self.shapes))
        self.layers = [self._structs + layer for layer in range(len(self.shapes))]
        self._arrays: list[list[np.ndarray]] = []  # per layer: keys, and values where they are stored
        for shape, kv in zip(self.shapes, self.layers, strict=True):
            slots = shape.num_slots(capacity, max_tokens)
            arrays = [aligned_empty(shape.num_heads * slots * width * self._item_bytes) for width in shape.widths]
            self._arrays.append(arrays)
            kv.k, kv.v = address(arrays[0]), ffi.NULL if shape.latent else address(arrays[1])
            kv.num_heads, kv.head_dim, kv.value_dim = shape.num_heads, shape.head_dim, shape.value_dim or shape.head_dim
            kv.capacity, kv.is_f32 = slots, kind == "f32"
        self.num_bytes = sum(array.nbytes for arrays in self._arrays for array in arrays)

    def extend(self, first_position: int, num_tokens: int) -> None:
        """Account for positions first_position .. + num_tokens; what was stored from there on is forgotten."""
        if first_position > self.length:
            raise ConfigError(f"KV cache: position {first_position} follows a gap; {self.length} positions are filled")
        if num_tokens > self.max_tokens:
            raise ConfigError(f"KV cache: {num_tokens} positions in one call, made for {self.max_tokens}")
        end = first_position + num_tokens
        if end > self.capacity:
            raise ConfigError(
                f"KV cache: {end} positions needed, the context holds {self.capacity}; "
                "raise --ctx or shorten the prompt"
            )
        if self.truncate(first_position) < first_position:
            raise ConfigError(f"KV cache: positions before {first_position} were overwritten; start again at 0")
        self.length = end
        self._oldest = [max(o, end - kv.capacity) for o, kv in zip(self._oldest, self.layers, strict=True)]

    def truncate(self, length: int) -> int:
        """Keep the first `length` positions. Returns how many are left: those, or none where a ring has already
        overwritten what positions from there on would look back at (never when up to SLACK are taken back)."""
        length = min(self.length, max(length, 0))
        needed = (length - shape.num_seen(length) for shape in self.shapes)
        if length == 0 or any(n < oldest for n, oldest in zip(needed, self._oldest, strict=True)):
            length, self._oldest = 0, [0] * len(self.shapes)
        self.length = length
        return length

    def restore(self, length: int) -> None:
        """Say that `regions(length)` were filled from elsewhere."""
        self.length = length
        if self.follower is not None:
            self.follower.clear()
        self._oldest = [length - shape.num_kept(length) for shape in self.shapes]

    def describe(self) -> dict:
        """What two caches must have in common for the `regions` of one to be those of the other."""
        return {"kind": self.kind, "layers": [list(astuple(shape)) for shape in self.shapes]}

    def regions(self, length: int) -> list[np.ndarray]:
        """The memory of positions 0 .. length - 1 as writable uint8 views, in an order that depends on the shape of
        the model alone: per layer the heads' keys, then the heads' values, each [length, D] without gaps. A ring gives
        the last KVShape.num_kept positions, in two views where it wraps: the bytes in a row are those of any cache.
        Raises ConfigError when so many positions were taken back that those are not all there."""
        views = []
        for shape, kv, arrays, oldest in zip(self.shapes, self.layers, self._arrays, self._oldest, strict=True):
            first, slots = length - shape.num_kept(length), kv.capacity
            if first < oldest <= length <= self.length:
                raise ConfigError(f"KV cache: positions before {oldest} were overwritten; go on a little, then save")
            head = min(length - first, slots - first % slots)  # positions before the ring wraps
            parts = [(first % slots, head), (0, length - first - head)]
            for array, width in zip(arrays, shape.widths, strict=True):
                row = width * self._item_bytes
                for rows in array.reshape(shape.num_heads, -1):
                    views += [rows[start * row : (start + count) * row] for start, count in parts if count]
        return views
