"""The float arithmetic (--arith float): weights dequantized to float32 meet float32 activations, with one result for
every tier, thread count, number of tokens and form of the weights."""

import itertools
import json
import shutil
import subprocess

import numpy as np
import pytest
import tiny_models
from cli_program import make_snapshot, run
from engine._native import ffi, lib
from kernel_oracle import CODECS, LAYOUTS, encode, pointer, random_storage, seeded
from native_calls import Experts, assert_same_bits, linear, linear_heads, run_experts, swiglu

import engine
from engine import kernels
from engine.formats import FORMATS

TIERS = [name for name, supported, _ in kernels.tiers() if supported]
CONTEXTS = {}
COLS = 512


def context(tier=None, threads=1, arith="float"):
    return CONTEXTS.setdefault((tier, threads, arith), kernels.Context(tier, threads, arith))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows_for(name, rows):
    group = FORMATS[name].group_rows or 1
    return -(-rows // group) * group


def quantized(name, rows, cols, seed):
    """Storage rows of normal weights where the format can be made here, else of random blocks of moderate values."""
    fmt = FORMATS[name]
    if fmt.group_rows or CODECS[name, "scalar"].quantize_row:
        return context().quantize(name, normal(seed, rows, cols))
    return random_storage(name, rows, cols, seeded(name, rows, seed), limit=4)


def dense(name, storage, cols):
    """float64 weights as numpy decodes them, and the rotation that their activations need."""
    fmt = FORMATS[name]
    weights = fmt.dequantize(storage, cols).astype(np.float64)
    return weights, fmt.rotate or (lambda x: x)


# ---- dequantized strips ----
@pytest.mark.parametrize("name", sorted(name for name, f in FORMATS.items() if not f.group_rows))
@pytest.mark.parametrize("tier", TIERS)
def test_a_strip_dequantizes_to_the_values_of_the_format(tier, name):
    """Random bytes, all scales; against the numpy decoder. Guard floats behind the strip."""
    fmt = FORMATS[name]
    layout = LAYOUTS.get((fmt.layout, tier)) or LAYOUTS[fmt.layout, "scalar"]
    if not layout.dequantize_strip:
        assert layout.strip_rows == 1  # float rows need no decoding
        return
    for cols in (fmt.block_len, 2 * fmt.block_len, 5 * fmt.block_len):
        cols = max(cols, layout.block_len)
        storage = random_storage(name, 8, cols, seeded(name, cols, "strip"), limit=3e38)
        out = np.full(8 * cols + 16, 7, np.float32)
        strip = encode(name, "scalar", storage, cols)
        layout.dequantize_strip(ffi.cast("float *", out.ctypes.data), pointer(strip), cols)
        assert (out[8 * cols :] == 7).all()
        assert_same_bits(out[: 8 * cols].reshape(8, cols), fmt.dequantize(storage, cols))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("alone", [False, True])
def test_mxfp4_strips_of_every_byte_under_every_exponent(tier, alone):
    """alone: one exponent in a strip, so that the short way is taken wherever it is exact; else eight in a strip, the
    subnormal and overflowing ones among them, and in every lane."""
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)  # sixteen blocks hold all bytes
    layout, cols = LAYOUTS["nib8_mxfp4", tier], 512
    for group in range(32 if not alone else 256):
        exponents = np.full(8, group) if alone else (np.arange(8) * 32 + group * 9) % 256
        blocks = np.empty((8, 16, 17), np.uint8)
        blocks[:, :, 0], blocks[:, :, 1:] = exponents[:, None], codes
        blocks = blocks.reshape(8, -1)
        out = np.full((8, cols), np.nan, np.float32)
        strip = encode("mxfp4", "scalar", blocks, cols)
        layout.dequantize_strip(ffi.cast("float *", out.ctypes.data), pointer(strip), cols)
        assert_same_bits(out, FORMATS["mxfp4"].dequantize(blocks, cols))
        assert (out.reshape(8, 16, 2, 16)[:, 8, 1].view(np.uint32) == 0).all()  # bytes 0x80 .. 0x8f: code 8 is +0


def disassembly(function):
    done = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", kernels.ffi and engine._native.__file__],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for part in done.stdout.split("\n\n"):
        if f"<{function}" in part.split("\n", 1)[0]:
            yield part


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
@pytest.mark.skipif("avx512" not in {name for name, _, _ in kernels.tiers()}, reason="no AVX-512 tier in this build")
def test_mxfp4_takes_two_instructions_for_zeros_and_scale():
    """vptestmw gives the lanes that are not zero, a zero-masked vpaddw applies the scale to them."""
    found = [code for code in disassembly("dequantize_strip_mxfp4") if "%zmm" in code]
    assert len(found) == 1
    lines = [line.split("\t")[-1].split() for line in found[0].splitlines()[1:]]
    names = [line[0] for line in lines if line]
    adds = [line for line in lines if line and line[0] == "vpaddw" and "{z}" in line[-1]]
    assert names.count("vptestmw") == len(adds) >= 2
    assert any(line and line[0] == "vpermw" and "%zmm" in line[-1] for line in lines)
    assert not any(name.startswith(("vpcmpeqw", "vpblendmw", "vpblendvb")) and "zmm" in str(name) for name in names)
    assert not any(name.startswith("vdpbf16") for name in names)


# ---- products ----
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_products_match_float64_of_dequantized_weights(name):
    rows = rows_for(name, 40)
    storage, x = quantized(name, rows, COLS, 1), normal(2, 5, COLS)
    weights, rotate = dense(name, storage, COLS)
    want = rotate(x).astype(np.float64) @ weights.T
    (got,) = linear(context().handle, [context().matrix(name, storage, rows, COLS)], x)
    assert np.abs(got - want).sum() <= 1e-6 * np.abs(want).sum()
    canonical = context(arith="canonical")
    (other,) = linear(canonical.handle, [canonical.matrix(name, storage, rows, COLS)], x)
    if name not in ("f32", "f16", "bf16"):  # it is another arithmetic, not another name for the same
        assert np.abs(other - want).sum() > 10 * np.abs(got - want).sum()
    else:
        assert_same_bits(other, got)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_products_have_one_result(name):
    """Tiers, threads, tokens per call in any company, strips or compact rows, rows that end inside a strip."""
    rows = rows_for(name, 37)
    storage, x = quantized(name, rows, COLS, 3), normal(4, 19, COLS)
    want = None
    for tier, threads in [(t, n) for t in TIERS for n in (1, 3)]:
        ctx = context(tier, threads)
        for compact in (False, True):
            w = ctx.matrix(name, storage, rows, COLS, compact=compact)
            (got,) = linear(ctx.handle, [w], x)
            want = got if want is None else want
            assert_same_bits(got, want)
    ctx = context(None, 2)
    w = ctx.matrix(name, storage, rows, COLS)
    for parts in ([1] * 19, [8, 3, 8], [2, 5, 4, 1, 7]):
        cuts = list(itertools.pairwise(np.cumsum([0, *parts])))
        got = [linear(ctx.handle, [w], np.ascontiguousarray(x[a:b]))[0] for a, b in cuts]
        assert_same_bits(np.concatenate(got), want)


COMBINATIONS = [
    ("iq3_s", "iq3_s", "iq4_nl"),
    ("mxfp4", "q8_0", "e8-iq3"),
    ("hqq5-ax0-g32",) * 3,
    ("q4_k", "f16", "int8-row"),
]


@pytest.mark.parametrize("names", COMBINATIONS)
def test_whole_expert_matches_float64(names):
    """down(silu(gate x) * up x) within 1e-5 of float64 on dequantized weights and float activations, one result."""
    hidden, width = 256, 512
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    storage = [quantized(name, *shape, seed) for seed, (name, shape) in enumerate(zip(names, shapes, strict=True))]
    scale = 0.1  # keeps silu in its curved part
    x = scale * normal(9, 11, hidden)
    gate, up, down = (dense(name, s, cols) for name, s, (_, cols) in zip(names, storage, shapes, strict=True))
    g, u = (rotate(x).astype(np.float64) @ w.T for w, rotate in (gate, up))
    h = g / (1 + np.exp(-g)) * u
    h = down[1](h.astype(np.float32)).astype(np.float64) if FORMATS[names[2]].rotate else h
    want, ids = h @ down[0].T, np.zeros((11, 1), np.int32)
    results = []
    for tier, threads, compact in itertools.product(TIERS, (1, 2), (False, True)):
        ctx = context(tier, threads)
        triple = [ctx.matrix(n, s, *shape, compact=compact) for n, s, shape in zip(names, storage, shapes, strict=True)]
        results.append(run_experts(ctx.handle, Experts([triple]), x, ids))
    for got in results[1:]:
        assert_same_bits(got, results[0])
    assert np.abs(results[0] - want).sum() <= 1e-5 * np.abs(want).sum()
    ctx = context()
    triple = [ctx.matrix(n, s, *shape) for n, s, shape in zip(names, storage, shapes, strict=True)]
    parts = [linear(ctx.handle, [w], x)[0] for w in triple[:2]]
    assert_same_bits(linear(ctx.handle, [triple[2]], swiglu(ctx.handle, *parts))[0], results[0])


@pytest.mark.parametrize("name", ["q8_0", "mxfp4"])
def test_one_matrix_per_head(name):
    """The products of latent attention follow the arithmetic of their context, too."""
    heads, rows, cols = 3, 16, 64
    storage, x = quantized(name, heads * rows, cols, 7), normal(8, 11, heads, cols)
    ctx = context(None, 2)
    status, got = linear_heads(ctx.handle, ctx.matrix(name, storage, heads * rows, cols), x, heads, 0)
    assert status == 0
    for head in range(heads):
        w = ctx.matrix(name, storage[head * rows : (head + 1) * rows], rows, cols)
        assert_same_bits(got[:, head].copy(), linear(ctx.handle, [w], x[:, head].copy())[0])


def test_arithmetic_can_be_changed_and_refuses_what_it_does_not_know():
    ctx, storage, x = kernels.Context(None, 1), quantized("q4_0", 16, COLS, 5), normal(6, 2, COLS)
    w = ctx.matrix("q4_0", storage, 16, COLS)
    canonical = linear(ctx.handle, [w], x)[0]
    assert lib.moe_ctx_set_arith(ctx.handle, 2) == lib.MOE_BAD_ARGUMENT
    assert_same_bits(linear(ctx.handle, [w], x)[0], canonical)
    assert lib.moe_ctx_set_arith(ctx.handle, lib.MOE_ARITH_FLOAT) == 0
    assert (linear(ctx.handle, [w], x)[0] != canonical).any()
    assert lib.moe_ctx_set_arith(ctx.handle, lib.MOE_ARITH_CANONICAL) == 0
    assert_same_bits(linear(ctx.handle, [w], x)[0], canonical)


# ---- whole models ----
def test_a_model_says_which_arithmetic_it_runs(tmp_path):
    model = make_snapshot(tmp_path, "mha_base")
    found = {}
    for arith in ("canonical", "float"):
        done = run("generate", tiny_models.PROMPT, "-m", model, "-n", 12, "--ignore-eos", "--arith", arith, "--json")
        assert f"arithmetic {arith} (" in done.stderr
        found[arith] = json.loads(done.stdout)
        assert found[arith]["arith"] == arith
    text = tmp_path / "text.txt"
    text.write_text(tiny_models.PROMPT * 3)
    arguments = ("perplexity", "-m", model, "--text", text, "--ctx", 16, "--json", "--arith")
    canonical, one, other = (
        json.loads(run(*arguments, *options).stdout)
        for options in (("canonical",), ("float", "--threads", 1, "--isa", "scalar"), ("float", "--threads", 3))
    )
    assert one["bits"] == other["bits"] != canonical["bits"]
    assert one["bits"] == pytest.approx(canonical["bits"], rel=0.02)
