"""Keys and values of every layer. Owns the memory and how many positions are filled; knows no model."""

import numpy as np

from .errors import ConfigError
from .kernels import address, aligned_empty, ffi

CHUNK_POSITIONS = 64  # MOE_ATTENTION_CHUNK: a chunk of positions never wraps around the end of a cache


class KVCache:
    """KV cache of num_layers layers, each [K, capacity, D] keys and values in float16 or float32.

    `capacity` positions can be stored; memory is committed by the system as positions are first written.
    """

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, capacity: int, kind: str = "f16"):
        self.capacity, self.length, self.kind = capacity, 0, kind
        self._num_heads, self._head_dim = num_heads, head_dim
        slots = -(-capacity // CHUNK_POSITIONS) * CHUNK_POSITIONS
        bytes_per_tensor = num_heads * slots * head_dim * (4 if kind == "f32" else 2)
        self.num_bytes = 2 * num_layers * bytes_per_tensor
        self._arrays: list[np.ndarray] = [aligned_empty(bytes_per_tensor) for _ in range(2 * num_layers)]
        self._structs = ffi.new("struct moe_kv[]", num_layers)
        self.layers = [self._structs + layer for layer in range(num_layers)]
        for layer, kv in enumerate(self.layers):
            kv.k, kv.v = address(self._arrays[2 * layer]), address(self._arrays[2 * layer + 1])
            kv.num_heads, kv.head_dim, kv.capacity, kv.is_f32 = num_heads, head_dim, slots, kind == "f32"

    def extend(self, first_position: int, num_tokens: int) -> None:
        """Account for positions first_position .. + num_tokens; what was stored from there on is forgotten."""
        if first_position > self.length:
            raise ConfigError(f"KV cache: position {first_position} follows a gap; {self.length} positions are filled")
        if first_position + num_tokens > self.capacity:
            raise ConfigError(
                f"KV cache: {first_position + num_tokens} positions needed, the context holds {self.capacity}; "
                "raise --ctx or shorten the prompt"
            )
        self.length = first_position + num_tokens

    def truncate(self, length: int) -> int:
        """Keep the first `length` positions. Returns how many are left: those, or none where a cache has already
        overwritten what positions from there on would look back at."""
        self.length = min(self.length, length)
        return self.length

    def describe(self) -> dict:
        """What two caches must have in common for the `regions` of one to be those of the other."""
        heads, dim = self._num_heads, self._head_dim
        return {"kind": self.kind, "layers": len(self.layers), "num_heads": heads, "head_dim": dim}

    def regions(self, length: int) -> list[np.ndarray]:
        """The memory of positions 0 .. length - 1 as writable uint8 views, in an order that depends on the shape of
        the model alone: per layer the heads' keys, then the heads' values, each [length, D] without gaps."""
        per_position = self._head_dim * (4 if self.kind == "f32" else 2)
        return [head[: length * per_position] for array in self._arrays for head in array.reshape(self._num_heads, -1)]
