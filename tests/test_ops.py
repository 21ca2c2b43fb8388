"""Row operations: every tier gives the scalar tier's bits, results are accurate, and nothing hides a NaN.

The tables of native/ops/vector.c are reached through the public calls, and once more directly through a library that
the test compiles per tier, for the operations that no public call shows alone.
"""

import ctypes
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from engine._native import lib
from native_calls import (
    F32,
    Q8_32,
    Q8_256,
    TIERS,
    assert_same_bits,
    context,
    pointer,
    poisoned,
    quantize_activations,
    rmsnorm,
    softmax,
    swiglu,
    token_logprobs,
)

ROOT = Path(__file__).parent.parent
WIDTHS = [1, 3, 15, 16, 17, 31, 64, 100, 257, 2048]


def _operations() -> list[str]:
    """The slots of struct moe_vector_ops, in order: a table is read as an array of addresses."""
    header = (ROOT / "native/internal.h").read_text()
    body = header.split("struct moe_vector_ops {")[1].split("\n};")[0]
    return re.findall(r"\(\*(\w+)\)\(", body)


OPS = _operations()
PINNED = [
    "08d8ab7b",
    "d59cfadc",
    "e2696aa9",
    "ba60a9db",
    "4d1511b7",
    "c6dc6184",
    "f92afdb3",
    "2e6465c8",
]  # docs/arithmetic.md
HIGHER_TIERS = [tier for tier in TIERS if tier != "scalar"]


def sample(rng, *shape):
    """Mixed magnitudes, with zeros of both signs and subnormals among them."""
    x = (rng.standard_normal(shape) * np.exp(rng.uniform(-6, 3, shape))).astype(np.float32)
    x[rng.random(shape) < 0.03] = 0.0
    x[rng.random(shape) < 0.03] = -0.0
    x[rng.random(shape) < 0.03] = np.float32(3e-41)
    return x


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """{tier: {operation: address}} of native/ops/vector.c compiled alone."""
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    sys.path.insert(0, str(ROOT / "native"))
    import build

    folder, found = tmp_path_factory.mktemp("ops"), {}
    for tier in TIERS:
        tier_id, flags = build.ALL_TIERS[tier]
        options = [*build.CFLAGS, *flags, f"-DMOE_TIER={tier}", f"-DMOE_TIER_ID={tier_id}", "-fvisibility=default"]
        library = folder / f"{tier}.so"
        source = ROOT / "native/ops/vector.c"
        subprocess.run(["gcc", *options, "-shared", "-fPIC", source, "-o", library], check=True, cwd=ROOT)
        table = (ctypes.c_void_p * (1 + len(OPS))).in_dll(ctypes.CDLL(str(library)), f"moe_ops_vector_{tier}")
        found[tier] = dict(zip(OPS, list(table)[1:], strict=True))
        assert all(found[tier].values()), "a table has an empty slot"
    return found


def call(tables, tier, name, *arguments, result=None):
    """One operation of one tier; arrays go as addresses, int as int64, float as float32."""
    kinds, values = [], []
    for a in arguments:
        if isinstance(a, np.ndarray):
            kinds.append(ctypes.c_void_p)
            values.append(a.ctypes.data)
        else:
            kinds.append(ctypes.c_float if isinstance(a, float) else ctypes.c_int64)
            values.append(a)
    return ctypes.CFUNCTYPE(result, *kinds)(tables[tier][name])(*values)


# ---- accuracy ----
def test_exp_is_within_two_ulp_over_the_whole_range(tables):
    x = np.concatenate([np.linspace(-87.33, 88.37, 100_000), np.linspace(-1e-3, 1e-3, 2001)]).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    for tier in TIERS:
        y = poisoned(x.size)
        call(tables, tier, "exp", y, x, x.size)
        assert (np.abs(y - want) / np.spacing(want.astype(np.float32))).max() <= 2.0


def test_exp_at_the_ends(tables):
    x = np.array([-np.inf, -200, -87.34, 0, -0.0, 89, np.inf, np.nan], np.float32)
    for tier in TIERS:
        y = poisoned(x.size)
        call(tables, tier, "exp", y, x, x.size)
        np.testing.assert_array_equal(y[:5], [0, 0, 0, 1, 1])
        assert (y[5:7] > 2.3e38).all()
        assert np.isfinite(y[5:7]).all()
        assert np.isnan(y[7])


@pytest.mark.parametrize("width", WIDTHS)
def test_rmsnorm_matches_float64(width):
    rng = np.random.default_rng(width)
    x, weight = sample(rng, 5, width), sample(rng, width)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(rmsnorm(context(), x, weight), want, rtol=3e-6, atol=1e-30)


def test_rmsnorm_rounds_each_step_as_documented():
    """One element: the mean is x * x, and the steps are single float32 operations."""
    x, weight = np.array([[1.7]], np.float32), np.array([3.3], np.float32)
    r = np.float32(1) / np.sqrt(x * x + np.float32(1e-5))
    assert_same_bits(rmsnorm(context(), x, weight), (x * r) * weight)


@pytest.mark.parametrize("width", WIDTHS)
def test_softmax_matches_float64(width):
    x = np.random.default_rng(width).standard_normal((7, width)).astype(np.float32) * 6
    e = np.exp((x - x.max(1, keepdims=True)).astype(np.float64))  # the difference is rounded to float32
    np.testing.assert_allclose(softmax(context(), x), e / e.sum(1, keepdims=True), rtol=1e-6, atol=1e-37)


def test_swiglu_matches_float64_and_survives_large_gates():
    rng = np.random.default_rng(3)
    gate, up = sample(rng, 1003) * 3, sample(rng, 1003)
    wide = gate.astype(np.float64)
    want = wide / (1 + np.exp(-np.clip(wide, -700, None))) * up
    np.testing.assert_allclose(swiglu(context(), gate, up), want, rtol=2e-6, atol=1e-32)
    edge = np.array([-1e30, -100, 100, 1e30, np.inf], np.float32)
    y = swiglu(context(), edge, np.ones_like(edge))
    np.testing.assert_array_equal(y[2:], edge[2:])
    assert abs(y[1]) < 1e-35


def test_clamped_swiglu_matches_float64_on_both_sides_of_the_limit():
    rng = np.random.default_rng(3)
    gate, up, limit = sample(rng, 1003) * 9, sample(rng, 1003) * 9, 7.0
    assert min((gate > limit).sum(), (gate < -limit).sum(), (up > limit).sum(), (up < -limit).sum()) > 20
    wide = np.minimum(gate.astype(np.float64), limit)
    want = wide / (1 + np.exp(np.minimum(-1.702 * wide, 700))) * (np.clip(up.astype(np.float64), -limit, limit) + 1)
    y = poisoned(1003)
    assert lib.moe_swiglu_clamped(context(), pointer(y), pointer(gate), pointer(up), 1003, limit) == 0
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-30)
    assert lib.moe_swiglu_clamped(context(), pointer(y), pointer(gate), pointer(up), 1003, 0) == lib.MOE_BAD_ARGUMENT


def test_sigmoid_matches_float64():
    x = np.linspace(-80, 80, 1003).astype(np.float32)
    y = poisoned(1003)
    assert lib.moe_sigmoid(context(), pointer(y), pointer(x), 1003) == 0
    np.testing.assert_allclose(y, 1 / (1 + np.exp(-x.astype(np.float64))), rtol=1e-6)


def test_rmsnorm_of_a_part_leaves_the_rest():
    x = sample(np.random.default_rng(4), 30, 48)
    y, weight = x.copy(), sample(np.random.default_rng(5), 40)
    assert lib.moe_rmsnorm_part(context(None, 2), pointer(y), pointer(weight), 30, 40, 48, 1e-6) == 0
    assert_same_bits(y[:, :40].copy(), rmsnorm(context(), x[:, :40].copy(), weight, 1e-6))
    assert_same_bits(y[:, 40:].copy(), x[:, 40:].copy())


@pytest.mark.parametrize("width", [1, 2, 16, 33, 50304])
def test_token_logprobs_match_float64(width):
    logits = np.random.default_rng(width).standard_normal((4, width)).astype(np.float32) * 5
    targets = np.random.default_rng(9).integers(0, width, 4)
    status, got = token_logprobs(context(), logits, targets)
    wide = logits.astype(np.float64)
    want = wide[range(4), targets] - np.logaddexp.reduce(wide, axis=1)
    assert status == 0
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_own_logarithm_is_accurate_to_1e_12():
    """Equal logits have logprob -ln n: the sum is exact, so this is the logarithm alone."""
    for n in [*range(1, 130), 1000, 4095, 4097, 50304, 151936]:
        _, got = token_logprobs(context(), np.zeros((1, n), np.float32), [0])
        assert abs(got[0] + np.log(n)) < 1e-12


def test_16_bit_floats_round_to_nearest_even():
    ctx = context()
    every = np.arange(65536, dtype=np.uint16)
    x = np.concatenate([np.random.default_rng(1).integers(0, 2**32, 200_000, np.uint32), every.astype(np.uint32) << 16])
    x = np.concatenate([x, (every.astype(np.uint32) << 13) + 0x38000000, (every.astype(np.uint32) << 12) + 0x33000000])
    x = x.view(np.float32)
    y, wide = np.empty(x.size, np.uint16), poisoned(every.size)
    assert lib.moe_from_f32(ctx, pointer(y, "void *"), pointer(x), x.size, 0) == 0
    with np.errstate(all="ignore"):
        want = x.astype(np.float16)
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(y[finite], want[finite].view(np.uint16))
    assert np.isnan(y[~finite].view(np.float16)).all()
    assert lib.moe_to_f32(ctx, pointer(wide), pointer(every, "void *"), every.size, 0) == 0
    np.testing.assert_array_equal(wide, every.view(np.float16).astype(np.float32))
    assert lib.moe_from_f32(ctx, pointer(y, "void *"), pointer(x), x.size, 1) == 0
    u = x.view(np.uint32).astype(np.uint64)
    np.testing.assert_array_equal(y[finite], ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)[finite])
    assert lib.moe_to_f32(ctx, pointer(wide), pointer(every, "void *"), every.size, 1) == 0
    np.testing.assert_array_equal(wide, (every.astype(np.uint32) << 16).view(np.float32))


def test_arithmetic_is_pinned():
    """A fingerprint: a change that alters every tier alike is still a change of the canonical arithmetic."""
    ctx, n = context(), 1003
    k = np.arange(6 * n, dtype=np.int64)
    x = ((k * 2654435761 % 20011 - 10005) / np.float32(1024)).astype(np.float32).reshape(6, n)
    outs = [rmsnorm(ctx, x, x[3].copy()), softmax(ctx, x), swiglu(ctx, x, x[::-1].copy())]
    outs += [
        token_logprobs(ctx, x, [0, 5, 17, 300, 1002, 999])[1],
        *quantize_activations(ctx, x[:, :768].copy(), Q8_256),
    ]
    assert [f"{zlib.crc32(out.tobytes()):08x}" for out in outs] == PINNED


# ---- activation quantizer ----
def reference_q8(x, block):
    """The definition in numpy float32 steps."""
    parts = x.reshape(x.shape[0], -1, block)
    amax = np.abs(parts).max(2, keepdims=True)
    with np.errstate(all="ignore"):
        inv = np.float32(127) / amax
        q = np.rint(np.where(np.isfinite(inv), parts * inv, 0)).astype(np.int8)
    d = np.where(np.isfinite(inv), amax / np.float32(127), np.float32(0))[..., 0]
    return q.reshape(x.shape), d.astype(np.float32)


def quantizer_input(rng, block):
    x = sample(rng, 9, 3 * block)
    x[1] = 0
    x[2] = np.float32(1e-40)  # 127 / amax overflows: counts as zero
    x[3, :block] = np.arange(block) % 32 * np.float32(0.5)
    x[3, 5] = 127  # factor 1: halves are ties, to even
    x[4] = np.float32(3e38)
    x[5] = np.float32(-4e-37)
    x[6, block:] = -x[6, block:]
    x[7, :block] = -np.float32(12.7)  # equal magnitudes reach the end of the range
    return x


@pytest.mark.parametrize("form, block", [(Q8_32, 32), (Q8_256, 256)])
@pytest.mark.parametrize("tier", TIERS)
def test_quantizer_follows_its_definition(tier, form, block):
    x = quantizer_input(np.random.default_rng(block), block)
    q, d, sum16, sum32 = quantize_activations(context(tier), x, form)
    want_q, want_d = reference_q8(x, block)
    np.testing.assert_array_equal(q, want_q)
    assert_same_bits(d, want_d)
    wide = q.astype(np.int64)
    np.testing.assert_array_equal(sum16, wide.reshape(9, -1, 16).sum(2))
    np.testing.assert_array_equal(sum32, wide.reshape(9, -1, 32).sum(2))
    assert q.min() == -127
    assert q.max() == 127


@pytest.mark.parametrize("form, block", [(Q8_32, 32), (Q8_256, 256)])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantizer_shows_non_finite_input_in_the_scale(tier, form, block, bad):
    for place in (0, 7, block - 1):
        x = np.ones((1, 2 * block), np.float32)
        x[0, block + place] = bad
        q, d, _, _ = quantize_activations(context(tier), x, form)
        assert np.isfinite(d[0, 0])
        assert not np.isfinite(d[0, 1])
        assert not q[0, block:].any()


def test_activation_bytes_refuse_unknown_forms():
    assert lib.moe_activation_bytes(F32, 100) >= 400
    assert lib.moe_activation_bytes(Q8_32, 48) == 0
    assert lib.moe_activation_bytes(Q8_256, 96) == 0
    assert lib.moe_activation_bytes(7, 256) == 0
    assert lib.moe_activation_bytes(Q8_32, 0) == 0


# ---- tiers ----
@pytest.mark.parametrize("tier", HIGHER_TIERS)
@pytest.mark.parametrize("width", WIDTHS)
def test_public_operations_equal_the_scalar_tier(tier, width):
    rng = np.random.default_rng(width)
    x, other = sample(rng, 6, width), sample(rng, 6, width)
    fast, scalar = context(tier), context("scalar")
    assert_same_bits(rmsnorm(fast, x, other[0].copy()), rmsnorm(scalar, x, other[0].copy()))
    assert_same_bits(softmax(fast, x), softmax(scalar, x))
    assert_same_bits(swiglu(fast, x, other), swiglu(scalar, x, other))
    targets = rng.integers(0, width, 6)
    assert_same_bits(token_logprobs(fast, x, targets)[1], token_logprobs(scalar, x, targets)[1])
    clipped = [x.copy(), x.copy()]
    for ctx, y in zip((fast, scalar), clipped, strict=True):
        assert lib.moe_clip(ctx, pointer(y), y.size, 0.75) == 0
    assert_same_bits(*clipped)
    np.testing.assert_array_equal(clipped[0], np.clip(x, -0.75, 0.75))


@pytest.mark.parametrize("tier", HIGHER_TIERS)
@pytest.mark.parametrize("n", [1, 5, 16, 19, 35, 1000])
def test_table_operations_equal_the_scalar_tier(tables, tier, n):
    rng = np.random.default_rng(n)
    x, start = sample(rng, n), sample(rng, n)
    for name, arguments in {"add": (), "scale": (0.37,), "fma": (-1.25,), "exp": ()}.items():
        rows = {}
        for t in (tier, "scalar"):
            rows[t] = np.append(start, np.float32(7))
            call(tables, t, name, rows[t], x, *arguments, n)
        assert_same_bits(rows[tier], rows["scalar"])
        assert rows[tier][n] == 7
        assert not np.array_equal(rows[tier][:n], start)


@pytest.mark.parametrize("tier", TIERS)
def test_fused_multiply_add_rounds_once(tables, tier):
    x = np.random.default_rng(4).standard_normal(4096).astype(np.float32)
    s = np.float32(1.2345678)
    y = (-x * s).astype(np.float32)
    exact = y.astype(np.float64) + x.astype(np.float64) * np.float64(s)
    call(tables, tier, "fma", y, x, float(s), x.size)
    assert_same_bits(y, exact.astype(np.float32))
    assert y.any()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rotary_dim, head_dim", [(8, 8), (32, 32), (64, 80), (20, 24), (128, 128)])
def test_rope_of_one_head_is_products_and_sums_rounded_once_each(tables, tier, interleaved, rotary_dim, head_dim):
    rng = np.random.default_rng(rotary_dim)
    half = rotary_dim // 2
    x, cosines, sines = (rng.standard_normal(n).astype(np.float32) for n in (head_dim, half, half))
    want = x.copy()
    a, b = (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleaved else (slice(half), slice(half, rotary_dim))
    want[a] = x[a] * cosines - x[b] * sines
    want[b] = x[b] * cosines + x[a] * sines
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int] * 3)(tables[tier]["rope"])
    function(x.ctypes.data, cosines.ctypes.data, sines.ctypes.data, head_dim, rotary_dim, interleaved)
    assert_same_bits(x, want)


# ---- non-finite values ----
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [5, 16, 40, 333])
def test_non_finite_input_is_reported_or_stays_visible(tier, bad, width):
    ctx = context(tier)
    for place in {0, width // 2, width - 1}:
        x = np.random.default_rng(2).standard_normal((1, width)).astype(np.float32)
        assert lib.moe_check_finite(ctx, pointer(x), width) == lib.MOE_OK
        x[0, place] = bad
        assert lib.moe_check_finite(ctx, pointer(x), width) == lib.MOE_NONFINITE
        ones = np.ones((1, width), np.float32)
        assert not np.isfinite(rmsnorm(ctx, x, ones[0])).all()
        assert not np.isfinite(swiglu(ctx, x, ones)).all()
        assert not np.isfinite(swiglu(ctx, ones, x)).all()
        if bad > 0 or np.isnan(bad):  # -inf is a legal way to mask a logit
            assert np.isnan(softmax(ctx, x)).all()
            assert token_logprobs(ctx, x, [0])[0] == lib.MOE_NONFINITE
        y = x.copy()
        assert lib.moe_clip(ctx, pointer(y), width, 2.0) == lib.MOE_OK
        assert np.isnan(y[0, place]) == np.isnan(bad)


def test_rmsnorm_does_not_turn_an_overflowed_row_into_zeros():
    x, ones = np.full((1, 32), 1e20, np.float32), np.ones(32, np.float32)
    assert np.isnan(rmsnorm(context(), x, ones)).all()


def test_softmax_of_masked_logits_gives_exact_zeros():
    x = np.zeros((1, 20), np.float32)
    x[0, 3:] = -np.inf
    y = softmax(context(), x)
    np.testing.assert_array_equal(y[0, 3:], 0)
    np.testing.assert_allclose(y[0, :3], 1 / 3, rtol=1e-6)


# ---- arguments and threads ----
def test_bad_arguments_are_refused():
    ctx, x = context(), np.ones((2, 32), np.float32)
    p, targets = pointer(x), np.array([0, 32], np.int32)
    out = poisoned(2, dtype=np.float64)
    assert lib.moe_rmsnorm(ctx, p, p, p, 1, 0, 1e-5) == lib.MOE_BAD_ARGUMENT
    assert lib.moe_softmax(ctx, p, p, -1, 4) == lib.MOE_BAD_ARGUMENT
    assert lib.moe_clip(ctx, p, 4, float("nan")) == lib.MOE_BAD_ARGUMENT
    assert lib.moe_to_f32(ctx, p, p, 4, 2) == lib.MOE_BAD_ARGUMENT
    assert lib.moe_quantize_activations(ctx, p, Q8_256, p, 1, 32) == lib.MOE_BAD_ARGUMENT
    logprobs = (ctx, pointer(out, "double *"), p, pointer(targets, "int32_t *"), 2, 32)
    assert lib.moe_token_logprobs(*logprobs) == lib.MOE_BAD_ARGUMENT


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_thread_count_gives_the_same_bits(threads):
    rng = np.random.default_rng(threads)
    x, weight = sample(rng, 41, 2500), sample(rng, 2500)
    one, many = context(None, 1), context(None, threads)
    assert_same_bits(rmsnorm(many, x, weight), rmsnorm(one, x, weight))
    assert_same_bits(softmax(many, x), softmax(one, x))
    assert_same_bits(swiglu(many, x, x[::-1].copy()), swiglu(one, x, x[::-1].copy()))
    targets = rng.integers(0, 2500, 41)
    assert_same_bits(token_logprobs(many, x, targets)[1], token_logprobs(one, x, targets)[1])
    for form in (Q8_32, Q8_256):
        got, want = (quantize_activations(ctx, x[:, :2304].copy(), form) for ctx in (many, one))
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
    x[40, 2499] = np.nan
    assert lib.moe_check_finite(many, pointer(x), x.size) == lib.MOE_NONFINITE
