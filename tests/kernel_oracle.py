"""What the kernel tests share: activations in the form a kernel wants, storage bytes that reach every code, and guarded
calls straight into the compiled tables. Definitions are written in numpy here, not taken from the native side."""

import zlib

import numpy as np

from engine import kernels
from engine.formats import FORMATS
from engine.kernels import ffi

GUARD = 16  # floats before and after every output row
POISON = np.uint32(0x7FC0DEAD)  # a NaN nobody computes
ACT_F32, ACT_Q8_32, ACT_Q8_256, ACT_Q8_256_ROTATED = 0, 1, 2, 3
SHAPES_ROWS = (1, 7, 8, 9, 17, 24)
SHAPES_COLS = (1, 15, 32, 33, 96, 160, 256, 512, 640, 1536, 2048, 2816, 2880)


def own(tables):
    """(name, tier) -> cdata of tables with code of their own."""
    return {(t.name, t.tier): t.cdata for t in tables if not t.same_as}


# Formats whose rows do not stand alone have tests of their own (test_hqq5.py): no row of theirs can be made, cut or
# encoded by itself.
LAYOUTS = {key: table for key, table in own(kernels.layouts()).items() if not table.scattered}
CODECS = {key: table for key, table in own(kernels.formats()).items() if not table.group_rows}
RUNS_HERE = {name for name, supported, _ in kernels.tiers() if supported}
BY_LAYOUT = {f.layout: f for f in FORMATS.values() if not f.group_rows}


def here(tables):
    return sorted(key for key in tables if key[1] in RUNS_HERE)


def seeded(*key):
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def round64(n):
    return -(-n // 64) * 64


def aligned(num_bytes):
    raw = kernels.aligned_empty(num_bytes)
    raw[:] = 0xA5
    return raw


def pointer(array):
    return ffi.cast("void *", array.ctypes.data)


def allowed_cols(layout):
    return [cols for cols in SHAPES_COLS if cols % layout.block_len == 0]


# ---- activations ----


def pack(q, d, cols):
    """int8 q and float32 d in the memory form of moe_act_view."""
    parts = (q, d, q.reshape(-1, 16).sum(1).astype(np.int16), q.reshape(-1, 32).sum(1).astype(np.int32))
    out = aligned(sum(round64(p.nbytes) for p in parts))
    at = 0
    for part in parts:
        out[at : at + part.nbytes] = part.view(np.uint8)
        at += round64(part.nbytes)
    return out


def quantize_q8(x, block):
    """The definition: d = amax / 127, q = x * (127 / amax) rounded half to even, in float32."""
    blocks = x.astype(np.float32).reshape(-1, block)
    amax = np.abs(blocks).max(1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(amax == 0, np.float32(0), np.float32(127) / amax)
    q = np.clip(np.rint(blocks * inverse[:, None]), -127, 127).astype(np.int8).reshape(-1)
    return q, (amax / np.float32(127)).astype(np.float32)


def activation(x, form):
    """(memory form, float64 values it stands for) of one token; the rotated form takes it as rotated already."""
    if form == ACT_F32:
        memory = aligned(4 * len(x))
        memory[:] = x.astype(np.float32).view(np.uint8)
        return memory, x.astype(np.float64)
    block = 32 if form == ACT_Q8_32 else 256
    q, d = quantize_q8(x, block)
    return pack(q, d, len(x)), (q.reshape(-1, block) * d[:, None].astype(np.float64)).reshape(-1)


# ---- storage bytes ----


def first_bad_block(name, row, cols):
    return CODECS[name, "scalar"].check_row(pointer(row), cols)


def random_storage(name, rows, cols, rng, limit=1e4):
    """Random bytes, redrawn block by block until every weight is finite and at most `limit`."""
    f = FORMATS[name]
    if f.row_extra_bytes:  # a float32 scale of the whole row behind its codes
        codes = rng.integers(0, 256, (rows, f.row_bytes(cols) - 4), dtype=np.uint8)
        scales = (rng.uniform(0.1, 1, (rows, 1)) * min(limit, 1e30) / 128).astype("<f4")
        return np.concatenate([codes, scales.view(np.uint8)], axis=1)
    blocks = rng.integers(0, 256, (rows * cols // f.block_len, f.block_bytes), dtype=np.uint8)
    while True:
        with np.errstate(all="ignore"):
            values = f.dequantize(blocks, f.block_len)
        bad = ~(np.abs(values) <= limit).all(1)
        if not bad.any():
            return blocks.reshape(rows, -1)
        blocks[bad] = rng.integers(0, 256, (int(bad.sum()), f.block_bytes), dtype=np.uint8)


# Formats whose every scale byte is a finite scale: where the scales are, and the byte that makes them about 1.
FINITE_SCALES = {"mxfp4": ([0], 0x80), "nvfp4": ([0, 1, 2, 3], 0x38)}
MOST_SCALE_BYTES = 3  # that an exponent is spread over: one in a half, two in a float, more where a half is scattered


def refuses(name, first, last):
    """Whether a block that is zero except for ones in bytes first .. last is refused as non-finite."""
    f = FORMATS[name]
    block = np.zeros(f.block_bytes, np.uint8)
    block[max(first, 0) : last + 1] = 0xFF
    return first_bad_block(name, block, f.block_len) == 0


def scale_bytes(name):
    """Positions of the high bytes of the scales: the shortest runs of ones that are refused end there."""
    for length in range(1, MOST_SCALE_BYTES + 1):
        found = [i for i in range(FORMATS[name].block_bytes) if refuses(name, i - length + 1, i)]
        if found:
            return found
    return []


def filled_storage(name, byte, rows, cols):
    """Every byte the same, except the high bytes of the scales, which make them about 1."""
    f = FORMATS[name]
    if f.row_extra_bytes:
        ones = np.ones((rows, 1), "<f4").view(np.uint8)
        return np.concatenate([np.full((rows, f.row_bytes(cols) - 4), byte, np.uint8), ones], axis=1)
    blocks = np.full((rows * cols // f.block_len, f.block_bytes), byte, np.uint8)
    at, value = FINITE_SCALES.get(name) or (scale_bytes(name), 0x3C)
    blocks[:, at] = value
    return blocks.reshape(rows, -1)


# ---- calls ----


def encode(name, tier, storage, cols):
    """Storage rows to strips, each strip in a buffer of exactly its size with guard bytes behind it."""
    codec = CODECS[name, tier]
    layout = LAYOUTS[FORMATS[name].layout, "scalar"]
    strip_rows, strip_bytes = layout.strip_rows, layout.strip_bytes(cols)
    out = []
    for row in range(0, len(storage), strip_rows):
        part = np.ascontiguousarray(storage[row : row + strip_rows])
        strip = aligned(strip_bytes + 64)
        codec.encode_strip(pointer(strip), pointer(part), part.shape[1], len(part), cols)
        assert (strip[strip_bytes:] == 0xA5).all(), "codec wrote past its strip"
        out.append(strip[:strip_bytes])
    strips = aligned(strip_bytes * len(out))
    strips[:] = np.concatenate(out)
    return strips


def dequantize(layout_name, strips, rows, cols):
    out = np.empty((rows, cols), np.float32)
    for row in range(rows):
        target = ffi.cast("float *", out[row].ctypes.data)
        LAYOUTS[layout_name, "scalar"].dequantize_row(target, pointer(strips), cols, row)
    return out


def matmul(layout, strips, rows, cols, activations, ranges=None):
    """uint32 bits [T, rows] of a kernel call per strip range; outputs start as NaN, guards must survive."""
    T = len(activations)
    y = np.full((T, rows + 2 * GUARD), POISON, np.uint32)
    targets = [ffi.cast("float *", y[t, GUARD:].ctypes.data) for t in range(T)]
    strips_in_all = -(-rows // layout.strip_rows)
    for first, last in ranges or [(0, strips_in_all)]:
        layout.matmul(targets, pointer(strips), rows, cols, first, last, [pointer(a) for a in activations], T)
    assert (y[:, :GUARD] == POISON).all() and (y[:, -GUARD:] == POISON).all(), "kernel wrote outside its rows"
    return y[:, GUARD:-GUARD].copy()


def absolute_error(bits, want):
    """Sum of |got - want|; NaN stays NaN and fails any comparison."""
    return np.abs(bits.view(np.float32).astype(np.float64) - want).sum()
