"""Rotary embedding: frequencies against 50 digits, tables against numpy's float64, rotation against float64."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
from conftest import supported_tiers

from engine.kernels import Context, address, lib

TIERS = supported_tiers()


def frequencies(theta, rotary_dim):
    out = np.full(rotary_dim // 2, np.nan, np.float32)
    assert lib.moe_rope_inv_freq(address(out, "float *"), theta, rotary_dim) == lib.MOE_OK
    return out


def tables(inv_freq, first, count, scale=1.0):
    """(status, cos, sin [count, half])."""
    cosines, sines = (np.full((count, len(inv_freq)), np.nan, np.float32) for _ in range(2))
    pointers = (address(cosines, "float *"), address(sines, "float *"), address(inv_freq, "float *"))
    return lib.moe_rope_table(*pointers, len(inv_freq), first, count, scale), cosines, sines


def rotate(context, x, rotary_dim, cosines, sines, first, interleaved):
    """Rotated copy of x [T, N, D], guards around it checked."""
    raw = np.full(x.size + 32, 777.0, np.float32)
    raw[16:-16] = x.reshape(-1)
    tokens, heads, head_dim = x.shape
    status = lib.moe_rope(
        context.handle, address(raw[16:-16], "float *"), tokens, heads, head_dim, rotary_dim,
        address(cosines, "float *"), address(sines, "float *"), first, interleaved,
    )  # fmt: skip
    assert status == lib.MOE_OK
    assert (raw[:16] == 777).all() and (raw[-16:] == 777).all()
    return raw[16:-16].reshape(x.shape).copy()


@pytest.mark.parametrize("theta", [10000.0, 10000.5, 150000.0, 500000.0, 1e6, 5e6, 1e7, 0.25, 1.0, 1e-100, 1e100])
@pytest.mark.parametrize("rotary_dim", [2, 6, 16, 64, 80, 128])
def test_frequencies_are_correctly_rounded(theta, rotary_dim):
    with localcontext() as numbers:
        numbers.prec = 50
        log = Decimal(theta).ln()
        exact = [(log * (-2 * i) / rotary_dim).exp() for i in range(rotary_dim // 2)]
    with np.errstate(over="ignore"):
        want = np.array([np.float32(float(x)) for x in exact])
    np.testing.assert_array_equal(frequencies(theta, rotary_dim), want)


@pytest.mark.parametrize("first", [0, 4000, 131072 - 3000])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_tables_are_the_cosine_and_sine_of_the_float32_angle(first, theta):
    inv_freq = frequencies(theta, 128)
    status, cosines, sines = tables(inv_freq, first, 3001)
    assert status == lib.MOE_OK
    angles = np.arange(first, first + 3001, dtype=np.float32)[:, None] * inv_freq[None, :]
    for got, want in ((cosines, np.cos(angles.astype(np.float64))), (sines, np.sin(angles.astype(np.float64)))):
        assert (np.abs(got - want) <= np.spacing(np.abs(want).astype(np.float32))).all()
        assert (got != want.astype(np.float32)).mean() < 1e-6  # in fact correctly rounded


def test_every_position_of_the_largest_angles_is_right():
    one = np.ones(1, np.float32)
    status, cosines, sines = tables(one, 2**24 - 100000, 100000)
    assert status == lib.MOE_OK
    angles = np.arange(2**24 - 100000, 2**24, dtype=np.float64)[:, None]
    np.testing.assert_array_equal(cosines, np.cos(angles).astype(np.float32))
    np.testing.assert_array_equal(sines, np.sin(angles).astype(np.float32))


def test_scale_multiplies_before_rounding():
    inv_freq = frequencies(150000.0, 64)
    scale = float(np.float32(1.3465736))
    _, cosines, sines = tables(inv_freq, 0, 2000, scale)
    angles = (np.arange(2000, dtype=np.float32)[:, None] * inv_freq[None, :]).astype(np.float64)
    np.testing.assert_array_equal(cosines, (np.cos(angles) * scale).astype(np.float32))
    np.testing.assert_array_equal(sines, (np.sin(angles) * scale).astype(np.float32))


def test_a_table_in_parts_equals_the_whole():
    inv_freq = frequencies(10000.0, 32)
    whole = tables(inv_freq, 0, 500)[1:]
    for first, count in ((0, 1), (123, 200), (499, 1)):
        for part, all_rows in zip(tables(inv_freq, first, count)[1:], whole, strict=True):
            np.testing.assert_array_equal(part, all_rows[first : first + count])


def test_arguments_out_of_range_are_refused():
    one, out = np.ones(1, np.float32), np.zeros(4, np.float32)
    for theta, rotary_dim in ((0.0, 4), (-1.0, 4), (np.nan, 4), (np.inf, 4), (10000.0, 3), (10000.0, 0)):
        assert lib.moe_rope_inv_freq(address(out, "float *"), theta, rotary_dim) == lib.MOE_BAD_ARGUMENT
    assert tables(one, 2**24 - 1, 2)[0] == lib.MOE_BAD_ARGUMENT
    assert tables(one, -1, 1)[0] == lib.MOE_BAD_ARGUMENT
    assert tables(one * 20, 2**20, 1)[0] == lib.MOE_BAD_ARGUMENT  # angle past 2^24
    assert tables(one * np.float32(np.nan), 0, 1)[0] == lib.MOE_BAD_ARGUMENT
    context = Context(num_threads=1)
    x = address(out, "float *")
    for rotary_dim, first, interleaved in ((6, 0, 0), (3, 0, 0), (0, 0, 0), (4, -1, 0), (4, 0, 2)):
        status = lib.moe_rope(context.handle, x, 1, 1, 4, rotary_dim, x, x, first, interleaved)
        assert status == lib.MOE_BAD_ARGUMENT, (rotary_dim, first, interleaved)


SHAPES = [(128, 128), (64, 64), (80, 80), (64, 32), (24, 24), (16, 8), (128, 96), (16, 2), (48, 20), (192, 64)]


@pytest.mark.parametrize("interleaved", [0, 1], ids=["halves", "adjacent"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SHAPES)
def test_rotation_agrees_with_float64_in_both_pairings(head_dim, rotary_dim, interleaved):
    rng = np.random.default_rng(head_dim + rotary_dim)
    x = rng.standard_normal((9, 3, head_dim)).astype(np.float32)
    _, cosines, sines = tables(frequencies(10000.0, rotary_dim), 0, 40)
    out = rotate(Context(num_threads=1), x, rotary_dim, cosines, sines, 31, interleaved)
    half = rotary_dim // 2
    a, b = (np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2)) if interleaved else (
        np.arange(half), np.arange(half, rotary_dim))  # fmt: skip
    c, s = (t[31:, None, :].astype(np.float64) for t in (cosines, sines))
    want = x.astype(np.float64)
    want[..., a], want[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    assert np.abs(out - want).max() <= 1.5e-7 * 2 * np.abs(x).max()
    np.testing.assert_array_equal(out[..., rotary_dim:], x[..., rotary_dim:])
    assert np.abs(out[..., :rotary_dim] - x[..., :rotary_dim]).max() > 0.1


@pytest.mark.parametrize("interleaved", [0, 1], ids=["halves", "adjacent"])
def test_tiers_threads_and_splits_give_the_same_bits(interleaved):
    rng = np.random.default_rng(7)
    for head_dim, rotary_dim in SHAPES:
        x = rng.standard_normal((70, 16, head_dim)).astype(np.float32)
        _, cosines, sines = tables(frequencies(10000.0, rotary_dim), 0, 100)
        want = rotate(Context(TIERS[0], 1), x, rotary_dim, cosines, sines, 30, interleaved)
        for tier in TIERS:
            for threads in (1, 3):
                out = rotate(Context(tier, threads), x, rotary_dim, cosines, sines, 30, interleaved)
                np.testing.assert_array_equal(out.view(np.uint32), want.view(np.uint32))
        for t in (0, 5, 69):
            out = rotate(Context(None, 1), x[t : t + 1], rotary_dim, cosines, sines, 30 + t, interleaved)
            np.testing.assert_array_equal(out[0].view(np.uint32), want[t].view(np.uint32))
