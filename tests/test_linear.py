"""Dense products, routing and experts: one result for every tier, thread count, grouping and number of tokens."""

import itertools

import numpy as np
import pytest
from engine._native import ffi, lib
from native_calls import (
    TIERS,
    Experts,
    Matrix,
    assert_same_bits,
    context,
    linear,
    pointer,
    poisoned,
    route,
    route_plan,
    run_experts,
    softmax,
    swiglu,
)

FORMATS = ["f32", "f16", "bf16", "q8_0", "q4_0"]
WITH_ROTATED = [*FORMATS, "e8-iq3"]  # whose rows cannot be read back through moe_embed
COLS = 256
# Relative RMS of the product against float64 of the stored weights and float activations.
TOLERANCE = {"f32": 1e-6, "f16": 1e-6, "bf16": 1e-6, "q8_0": 2e-2, "q4_0": 2e-2}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- dense products ----
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tier", TIERS)
def test_linear_matches_float64(tier, fmt):
    ctx, x, bias = context(tier), normal(1, 11, COLS), normal(2, 53)
    w = Matrix(ctx, fmt, normal(3, 53, COLS), bias)
    want = x.astype(np.float64) @ w.dense(ctx).astype(np.float64).T + bias
    (got,) = linear(ctx, [w], x)
    assert np.sqrt(((got - want) ** 2).mean() / (want**2).mean()) <= TOLERANCE[fmt]


@pytest.mark.parametrize("fmt", WITH_ROTATED)
@pytest.mark.parametrize("tier", TIERS)
def test_a_token_does_not_depend_on_its_company(tier, fmt):
    ctx, x = context(tier, 2), normal(4, 37, COLS)
    w = Matrix(ctx, fmt, normal(5, 203, COLS), normal(6, 203))
    single = np.concatenate([linear(ctx, [w], x[t : t + 1])[0] for t in range(37)])
    for parts in ([8] * 4 + [5], [37], [3, 9, 1, 24], [7, 30]):
        cuts = np.cumsum([0, *parts])
        got = [linear(ctx, [w], np.ascontiguousarray(x[a:b]))[0] for a, b in itertools.pairwise(cuts)]
        assert_same_bits(np.concatenate(got), single)
    order = np.random.default_rng(7).permutation(37)
    assert_same_bits(linear(ctx, [w], np.ascontiguousarray(x[order]))[0], single[order])


@pytest.mark.parametrize("fmt", WITH_ROTATED)
def test_linear_gives_the_same_bits_on_every_tier_and_thread_count(fmt):
    x = normal(8, 9, COLS)
    results = []
    for tier in TIERS:
        for threads in (1, 2, 3, 4):
            ctx = context(tier, threads)
            results.append(linear(ctx, [Matrix(ctx, fmt, normal(9, 1001, COLS))], x)[0])
    for got in results[1:]:
        assert_same_bits(got, results[0])


def test_many_tokens_and_few_rows_are_cut_by_token_without_a_trace():
    """Weights of one task: the driver cuts the tokens instead."""
    x = normal(10, 1003, 32)
    one, four = context(None, 1), context(None, 4)
    w = [Matrix(ctx, "q8_0", normal(11, 5, 32), normal(12, 5)) for ctx in (one, four)]
    assert_same_bits(linear(four, [w[1]], x)[0], linear(one, [w[0]], x)[0])


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_several_matrices_share_one_call(num_tokens):
    """Mixed layouts, so that each activation form is made once and used by its own matrices."""
    ctx, x = context(None, 2), normal(13, num_tokens, COLS)
    formats = enumerate([*WITH_ROTATED, "iq4_xs"])
    matrices = [Matrix(ctx, fmt, normal(i, 40 + i, COLS), normal(i, 40 + i)) for i, fmt in formats]
    for got, w in zip(linear(ctx, matrices, x), matrices, strict=True):
        assert_same_bits(got, linear(ctx, [w], x)[0])


@pytest.mark.parametrize("fmt", ["f32", "q8_0"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_add_is_old_value_plus_finished_product(fmt, with_bias):
    ctx, x, old = context(None, 2), normal(14, 19, COLS), normal(15, 19, 700)
    w = Matrix(ctx, fmt, normal(16, 700, COLS), normal(17, 700) if with_bias else None)
    (plain,) = linear(ctx, [w], x)
    assert_same_bits(linear(ctx, [w], x, add_to=[old])[0], old + plain)
    if with_bias:
        w.cdata.bias = ffi.NULL
        assert_same_bits(plain, linear(ctx, [w], x)[0] + w.bias)


@pytest.mark.parametrize("fmt", WITH_ROTATED)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_activations_reach_the_output(fmt, bad):
    ctx, x = context(None, 2), normal(18, 9, COLS)
    w = Matrix(ctx, fmt, normal(19, 64, COLS))
    clean = linear(ctx, [w], x)[0]
    x[4, 100] = bad
    got = linear(ctx, [w], x)[0]
    assert not np.isfinite(got[4]).any()
    assert_same_bits(np.delete(got, 4, 0), np.delete(clean, 4, 0))


def test_linear_writes_nothing_outside_its_rows():
    ctx, x = context(None, 2), normal(20, 3, COLS)
    w = Matrix(ctx, "q8_0", normal(21, 13, COLS))
    y = np.full(3 * 13 + 16, 7, np.float32)
    outs = ffi.new("float *[]", [pointer(y) + 8])
    assert lib.moe_linear(ctx, ffi.new("const struct moe_matrix *[]", [w.cdata]), outs, 1, pointer(x), 3, 0) == 0
    assert (y[:8] == 7).all()
    assert (y[-8:] == 7).all()
    assert_same_bits(y[8:-8].reshape(3, 13), linear(ctx, [w], x)[0])


def test_linear_refuses_bad_arguments():
    ctx, x = context(), normal(22, 2, COLS)
    w = Matrix(ctx, "q8_0", normal(23, 8, COLS))
    y = poisoned(2, 8)
    pointers = ffi.new("float *[]", [pointer(y)])

    def status(cdata, outs=pointers):
        return lib.moe_linear(ctx, ffi.new("const struct moe_matrix *[]", [cdata]), outs, 1, pointer(x), 2, 0)

    changes = {"cols": 40, "rows": 0, "data": ffi.NULL, "layout": ffi.NULL}
    for field, value in changes.items():
        broken = ffi.new("struct moe_matrix *", w.cdata[0])
        setattr(broken, field, value)
        assert status(broken) == lib.MOE_BAD_ARGUMENT, field
    assert status(ffi.NULL) == lib.MOE_BAD_ARGUMENT
    assert status(w.cdata, ffi.new("float *[]", [ffi.NULL])) == lib.MOE_BAD_ARGUMENT
    assert np.isnan(y).all()
    assert status(w.cdata) == lib.MOE_OK


def test_embed_checks_ids_and_equals_the_stored_rows():
    ctx = context(None, 2)
    w = Matrix(ctx, "q8_0", normal(24, 21, COLS))
    dense, ids = w.dense(ctx), np.array([20, 0, 7, 7], np.int32)
    y = poisoned(4, COLS)
    assert lib.moe_embed(ctx, pointer(y), w.cdata, pointer(ids, "int32_t *"), 4) == 0
    assert_same_bits(y, dense[ids])
    for wrong in (-1, 21):
        ids[1] = wrong
        assert lib.moe_embed(ctx, pointer(y), w.cdata, pointer(ids, "int32_t *"), 4) == lib.MOE_BAD_ARGUMENT


def test_embed_refuses_rotated_rows():
    ctx, ids, y = context(), np.zeros(1, np.int32), poisoned(1, COLS)
    w = Matrix(ctx, "e8-iq3", normal(26, 8, COLS))
    assert lib.moe_embed(ctx, pointer(y), w.cdata, pointer(ids, "int32_t *"), 1) == lib.MOE_NO_KERNEL
    assert np.isnan(y).all()


# ---- storage ----
@pytest.mark.parametrize("fmt", ["q8_0", "q4_0"])
def test_check_rows_finds_the_first_bad_scale_on_any_thread_count(fmt):
    rows, cols = 400, 512
    for threads in (1, 4):
        ctx, error = context(None, threads), ffi.new("const char **")
        table = lib.moe_select_format(ctx, fmt.encode(), error)
        storage = np.zeros((rows, cols // 32, table.block_bytes), np.uint8)
        x = normal(25, rows, cols)
        assert lib.moe_quantize(ctx, pointer(storage, "void *"), fmt.encode(), pointer(x), rows, cols) == 0
        args = (ctx, fmt.encode(), pointer(storage, "void *"), rows, cols)
        assert lib.moe_check_rows(*args) == -1
        for row, block in ((399, 15), (250, 3), (250, 2), (0, 0)):
            storage[row, block, :2] = [0, 0x7C]  # float16 infinity
            assert lib.moe_check_rows(*args) == row * 16 + block
        assert lib.moe_check_rows(ctx, b"no such format", *args[2:]) == lib.MOE_NO_KERNEL
        assert lib.moe_check_rows(*args[:4], 33) == lib.MOE_BAD_ARGUMENT
        x[3, 3] = np.nan
        status = lib.moe_quantize(ctx, pointer(storage, "void *"), fmt.encode(), pointer(x), rows, cols)
        assert status == lib.MOE_NONFINITE


# ---- routing ----
def reference_route(logits, top, score, norm, scale):
    """The rule in numpy float32 steps; probabilities by the native softmax, which has its own test."""
    ctx = context("scalar")
    values = softmax(ctx, logits) if score == lib.MOE_SOFTMAX_THEN_TOPK else logits
    ids = np.argsort(-values, axis=1, kind="stable")[:, :top].astype(np.int32)
    weights = np.take_along_axis(values, ids, 1)
    if score == lib.MOE_TOPK_THEN_SOFTMAX:
        weights = softmax(ctx, np.ascontiguousarray(weights))
    if norm:
        total = weights[:, 0].copy()
        for rank in range(1, top):
            total += weights[:, rank]
        weights = weights / total[:, None]
    return ids, weights * np.float32(scale)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("score", [lib.MOE_SOFTMAX_THEN_TOPK, lib.MOE_TOPK_THEN_SOFTMAX])
@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize(
    "num_experts, top, scale", [(64, 8, 1.0), (8, 2, 2.5), (5, 5, 1.0), (160, 6, 16.0), (1, 1, 1.0)]
)
def test_routing_follows_the_rule(tier, score, norm, num_experts, top, scale):
    logits = normal(num_experts, 300, num_experts) * 3
    logits[::3] = np.round(logits[::3])  # ties
    logits[7] = 0.25
    want_ids, want_weights = reference_route(logits, top, score, norm, scale)
    status, ids, weights = route(context(tier, 3), logits, top, score, norm, scale)
    assert status == 0
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(ids[7], np.arange(top))
    assert_same_bits(weights, want_weights)
    if norm and scale == 1:
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)


def test_kept_mass_below_one_stays_below_one():
    """OLMoE: without norm_topk_prob the kept probabilities are those of the softmax over all experts."""
    logits = normal(26, 50, 64)
    _, _, plain = route(context(), logits, 8, norm=0)
    _, _, normed = route(context(), logits, 8, norm=1)
    assert (plain.sum(1) < 0.9).all()
    np.testing.assert_allclose(normed.sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_reported(bad):
    logits = normal(27, 100, 64)
    logits[93, 63] = bad
    assert route(context(None, 2), logits, 8)[0] == lib.MOE_NONFINITE


def test_route_refuses_bad_arguments():
    logits = normal(28, 2, 4)
    assert route(context(), logits, 5)[0] == lib.MOE_BAD_ARGUMENT
    assert route(context(), logits, 2, score=3)[0] == lib.MOE_BAD_ARGUMENT


def test_plan_is_a_stable_grouping():
    ids = np.random.default_rng(29).integers(0, 13, (50, 3)).astype(np.int32)
    experts, offsets, assignments = route_plan(ids, 40)
    np.testing.assert_array_equal(experts, np.unique(ids))
    np.testing.assert_array_equal(assignments, np.argsort(ids.reshape(-1), kind="stable"))
    np.testing.assert_array_equal(np.diff(offsets), np.unique(ids, return_counts=True)[1])
    one = np.array([4], np.int32)
    args = [pointer(a, "int32_t *") for a in (one.copy(), np.zeros(2, np.int32), one.copy(), one)]
    assert lib.moe_route_plan(context(), *args, 1, 1, 4) == lib.MOE_BAD_ARGUMENT


# ---- experts ----
HIDDEN, WIDE = 256, 512


def make_experts(ctx, kinds, hidden=HIDDEN, width=WIDE, bias=False):
    """One expert per (gate, up, down) format triple."""
    triples = []
    for i, (gate, up, down) in enumerate(kinds):
        shapes = [(gate, width, hidden), (up, width, hidden), (down, hidden, width)]
        triples.append(
            tuple(
                Matrix(ctx, fmt, normal(100 * i + j, rows, cols) / 16, normal(i, rows) if bias else None)
                for j, (fmt, rows, cols) in enumerate(shapes)
            )
        )
    return Experts(triples)


MIXED = [
    ("q8_0",) * 3,
    ("q4_0", "q8_0", "f32"),
    ("f32", "q4_0", "iq4_xs"),
    ("iq4_xs", "iq4_xs", "q8_0"),
    ("f16", "bf16", "f16"),
    ("e8-iq3", "iq4_xs", "e8-iq3"),
]


def by_parts(ctx, experts, x, ids):
    """Expert outputs through the separate public calls, one token at a time."""
    out = poisoned(ids.size, x.shape[1])
    for a, expert in enumerate(ids.reshape(-1)):
        gate, up, down = experts.triples[expert]
        row = x[a // ids.shape[1]][None].copy()
        out[a] = linear(ctx, [down], swiglu(ctx, linear(ctx, [gate], row)[0], linear(ctx, [up], row)[0]))[0]
    return out


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_experts_equal_the_separate_calls(tier, bias, num_tokens):
    ctx = context(tier, 2)
    experts, x = make_experts(ctx, MIXED, bias=bias), normal(30, num_tokens, HIDDEN)
    ids = np.stack([np.random.default_rng(t).permutation(len(MIXED))[:3] for t in range(num_tokens)]).astype(np.int32)
    assert_same_bits(run_experts(ctx, experts, x, ids), by_parts(ctx, experts, x, ids))


def test_experts_give_the_same_bits_for_every_tier_thread_count_and_arrival():
    x = normal(31, 40, HIDDEN)
    ids = np.stack([np.random.default_rng(t).permutation(len(MIXED))[:2] for t in range(40)]).astype(np.int32)
    results = []
    for tier in TIERS:
        for threads in (1, 2, 3, 4):
            ctx = context(tier, threads)
            experts = make_experts(ctx, MIXED)
            results.append(run_experts(ctx, experts, x, ids))
            chosen, offsets, assignments = route_plan(ids, len(MIXED))
            out = poisoned(ids.size, HIDDEN)
            for i in np.random.default_rng(threads).permutation(len(chosen)):
                before = out.copy()
                run_experts(ctx, experts, x, ids, (chosen[i : i + 1], offsets[i : i + 2], assignments), out)
                others = np.delete(np.arange(ids.size), assignments[offsets[i] : offsets[i + 1]])
                assert_same_bits(out[others], before[others])
            results.append(out)
    for got in results[1:]:
        assert_same_bits(got, results[0])


@pytest.mark.parametrize("parts", [[1] * 37, [8] * 4 + [5], [5, 32]])
def test_experts_do_not_depend_on_the_number_of_tokens(parts):
    ctx, x = context(None, 2), normal(32, 37, HIDDEN)
    experts = make_experts(ctx, MIXED)
    ids = np.stack([np.random.default_rng(t).permutation(len(MIXED))[:2] for t in range(37)]).astype(np.int32)
    whole, cuts = run_experts(ctx, experts, x, ids), np.cumsum([0, *parts])
    got = [run_experts(ctx, experts, x[a:b].copy(), ids[a:b].copy()) for a, b in itertools.pairwise(cuts)]
    assert_same_bits(np.concatenate(got), whole)


def test_more_assignments_than_one_pass_holds():
    """1500 tokens on two experts: passes of 1024 assignments cut an expert's tokens."""
    ctx, x = context(None, 2), normal(33, 1500, 32)
    experts = make_experts(ctx, [("q8_0",) * 3, ("f32",) * 3], 32, 32)
    ids = np.tile(np.array([[1, 0]], np.int32), (1500, 1))
    got = run_experts(ctx, experts, x, ids)
    assert np.isfinite(got).all()
    for t in (0, 511, 512, 1023, 1024, 1499):
        assert_same_bits(got[2 * t : 2 * t + 2], run_experts(ctx, experts, x[t : t + 1].copy(), ids[:1].copy()))


def test_experts_match_float64():
    ctx, x = context(), normal(34, 6, HIDDEN)
    experts = make_experts(ctx, [("f32",) * 3, ("q8_0",) * 3])
    out = run_experts(ctx, experts, x, np.tile(np.array([[0, 1]], np.int32), (6, 1))).reshape(6, 2, HIDDEN)
    for rank, bound in ((0, 1e-5), (1, 3e-2)):
        gate, up, down = (m.dense(ctx).astype(np.float64) for m in experts.triples[rank])
        g = x.astype(np.float64) @ gate.T
        want = (g / (1 + np.exp(-g)) * (x.astype(np.float64) @ up.T)) @ down.T
        assert np.sqrt(((out[:, rank] - want) ** 2).mean() / (want**2).mean()) <= bound


def test_experts_refuse_bad_arguments():
    ctx, x = context(), normal(35, 2, HIDDEN)
    experts = make_experts(ctx, MIXED)
    out, ids = poisoned(4, HIDDEN), np.array([[0, 1], [1, 0]], np.int32)
    for plan in (
        ([0, 1], [0, 2, 4], [0, 1, 2, 4]),
        ([-1, 1], [0, 2, 4], [0, 1, 2, 3]),
        ([0, 1], [0, 4, 2], [0, 1, 2, 3]),
    ):
        keep = [np.array(a, np.int32) for a in plan]
        arrays = [pointer(a, "int32_t *") for a in keep]
        assert lib.moe_experts(ctx, pointer(out), experts.table, *arrays, 2, pointer(x), 2, 2) == lib.MOE_BAD_ARGUMENT
    assert np.isnan(out).all()
    experts.cdata[1].up.cols = 512
    plan = [pointer(a, "int32_t *") for a in route_plan(ids, len(MIXED))]
    assert lib.moe_experts(ctx, pointer(out), experts.table, *plan, 2, pointer(x), 2, 2) == lib.MOE_BAD_ARGUMENT


# ---- sum over ranks ----
def fma32(a, b, c):
    """float32 fused multiply-add in float64: the tests' inputs are short enough for product and sum to be exact."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("num_tokens, hidden", [(1, 2048), (9, 1500), (70, 33)])
def test_combine_adds_in_rank_order(tier, num_tokens, hidden):
    rng = np.random.default_rng(hidden)
    out = (rng.integers(-(2**11), 2**11, (num_tokens, 4, hidden)) / 256).astype(np.float32)
    weights, y = (
        rng.random((num_tokens, 4)).astype(np.float32),
        rng.standard_normal((num_tokens, hidden)).astype(np.float32),
    )
    total = weights[:, 0, None] * out[:, 0]
    for rank in range(1, 4):
        total = fma32(weights[:, rank, None], out[:, rank], total)
    want = y + total
    args = (pointer(out), pointer(weights), num_tokens, 4, hidden)
    assert lib.moe_experts_combine(context(tier, 2), pointer(y), *args) == lib.MOE_OK
    assert_same_bits(y, want)


def test_combine_reports_non_finite_sums():
    ctx, y, weights = context(None, 2), np.zeros((30, 2000), np.float32), np.ones((30, 2), np.float32)
    out = np.ones((60, 2000), np.float32)
    args = (pointer(out), pointer(weights), 30, 2, 2000)
    assert lib.moe_experts_combine(ctx, pointer(y), *args) == lib.MOE_OK
    out[59, 1999] = np.inf
    assert lib.moe_experts_combine(ctx, pointer(y), *args) == lib.MOE_NONFINITE


def test_weights_never_share_memory():
    """Pieces of large blocks, asked for by several threads at once."""
    from concurrent.futures import ThreadPoolExecutor

    from engine.kernels import weights_empty

    sizes = [1, 63, 64, 65, 4096, 1_000_001, 5 << 20, 40 << 20] * 6
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(weights_empty, sizes))
    assert [p.nbytes for p in pieces] == sizes and all(p.ctypes.data % 64 == 0 for p in pieces)
    spans = sorted((p.ctypes.data, p.ctypes.data + p.nbytes) for p in pieces)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
