"""Attention and the key/value ring: against float64, and bit for bit the same for every tier, thread count and split.

Every cache slot that was not stored holds NaN and every output starts as NaN between guards, so a value that is read
too early, too late or not written at all shows. Shapes: T tokens, N heads, K kv heads, D head_dim.
"""

import numpy as np
import pytest
from conftest import supported_tiers

from engine.kernels import Context, address, ffi, lib

TIERS = supported_tiers()
MAX_ERROR = 2e-6  # sum|a-b| / sum|b|: 16-lane float32 dot products, exp to 2 ulp
GUARD = 64
GUARD_VALUE = np.float32(-12345.0)


class Cache:
    """A moe_kv whose slots are NaN until stored. capacity in slots, a multiple of 64."""

    def __init__(self, num_heads, head_dim, capacity, f32, value_dim=None, latent=False):
        dtype, value_dim = np.float32 if f32 else np.float16, value_dim or head_dim
        self.k, self.v = (np.full((num_heads, capacity, dim), np.nan, dtype) for dim in (head_dim, value_dim))
        self.latent = latent
        self.cdata = ffi.new("struct moe_kv *")
        self.cdata.k, self.cdata.v = address(self.k), ffi.NULL if latent else address(self.v)
        self.cdata.num_heads, self.cdata.head_dim, self.cdata.capacity = num_heads, head_dim, capacity
        self.cdata.value_dim, self.cdata.is_f32 = value_dim, f32

    def store(self, context, k, v, first):
        k, v = np.ascontiguousarray(k, np.float32), np.ascontiguousarray(v, np.float32)
        if self.latent:
            return lib.moe_kv_store(context.handle, self.cdata, address(k, "float *"), ffi.NULL, first, len(k))
        return lib.moe_kv_store(context.handle, self.cdata, address(k, "float *"), address(v, "float *"), first, len(k))


def attention(context, cache, q, first, scale, window=0, sinks=None):
    """(status, out [T, N, D]); checks the guards around out."""
    q = np.ascontiguousarray(q, np.float32)
    shape = (*q.shape[:2], cache.cdata.value_dim)
    raw = np.full(np.prod(shape) + 2 * GUARD, GUARD_VALUE, np.float32)
    raw[GUARD:-GUARD] = np.nan
    out = raw[GUARD:-GUARD]
    sink_pointer = ffi.NULL if sinks is None else address(sinks, "float *")
    status = lib.moe_attention(
        context.handle, address(out, "float *"), address(q, "float *"), cache.cdata, q.shape[0], q.shape[1], first,
        scale, window, sink_pointer,
    )  # fmt: skip
    assert (raw[:GUARD] == GUARD_VALUE).all() and (raw[-GUARD:] == GUARD_VALUE).all()
    return status, out.reshape(shape)


class Case:
    """Random q, k, v for `length` positions; `skip` of them are stored before the first query."""

    def __init__(
        self, heads=4, kv_heads=2, head_dim=64, length=150, f32=True, window=0, sinks=False, skip=0, spread=1.0,
        value_dim=None, latent=False,
    ):  # fmt: skip
        rng = np.random.default_rng([heads, kv_heads, head_dim, length])
        self.f32, self.window, self.skip, self.kv_heads, self.head_dim = f32, window, skip, kv_heads, head_dim
        self.q = (rng.standard_normal((length, heads, head_dim)) * spread).astype(np.float32)
        self.k = rng.standard_normal((length, kv_heads, head_dim)).astype(np.float32)
        self.v = rng.standard_normal((length, kv_heads, value_dim or head_dim)).astype(np.float32)
        self.value_dim, self.latent = value_dim, latent
        if latent:
            self.v = self.k[..., : value_dim or head_dim]
        self.sinks = rng.standard_normal(heads).astype(np.float32) * 3 if sinks else None
        self.scale = float(np.float32(head_dim**-0.5))
        self.length = length

    def run(self, context, splits=None, capacity=None):
        """out [length - skip, N, D] of calls of the given numbers of tokens."""
        capacity = capacity or -(-self.length // 64) * 64
        cache = Cache(self.kv_heads, self.head_dim, capacity, self.f32, self.value_dim, self.latent)
        for p in range(0, self.skip, 32):
            end = min(p + 32, self.skip)
            assert cache.store(context, self.k[p:end], self.v[p:end], p) == lib.MOE_OK
        done, outs = self.skip, []
        for tokens in splits or [self.length - self.skip]:
            part = slice(done, done + tokens)
            assert cache.store(context, self.k[part], self.v[part], done) == lib.MOE_OK
            status, out = attention(context, cache, self.q[part], done, self.scale, self.window, self.sinks)
            assert status == lib.MOE_OK
            outs.append(out)
            done += tokens
        assert done == self.length
        return np.concatenate(outs)

    def reference(self):
        """The same in float64, of the keys and values as they are stored."""
        stored = np.float32 if self.f32 else np.float16
        k, v, q = (x.astype(np.float64) for x in (self.k.astype(stored), self.v.astype(stored), self.q))
        heads = q.shape[1]
        k, v = (np.repeat(x, heads // self.kv_heads, axis=1) for x in (k, v))
        scores = np.einsum("tnd,snd->nts", q[self.skip :], k) * self.scale
        p, s = np.arange(self.skip, self.length)[:, None], np.arange(self.length)[None, :]
        visible = (s <= p) & (s > p - self.window if self.window else True)
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        if self.sinks is not None:
            top = np.maximum(top, self.sinks[:, None, None])
        e = np.exp(scores - top)
        total = e.sum(-1, keepdims=True)
        if self.sinks is not None:
            total = total + np.exp(self.sinks.astype(np.float64)[:, None, None] - top)
        return np.einsum("nts,snd->tnd", e / total, v)


def assert_close(out, want, bound=MAX_ERROR):
    error = np.abs(out - want).sum() / np.abs(want).sum()
    assert error <= bound, error  # false for NaN
    assert np.abs(out - want).max() <= 50 * bound * max(1.0, np.abs(want).max())


def assert_same_bits(a, b):
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.fixture(scope="module")
def context():
    return Context(num_threads=2)


@pytest.mark.parametrize("f32", [True, False], ids=["f32", "f16"])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 64, 80, 96, 104, 128, 192, 256])
def test_every_head_dim_agrees_with_float64(context, head_dim, f32):
    case = Case(head_dim=head_dim, f32=f32)
    assert_close(case.run(context), case.reference())


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [0, 1, 5, 64, 65, 100])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_groups_windows_and_sinks_agree_with_float64(context, kv_heads, window, sinks):
    case = Case(heads=8, kv_heads=kv_heads, head_dim=32, length=200, window=window, sinks=sinks)
    assert_close(case.run(context, [3, 1, 120, 1, 75]), case.reference())


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500])
def test_lengths_around_chunks_agree_with_float64(context, length):
    case = Case(length=length, head_dim=48)
    assert_close(case.run(context), case.reference())


@pytest.mark.parametrize("spread", [0.0, 10.0, 60.0], ids=["flat", "peaked", "one key"])
def test_score_ranges_agree_with_float64(context, spread):
    case = Case(spread=spread, length=300, head_dim=128)
    # A score of size S carries an error of about S * 2^-23, which the exponential turns into a relative one.
    scores = np.abs(case.q).max() * np.sqrt(128)
    assert_close(case.run(context), case.reference(), MAX_ERROR + scores * 2.0**-23)


@pytest.mark.parametrize("f32", [True, False], ids=["f32", "f16"])
@pytest.mark.parametrize("head_dim, value_dim", [(576, 512), (40, 32), (24, 8), (64, 64)])
def test_values_that_are_part_of_their_keys_agree_with_float64(context, head_dim, value_dim, f32):
    case = Case(20, 1, head_dim, 140, f32, value_dim=value_dim, latent=True, window=100, sinks=True)
    assert_close(case.run(context, [3, 1, 135, 1]), case.reference())


@pytest.mark.parametrize("head_dim, value_dim", [(24, 40), (96, 64)])
def test_values_of_another_width_agree_with_float64(context, head_dim, value_dim):
    case = Case(head_dim=head_dim, value_dim=value_dim, f32=False)
    assert_close(case.run(context), case.reference())


def test_long_context_with_one_query_agrees_with_float64(context):
    for skip, tokens in ((4095, 1), (3000, 3)):
        case = Case(heads=2, kv_heads=1, length=skip + tokens, skip=skip, head_dim=64)
        assert_close(case.run(context), case.reference())


GRID = [
    {"head_dim": 128, "length": 200},
    {"head_dim": 40, "length": 300, "f32": False, "window": 70, "sinks": True},
    {"head_dim": 16, "length": 130, "heads": 3, "kv_heads": 3, "f32": False},
    {"head_dim": 192, "length": 140, "heads": 8, "kv_heads": 1, "sinks": True},
    {"head_dim": 8, "length": 90, "heads": 5, "kv_heads": 1, "window": 3, "spread": 40.0},
    {"head_dim": 72, "value_dim": 40, "length": 100, "f32": False},
    {"head_dim": 104, "value_dim": 88, "latent": True, "length": 150, "heads": 34, "kv_heads": 1, "f32": False},
]
IDS = [f"D{g['head_dim']}" for g in GRID]


@pytest.mark.parametrize("options", GRID, ids=IDS)
def test_tiers_give_the_same_bits(options):
    case = Case(**options)
    splits = [1, 4, case.length - 5]
    first = case.run(Context(TIERS[0], 1), splits)
    for tier in TIERS[1:]:
        assert_same_bits(case.run(Context(tier, 1), splits), first)


@pytest.mark.parametrize("options", GRID, ids=IDS)
def test_splits_of_a_prompt_give_the_same_bits(context, options):
    case = Case(**options)
    whole = case.run(context)
    rng = np.random.default_rng(1)
    for _ in range(3):
        cuts = np.sort(rng.choice(np.arange(1, case.length), 6, replace=False))
        assert_same_bits(case.run(context, np.diff([0, *cuts, case.length]).tolist()), whole)
    assert_same_bits(case.run(context, [1] * case.length), whole)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_give_the_same_bits(threads):
    one, many = Context(num_threads=1), Context(num_threads=threads)
    for options in GRID:
        case = Case(**options)
        assert_same_bits(case.run(many), case.run(one))
    for tokens in (1, 3):  # one key/value head, many query heads: the group is cut, at last the chunks too
        case = Case(34, 1, 40, 1200, False, skip=1200 - tokens, value_dim=32, latent=True)
        assert_same_bits(case.run(many), case.run(one))
    # Few heads and many positions: chunks are spread over the threads.
    for tokens, window, f32 in ((1, 0, False), (1, 1000, True), (5, 0, False), (2, 900, True)):
        case = Case(head_dim=24, length=2100, skip=2100 - tokens, window=window, f32=f32, sinks=True)
        assert_same_bits(case.run(many), case.run(one))


def test_spread_chunks_give_the_same_bits_in_every_tier():
    case = Case(heads=3, kv_heads=1, head_dim=80, length=1500, skip=1498, f32=False)
    outs = [case.run(Context(tier, threads), [1, 1]) for tier in TIERS for threads in (1, 4)]
    for out in outs[1:]:
        assert_same_bits(out, outs[0])
    assert_close(outs[0], case.reference())


@pytest.mark.parametrize("f32", [True, False], ids=["f32", "f16"])
def test_ring_smaller_than_the_text_gives_the_same_bits(context, f32):
    case = Case(length=700, window=100, head_dim=24, f32=f32, sinks=True)
    full = case.run(context)
    for splits in ([1] * 700, [64] * 10 + [60], [93] * 7 + [49]):
        assert_same_bits(case.run(context, splits, capacity=192), full)
    assert_close(full, case.reference())


def test_overwritten_positions_are_refused(context):
    rng = np.random.default_rng(0)
    cache = Cache(1, 16, 64, True)
    rows = rng.standard_normal((64, 1, 16)).astype(np.float32)
    assert cache.store(context, rows, rows, 0) == lib.MOE_OK
    assert attention(context, cache, rows, 0, 0.25)[0] == lib.MOE_OK
    assert cache.store(context, rows[:33], rows[:33], 64) == lib.MOE_OK
    assert attention(context, cache, rows[:33], 64, 0.25, window=32)[0] == lib.MOE_OK  # 33 + 32 - 1 positions
    assert attention(context, cache, rows[:33], 64, 0.25, window=33)[0] == lib.MOE_BAD_ARGUMENT
    assert attention(context, cache, rows[:33], 64, 0.25)[0] == lib.MOE_BAD_ARGUMENT
    assert cache.store(context, rows.repeat(2, 0), rows.repeat(2, 0), 0) == lib.MOE_BAD_ARGUMENT


def test_arguments_out_of_range_are_refused(context):
    q = np.zeros((2, 4, 16), np.float32)
    cache = Cache(2, 16, 64, True)

    def statuses(**changes):
        for name, value in changes.items():
            setattr(cache.cdata, name, value)
        result = {attention(context, cache, q, 0, 1.0)[0], cache.store(context, q[:, :2], q[:, :2], 0)}
        cache.cdata.num_heads, cache.cdata.head_dim, cache.cdata.capacity, cache.cdata.is_f32 = 2, 16, 64, 1
        cache.cdata.value_dim, cache.cdata.v = 16, address(cache.v)
        return result

    assert statuses() == {lib.MOE_OK}
    for changes in (
        {"capacity": 63}, {"capacity": 0}, {"head_dim": 12}, {"num_heads": 0}, {"is_f32": 2}, {"value_dim": 0},
        {"value_dim": 12}, {"v": ffi.NULL, "value_dim": 24},
    ):  # fmt: skip
        assert statuses(**changes) == {lib.MOE_BAD_ARGUMENT}, changes
    assert attention(context, cache, q[:, :3], 0, 1.0)[0] == lib.MOE_BAD_ARGUMENT
    assert attention(context, cache, q, -1, 1.0)[0] == lib.MOE_BAD_ARGUMENT
    assert attention(context, cache, q, 2**31 - 2, 1.0)[0] == lib.MOE_BAD_ARGUMENT
    assert attention(context, cache, q, 0, 1.0, window=-1)[0] == lib.MOE_BAD_ARGUMENT
    assert attention(context, cache, q[:0], 0, 1.0)[0] == lib.MOE_OK


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("f32", [True, False], ids=["f32", "f16"])
def test_a_nan_reaches_exactly_the_queries_that_see_it(tier, f32):
    context = Context(tier, 2)
    bad = 70
    for name in ("q", "k", "v"):
        case = Case(length=200, head_dim=24, f32=f32, window=90, heads=4, kv_heads=2)
        clean = case.run(context)
        getattr(case, name)[bad, 1, 5] = np.nan
        out = case.run(context)
        hit = np.zeros((200, 4, 24), bool)
        if name == "q":
            hit[bad, 1] = True
        elif name == "k":
            hit[bad : bad + 90, 2:] = True
        else:
            hit[bad : bad + 90, 2:, 5] = True
        np.testing.assert_array_equal(np.isnan(out), hit)
        assert_same_bits(out[~hit], clean[~hit])


def test_a_value_of_weight_zero_still_shows_its_nan(context):
    case = Case(length=130, head_dim=16, heads=1, kv_heads=1, spread=0.0)
    case.q[:] = 1
    case.k[:] = -50
    case.k[0] = 50  # every other key has weight exp(-400) = 0, in its own chunk or after the merge
    clean = case.run(context)
    assert_same_bits(clean, np.broadcast_to(case.v[0], clean.shape).copy())
    case.v[100, 0, 3] = np.nan
    out = case.run(context)
    assert np.isnan(out[100:, 0, 3]).all()
    assert np.isnan(out).sum() == 30


def test_float16_overflow_is_not_hidden(context):
    case = Case(length=10, head_dim=16, heads=1, kv_heads=1, f32=False)
    case.v[4, 0, 2] = 65520.0  # rounds to Inf; 65519 still rounds to 65504
    case.v[4, 0, 3] = 65519.0
    out = case.run(context)
    assert np.isinf(out[4:, 0, 2]).all()
    assert np.isfinite(np.delete(out, 2, axis=2)).all()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("threads", [1, 3])
def test_stored_values_are_rounded_to_nearest_even_and_land_in_their_slots(tier, threads):
    rng = np.random.default_rng(3)
    context = Context(tier, threads)
    k = (rng.standard_normal((150, 3, 104)) * 10.0 ** rng.integers(-9, 5, (150, 3, 104))).astype(np.float32)
    v = rng.standard_normal((150, 3, 104)).astype(np.float32)
    for f32 in (True, False):
        cache = Cache(3, 104, 192, f32)
        assert cache.store(context, k, v, 100) == lib.MOE_OK
        slots = np.arange(100, 250) % 192
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(cache.k[:, slots], k.transpose(1, 0, 2).astype(cache.k.dtype))
            np.testing.assert_array_equal(cache.v[:, slots], v.transpose(1, 0, 2).astype(cache.v.dtype))
        others = np.setdiff1d(np.arange(192), slots)
        assert np.isnan(cache.k[:, others]).all() and np.isnan(cache.v[:, others]).all()


def test_a_sink_alone_takes_its_share(context):
    case = Case(length=1, heads=2, kv_heads=1, head_dim=16)
    plain = case.run(context)
    for sink, share in ((-np.inf, 1.0), (-1000.0, 1.0), (1000.0, 0.0)):
        case.sinks = np.full(2, sink, np.float32)
        np.testing.assert_allclose(case.run(context), plain * share, rtol=1e-6)
