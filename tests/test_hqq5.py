"""hqq5-ax0-g32: codec, quantizer and kernels against the numpy definition, drivers with scattered output rows."""

import itertools

import numpy as np
import pytest
from kernel_oracle import POISON, aligned, pointer, seeded
from native_calls import Experts, Matrix, context, linear, run_experts, swiglu

from engine import kernels
from engine.errors import FormatError
from engine.formats import FORMATS
from engine.kernels import ffi, lib

NAME, LAYOUT = "hqq5-ax0-g32", "hqq5_ax0"
FMT = FORMATS[NAME]
GROUP = 32
SHAPES = [(32, 32), (32, 96), (96, 32), (96, 288), (64, 2880), (2048, 96)]
MAX_DOT_ERROR = 1e-6
MAX_TOKENS = 8
GUARD = 64  # floats around every output row
TABLES = {t.tier: t.cdata for t in kernels.layouts() if t.name == LAYOUT and not t.same_as}
FORMAT_TABLES = {t.tier: t for t in kernels.formats() if t.name == NAME}
CODECS = {tier: FORMAT_TABLES[t.same_as or tier].cdata for tier, t in FORMAT_TABLES.items()}
TIERS = [name for name, supported, _ in kernels.tiers() if supported and name in TABLES]


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_storage(rows, cols, rng, largest_scale=4.0):
    """Random codes; scales and zeros random, finite, of either sign and every size up to the limits."""
    data = rng.integers(0, 256, rows * cols // 32 * 24, dtype=np.uint8)
    meta = data[rows * cols // 32 * 20 :].view("<f2").reshape(rows // GROUP, 2, cols)
    meta[:, 0] = largest_scale * rng.choice([1.0, 0.01, 1e-6, 0.0, -0.5], (rows // GROUP, cols))
    meta[:, 1] = rng.uniform(-40, 70, (rows // GROUP, cols))
    return data.reshape(rows, -1)


def parts(storage, cols):
    """Codes [32, n, cols], scales and zeros [n, cols] as float64, read byte by byte from the description."""
    rows = len(storage)
    n, data = rows // GROUP, storage.reshape(-1)
    codes = np.empty((rows, cols))
    for row, block, c in itertools.product(range(rows), range(cols // 32), range(32)):
        at = (row * (cols // 32) + block) * 20
        nibble = data[at + c % 16] >> 4 if c >= 16 else data[at + c % 16] & 15
        codes[row, 32 * block + c] = nibble + 16 * (data[at + 16 + c // 8] >> c % 8 & 1)
    meta = data[rows * cols // 32 * 20 :].view("<f2").astype(np.float64).reshape(n, 2, cols)
    return codes.reshape(GROUP, n, cols), meta[:, 0], meta[:, 1]


def encode(tier, storage, cols):
    """Strips, each written into a buffer of exactly its size with guard bytes behind."""
    out, num_bytes = [], TABLES[tier].strip_bytes(cols)
    assert num_bytes == 24 * cols
    for group in range(len(storage) // GROUP):
        strip = aligned(num_bytes + 64)
        CODECS[tier].encode_group(pointer(strip), pointer(storage), len(storage), cols, group)
        assert (strip[num_bytes:] == 0xA5).all(), "codec wrote past its strip"
        out.append(strip[:num_bytes])
    strips = aligned(num_bytes * len(out))
    strips[:] = np.concatenate(out)
    return strips


def matmul(tier, strips, rows, cols, tokens, ranges=None):
    """uint32 bits [T, rows]; outputs start as NaN, guards must survive."""
    T = len(tokens)
    y = np.full((T, rows + 2 * GUARD), POISON, np.uint32)
    targets = [ffi.cast("float *", y[t, GUARD:].ctypes.data) for t in range(T)]
    for first, last in ranges or [(0, rows // GROUP)]:
        TABLES[tier].matmul(targets, pointer(strips), rows, cols, first, last, [pointer(x) for x in tokens], T)
    assert (y[:, :GUARD] == POISON).all() and (y[:, -GUARD:] == POISON).all(), "kernel wrote outside its rows"
    return y[:, GUARD:-GUARD].copy()


def quantized_activations(x, scale):
    """float64 [n, cols]: what x * scale of each row group is after the canonical quantization, blocks of 32."""
    xs = (x[None, :] * scale.astype(np.float32)).reshape(len(scale), -1, 32)
    amax = np.abs(xs).max(2, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127) / amax
    inverse = np.where(np.isfinite(inverse), inverse, np.float32(0))
    d = np.where(inverse > 0, amax / np.float32(127), np.float32(0)).astype(np.float64)
    return (np.rint(xs * inverse) * d).reshape(len(scale), -1)


def expected(storage, cols, tokens):
    """float64 [T, rows] from the operands the kernel has."""
    q, scale, zero = parts(storage, cols)
    acts = np.stack([quantized_activations(x, scale) for x in tokens])
    return np.einsum("tnc,knc->tkn", acts, q - zero).reshape(len(tokens), -1)


def company(cols, rng):
    """Eight tokens of different size, one of them zero."""
    scale = rng.permutation([0.0, 1e-3, 0.1, 1.0, 1.0, 3.0, 50.0, 1e4])
    return [(s * rng.standard_normal(cols)).astype(np.float32) for s in scale]


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_definition_reads_the_bytes_as_described(rows, cols):
    storage = random_storage(rows, cols, seeded(rows, cols))
    q, scale, zero = parts(storage, cols)
    want = ((q - zero).astype(np.float32) * scale.astype(np.float32)).reshape(rows, cols)
    np.testing.assert_array_equal(FMT.dequantize(storage, cols).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_strips_hold_the_storage_values_exactly(tier, rows, cols):
    storage = random_storage(rows, cols, seeded(rows, cols))
    strips = encode(tier, storage, cols)
    np.testing.assert_array_equal(strips, encode("scalar", storage, cols))
    ctx = kernels.Context(tier, 2)
    np.testing.assert_array_equal(ctx.encode(NAME, storage, rows, cols), strips)
    matrix, ids = ctx.matrix(NAME, storage, rows, cols), np.arange(rows, dtype=np.int32)
    got = np.full((rows, cols), np.nan, np.float32)
    lib.moe_embed(ctx.handle, kernels.address(got, "float *"), matrix.cdata, kernels.address(ids, "int32_t *"), rows)
    np.testing.assert_array_equal(got.view(np.uint32), FMT.dequantize(storage, cols).view(np.uint32))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_kernel_matches_float64_and_scalar_bits_at_every_width(tier, rows, cols):
    rng = seeded(rows, cols)
    storage, tokens = random_storage(rows, cols, rng), company(cols, rng)
    strips = encode("scalar", storage, cols)
    reference = matmul("scalar", strips, rows, cols, tokens)
    want = expected(storage, cols, tokens)
    for got, w in zip(reference.view(np.float32).astype(np.float64), want, strict=True):
        assert np.abs(got - w).sum() <= MAX_DOT_ERROR * np.abs(w).sum()
    for width in range(1, MAX_TOKENS + 1):
        chosen = rng.permutation(MAX_TOKENS)[:width]
        got = matmul(tier, strips, rows, cols, [tokens[t] for t in chosen])
        np.testing.assert_array_equal(got, reference[chosen], err_msg=f"{width} tokens")


@pytest.mark.parametrize("tier", TIERS)
def test_extreme_codes_and_activations_do_not_overflow(tier):
    rows, cols = 64, 544
    for byte, zero in itertools.product((0x00, 0xFF, 0xF0, 0x0F), (0.0, 16.0, 31.0)):
        storage = np.full((rows, 24 * cols // 32), byte, np.uint8)
        meta = storage.reshape(-1)[rows * cols // 32 * 20 :].view("<f2").reshape(rows // GROUP, 2, cols)
        meta[:, 0], meta[:, 1] = 1.0, zero
        signs = (np.ones(cols), -np.ones(cols), np.where(np.arange(cols) % 2, 1, -1))
        tokens = [(127 * s).astype(np.float32) for s in signs]
        got = matmul(tier, encode("scalar", storage, cols), rows, cols, tokens)
        np.testing.assert_array_equal(got, matmul("scalar", encode("scalar", storage, cols), rows, cols, tokens))
        want = expected(storage, cols, tokens)
        np.testing.assert_allclose(got.view(np.float32), want, rtol=1e-6, atol=1e-6 * 127 * 16 * cols)


@pytest.mark.parametrize("tier", TIERS)
def test_any_finite_bytes_give_scalar_bits(tier):
    rng = seeded("any")
    rows, cols = 96, 544
    storage = rng.integers(0, 256, (rows, 24 * cols // 32), dtype=np.uint8)
    meta = storage.reshape(-1)[rows * cols // 32 * 20 :].view("<u2")
    meta[(meta & 0x7C00) == 0x7C00] &= 0x83FF
    strips = encode("scalar", storage, cols)
    tokens = [(s * rng.standard_normal(cols)).astype(np.float32) for s in (1e-42, 1e-38, 1e-30, 1.0, 1e20, 1e37)]
    tokens.append(np.where(np.arange(cols) == 40, np.inf, 1.0).astype(np.float32))
    got, want = (matmul(k, strips, rows, cols, tokens) for k in (tier, "scalar"))
    both_nan = np.isnan(got.view(np.float32)) & np.isnan(want.view(np.float32)) & (got != POISON)
    np.testing.assert_array_equal(np.where(both_nan, 0, got), np.where(both_nan, 0, want))
    assert np.isnan(want[-1].view(np.float32)).all(), "an infinite activation must show"


@pytest.mark.parametrize("tier", TIERS)
def test_zero_weights_give_exactly_zero(tier):
    rows, cols = 64, 96
    storage = kernels.Context(tier, 1).quantize(NAME, np.zeros((rows, cols), np.float32))
    tokens = [seeded(t).standard_normal(cols).astype(np.float32) for t in range(3)]
    assert not matmul(tier, encode("scalar", storage, cols), rows, cols, tokens).any()


@pytest.mark.parametrize("tier", TIERS)
def test_strip_ranges_compose_and_leave_other_rows_alone(tier):
    rng = seeded("ranges")
    rows, cols = 224, 96
    strips = encode("scalar", random_storage(rows, cols, rng), cols)
    tokens = company(cols, rng)[:5]
    n = rows // GROUP
    whole = matmul(tier, strips, rows, cols, tokens)
    cuts = [(4, 7), (0, 1), (1, 4)]
    np.testing.assert_array_equal(matmul(tier, strips, rows, cols, tokens, cuts), whole)
    got = matmul(tier, strips, rows, cols, tokens, [(2, 4)]).reshape(5, GROUP, n)
    np.testing.assert_array_equal(got[:, :, 2:4], whole.reshape(5, GROUP, n)[:, :, 2:4])
    got[:, :, 2:4] = POISON
    assert (got == POISON).all(), "rows outside the range were written"


# ---- drivers: scattered rows ----


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tier", TIERS)
def test_linear_adds_bias_and_old_values_at_the_right_rows(tier, threads):
    ctx, rng = context(tier, threads), seeded("linear")
    rows, cols = 2048, 96
    bias = normal(1, rows)
    plain, biased = (Matrix(ctx, NAME, normal(2, rows, cols), b) for b in (None, bias))
    x = normal(3, 19, cols)
    (y,) = linear(ctx, [plain], x)
    for t in range(0, 19, 7):
        np.testing.assert_array_equal(linear(ctx, [plain], x[t : t + 1])[0][0], y[t])
    (with_bias,) = linear(ctx, [biased], x)
    np.testing.assert_array_equal(with_bias, y + bias)
    old = rng.standard_normal(y.shape).astype(np.float32)
    np.testing.assert_array_equal(linear(ctx, [biased], x, [old])[0], with_bias + old)
    dense = plain.dense(ctx)
    assert np.abs(y - x @ dense.T).sum() <= 3e-2 * np.abs(x @ dense.T).sum()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tier", TIERS)
def test_expert_equals_its_steps(tier, threads):
    """gate, up, swiglu and down one by one, and with a down of another layout."""
    ctx = context(tier, threads)
    hidden, inner = 160, 1056
    for down_format in (NAME, "q8_0"):
        gate, up = (Matrix(ctx, NAME, normal(i, inner, hidden), normal(9 + i, inner)) for i in range(2))
        down = Matrix(ctx, down_format, normal(3, hidden, inner), normal(4, hidden))
        x = normal(5, 11, hidden)
        g, u = linear(ctx, [gate, up], x)
        (want,) = linear(ctx, [down], swiglu(ctx, g, u))
        got = run_experts(ctx, Experts([(gate, up, down)]), x, np.zeros((11, 1), np.int32))
        np.testing.assert_array_equal(got, want)


def test_matrix_with_incomplete_groups_is_refused():
    ctx = kernels.Context(None, 1)
    assert ctx.matrix_bytes(LAYOUT, 40, 32) == 0
    for rows in (1, 40):
        with pytest.raises(FormatError, match="32 that share"):
            ctx.quantize(NAME, np.zeros((rows, 32), np.float32))
        with pytest.raises(FormatError, match="32 that share"):
            FMT.check_rows(rows)


def test_non_finite_scale_or_zero_is_found():
    rows, cols = 96, 128
    context_ = kernels.Context(None, 2)
    good = random_storage(rows, cols, seeded("bad"))
    assert context_.check_rows(NAME, good, rows, cols) is None
    for which, group, col in itertools.product((0, 1), range(3), (0, 31, 32, 127)):
        bad = good.copy()
        bad.reshape(-1)[rows * cols // 32 * 20 :].view("<u2").reshape(3, 2, cols)[group, which, col] = 0x7C00
        assert context_.check_rows(NAME, bad, rows, cols) == group * (cols // 32) + col // 32


# ---- quantizer ----


def shrink(x, beta):
    with np.errstate(divide="ignore"):
        return np.sign(x) * np.maximum(np.abs(x) - np.abs(x) ** -0.3 / beta, 0)


def reference(w, steps=20):
    """The recipe in float64 on [32, columns], scale and zero as fp16: (dequantized, dequantized of the start)."""

    def half(v):
        return v.astype(np.float16).astype(np.float64)

    s = half((w.max(0) - w.min(0)) / 31)
    z = half(-w.min(0) / s)
    best, kept, running = np.full(s.shape, np.inf), z, np.ones(s.shape, bool)
    for k in range(steps + 1):
        q = np.clip(np.rint(w / s + z), 0, 31)
        r = (q - z) * s
        error = ((w - r) ** 2).sum(0)
        running &= error < best
        best, kept = np.where(running, error, best), np.where(running, z, kept)
        if k == 0:
            start = r
        e = shrink(w - r, 10 * 1.01**k)
        z = half((q - (w - e) / s).mean(0))
    return (np.clip(np.rint(w / s + kept), 0, 31) - kept) * s, start


def rms(x):
    return np.sqrt(np.mean(np.asarray(x, np.float64) ** 2))


def grouped(x):
    return x.reshape(GROUP, -1)


@pytest.mark.parametrize("scale", [0.02, 1.0, 300.0])
@pytest.mark.parametrize("shape", [(32, 32), (96, 96), (256, 512)])
def test_quantizer_is_the_recipe(scale, shape):
    rng = seeded(scale, shape)
    x = scale * rng.standard_normal(shape)
    x[rng.random(shape) < 0.002] *= 6
    x = x.astype(np.float32)
    got = FMT.dequantize(kernels.Context(None, 2).quantize(NAME, x), shape[1])
    want, start = reference(grouped(x).astype(np.float64))
    ours, theirs, first = rms(got - x), rms(want - grouped(x)), rms(start - grouped(x))
    assert ours <= 1.001 * theirs, (ours, theirs)
    assert ours < first
    per_column = ((grouped(got) - grouped(x)).astype(np.float64) ** 2).sum(0)
    start_per_column = ((start - grouped(x)) ** 2).sum(0)
    # A tie of the rounding may go either way in float32.
    assert (per_column <= start_per_column * (1 + 1e-3) + 1e-12 * scale**2).all()


@pytest.mark.parametrize("scale", [0.02, 1.0, 300.0])
def test_quantizer_error_bound(scale):
    x = (scale * seeded(scale).standard_normal((128, 1024))).astype(np.float32)
    got = FMT.dequantize(kernels.Context(None, 2).quantize(NAME, x), 1024)
    assert rms(got - x) <= FMT.max_relative_error * rms(x)


def test_quantizer_is_the_same_for_every_tier_and_thread_count():
    x = seeded("threads").standard_normal((192, 160)).astype(np.float32)
    want = kernels.Context("scalar", 1).quantize(NAME, x)
    for tier, threads in itertools.product(TIERS, (1, 2, 5)):
        np.testing.assert_array_equal(kernels.Context(tier, threads).quantize(NAME, x), want)


@pytest.mark.parametrize("values", [1, 3 * 32 * 160, 1 << 20])
def test_groups_by_and_by_are_the_whole_matrix(values):
    """192 rows are six groups: one, three and all of them per native call."""
    x, told = seeded("by and by").standard_normal((192, 160)).astype(np.float32), []
    got = kernels.Context(None, 2).quantize_groups(NAME, x, values, told.append)
    np.testing.assert_array_equal(got, kernels.Context("scalar", 1).quantize(NAME, x))
    assert told == {1: [n / 6 for n in range(1, 7)], 3 * 32 * 160: [0.5, 1.0]}.get(values, [1.0])


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (2, 1), (0, 3)])
def test_groups_that_the_matrix_lacks_are_refused(first, last):
    x, out = np.zeros((64, 32), np.float32), np.full((64, 64), 7, np.uint8)
    args = (kernels.address(out), NAME.encode(), kernels.address(x, "float *"), 64, 32)
    assert kernels.lib.moe_quantize_groups(kernels.Context(None, 1).handle, *args, first, last) < 0
    assert (out == 7).all()


def test_quantizer_survives_hard_columns():
    rng = seeded("hard")
    x = rng.standard_normal((32, 320)).astype(np.float32)
    x[:, 0] = 0
    x[:, 1], x[:, 2], x[:, 3] = 0.25, -0.25, 1e-3
    x[:, 4] = 1 + 1e-6 * x[:, 4]
    x[:, 5] *= 1e-8
    x[:, 6] *= 1e-30
    x[:, 7] = 1e4 + x[:, 7]
    x[:, 8] *= 1e4
    x[5, 9] = 1e3
    x[:, 10] = np.where(np.arange(32) % 2, 3.0, -3.0)
    x[:, 11] = np.float32(1e-45)
    context_ = kernels.Context(None, 1)
    storage = context_.quantize(NAME, x)
    assert context_.check_rows(NAME, storage, 32, 320) is None
    got = FMT.dequantize(storage, 320)
    np.testing.assert_array_equal(got[:, :4][:, [0, 1, 2]], x[:, :3])
    np.testing.assert_allclose(got[:, 3], x[:, 3], rtol=5e-4)
    np.testing.assert_allclose(got[:, 10], x[:, 10], rtol=5e-4)
    largest = np.abs(x).max(0)
    assert (np.abs(got - x).max(0) <= 0.06 * largest + 3e-8).all()


def test_weight_that_is_not_finite_or_too_large_is_refused():
    from engine.errors import KernelError

    context_, x = kernels.Context(None, 2), seeded("big").standard_normal((64, 64)).astype(np.float32)
    for value in (np.nan, np.inf, -np.inf):
        bad = x.copy()
        bad[33, 40] = value
        with pytest.raises(KernelError, match="not finite"):
            context_.quantize(NAME, bad)
    x[33, 40] = 3e38
    assert context_.check_rows(NAME, context_.quantize(NAME, x), 64, 64) == 1 * 2 + 1
