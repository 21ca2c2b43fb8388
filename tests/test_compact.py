"""Compact strips: storage rows that are re-coded strip by strip inside a call give the same bits."""

import functools

import numpy as np
import pytest
from engine._native import ffi, lib
from kernel_oracle import random_storage, seeded
from native_calls import Experts, assert_same_bits, linear, pointer, poisoned, run_experts

from engine import kernels
from engine.formats import FORMATS

TIERS = [name for name, supported, _ in kernels.tiers() if supported]
COLS = 512
CONTEXTS = {}


def context(tier=None, threads=1):
    return CONTEXTS.setdefault((tier, threads), kernels.Context(tier, threads))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache
def storage_of(name, rows, cols, seed=0):
    """Storage bytes uint8 [rows * row_bytes] at an odd address, read only, as a mapped file may hand them out."""
    if FORMATS[name].group_rows:
        data = context("scalar").quantize(name, normal(seed, rows, cols))
    else:
        distinct = random_storage(name, min(rows, 17), cols, seeded(name, rows, cols, seed), limit=4)
        data = np.resize(distinct, (rows, distinct.shape[1]))
    view = np.empty(data.size + 1, np.uint8)[1:]
    view[:] = data.reshape(-1)
    view.flags.writeable = False
    return view


def pair(ctx, name, rows, cols, seed=0):
    storage = storage_of(name, rows, cols, seed)
    compact = ctx.matrix(name, storage, rows, cols, compact=True)
    assert np.shares_memory(compact.strips, storage), "the storage bytes were copied"
    return ctx.matrix(name, storage, rows, cols), compact


def rows_for(name, *counts):
    group = FORMATS[name].group_rows or 1
    return [-(-count // group) * group for count in counts]


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("tier", TIERS)
def test_compact_gives_the_bits_of_strips(tier, name):
    """Every format and tier; rows that end inside a strip and a span; 1..8 tokens, and more than one call takes."""
    ctx = context(tier, 1 if tier == "scalar" else 2)
    for rows in rows_for(name, 1, 9, 39):
        fast, compact = pair(ctx, name, rows, COLS)
        assert compact.compact and compact.num_bytes == rows * FORMATS[name].row_bytes(COLS)
        for num_tokens in (1, 2, 3, 4, 5, 6, 7, 8, 19) if rows > 32 else (3,):
            x = normal(num_tokens, num_tokens, COLS)
            assert_same_bits(linear(ctx.handle, [compact], x)[0], linear(ctx.handle, [fast], x)[0])


@pytest.mark.parametrize("name", ["iq3_s", "q4_0", "hqq5-ax0-g32", "f16"])
@pytest.mark.parametrize("threads", [1, 3])
def test_bias_and_residual_of_compact_rows(name, threads):
    ctx, rows = context(None, threads), 416
    fast, compact = pair(ctx, name, rows, COLS)
    bias, old = normal(1, rows), [normal(2, 11, rows)]
    fast.cdata.bias = compact.cdata.bias = pointer(bias)
    x = normal(3, 11, COLS)
    assert_same_bits(linear(ctx.handle, [compact], x, old)[0], linear(ctx.handle, [fast], x, old)[0])
    both = linear(ctx.handle, [compact, fast], x)
    assert_same_bits(both[0], both[1])


@pytest.mark.parametrize("name", [name for name in sorted(FORMATS) if FORMATS[name].rotate is None])
def test_embed_reads_storage_rows(name):
    ctx = context(None, 2)
    rows = rows_for(name, 41)[0]
    fast, compact = pair(ctx, name, rows, COLS)
    ids = np.array([rows - 1, 0, 7, 8, 8, 33], np.int32)
    got, want = poisoned(6, COLS), poisoned(6, COLS)
    for matrix, out in ((compact, got), (fast, want)):
        assert lib.moe_embed(ctx.handle, pointer(out), matrix.cdata, pointer(ids, "int32_t *"), 6) == 0
    assert_same_bits(got, want)


COMBINATIONS = [
    ("iq3_s", "iq3_s", "iq4_nl", (1, 1, 1)),
    ("iq2_xxs", "iq2_xxs", "q8_0", (1, 1, 0)),
    ("q4_0", "f16", "f32", (1, 0, 1)),
    ("f16", "q5_k", "e8-iq3", (0, 1, 1)),
    ("hqq5-ax0-g32", "hqq5-ax0-g32", "hqq5-ax0-g32", (1, 1, 1)),
    ("hqq5-ax0-g32", "hqq5-ax0-g32", "mxfp4", (1, 0, 1)),
]


@pytest.mark.parametrize("gate,up,down,compact", COMBINATIONS)
@pytest.mark.parametrize("tier,threads", [(None, 1), (None, 3), ("scalar", 2)])
def test_experts_of_any_mixture_give_the_bits_of_strips(gate, up, down, compact, tier, threads):
    ctx, hidden, width, count = context(tier, threads), 256, 512, 3
    tables = [[], []]
    for e in range(count):
        shapes = ((gate, width, hidden), (up, width, hidden), (down, hidden, width))
        pairs = [pair(ctx, name, rows, cols, seed=e) for name, rows, cols in shapes]
        tables[0].append([p[0] for p in pairs])
        tables[1].append([p[wanted] for p, wanted in zip(pairs, compact, strict=True)])
    for num_tokens in (1, 3, 14):
        x = normal(num_tokens, num_tokens, hidden)
        ids = np.random.default_rng(num_tokens).permuted(np.tile(np.arange(count), (num_tokens, 1)), axis=1)
        ids = np.ascontiguousarray(ids[:, :2], np.int32)
        want, got = (run_experts(ctx.handle, Experts(table), x, ids) for table in tables)
        assert_same_bits(got, want)


def counting(ctx, matrix):
    """The matrix with a codec that counts its calls."""
    codec, calls = ctx.format(matrix.format), []

    @ffi.callback("void(void *, const void *, size_t, int, int)")
    def encode(strip, rows, row_bytes, num_rows, cols):
        calls.append(num_rows)
        codec.encode_strip(strip, rows, row_bytes, num_rows, cols)

    table = ffi.new("struct moe_format *", codec[0])
    table.encode_strip = encode
    matrix.cdata.storage = table
    return calls, (encode, table)


@pytest.mark.parametrize("num_tokens", [1, 8, 24])
def test_each_strip_is_recoded_once_for_all_tokens(num_tokens):
    ctx, rows = context(), 8 * 40 + 3
    _, compact = pair(ctx, "iq3_s", rows, COLS)
    calls, keep = counting(ctx, compact)
    linear(ctx.handle, [compact], normal(1, num_tokens, COLS))
    assert calls == [8] * 40 + [3]
    del keep


def test_each_strip_of_an_expert_is_recoded_once_for_all_its_tokens():
    ctx, hidden, width = context(), 256, 520
    shapes = (("iq3_s", width, hidden), ("iq3_s", width, hidden), ("iq4_nl", hidden, 544))
    with pytest.raises(AssertionError):  # a down of another width is refused, not read past its end
        experts = Experts([[pair(ctx, *s)[1] for s in shapes]])
        run_experts(ctx.handle, experts, normal(1, 2, hidden), np.zeros((2, 1), np.int32))
    width = 544
    shapes = (("iq3_s", width, hidden), ("iq3_s", width, hidden), ("iq4_nl", hidden, width))
    matrices = [pair(ctx, *s)[1] for s in shapes]
    counted = [counting(ctx, matrix) for matrix in matrices]
    run_experts(ctx.handle, Experts([matrices]), normal(1, 20, hidden), np.zeros((20, 1), np.int32))
    assert [len(calls) for calls, _ in counted] == [68, 68, 32]


def test_a_codec_of_another_layout_is_refused():
    ctx = context()
    _, compact = pair(ctx, "iq3_s", 16, COLS)
    compact.cdata.storage = ctx.format("iq4_xs")
    y, x = poisoned(1, 16), normal(1, 1, COLS)
    arrays = ffi.new("const struct moe_matrix *[]", [compact.cdata]), ffi.new("float *[]", [pointer(y)])
    assert lib.moe_linear(ctx.handle, *arrays, 1, pointer(x), 1, 0) == lib.MOE_BAD_ARGUMENT
    ids = np.zeros(1, np.int32)
    assert lib.moe_embed(ctx.handle, pointer(y), compact.cdata, pointer(ids, "int32_t *"), 1) == lib.MOE_BAD_ARGUMENT
    assert np.isnan(y).all()
