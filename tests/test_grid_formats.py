"""The codebook formats: generated tables, every index and sign against the gguf package, e8-iq3 and its rotation.

That every codec and kernel of them agrees with its definition on random bytes is test_format_parity's work."""

import importlib.util
from pathlib import Path

import native_calls
import numpy as np
import pytest
from kernel_oracle import (
    ACT_Q8_256_ROTATED,
    CODECS,
    RUNS_HERE,
    dequantize,
    encode,
    here,
    pack,
    pointer,
    quantize_q8,
    seeded,
)

from engine import kernels
from engine.formats import FORMATS
from engine.formats._rotation import rotate, rotate_tile, sign_bits, tiles
from engine.kernels import ffi

ROOT = Path(__file__).parent.parent
GRIDS = ("iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs", "e8-iq3")
IQ1_M_SCALE = ((48, 0), (50, 1), (52, 2), (54, 3))  # byte of the word, nibble of the half in its top four bits


def put_scale(name, blocks, half):
    """Write the bits of an fp16 scale into every block."""
    if name == "iq1_m":
        for at, nibble in IQ1_M_SCALE:
            blocks[:, at + 1] = blocks[:, at + 1] & 0x0F | (half >> 4 * nibble & 15) << 4
        return
    at = 96 if name == "e8-iq3" else 0
    blocks[:, at], blocks[:, at + 1] = half & 255, half >> 8


def random_blocks(name, count, half, rng):
    blocks = rng.integers(0, 256, (count, FORMATS[name].block_bytes), dtype=np.uint8)
    put_scale(name, blocks, half)
    return blocks


def test_committed_grids_are_the_generated_ones():
    spec = importlib.util.spec_from_file_location("make_grids", ROOT / "scripts" / "make_grids.py")
    make_grids = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_grids)
    assert (ROOT / "native" / "formats" / "grids.h").read_text() == make_grids.header()


@pytest.mark.parametrize(("name", "tier"), [key for key in here(CODECS) if key[0] in GRIDS])
@pytest.mark.parametrize("half", [0x3C00, 0xBC00, 0x0100, 0x8001, 0x7BFF, 0x0000, 0x8000])
def test_every_index_sign_and_scale_equals_the_definition(name, tier, half):
    """Enough random blocks that all 2048 indices of the largest codebook occur; the float bits must be equal."""
    fmt, rows, cols = FORMATS[name], 128, 2048
    storage = random_blocks(name, rows * cols // 256, half, seeded(name, half)).reshape(rows, -1)
    got = dequantize(fmt.layout, encode(name, tier, storage, cols), rows, cols)
    np.testing.assert_array_equal(got.view(np.uint32), fmt.dequantize(storage, cols).view(np.uint32))


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7C01, 0xFFFF])
def test_non_finite_scale_is_refused_and_its_neighbours_are_not(name, half):
    blocks = random_blocks(name, 5, 0x7BFF, seeded(name))
    check = CODECS[name, "scalar"].check_row
    assert check(pointer(blocks), 5 * 256) == -1
    put_scale(name, blocks[3:4], half)
    assert check(pointer(blocks), 5 * 256) == 3


def test_tables_hold_every_weight_within_the_stated_range():
    """Weights that strips stand for, over the sub-scale: what the kernels' int16 arithmetic relies on."""
    limits = {
        "iq1_m": 9,
        "iq1_s": 9,
        "iq2_s": 43,
        "iq2_xs": 43,
        "iq2_xxs": 43,
        "iq3_s": 15,
        "iq3_xxs": 31,
        "e8-iq3": 31,
    }
    shifts = {"iq1_m": 3, "iq1_s": 3, "iq2_s": 3, "iq2_xs": 3, "iq2_xxs": 3, "iq3_s": 0, "iq3_xxs": 1, "e8-iq3": 2}
    for name in GRIDS:
        values = FORMATS[name].dequantize(random_blocks(name, 512, 0x3C00, seeded(name)), 256) * 2.0 ** shifts[name]
        assert (values == np.rint(values)).all()
        top = 15 if name.startswith("iq1") else 31
        assert np.abs(values).max() == limits[name] * top


# ---- e8-iq3 ----


def test_e8_golden_block():
    block = np.zeros((1, 98), np.uint8)
    block[0, :96] = (37 * np.arange(96) + 11) % 256
    put_scale("e8-iq3", block, 0x2400)  # 2^-6
    values = dequantize("nib8_e8_iq3", encode("e8-iq3", "scalar", block, 256), 1, 256)[0].astype(np.float64)
    first = [-1.9765625, -2.78515625, 0.1796875, -0.1796875, 2.78515625, 0.1796875, -1.9765625, 0.1796875]
    assert values[:8].tolist() == first
    assert values[32:36].tolist() == [-0.7734375, -0.4921875, -0.9140625, -0.0703125]
    assert (values.sum(), (values**2).sum()) == (-3.8828125, 312.61932373046875)


def test_e8_block_is_an_iq3_xxs_block_with_twice_the_scale_at_the_end():
    blocks = random_blocks("iq3_xxs", 512, 0x2A00, seeded("equivalence"))
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16) * np.float16(2)
    e8 = np.concatenate([blocks[:, 2:], scale.view(np.uint8)], axis=1)
    want = FORMATS["iq3_xxs"].dequantize(blocks, 256)
    np.testing.assert_array_equal(FORMATS["e8-iq3"].dequantize(e8, 256), want)
    np.testing.assert_array_equal(dequantize("nib8_e8_iq3", encode("e8-iq3", "scalar", e8, 256), 512, 256), want)


def test_e8_subnormal_scale():
    block = np.zeros((1, 98), np.uint8)
    put_scale("e8-iq3", block, 0x0100)
    assert np.float16(1.52587890625e-05).view(np.uint16) == 0x0100
    got = dequantize("nib8_e8_iq3", encode("e8-iq3", "scalar", block, 256), 1, 256)
    assert (got == np.float32(2 * 1.52587890625e-05 * 0.25)).all()


def encode_by_recipe(rotated):
    """Weights of the written recipe in float64, [rows, cols] rotated rows in."""
    from gguf import quants

    quants.IQ3_XXS.init_grid()
    grid = quants.IQ3_XXS.grid.reshape(256, 4).astype(np.float64) / 2
    out = []
    for block in rotated.astype(np.float64).reshape(-1, 256):
        eights = block.reshape(32, 8)
        sign = np.where(eights < 0, -1.0, 1.0)
        odd = (sign < 0).sum(1) % 2 == 1
        sign[odd, np.abs(eights[odd]).argmin(1)] *= -1
        d = float(np.float16(np.sqrt((block**2).mean()) / 20 + 1e-12))
        for group, s in zip((eights * sign).reshape(8, 8, 4), sign.reshape(8, 32), strict=True):
            best = None
            for c in range(16):
                db = d * (c + 0.5) * 0.5
                pick = (db * (grid**2).sum(1) - 2 * group @ grid.T).argmin(1)
                error = ((group - db * grid[pick]) ** 2).sum()
                if best is None or error < best[0]:
                    best = error, (db * grid[pick]).reshape(32) * s
            out.append(best[1])
    return np.concatenate(out).reshape(rotated.shape)


def quantize_e8(x):
    out = np.empty((len(x), FORMATS["e8-iq3"].row_bytes(x.shape[1])), np.uint8)
    for row, values in zip(out, x, strict=True):
        CODECS["e8-iq3", "scalar"].quantize_row(pointer(row), ffi.cast("float *", values.ctypes.data), x.shape[1])
    return out


def relative_rms(error, x):
    return np.sqrt((error.astype(np.float64) ** 2).mean() / (x.astype(np.float64) ** 2).mean())


def test_e8_encoder_is_as_good_as_the_recipe_and_as_iq3_xxs():
    x = seeded("e8").standard_normal((24, 1536)).astype(np.float32)
    rotated = rotate(x)
    ours = relative_rms(FORMATS["e8-iq3"].dequantize(quantize_e8(x), 1536) - rotated, rotated)
    recipe = relative_rms(encode_by_recipe(rotated) - rotated, rotated)
    assert ours <= 1.001 * recipe
    assert ours <= 1.02 * 0.213


def test_e8_quantization_does_not_depend_on_threads():
    x = seeded("threads").standard_normal((9, 768)).astype(np.float32)
    for threads in (1, 3):
        got = kernels.Context(num_threads=threads).quantize("e8-iq3", x)
        np.testing.assert_array_equal(np.asarray(got).reshape(9, -1), quantize_e8(x))


# ---- rotation ----


def test_sign_streams():
    assert sign_bits(256)[:6].tobytes() == bytes.fromhex("de658f1678ee")
    assert sign_bits(1024)[:6].tobytes() == bytes.fromhex("3bc2ac6aeab1")
    assert sign_bits(2048)[:6].tobytes() == bytes.fromhex("a038f927cb70")


def test_tiles():
    assert tiles(6144) == [2048, 4096]
    assert tiles(1536) == [512, 1024]
    assert tiles(2048) == [2048]
    assert tiles(65536 + 256) == [256, 32768, 32768]


@pytest.mark.parametrize("n", [256, 512, 2048])
def test_rotation_is_orthogonal(n):
    q = rotate_tile(np.eye(n))
    assert np.abs(q @ q.T - np.eye(n)).max() < 1e-6  # 1 / sqrt(n) is a float32
    assert np.abs(np.abs(q) - n**-0.5).max() < 1e-8


def quantized_activations(tier, threads, x):
    """q and d of kind 3 from the native side, one row of memory per token."""
    context = kernels.Context(tier=tier, num_threads=threads)
    size = kernels.lib.moe_activation_bytes(ACT_Q8_256_ROTATED, x.shape[1])
    out = np.full((len(x), size), 0xA5, np.uint8)
    source = ffi.cast("float *", x.ctypes.data)
    status = kernels.lib.moe_quantize_activations(context.handle, pointer(out), ACT_Q8_256_ROTATED, source, *x.shape)
    assert status == 0
    return out


@pytest.mark.parametrize("tier", sorted(RUNS_HERE))
@pytest.mark.parametrize("cols", [256, 768, 1536, 4096, 33024, 65536])
def test_rotated_activations_equal_the_definition_bit_for_bit(tier, cols):
    x = (seeded(cols).standard_normal((3, cols)) * np.array([[1e-3], [1.0], [3e4]])).astype(np.float32)
    got = quantized_activations(tier, 2, x)
    for row, values in zip(got, x, strict=True):
        want = pack(*quantize_q8(rotate(values), 256), cols)
        np.testing.assert_array_equal(row[:cols], want[:cols])
        at = -(-cols // 64) * 64
        np.testing.assert_array_equal(row[at : at + cols // 64], want[at : at + cols // 64])


def test_non_finite_activations_are_not_hidden_by_the_rotation():
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((1, 512), np.float32)
        x[0, 300] = bad
        d = quantized_activations(None, 1, x)[0, 512:520].view(np.float32)
        assert not np.isfinite(d).any()


@pytest.mark.parametrize("cols", [512, 1536])
def test_rotated_product_is_the_plain_product(cols):
    """W Q stored, x Q as activations: W x, up to the error of the activations' eight bits."""
    rng = seeded("product", cols)
    w, x = rng.standard_normal((24, cols)).astype(np.float32), rng.standard_normal((1, cols)).astype(np.float32)
    exact = rotate(w.astype(np.float64)) @ rotate(x.astype(np.float64))[0]
    np.testing.assert_allclose(exact, w.astype(np.float64) @ x[0].astype(np.float64), atol=1e-5)
    ctx = native_calls.context(None, 2)
    (got,) = native_calls.linear(ctx, [native_calls.Matrix(ctx, "e8-iq3", w)], x)
    want = FORMATS["e8-iq3"].dequantize(quantize_e8(w), cols).astype(np.float64) @ rotate(x.astype(np.float64))[0]
    assert np.linalg.norm(got[0] - want) <= 0.02 * np.linalg.norm(want)
    assert np.linalg.norm(got[0] - exact) <= 0.25 * np.linalg.norm(exact)
