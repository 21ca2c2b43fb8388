"""Every compiled kernel and codec of every registered format against its definition. No list to maintain: the cases are
the compiled tables."""

import itertools

import numpy as np
import pytest
from kernel_oracle import (
    ACT_F32,
    ACT_Q8_32,
    BY_LAYOUT,
    CODECS,
    FINITE_SCALES,
    LAYOUTS,
    MOST_SCALE_BYTES,
    POISON,
    SHAPES_ROWS,
    absolute_error,
    activation,
    allowed_cols,
    dequantize,
    encode,
    filled_storage,
    first_bad_block,
    here,
    matmul,
    pack,
    pointer,
    random_storage,
    scale_bytes,
    seeded,
)

from engine import kernels
from engine.errors import FormatError, KernelError
from engine.formats import FORMATS
from engine.kernels import ffi

MAX_DOT_ERROR = 1e-6
MAX_TOKENS = 8


def company(layout, cols, rng):
    """Eight tokens of different size, one of them zero."""
    scale = rng.permutation([0.0, 1e-3, 0.1, 1.0, 1.0, 3.0, 50.0, 1e4])
    return [activation(s * rng.standard_normal(cols), layout.activation) for s in scale]


@pytest.mark.parametrize(("name", "tier"), here(LAYOUTS))
def test_kernel_matches_float64_and_scalar_bits_at_every_width(name, tier):
    layout, reference, fmt = LAYOUTS[name, tier], LAYOUTS[name, "scalar"], BY_LAYOUT[name]
    for cols in allowed_cols(layout):
        error = total = 0.0
        for rows in SHAPES_ROWS:
            rng = seeded(name, rows, cols)
            storage = random_storage(fmt.name, rows, cols, rng)
            strips = encode(fmt.name, "scalar", storage, cols)
            tokens = company(layout, cols, rng)
            want = np.stack([x for _, x in tokens]) @ fmt.dequantize(storage, cols).astype(np.float64).T
            expected = matmul(reference, strips, rows, cols, [a for a, _ in tokens])
            error, total = error + absolute_error(expected, want), total + np.abs(want).sum()
            for width in range(1, MAX_TOKENS + 1):
                chosen = rng.permutation(MAX_TOKENS)[:width]
                got = matmul(layout, strips, rows, cols, [tokens[t][0] for t in chosen])
                np.testing.assert_array_equal(got, expected[chosen], err_msg=f"{rows}x{cols}, {width} tokens")
        assert error <= MAX_DOT_ERROR * total, cols


@pytest.mark.parametrize(("name", "tier"), here(LAYOUTS))
def test_each_token_is_close_to_float64(name, tier):
    """Per token, so that a small one cannot hide behind a large one."""
    layout, fmt, rng = LAYOUTS[name, tier], BY_LAYOUT[name], seeded(name)
    rows, cols = 24, allowed_cols(layout)[-1]
    storage = random_storage(fmt.name, rows, cols, rng, limit=1.0)
    strips = encode(fmt.name, "scalar", storage, cols)
    weights = fmt.dequantize(storage, cols).astype(np.float64)
    for a, x in company(layout, cols, rng):
        want = weights @ x
        assert absolute_error(matmul(layout, strips, rows, cols, [a]), want) <= MAX_DOT_ERROR * np.abs(want).sum()


@pytest.mark.parametrize(("name", "tier"), here(LAYOUTS))
def test_extreme_codes_and_activations_do_not_overflow(name, tier):
    layout, reference, fmt = LAYOUTS[name, tier], LAYOUTS[name, "scalar"], BY_LAYOUT[name]
    rows = 17
    for cols in (allowed_cols(layout)[0], 512):
        if layout.activation == ACT_F32:
            tokens = [activation(np.full(cols, v), ACT_F32) for v in (1.0, -1.0, 3e4)]
        else:
            block = 32 if layout.activation == ACT_Q8_32 else 256
            d = np.ones(cols // block, np.float32)
            signs = (
                np.ones(cols),
                -np.ones(cols),
                np.where(np.arange(cols) % 2, 1, -1),
                np.where(np.arange(cols) % 8 < 4, 1, -1),
            )
            tokens = [(pack((127 * s).astype(np.int8), d, cols), 127.0 * s) for s in signs]
        for byte in (0x00, 0xFF, 0x80, 0x7F, 0x08, 0x88, 0x0F, 0xF0, 0x77):
            storage = filled_storage(fmt.name, byte, rows, cols)
            strips = encode(fmt.name, "scalar", storage, cols)
            weights = fmt.dequantize(storage, cols).astype(np.float64)
            want = np.stack([x for _, x in tokens]) @ weights.T
            got = matmul(layout, strips, rows, cols, [a for a, _ in tokens])
            np.testing.assert_array_equal(got, matmul(reference, strips, rows, cols, [a for a, _ in tokens]))
            np.testing.assert_allclose(
                got.view(np.float32), want, rtol=1e-6, atol=1e-6 * np.abs(weights).max() * 127 * cols
            )


@pytest.mark.parametrize(("name", "tier"), here(LAYOUTS))
def test_any_finite_bytes_give_scalar_bits(name, tier):
    """Scales up to the largest and down to subnormal; only blocks that check_row refuses are replaced."""
    layout, reference, fmt, rng = LAYOUTS[name, tier], LAYOUTS[name, "scalar"], BY_LAYOUT[name], seeded(name, "any")
    rows, cols = 24, 512
    storage = random_storage(fmt.name, rows, cols, rng, limit=np.finfo(np.float32).max)
    strips = encode(fmt.name, "scalar", storage, cols)
    tokens = [activation(s * rng.standard_normal(cols), layout.activation)[0] for s in (1e-38, 1e-30, 1.0, 1e20)]
    got, want = (matmul(k, strips, rows, cols, tokens) for k in (layout, reference))
    both_nan = np.isnan(got.view(np.float32)) & np.isnan(want.view(np.float32)) & (got != POISON)
    np.testing.assert_array_equal(np.where(both_nan, 0, got), np.where(both_nan, 0, want))


@pytest.mark.parametrize(("name", "tier"), here(LAYOUTS))
def test_zero_weights_give_exactly_zero(name, tier):
    layout, fmt, rng = LAYOUTS[name, tier], BY_LAYOUT[name], seeded(name, "zero")
    rows, cols = 9, 512
    storage = np.zeros((rows, fmt.row_bytes(cols)), np.uint8)
    quantizer = CODECS[fmt.name, "scalar"].quantize_row
    if quantizer:
        zeros = np.zeros(cols, np.float32)
        for row in storage:
            quantizer(pointer(row), ffi.cast("float *", zeros.ctypes.data), cols)
    strips = encode(fmt.name, "scalar", storage, cols)
    tokens = [activation(rng.standard_normal(cols), layout.activation)[0] for _ in range(3)]
    assert not matmul(layout, strips, rows, cols, tokens).any()  # bits: +0 and nothing else


@pytest.mark.parametrize(("name", "tier"), here(LAYOUTS))
def test_strip_ranges_compose(name, tier):
    layout, fmt, rng = LAYOUTS[name, tier], BY_LAYOUT[name], seeded(name, "ranges")
    rows, cols = 53, 256
    strips = encode(fmt.name, "scalar", random_storage(fmt.name, rows, cols, rng), cols)
    tokens = [activation(rng.standard_normal(cols), layout.activation)[0] for _ in range(5)]
    count = -(-rows // layout.strip_rows)
    whole = matmul(layout, strips, rows, cols, tokens)
    for _ in range(10):
        cuts = [0, *sorted(rng.integers(0, count + 1, 3).tolist()), count]
        parts = list(itertools.pairwise(cuts))
        rng.shuffle(parts)
        np.testing.assert_array_equal(matmul(layout, strips, rows, cols, tokens, parts), whole)
    first, last = 2, 4
    got = matmul(layout, strips, rows, cols, tokens, [(first, last)])
    inside = slice(first * layout.strip_rows, last * layout.strip_rows)
    np.testing.assert_array_equal(got[:, inside], whole[:, inside])
    got[:, inside] = POISON
    assert (got == POISON).all(), "rows outside the range were written"


@pytest.mark.parametrize(("name", "tier"), here(CODECS))
def test_strips_hold_the_storage_values_exactly(name, tier):
    fmt = FORMATS[name]
    for cols in allowed_cols(LAYOUTS[fmt.layout, "scalar"]):
        for rows in SHAPES_ROWS:
            storage = random_storage(name, rows, cols, seeded(name, rows, cols), limit=3e38)
            strips = encode(name, tier, storage, cols)
            np.testing.assert_array_equal(strips, encode(name, "scalar", storage, cols))
            got = dequantize(fmt.layout, strips, rows, cols)
            np.testing.assert_array_equal(got.view(np.uint32), fmt.dequantize(storage, cols).view(np.uint32))


def hard_floats(cols, rng):
    """Rows that make quantizers disagree: zeros, subnormals, overflow, ties, one outlier, both signs of the maximum."""
    ties = (np.arange(cols) % 255 - 127 + 0.5) / 127
    rows = [np.zeros(cols), -np.zeros(cols), np.full(cols, 0.25), np.full(cols, -1.0), ties, -ties, ties * 2.0**-20]
    rows += [np.arange(cols) % 16 - 8.0, 8.0 - np.arange(cols) % 16, (np.arange(cols) % 16 - 7.5) / 8]
    rows += [s * rng.standard_normal(cols) for s in (1e-45, 1e-42, 1e-39, 3e-38, 1e-30, 1e-7, 1, 1e4, 1e6, 1e30, 3e37)]
    outlier = rng.standard_normal(cols)
    outlier[::37] = 1e3
    opposite = rng.standard_normal(cols)
    opposite[1::32], opposite[7::32] = 5.0, -5.0
    rows += [outlier, opposite, -opposite, rng.integers(-127, 128, cols).astype(float)]
    return np.stack(rows + [rng.standard_normal(cols) for _ in range(64)]).astype(np.float32)


def quantize(name, x):
    out = np.full((len(x), FORMATS[name].row_bytes(x.shape[1])), 0xA5, np.uint8)
    for row, values in zip(out, x, strict=True):
        CODECS[name, "scalar"].quantize_row(pointer(row), ffi.cast("float *", values.ctypes.data), x.shape[1])
    return out


def stored(fmt, x):
    """The rows that a format's blocks stand for."""
    return fmt.rotate(x) if fmt.rotate else x


QUANTIZERS = [name for name, tier in sorted(CODECS) if tier == "scalar" and CODECS[name, tier].quantize_row]


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_quantizer_equals_gguf_byte_for_byte(name):
    from gguf import GGMLQuantizationType, quants

    x = hard_floats(1024, seeded(name, "quantize"))
    if FORMATS[name].ggml_type is None:
        pytest.skip("not a GGUF type")
    try:
        want = quants.quantize(x, GGMLQuantizationType(FORMATS[name].ggml_type))
    except NotImplementedError:
        pytest.skip("the gguf package only reads this type; test_quantizer_error_bound judges ours")
    if name == "mxfp4":  # gguf wraps exponents below 0 around to huge scales; ours stop at 0
        x, want = (a[np.abs(x).reshape(len(x), -1, 32).max(2).min(1) > 2.0**-125] for a in (x, want))
        assert len(x) > 20
    np.testing.assert_array_equal(quantize(name, x), np.ascontiguousarray(want).view(np.uint8))


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("scale", [0.02, 1.0, 300.0])
def test_quantizer_error_bound(name, scale):
    fmt = FORMATS[name]
    x = (scale * seeded(name, scale).standard_normal((64, 1024))).astype(np.float32)
    error = fmt.dequantize(quantize(name, x), 1024).astype(np.float64) - stored(fmt, x)
    assert np.sqrt((error**2).mean() / (x.astype(np.float64) ** 2).mean()) <= fmt.max_relative_error


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizer_survives_hard_rows(name):
    """Whatever fits the scale's range comes back finite and no further away than the largest value of its block."""
    fmt = FORMATS[name]
    x = hard_floats(1024, seeded(name, "hard"))
    x = x[(np.abs(x).max(1) < 1e4) & (np.abs(x).max(1) > 1e-3)]
    storage = quantize(name, x)
    assert [first_bad_block(name, row, 1024) for row in storage] == [-1] * len(x)
    x = stored(fmt, x)
    error = np.abs(fmt.dequantize(storage, 1024) - x).reshape(len(x), -1, fmt.block_len).max(2)
    assert (error <= np.abs(x).reshape(len(x), -1, fmt.block_len).max(2)).all()


@pytest.mark.parametrize("name", sorted({name for name, _ in CODECS}))
def test_non_finite_scale_is_found(name):
    fmt, rng = FORMATS[name], seeded(name, "scales")
    cols = 3 * fmt.block_len
    context = kernels.Context(num_threads=1)
    if name in FINITE_SCALES:
        storage = np.full((2, fmt.row_bytes(cols)), 0xFF, np.uint8)
        assert context.check_rows(name, storage, 2, cols) is None
        assert np.isfinite(fmt.dequantize(storage, cols)).all() or name == "mxfp4"  # 2^127 * 12 is past float32
        return
    if fmt.row_extra_bytes:
        storage = random_storage(name, 2, cols, rng)
        assert context.check_rows(name, storage, 2, cols) is None
        storage[1, -4:] = np.array([np.inf], "<f4").view(np.uint8)
        assert context.check_rows(name, storage, 2, cols) == 3
        return
    for position in scale_bytes(name):
        storage = random_storage(name, 2, cols, rng)
        assert context.check_rows(name, storage, 2, cols) is None
        high = 2 * fmt.block_bytes + position
        storage[1, max(high - MOST_SCALE_BYTES + 1, 2 * fmt.block_bytes) : high + 1] = 0xFF
        assert context.check_rows(name, storage, 2, cols) == 5
    assert scale_bytes(name), "no byte of this format can be refused"


def test_python_and_native_registries_agree():
    codecs = {(t.name, t.tier): t.cdata for t in kernels.formats() if not t.same_as}
    assert {name for name, _ in codecs} == set(FORMATS)
    layouts = {(t.name, t.tier): t.cdata for t in kernels.layouts() if not t.same_as}
    for (name, _), codec in codecs.items():
        fmt = FORMATS[name]
        got = (codec.version, codec.block_len, codec.block_bytes, codec.group_rows, kernels.text(codec.layout))
        assert got == (fmt.version, fmt.block_len, fmt.block_bytes, fmt.group_rows, fmt.layout)
        assert layouts[fmt.layout, "scalar"].block_len == fmt.block_len or fmt.block_len % 32 == 0
        assert bool(fmt.group_rows) == bool(layouts[fmt.layout, "scalar"].scattered)
    assert {fmt.layout for fmt in FORMATS.values()} == {name for name, _ in layouts}


def test_row_that_does_not_fit_blocks_is_refused():
    for fmt in FORMATS.values():
        for cols in (0, -fmt.block_len, fmt.block_len + 1):
            if cols <= 0 or cols % fmt.block_len:
                with pytest.raises(FormatError, match=fmt.name):
                    fmt.row_bytes(cols)


def test_format_module_names_match():
    assert all(name == fmt.name for name, fmt in FORMATS.items())


@pytest.mark.parametrize("tier", ["avx1024", ""])
def test_unknown_tier_is_refused_by_name(tier):
    with pytest.raises(KernelError, match=f"tier {tier!r} is unknown; known: scalar"):
        kernels.Context(tier=tier, num_threads=1)


def test_tier_the_cpu_lacks_is_refused_by_name():
    lacking = [(name, missing) for name, supported, missing in kernels.tiers() if not supported]
    if not lacking:
        pytest.skip("this CPU runs every compiled tier")
    for name, missing in lacking:
        with pytest.raises(KernelError, match=f"{name}.*{missing}"):
            kernels.Context(tier=name, num_threads=1)
