"""Multipliers, gated sums and the double-precision helpers of rotary embedding."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
from native_calls import TIERS, assert_same_bits, context, pointer

from engine.kernels import ffi, lib


def scale(ctx, x, factor):
    y = x.copy()
    assert lib.moe_scale(ctx, pointer(y), y.size, factor) == lib.MOE_OK
    return y


def add_gated(ctx, y, x, gate):
    out = y.copy()
    assert lib.moe_add_gated(ctx, pointer(out), pointer(x), pointer(gate), *x.shape) == lib.MOE_OK
    return out


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size", [1, 17, 64, 100_003])
def test_scale_is_one_rounding(tier, size):
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    x[0] = np.float32(3e-41)  # subnormal
    for factor in (0.22, -12.0, 1.0, 0.0):
        assert_same_bits(scale(context(tier, 2), x, factor), x * np.float32(factor))


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (9, 2048), (200, 96)])
def test_gated_sum_matches_float64_on_every_tier(shape):
    rng = np.random.default_rng(shape[1])
    x, y = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    gate = np.resize(np.array([0.3, -2.0, 40.0, -100.0, 0.0, 7.5], np.float32), shape[0])
    found = [add_gated(context(tier, threads), y, x, gate) for tier in TIERS for threads in (1, 3)]
    for other in found[1:]:
        assert_same_bits(other, found[0])
    want = y.astype(np.float64) + x / (1 + np.exp(-gate.astype(np.float64)))[:, None]
    np.testing.assert_allclose(found[0], want, rtol=1e-6, atol=1e-6)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((5, 96)).astype(np.float32) for _ in range(2))
    gate = rng.standard_normal(5).astype(np.float32)
    whole = add_gated(context(TIERS[-1], 2), y, x, gate)
    for r in range(5):
        row = slice(r, r + 1)
        assert_same_bits(add_gated(context(TIERS[-1], 1), y[row], x[row].copy(), gate[row].copy()), whole[row])


def test_arguments_out_of_range_are_refused():
    ctx, x = context(TIERS[0], 1), pointer(np.zeros(4, np.float32))
    assert lib.moe_scale(ctx, ffi.NULL, 4, 1.0) == lib.MOE_BAD_ARGUMENT
    assert lib.moe_scale(ctx, x, -1, 1.0) == lib.MOE_BAD_ARGUMENT
    assert lib.moe_add_gated(ctx, x, x, ffi.NULL, 1, 4) == lib.MOE_BAD_ARGUMENT
    assert lib.moe_add_gated(ctx, x, x, x, 1, 0) == lib.MOE_BAD_ARGUMENT
    assert lib.moe_rope_frequencies(ffi.new("double[4]"), 1e4, 7) == lib.MOE_BAD_ARGUMENT
    assert lib.moe_rope_frequencies(ffi.NULL, 1e4, 8) == lib.MOE_BAD_ARGUMENT


@pytest.mark.parametrize("x", [1.0, 8.0, 40.0, 1e-300, 1e300, 0.15915494309189535, 10000.0, 1.0000000001])
def test_logarithm_is_right_to_the_last_bit_or_next_to_it(x):
    with localcontext() as numbers:
        numbers.prec = 50
        want = float(Decimal(x).ln())
    assert abs(lib.moe_log(x) - want) <= np.spacing(abs(want))


@pytest.mark.parametrize("theta", [10000.0, 1e6, 253.9])
def test_double_frequencies_round_to_the_float_ones(theta):
    exact, rounded = ffi.new("double[32]"), np.empty(32, np.float32)
    assert lib.moe_rope_frequencies(exact, theta, 64) == lib.MOE_OK
    assert lib.moe_rope_inv_freq(pointer(rounded), theta, 64) == lib.MOE_OK
    np.testing.assert_array_equal(np.array(list(exact)).astype(np.float32), rounded)
    with localcontext() as numbers:
        numbers.prec = 50
        want = [float((Decimal(theta).ln() * (-2 * i) / 64).exp()) for i in range(32)]
    np.testing.assert_allclose(list(exact), want, rtol=3e-16)
