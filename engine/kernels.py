"""The only module that imports engine._native: contexts, tables, and matrices in compute layouts.

A `Context` is one CPU tier plus one thread pool. It knows nothing about models; it turns arrays into native calls and
statuses into errors.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ._native import ffi, lib
from .errors import FormatError, KernelError

__all__ = [
    "Context",
    "KernelTable",
    "Matrix",
    "aligned_empty",
    "ffi",
    "formats",
    "layouts",
    "lib",
    "tiers",
    "weights_empty",
]


_STATUS = {
    lib.MOE_BAD_ARGUMENT: "an argument is out of range",
    lib.MOE_NO_MEMORY: "out of memory",
    lib.MOE_NO_KERNEL: "no kernel for this layout",
    lib.MOE_NONFINITE: "a value is not finite",
    lib.MOE_NO_THREAD: "a thread could not be started",
    lib.MOE_IN_USE: "it is in use",
}
_KINDS = {"f16": 0, "bf16": 1}
ALIGNMENT_BYTES = 64


def check(status: int, what: str) -> int:
    """Pass a native result through, or raise KernelError naming the call and the reason."""
    if status < 0:
        raise KernelError(f"{what}: {_STATUS.get(status, f'status {status}')}")
    return status


def text(pointer) -> str | None:
    return ffi.string(pointer).decode() if pointer else None


def aligned_empty(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes], contents undefined, starting at a multiple of 64."""
    raw = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + num_bytes]


_ARENA_BYTES = 32 << 20  # numpy asks the system for huge pages from 4 MiB on
_arena, _arena_lock = np.empty(0, np.uint8), threading.Lock()


def weights_empty(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] for weights that stay, contents undefined, at a multiple of 64; a piece of a large block.

    A matrix of a few MiB of its own would lie in small pages: reading it takes several times as long, since between
    two tokens everything else that is read pushes the entries of its pages out of the caches.
    """
    global _arena
    rounded = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if rounded >= _ARENA_BYTES:
        return aligned_empty(num_bytes)
    with _arena_lock:  # engines may be loaded by several threads
        if rounded > len(_arena):
            _arena = aligned_empty(_ARENA_BYTES)
        piece, _arena = _arena[:num_bytes], _arena[rounded:]
    return piece


def address(array: np.ndarray, ctype: str = "void *"):
    """Pointer to a C-contiguous array. The caller keeps the array alive."""
    if not array.flags.c_contiguous:
        raise KernelError(f"array of shape {array.shape} is not contiguous")
    return ffi.cast(ctype, array.ctypes.data)


@dataclass(frozen=True)
class KernelTable:
    """One line of the kernel matrix: which table a (name, tier) uses."""

    name: str
    tier: str
    same_as: str | None
    why: str | None
    cdata: object


def layouts() -> list[KernelTable]:
    """Every compiled (compute layout, tier)."""
    return [_table(lib.moe_layout_at(i)) for i in range(lib.moe_layout_count())]


def formats() -> list[KernelTable]:
    """Every compiled (storage format codec, tier)."""
    return [_table(lib.moe_format_at(i)) for i in range(lib.moe_format_count())]


def _table(k) -> KernelTable:
    return KernelTable(text(k.name), text(k.tier), text(k.same_as), text(k.why), k)


def has_tile(table: KernelTable) -> bool:
    """Has this layout's kernel a form for more than eight tokens at a time?"""
    return bool(table.cdata.tile)


def no_tile_reason(table: KernelTable) -> str | None:
    """Why more than eight tokens go through this layout's kernel eight at a time; None where there is a tile, or where
    the tier reuses another's table."""
    if table.same_as or has_tile(table):
        return None
    for prefix, reason in NO_TILE_REASONS.items():
        if f"{table.tier} {table.name}".startswith(prefix) or table.name.startswith(prefix):
            return reason
    return None


# A tile unpacks codes once for all of its tokens. Keys: beginnings of "layout" or "tier layout".
NO_TILE_REASONS = {
    "rows_": "rows of floats are used as they lie or widened by one instruction: nothing to unpack",
    "hqq5_ax0": "every token scales its activations per group of rows; unpacking is the small part",
    "avx2 ": "unpacking is a tenth of the work of eight tokens; a tile saves that and reads activations more often",
    "scalar ": "this tier defines the results and stays plain; one row at a time, it unpacks once for eight tokens",
}

# Why a tier asks for a feature that CPUs without it might be expected to do without.
FEATURE_REASONS = {
    "AVX512_VNNI": "AVX-512 alone is not enough: these kernels sum products with vpdpbusd and vpdpwssd, and without "
    "them the avx2 kernels are as good",
    "FMA": "the arithmetic is defined with fused multiply-add; emulating it costs more than AVX2 gains",
    "F16C": "scales are half precision and widened in the kernels",
}
# Machines whose vector unit no tier uses.
MACHINE_REASONS = {
    "aarch64": "no NEON tier yet: bits can be proved in an emulator, speed cannot, and a slow kernel helps nobody; the "
    "scalar tier runs",
}


def tier_reason(missing: str | None) -> str | None:
    """Why a tier needs the feature that this CPU lacks, where that wants an explanation."""
    return FEATURE_REASONS.get(missing) if missing else None


def tiers() -> list[tuple[str, bool, str | None]]:
    """(name, runs here, first missing CPU feature) of every tier, worst first."""
    names = [text(lib.moe_tier_name(i)) for i in range(lib.moe_tier_count())]
    return [
        (name, bool(lib.moe_tier_supported(name.encode())), text(lib.moe_tier_missing(name.encode()))) for name in names
    ]


class Matrix:
    """Weights [rows, cols] in a compute layout, ready for native calls.

    `strips` is a uint8 array (mapped, read or re-coded) that this object keeps alive; `cdata` is the moe_matrix.
    compact: it holds rows of the storage format `fmt` instead, re-coded strip by strip in every call.
    """

    __slots__ = ("bias", "cdata", "cols", "compact", "format", "layout", "num_bytes", "rows", "strips")

    def __init__(
        self, context: "Context", layout: str, strips: np.ndarray, rows: int, cols: int, fmt: str = "", compact=False
    ):
        need = rows * context.row_bytes(fmt, cols) if compact else context.matrix_bytes(layout, rows, cols)
        if strips.nbytes < need:
            what = f"format {fmt}" if compact else f"layout {layout}"
            raise FormatError(f"{what} [{rows}, {cols}]: got {strips.nbytes} bytes, expected {need}")
        self.rows, self.cols, self.layout, self.format, self.compact = rows, cols, layout, fmt, compact
        self.strips, self.num_bytes = strips, need
        self.cdata = ffi.new("struct moe_matrix *")
        self.cdata.data = address(strips)
        self.cdata.layout = context.layout(layout)
        self.cdata.storage = context.format(fmt) if compact else ffi.NULL
        self.cdata.rows, self.cdata.cols = rows, cols
        self.bias = None

    def set_bias(self, bias: np.ndarray) -> None:
        """float32 [rows], added to every product with the matrix; kept alive by it."""
        if bias.shape != (self.rows,) or bias.dtype != np.float32:
            raise FormatError(f"bias of a matrix [{self.rows}, {self.cols}]: got {bias.dtype} {list(bias.shape)}")
        self.bias, self.cdata.bias = bias, address(bias, "float *")


ARITHMETICS = {"canonical": lib.MOE_ARITH_CANONICAL, "float": lib.MOE_ARITH_FLOAT}


class Context:
    """One CPU tier and one thread pool.

    tier: None for the best this CPU runs, or a name that is then used exactly. arith: what quantized weights meet in
    products, "canonical" (int8 activations) or "float". Raises KernelError when a tier cannot be used.
    """

    def __init__(self, tier: str | None = None, num_threads: int | None = None, arith: str = "canonical"):
        if num_threads is None:
            from .hardware import usable_cpus

            num_threads = usable_cpus().count
        error = ffi.new("const char **")
        handle = lib.moe_ctx_create(ffi.NULL if tier is None else tier.encode(), num_threads, error)
        if not handle:
            known = ", ".join(name for name, _, _ in tiers())
            if tier is not None and tier not in known.split(", "):
                raise KernelError(f"tier {tier!r} is unknown; known: {known}")
            missing = text(lib.moe_tier_missing(tier.encode())) if tier else None
            if missing:
                raise KernelError(f"tier {tier} cannot run here: this CPU has no {missing}; known tiers: {known}")
            raise KernelError(f"a context of {num_threads} threads: {text(error[0])}")
        self.handle = ffi.gc(handle, lib.moe_ctx_destroy)
        self.tier = text(lib.moe_ctx_tier(handle))
        self.num_threads, self.arith = num_threads, arith
        check(lib.moe_ctx_set_arith(self.handle, ARITHMETICS[arith]), f"arithmetic {arith}")
        self._layouts: dict[str, object] = {}
        self._formats: dict[str, object] = {}

    def layout(self, name: str):
        """The moe_layout table of this tier."""
        return self._select(self._layouts, lib.moe_select_layout, "layout", name)

    def format(self, name: str):
        """The moe_format table of this tier."""
        return self._select(self._formats, lib.moe_select_format, "format", name)

    def _select(self, cache, select, kind, name):
        if name not in cache:
            error = ffi.new("const char **")
            found = select(self.handle, name.encode(), error)
            if not found:
                raise KernelError(f"{kind} {name!r} on tier {self.tier}: {text(error[0])}")
            cache[name] = found
        return cache[name]

    def layout_of(self, format_name: str) -> str:
        """Name of the compute layout that a storage format re-codes to."""
        return text(self.format(format_name).layout)

    def matrix_bytes(self, layout_name: str, rows: int, cols: int) -> int:
        return lib.moe_matrix_bytes(self.layout(layout_name), rows, cols)

    def _check_cols(self, format_name: str, cols: int):
        block = self.format(format_name).block_len
        if cols <= 0 or cols % block:
            raise FormatError(
                f"format {format_name}: row length {cols} is not a multiple of its block of {block}; "
                "choose a format with a block that divides it (for example q8_0, or f16)"
            )

    def _check_rows(self, format_name: str, rows: int):
        group = self.format(format_name).group_rows
        if group and (rows <= 0 or rows % group):
            raise FormatError(
                f"format {format_name}: {rows} rows are not a multiple of the {group} that share scales; choose "
                "another format"
            )

    def row_bytes(self, format_name: str, cols: int) -> int:
        """Storage bytes of one row, or its share of the matrix where rows do not stand alone."""
        self._check_cols(format_name, cols)
        table = self.format(format_name)
        return cols // table.block_len * table.block_bytes + table.row_extra_bytes

    def quantize(self, format_name: str, x: np.ndarray) -> np.ndarray:
        """float32 [rows, cols] to storage rows, uint8 [rows, row_bytes]; whole matrices where rows share data."""
        x = np.ascontiguousarray(x, np.float32)
        rows, cols = x.shape
        self._check_rows(format_name, rows)
        out = np.empty((rows, self.row_bytes(format_name, cols)), np.uint8)
        status = lib.moe_quantize(self.handle, address(out), format_name.encode(), address(x, "float *"), rows, cols)
        check(status, f"quantize to {format_name}")
        return out

    def quantize_groups(
        self, format_name: str, x: np.ndarray, values: int, tell: Callable[[float], None]
    ) -> np.ndarray:
        """`quantize` of a matrix whose rows share data, about `values` weights per native call: `tell` hears the share
        that is done after each."""
        x = np.ascontiguousarray(x, np.float32)
        rows, cols = x.shape
        self._check_rows(format_name, rows)
        out = np.empty((rows, self.row_bytes(format_name, cols)), np.uint8)
        group_rows = self.format(format_name).group_rows
        groups, step = rows // group_rows, max(1, values // (group_rows * cols))
        args = (self.handle, address(out), format_name.encode(), address(x, "float *"), rows, cols)
        for first in range(0, groups, step):
            last = min(first + step, groups)
            check(lib.moe_quantize_groups(*args, first, last), f"quantize to {format_name}")
            tell(last / groups)
        return out

    def encode(self, format_name: str, storage: np.ndarray, rows: int, cols: int) -> np.ndarray:
        """Storage rows (uint8, rows * row_bytes) to strips of the format's layout (uint8, 64-byte aligned)."""
        storage = self._storage_view(format_name, storage, rows, cols)
        table, layout = self.format(format_name), self.layout(self.layout_of(format_name))
        out = weights_empty(lib.moe_matrix_bytes(layout, rows, cols))
        check(lib.moe_encode(self.handle, address(out), table, layout, address(storage), rows, cols), "encode")
        return out

    def check_rows(self, format_name: str, storage: np.ndarray, rows: int, cols: int) -> int | None:
        """Index (row * blocks_per_row + block) of the first block with a non-finite scale, or None."""
        storage = np.ascontiguousarray(storage).view(np.uint8).reshape(-1)
        found = lib.moe_check_rows(self.handle, format_name.encode(), address(storage), rows, cols)
        if found < -1:
            check(int(found), f"check {format_name}")
        return None if found == -1 else int(found)

    def to_f32(self, x: np.ndarray, kind: str) -> np.ndarray:
        """uint16 bit patterns of "f16" or "bf16" to float32, same shape."""
        x = np.ascontiguousarray(x)
        out = np.empty(x.shape, np.float32)
        check(lib.moe_to_f32(self.handle, address(out, "float *"), address(x), x.size, _KINDS[kind]), f"{kind} to f32")
        return out

    def from_f32(self, x: np.ndarray, kind: str) -> np.ndarray:
        """float32 to uint16 bit patterns of "f16" or "bf16", round to nearest even, same shape."""
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty(x.shape, np.uint16)
        check(
            lib.moe_from_f32(self.handle, address(out), address(x, "float *"), x.size, _KINDS[kind]), f"f32 to {kind}"
        )
        return out

    def _storage_view(self, format_name: str, storage: np.ndarray, rows: int, cols: int) -> np.ndarray:
        """uint8 [rows * row_bytes], a view where the array is contiguous."""
        self._check_rows(format_name, rows)
        expected = rows * self.row_bytes(format_name, cols)
        storage = np.ascontiguousarray(storage).view(np.uint8).reshape(-1)
        if storage.nbytes != expected:
            raise FormatError(f"format {format_name} [{rows}, {cols}]: got {storage.nbytes} bytes, expected {expected}")
        return storage

    def matrix(self, format_name: str, storage: np.ndarray, rows: int, cols: int, compact: bool = False) -> Matrix:
        """Storage rows re-coded into a Matrix, or (compact) kept as they are, without a copy, and re-coded strip by
        strip in every call; storage may then be a view of a mapped file at any address."""
        layout = self.layout_of(format_name)
        if not compact:
            return Matrix(self, layout, self.encode(format_name, storage, rows, cols), rows, cols, format_name)
        storage = self._storage_view(format_name, storage, rows, cols)
        if self.layout(layout).strip_rows == 1 and storage.ctypes.data % ALIGNMENT_BYTES == 0:
            return Matrix(self, layout, storage, rows, cols, format_name)  # such rows are strips
        return Matrix(self, layout, storage, rows, cols, format_name, compact=True)
