"""One matrix per head (latent attention's way in and out), and experts with the clamped activation."""

import numpy as np
import pytest
from engine._native import lib
from native_calls import (
    TIERS,
    Experts,
    Matrix,
    assert_same_bits,
    context,
    linear,
    linear_heads,
    run_experts,
    swiglu_clamped,
)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("fmt, cols, bound", [("f32", 20, 1e-6), ("q8_0", 64, 2e-2), ("bf16", 24, 1e-6)])
def test_heads_equal_separate_products_and_float64(tier, fmt, cols, bound):
    heads, rows, tail, tokens = 5, 16, 8, 19
    ctx, x = context(tier, 3), normal(1, tokens, heads, cols + tail)
    weights = normal(2, heads * rows, cols)
    status, out = linear_heads(ctx, Matrix(ctx, fmt, weights), x, heads, tail)
    assert status == 0
    assert_same_bits(out[..., rows:].copy(), x[..., cols:].copy())
    dense = Matrix(ctx, fmt, weights).dense(ctx).astype(np.float64).reshape(heads, rows, cols)
    want = np.einsum("nrc,tnc->tnr", dense, x[..., :cols].astype(np.float64))
    assert np.abs(out[..., :rows] - want).sum() / np.abs(want).sum() <= bound
    for n in range(heads):
        one = Matrix(ctx, fmt, weights[n * rows : (n + 1) * rows])
        assert_same_bits(out[:, n, :rows].copy(), linear(ctx, [one], x[:, n, :cols].copy())[0])


def test_heads_do_not_depend_on_tokens_per_call_tier_or_threads():
    x, weights = normal(3, 21, 7, 32), normal(4, 7 * 24, 32)
    outs = []
    for tier in TIERS:
        for threads in (1, 4):
            ctx = context(tier, threads)
            matrix = Matrix(ctx, "q4_0", weights)
            outs.append(linear_heads(ctx, matrix, x, 7)[1])
            outs.append(np.concatenate([linear_heads(ctx, matrix, x[t : t + 1].copy(), 7)[1] for t in range(21)]))
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


def test_heads_refuse_bad_arguments():
    ctx, x = context(), normal(5, 2, 4, 40)
    matrix = Matrix(ctx, "q8_0", normal(6, 32, 32))
    assert linear_heads(ctx, matrix, x, 4, 8)[0] == 0
    assert linear_heads(ctx, matrix, x, 4, 9)[0] == lib.MOE_BAD_ARGUMENT  # x has 8 numbers behind the columns
    assert linear_heads(ctx, matrix, x[:, :3].copy(), 3)[0] == lib.MOE_BAD_ARGUMENT  # 32 rows for 3 heads
    assert linear_heads(ctx, matrix, x.reshape(1, 8, 40), 8)[0] == lib.MOE_BAD_ARGUMENT  # 4 rows are half a strip


LIMIT = 1.5  # low, so that many values are clamped
KINDS = [("f32", "f32", "f32"), ("mxfp4", "mxfp4", "mxfp4"), ("q8_0", "q4_0", "f32")]


def biased_experts(ctx, **activation):
    shapes = [(96, 64), (96, 64), (64, 96)]  # gate, up, down
    triples = [
        [
            Matrix(ctx, fmt, normal(10 * i + j, *shapes[j]) / 4, normal(i + j, shapes[j][0]))
            for j, fmt in enumerate(kind)
        ]
        for i, kind in enumerate(KINDS)
    ]
    return Experts(triples, **activation)


@pytest.mark.parametrize("tier", TIERS)
def test_clamped_experts_with_biases_equal_the_separate_calls_and_float64(tier):
    ctx, x = context(tier, 2), normal(7, 11, 64)
    ids = np.stack([np.random.default_rng(t).permutation(3)[:2] for t in range(11)]).astype(np.int32)
    experts = biased_experts(ctx, activation=lib.MOE_SWIGLU_CLAMPED, limit=LIMIT)
    out = run_experts(ctx, experts, x, ids)
    for a, expert in enumerate(ids.reshape(-1)):
        gate, up, down = experts.triples[expert]
        row = x[a // 2][None].copy()
        hidden = swiglu_clamped(ctx, linear(ctx, [gate], row)[0], linear(ctx, [up], row)[0], LIMIT)
        assert_same_bits(out[a], linear(ctx, [down], hidden)[0][0])
        if expert == 0:  # float weights
            gate, up, down = ((m.dense(ctx).astype(np.float64), m.bias.astype(np.float64)) for m in (gate, up, down))
            g = np.minimum(row @ gate[0].T + gate[1], LIMIT)
            u = np.clip(row @ up[0].T + up[1], -LIMIT, LIMIT)
            want = (g / (1 + np.exp(-1.702 * g)) * (u + 1)) @ down[0].T + down[1]
            np.testing.assert_allclose(out[a], want[0], rtol=1e-4, atol=1e-4)


def test_an_unknown_activation_or_limit_is_refused():
    ctx, x, ids = context(), normal(8, 1, 64), np.zeros((1, 1), np.int32)
    for activation in ({"activation": 2}, {"activation": 1}, {"activation": 1, "limit": np.nan}):
        with pytest.raises(AssertionError, match=str(lib.MOE_BAD_ARGUMENT)):
            run_experts(ctx, biased_experts(ctx, **activation), x, ids)
