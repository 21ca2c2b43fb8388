"""Quantizers as a set: all there, the same bytes from any number of threads, and as good as the figures and recipes
that docs and format notes state (hqq5-ax0-g32: test_hqq5.py, e8-iq3: test_grid_formats.py)."""

import numpy as np
import pytest

from engine import kernels
from engine.formats import FORMATS

# Relative RMS error in percent, Gaussian rows, of the field's reference quantizers; ours may have 2 % more.
FIELD_PERCENT = {
    "q8_0": 0.54, "q6_k": 1.8, "q5_k": 3.6, "q4_k": 7.2, "q4_0": 8.65, "iq4_nl": 7.6, "iq4_xs": 7.7, "mxfp4": 11.4,
    "e8-iq3": 21.3,
}  # fmt: skip
MADE_HERE = {
    *FIELD_PERCENT, "q4_1", "q5_0", "q5_1", "int8-row", "int4-g32", "int4-g64", "int4-g128", "int3-g64",
    "hqq5-ax0-g32", "f32", "f16", "bf16",
}  # fmt: skip


# Every weight format of a GGUF file, and our own.
KNOWN = MADE_HERE | {
    "q2_k", "q3_k", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "nvfp4", "tq1_0", "tq2_0",
}  # fmt: skip


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative_rms(name, storage, x):
    fmt = FORMATS[name]
    want = fmt.rotate(x) if fmt.rotate else x
    got = fmt.dequantize(storage, x.shape[1]).astype(np.float64).reshape(x.shape)
    return np.sqrt(((got - want) ** 2).mean() / (x.astype(np.float64) ** 2).mean())


def test_every_format_has_a_codec_and_a_kernel_on_every_tier():
    assert set(FORMATS) == KNOWN
    for tier in [name for name, supported, _ in kernels.tiers() if supported]:
        context = kernels.Context(tier, 1)
        for name in KNOWN:
            assert context.layout(context.layout_of(name)).matmul  # each of the two raises where there is none


def test_the_formats_that_can_be_made():
    context = kernels.Context("scalar", 1)
    made = set()
    for name, fmt in FORMATS.items():
        try:
            context.quantize(name, np.zeros((fmt.group_rows or 1, fmt.block_len), np.float32))
            made.add(name)
        except kernels.KernelError as error:
            assert "no kernel" in str(error)
    assert made == MADE_HERE


@pytest.mark.parametrize("name", sorted(MADE_HERE))
def test_any_number_of_threads_makes_the_same_bytes(name):
    x = normal(1, 96, 512)
    want = kernels.Context(None, 1).quantize(name, x)
    for threads in (2, 5):
        np.testing.assert_array_equal(kernels.Context(None, threads).quantize(name, x), want)
    for tier in [name for name, supported, _ in kernels.tiers() if supported]:
        np.testing.assert_array_equal(kernels.Context(tier, 2).quantize(name, x), want)


@pytest.mark.parametrize("name", sorted(FIELD_PERCENT))
def test_error_is_within_two_percent_of_the_field(name):
    x = normal(2, 192, 1024)
    error = relative_rms(name, kernels.Context(None, 2).quantize(name, x), x)
    assert error <= 1.02 * FIELD_PERCENT[name] / 100


def symmetric(x, group, levels, floor=0.0):
    """The written recipe in float64: s = max |w| / levels per group, codes to the nearest."""
    groups = x.astype(np.float64).reshape(-1, group)
    scale = np.maximum(np.abs(groups).max(1, keepdims=True) / levels, floor)
    return (np.clip(np.rint(groups / scale), -levels - (levels < 100), levels) * scale).reshape(x.shape)


@pytest.mark.parametrize(
    ("name", "group", "levels"),
    [("int8-row", 1024, 127), ("int4-g32", 32, 7), ("int4-g64", 64, 7), ("int4-g128", 128, 7), ("int3-g64", 64, 3)],
)
@pytest.mark.parametrize("scale", [0.02, 30.0])
def test_integer_formats_are_as_good_as_their_recipe(name, group, levels, scale):
    x = (scale * normal(3, 64, 1024)).astype(np.float32)
    recipe = symmetric(x, group, levels, 1e-12 if name == "int8-row" else 0.0)
    ours = FORMATS[name].dequantize(kernels.Context(None, 2).quantize(name, x), 1024).astype(np.float64)
    assert ((ours - x) ** 2).mean() <= 1.001**2 * ((recipe - x) ** 2).mean()
