"""MXFP4 exhaustively: every code byte under every exponent, and zeros that must stay exactly zero."""

import numpy as np
import pytest
from kernel_oracle import ACT_Q8_32, CODECS, LAYOUTS, activation, dequantize, encode, here, matmul, seeded

from engine.formats import FORMATS

TIERS = [tier for name, tier in here(LAYOUTS) if name == "nib8_mxfp4"]
COLS = 16 * 32  # sixteen blocks hold all 256 code bytes


def all_bytes(exponents):
    """Storage rows uint8 [len(exponents), 16 * 17]: row i holds the bytes 0 .. 255 under exponents[i]."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(len(exponents), 0)
    scales = np.asarray(exponents, np.uint8)[:, None, None].repeat(16, 1)
    return np.concatenate([scales, codes], axis=2).reshape(len(exponents), -1)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("tier", [tier for name, tier in here(CODECS) if name == "mxfp4"])
def test_every_byte_under_every_exponent_decodes_like_the_reference(tier):
    storage = all_bytes(range(256))
    got = dequantize("nib8_mxfp4", encode("mxfp4", tier, storage, COLS), 256, COLS)
    want = FORMATS["mxfp4"].dequantize(storage, COLS)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    assert np.isinf(want).any()  # 12 * 2^127: infinite in the reference, too
    assert (want != 0).any(axis=1).all()  # the smallest exponents are subnormal, not zero
    high_8 = got.reshape(256, 16, 2, 16)[:, 8, 1]  # bytes 0x80 .. 0x8f
    assert (high_8.view(np.uint32) == 0).all()  # code 8 is +0, never -0


@pytest.mark.parametrize("tier", TIERS)
def test_products_under_every_exponent_equal_float64(tier):
    rng = seeded("mxfp4 products")
    tokens = [activation(rng.standard_normal(COLS), ACT_Q8_32) for _ in range(8)]
    storage = all_bytes(range(2, 240))  # products that neither overflow nor become subnormal
    strips = encode("mxfp4", "scalar", storage, COLS)
    weights = FORMATS["mxfp4"].dequantize(storage, COLS).astype(np.float64)
    want = np.stack([x for _, x in tokens]) @ weights.T
    got = matmul(LAYOUTS["nib8_mxfp4", tier], strips, len(storage), COLS, [a for a, _ in tokens]).view(np.float32)
    assert (np.abs(got - want) <= 1e-6 * np.stack([np.abs(x) for _, x in tokens]) @ np.abs(weights).T).all()


@pytest.mark.parametrize("tier", TIERS)
def test_every_exponent_gives_the_bits_of_the_scalar_tier(tier):
    rng = seeded("mxfp4 bits")
    tokens = [activation(rng.standard_normal(COLS), ACT_Q8_32)[0] for _ in range(8)]
    strips = encode("mxfp4", "scalar", all_bytes(range(256)), COLS)
    got = matmul(LAYOUTS["nib8_mxfp4", tier], strips, 256, COLS, tokens)
    np.testing.assert_array_equal(got, matmul(LAYOUTS["nib8_mxfp4", "scalar"], strips, 256, COLS, tokens))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("exponent", [0, 1, 127, 200, 254, 255])
@pytest.mark.parametrize("zero", [0x00, 0x88, 0x80])
def test_all_zero_codes_give_exactly_zero(tier, exponent, zero):
    storage = np.full((8, 17), zero, np.uint8)
    storage[:, 0] = exponent
    token = activation(seeded(exponent).standard_normal(32), ACT_Q8_32)[0]
    got = matmul(LAYOUTS["nib8_mxfp4", tier], encode("mxfp4", "scalar", storage, 32), 8, 32, [token])
    assert (got == 0).all()  # the bits of +0


@pytest.mark.parametrize("tier", TIERS)
def test_zero_codes_beside_others_add_nothing(tier):
    rng = seeded("mxfp4 mixed")
    storage = rng.integers(0, 256, (16, 17), dtype=np.uint8)
    storage[:, 0] = 120
    sparse = storage.copy()
    sparse[:, 1::2] &= 0x0F  # every second byte: high code 0
    sparse[:, 2::2] |= 0x80
    sparse[:, 2::2] &= 0x8F  # the others: high code 8
    token = activation(rng.standard_normal(32), ACT_Q8_32)
    weights = FORMATS["mxfp4"].dequantize(sparse, 32).astype(np.float64)
    assert (weights[:, 16:] == 0).all() and (weights[:, :16] != 0).any()
    strips = encode("mxfp4", "scalar", sparse, 32)
    got = matmul(LAYOUTS["nib8_mxfp4", tier], strips, 16, 32, [token[0]]).view(np.float32)
    np.testing.assert_allclose(got[0], weights @ token[1], rtol=1e-5, atol=1e-12)
