"""The tile of many tokens gives the bits of the scalar kernel on one token at a time, for every format that has one."""

import numpy as np
import pytest

from engine import kernels
from engine.doctor import finite_rows
from engine.formats import FORMATS
from engine.kernels import address, ffi, lib

ROWS, COLS, TOKENS = 61, 768, 24  # strips that do not fill the last pass, a panel and a half, three groups of tokens
TIERS = [name for name, supported, _ in kernels.tiers() if supported and name != "scalar"]


def run(call, strips, xs, first, last, group):
    y = np.full((TOKENS, ROWS), np.nan, np.float32)
    out = ffi.new("float *[]", [address(row, "float *") for row in y])
    for t in range(0, TOKENS, group):
        call(out + t, address(strips), ROWS, COLS, first, last, xs + t, group)
    return y.view(np.uint32)


@pytest.mark.parametrize("name", sorted(f for f in FORMATS if not FORMATS[f].group_rows))
@pytest.mark.parametrize("tier", TIERS)
def test_tile_equals_one_token_of_the_scalar_tier(tier, name):
    context, scalar = kernels.Context(tier, 1), kernels.Context("scalar", 1)
    layout, reference = context.layout(FORMATS[name].layout), scalar.layout(FORMATS[name].layout)
    if not layout.tile:
        assert tier == "avx2" or name in ("f32", "f16", "bf16")
        return
    rng = np.random.default_rng(1)
    strips = scalar.encode(name, finite_rows(scalar, name, ROWS, COLS, rng), ROWS, COLS)
    x = rng.standard_normal((TOKENS, COLS)).astype(np.float32)
    num_bytes = lib.moe_activation_bytes(layout.activation, COLS)
    act = kernels.aligned_empty(num_bytes * TOKENS)
    args = (address(act), layout.activation, address(x, "float *"), TOKENS, COLS)
    kernels.check(lib.moe_quantize_activations(context.handle, *args), "quantize activations")
    xs = ffi.new("void *[]", [address(act[t * num_bytes :]) for t in range(TOKENS)])
    for first, last in ((0, 8), (3, 8), (0, 5)):
        got = run(layout.tile, strips, xs, first, last, TOKENS)
        assert (got == run(reference.matmul, strips, xs, first, last, 1)).all(), (first, last)  # NaN where no row is


@pytest.mark.parametrize("name", ["iq4_xs", "iq4_nl"])
@pytest.mark.parametrize("tier", TIERS)
def test_rows_longer_than_the_sizes_of_activations_that_are_kept(tier, name):
    """AVX2 keeps |x| of up to four tokens for at most 8192 columns; longer rows go the other way to the same bits."""
    context, scalar, rng = kernels.Context(tier, 1), kernels.Context("scalar", 1), np.random.default_rng(2)
    for cols in (8192, 8448):
        layout, reference = context.layout(FORMATS[name].layout), scalar.layout(FORMATS[name].layout)
        strips = scalar.encode(name, finite_rows(scalar, name, 9, cols, rng), 9, cols)
        num_bytes = lib.moe_activation_bytes(layout.activation, cols)
        x, act = rng.standard_normal((5, cols)).astype(np.float32), kernels.aligned_empty(num_bytes * 5)
        args = (address(act), layout.activation, address(x, "float *"), 5, cols)
        kernels.check(lib.moe_quantize_activations(context.handle, *args), "quantize activations")
        xs = ffi.new("void *[]", [address(act[t * num_bytes :]) for t in range(5)])
        results = []
        for call, group in ((reference.matmul, 1), (layout.matmul, 1), (layout.matmul, 5)):
            y = np.full((5, 9), np.nan, np.float32)
            out = ffi.new("float *[]", [address(row, "float *") for row in y])
            for t in range(0, 5, group):
                call(out + t, address(strips), 9, cols, 0, 2, xs + t, group)
            results.append(y.view(np.uint32))
        assert (results[1] == results[0]).all(), cols
        assert (results[2] == results[0]).all(), cols
