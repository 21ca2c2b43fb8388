"""The layers that models are written with: thin methods over native operations on preallocated buffers.

A `Buffer` is memory for up to max_tokens rows; every method takes the number of tokens in use. Nothing here allocates
during a decode step, and each method is one native call (the GIL is released in it).
"""

import numpy as np

from .errors import NumericsError
from .kernels import Context, Matrix, address, aligned_empty, check, ffi, lib


class Buffer:
    """float32 or int32 [rows, width] with a C pointer kept beside it."""

    __slots__ = ("array", "ptr", "width")

    def __init__(self, rows: int, width: int, dtype=np.float32):
        self.array = aligned_empty(rows * width * 4).view(dtype).reshape(rows, width)
        self.ptr = address(self.array, "float *" if dtype == np.float32 else "int32_t *")
        self.width = width


class Vector:
    """float32 [n] weights (a norm) with a C pointer."""

    __slots__ = ("array", "ptr")

    def __init__(self, array: np.ndarray):
        self.array = np.ascontiguousarray(array, np.float32)
        self.ptr = address(self.array, "float *")


class Linear:
    """Several matrices [out_m, in] applied to the same input in one call (q, k and v; or a single one)."""

    __slots__ = ("_y", "matrices", "w")

    def __init__(self, *matrices: Matrix):
        self.matrices = matrices
        self.w = ffi.new("struct moe_matrix *[]", [m.cdata for m in matrices])
        self._y = ffi.new("float *[]", len(matrices))

    def __call__(self, layers: "Layers", x: Buffer, outputs: tuple[Buffer, ...], num_tokens: int, add: bool = False):
        """outputs[m] [T, out_m] = x [T, in] W_m^T, added to what they hold when add."""
        for i, out in enumerate(outputs):
            self._y[i] = out.ptr
        check(lib.moe_linear(layers.ctx, self.w, self._y, len(outputs), x.ptr, num_tokens, add), "linear")


class Layers:
    """The operations of a forward pass on one context. Shapes: T tokens, N heads, K kv heads, D head_dim, H hidden."""

    def __init__(self, context: Context):
        self.context, self.ctx = context, context.handle
        self.experts_used = 0  # distinct experts of every layer call, added up
        self.keep_rows = None  # during a forward pass that may drop its last rows: see Decoder.forward

    def embed(self, out: Buffer, matrix: Matrix, ids: Buffer, num_tokens: int) -> None:
        check(lib.moe_embed(self.ctx, out.ptr, matrix.cdata, ids.ptr, num_tokens), "embed")

    def rmsnorm(self, out: Buffer, x: Buffer, weight: Vector, num_rows: int, width: int, eps: float) -> None:
        """Rows of `width`; the per-head norm of [T, N, D] is T * N rows of D."""
        check(lib.moe_rmsnorm(self.ctx, out.ptr, x.ptr, weight.ptr, num_rows, width, eps), "rmsnorm")

    def clip(self, x: Buffer, count: int, limit: float) -> None:
        check(lib.moe_clip(self.ctx, x.ptr, count, limit), "clip")

    def scale(self, x: Buffer, count: int, factor: float) -> None:
        """The first `count` values times factor."""
        check(lib.moe_scale(self.ctx, x.ptr, count, factor), "scale")

    def swiglu(self, out: Buffer, gate: Buffer, up: Buffer, count: int) -> None:
        """out = silu(gate) * up; out may be gate."""
        check(lib.moe_swiglu(self.ctx, out.ptr, gate.ptr, up.ptr, count), "swiglu")

    def add_gated(self, y: Buffer, x: Buffer, gate: Buffer, num_tokens: int, width: int) -> None:
        """y [T, width] += sigmoid(gate [T]) * x [T, width]."""
        check(lib.moe_add_gated(self.ctx, y.ptr, x.ptr, gate.ptr, num_tokens, width), "gated sum")

    def check_finite(self, x: Buffer, count: int, where: str) -> None:
        """Raises NumericsError naming `where` when one of the first `count` values is not finite."""
        status = lib.moe_check_finite(self.ctx, x.ptr, count)
        if status == lib.MOE_NONFINITE:
            raise NumericsError(nonfinite_message(where))
        check(status, where)

    def rope(
        self, x: Buffer, table, num_tokens: int, num_heads: int, head_dim: int, position: int, start: int = 0
    ) -> None:
        """Rotate x [T, N, D] in place, from number `start` of every head on; table: a rope.RopeTable."""
        tables = (table.rotary_dim, table.cosines.ptr, table.sines.ptr)
        check(
            lib.moe_rope(
                self.ctx, x.ptr + start, num_tokens, num_heads, head_dim, *tables, position, table.interleaved
            ),
            "rope",
        )

    def kv_store(self, kv, k: Buffer, v: Buffer, position: int, num_tokens: int) -> None:
        check(lib.moe_kv_store(self.ctx, kv, k.ptr, v.ptr, position, num_tokens), "kv store")

    def attention(
        self, out: Buffer, q: Buffer, kv, num_tokens: int, num_heads: int, position: int, scale: float, window: int = 0,
        sinks: Vector | None = None,
    ) -> None:  # fmt: skip
        """Causal attention of q [T, N, D] over the cache; out [T, N, V]. window: positions seen (0: all); sinks [N]."""
        sinks_ptr = ffi.NULL if sinks is None else sinks.ptr
        call = (out.ptr, q.ptr, kv, num_tokens, num_heads, position, scale, window, sinks_ptr)
        check(lib.moe_attention(self.ctx, *call), "attention")

    def rmsnorm_part(self, x: Buffer, weight: Vector, num_rows: int, width: int, eps: float) -> None:
        """In place, the first `width` numbers of every row of x."""
        check(lib.moe_rmsnorm_part(self.ctx, x.ptr, weight.ptr, num_rows, width, x.width, eps), "rmsnorm")

    def linear_heads(
        self, out: Buffer, w: Matrix, x: Buffer, num_tokens: int, num_heads: int, x_width: int, tail: int = 0
    ) -> None:
        """out [T, N, rows + tail]: one matrix of w [N * rows, cols] per head times x [T, N, :cols], then the `tail`
        numbers of x behind those."""
        check(lib.moe_linear_heads(self.ctx, w.cdata, out.ptr, x.ptr, num_tokens, num_heads, x_width, tail), "heads")


def nonfinite_message(where: str) -> str:
    return f"{where}: a value is not finite; the weights are damaged (millstream inspect --verify) or out of range"
