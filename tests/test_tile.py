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
        assert name in ("f32", "f16", "bf16")
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
