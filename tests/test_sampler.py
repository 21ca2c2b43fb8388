"""Sampler: the documented algorithm written out in Python, exact probabilities, ties, ranges, determinism."""

import math

import numpy as np
import pytest
from conftest import supported_tiers

from engine.errors import ConfigError, KernelError, NumericsError
from engine.kernels import Context, address, ffi, lib
from engine.sampler import Sampler, SamplingParams

TIERS = supported_tiers()


@pytest.fixture(scope="module")
def context():
    return Context(num_threads=1)


def penalized(logits, history, params):
    """float32 logits after penalties, one id at a time."""
    out = logits.copy()
    if params.repeat_last_n >= 0:
        history = history[len(history) - min(len(history), params.repeat_last_n) :]
    f = np.float32
    for token in set(history):
        count = history.count(token)
        value = out[token] / f(params.repeat_penalty) if out[token] > 0 else out[token] * f(params.repeat_penalty)
        out[token] = value - f(count) * f(params.frequency_penalty) - f(params.presence_penalty)
    return out


def candidates(logits, params):
    """(ids, probabilities) that are left, in order of rank. float64, written from the documentation."""
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    with np.errstate(over="ignore"):
        p = np.exp((logits[ids].astype(np.float64) - float(logits.max())) / params.temperature)
    weights = np.floor(p * 2.0**40)
    keep = int((weights > 0).sum())
    if params.top_k:
        keep = min(keep, params.top_k)
    if params.top_p < 1:
        cumulative = np.cumsum(weights[:keep])
        keep = int(np.argmax(cumulative >= params.top_p * cumulative[-1])) + 1
    if params.min_p > 0:
        below = weights[:keep] < params.min_p * 2.0**40
        keep = max(1, int(np.argmax(below)) if below.any() else keep)
    return ids[:keep], weights[:keep] / weights[:keep].sum()


def expected_token(logits, history, params, position):
    logits = penalized(logits, history, params)
    if params.temperature == 0:
        return int(np.argmax(logits))
    ids, p = candidates(logits, params)
    return ids[int(np.searchsorted(np.cumsum(p), lib.moe_draw(params.seed, position), side="right"))]


def some_logits(seed, vocab_size, spread=3.0):
    return (np.random.default_rng(seed).standard_normal(vocab_size) * spread).astype(np.float32)


SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.5},
    {"temperature": 1.5, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 0.999},
    {"temperature": 3.0, "top_k": 900, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 100.0},
    {"temperature": 1e9, "top_k": 500},
    {"temperature": 1e-30},
    {"temperature": 0.7, "repeat_penalty": 1.3, "repeat_last_n": 30},
    {"temperature": 1.0, "frequency_penalty": 0.4, "presence_penalty": -0.7, "repeat_last_n": -1, "top_k": 20},
    {"repeat_penalty": 0.5, "frequency_penalty": 1.1, "repeat_last_n": -1},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1000, 5000])
def test_picks_equal_the_written_out_algorithm(context, options, vocab_size):
    params = SamplingParams(**options, seed=11)
    sampler = Sampler(context, params)
    rng = np.random.default_rng(vocab_size)
    wrong = 0
    for position in range(40):
        logits = some_logits(position, vocab_size)
        history = rng.integers(0, vocab_size, 100).tolist()
        wrong += sampler.pick(logits, history, position) != expected_token(logits, history, params, position)
    # A draw can fall between a float32 and a float64 probability: 1e-7 of the line per candidate.
    assert wrong <= (1 if options.get("temperature", 0) > 50 else 0)


@pytest.mark.parametrize("options", [s for s in SETTINGS if s.get("temperature", 0) > 1e-9], ids=str)
def test_frequencies_match_exact_probabilities(context, options):
    vocab_size, draws = 300, 4000
    logits = some_logits(5, vocab_size, 1.5)
    history = [int(t) for t in np.random.default_rng(0).integers(0, vocab_size, 50)]
    params = SamplingParams(**options, seed=1234)
    sampler = Sampler(context, params)
    ids, p = candidates(penalized(logits, history, params), params)
    counts = np.bincount([sampler.pick(logits, history, i) for i in range(draws)], minlength=vocab_size)
    assert counts.sum() == counts[ids].sum() == draws  # nothing outside the candidates
    # Chi-square over cells of at least ten expected draws, the rest pooled.
    expected, observed = p * draws, counts[ids]
    large = expected >= 10
    cells = [(o, e) for o, e in zip(observed[large], expected[large], strict=True)]
    if (~large).any():
        cells.append((observed[~large].sum(), expected[~large].sum()))
    chi2 = sum((o - e) ** 2 / e for o, e in cells if e > 0)
    freedom = max(1, len(cells) - 1)
    # Wilson-Hilferty: chi2 of `freedom` exceeds this with probability 1e-4.
    assert chi2 <= freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def test_a_pick_depends_on_seed_and_position_only(context):
    logits = some_logits(1, 2000)

    def picks(seed, positions):
        sampler = Sampler(context, SamplingParams(temperature=2.0, seed=seed))
        return [sampler.pick(logits, [], p) for p in positions]

    first = picks(7, range(200))
    assert picks(7, reversed(range(200)))[::-1] == first
    assert picks(7, range(200)) == first
    assert len(set(first)) > 100
    assert sum(a == b for a, b in zip(first, picks(8, range(200)), strict=True)) < 20
    assert sum(a == b for a, b in zip(first, picks(7, range(1, 201)), strict=True)) < 20


def test_draws_are_uniform_and_uncorrelated():
    for seed in (0, 1, 2**64 - 1):
        u = np.array([lib.moe_draw(seed, p) for p in range(20000)])
        assert (u >= 0).all() and (u < 1).all()
        counts = np.bincount((u * 50).astype(int), minlength=50)
        assert ((counts - 400) ** 2 / 400).sum() < 105  # chi-square of 49, p about 1e-5
        assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.03
    u = np.array([lib.moe_draw(seed, 5) for seed in range(20000)])
    assert ((np.bincount((u * 50).astype(int), minlength=50) - 400) ** 2 / 400).sum() < 105


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_tiers_pick_the_same_tokens(options):
    samplers = [Sampler(Context(tier, 1), SamplingParams(**options, seed=3)) for tier in TIERS]
    for position in range(60):
        logits = some_logits(position, 3333)
        history = np.arange(position) * 7 % 3333
        assert len({s.pick(logits, history, position) for s in samplers}) == 1


def test_ties_go_to_the_lowest_id(context):
    logits = np.full(1000, -3.0, np.float32)
    logits[[77, 500, 900]] = 2.0
    assert Sampler(context, SamplingParams()).pick(logits, [], 0) == 77
    for options, allowed in (
        ({"top_k": 1}, {77}),
        ({"top_k": 2}, {77, 500}),
        ({"top_k": 4}, {77, 500, 900, 0}),
        ({"top_p": 0.3, "temperature": 0.3}, {77}),
        ({"top_p": 0.6, "temperature": 0.3}, {77, 500}),
        ({"min_p": 0.9}, {77, 500, 900}),
    ):
        sampler = Sampler(context, SamplingParams(**({"temperature": 20.0} | options)))
        assert {sampler.pick(logits, [], i) for i in range(300)} == allowed, options


def test_ties_survive_merging_and_a_cut_on_its_boundary_keeps_the_short_prefix(context):
    logits = np.full(64, 1.0, np.float32)
    logits[1::2] = np.nextafter(np.float32(1), np.float32(0))  # interleaved
    logits[63] = -20.0  # widens the buckets, so that all the others share one
    sampler = Sampler(context, SamplingParams(temperature=1.0, top_k=16))
    assert {sampler.pick(logits, [], i) for i in range(500)} == set(range(0, 32, 2))
    pair = Sampler(context, SamplingParams(temperature=1.0, top_p=0.5))
    assert {pair.pick(np.zeros(2, np.float32), [], i) for i in range(50)} == {0}


def test_zeros_of_both_signs_are_a_tie(context):
    logits = np.array([-1.0, -0.0, 0.0, -2.0], np.float32)
    assert Sampler(context, SamplingParams()).pick(logits, [], 0) == 1
    assert Sampler(context, SamplingParams(temperature=1.0, top_k=1)).pick(logits, [], 0) == 1


def test_equal_logits_of_a_large_vocabulary_are_drawn_evenly(context):
    logits = np.zeros(100_000, np.float32)
    sampler = Sampler(context, SamplingParams(temperature=1.0, seed=9))
    picks = np.array([sampler.pick(logits, [], i) for i in range(2000)])
    want = [int(lib.moe_draw(9, i) * 100_000) for i in range(2000)]
    np.testing.assert_array_equal(picks, want)


def test_minus_infinity_excludes_a_token(context):
    logits = np.full(500, -np.inf, np.float32)
    logits[[3, 400]] = 0.0
    for options in ({}, {"top_k": 5}, {"top_k": 400}, {"top_p": 0.99}, {"min_p": 0.01}):
        sampler = Sampler(context, SamplingParams(temperature=5.0, **options))
        assert {sampler.pick(logits, [], i) for i in range(100)} == {3, 400}
    penalty = Sampler(context, SamplingParams(repeat_penalty=1.5, presence_penalty=1.0))
    assert penalty.pick(logits, [3, 7, 8], 0) == 400


@pytest.mark.parametrize("where", [0, 7, 63, 64, 130])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf], ids=["NaN", "-NaN", "Inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_is_an_error(context, where, value, temperature):
    logits = some_logits(0, 131)
    logits[where] = value
    with pytest.raises(NumericsError, match="logits"):
        Sampler(context, SamplingParams(temperature=temperature, top_k=1)).pick(logits, [], 0)


def test_no_token_left_is_an_error(context):
    with pytest.raises(NumericsError, match="no token left"):
        Sampler(context, SamplingParams()).pick(np.full(70, -np.inf, np.float32), [], 0)


BAD = {
    "temperature": [-0.1, math.nan, math.inf, "1", None, 1e39, True],
    "top_k": [-1, 2**31, 1.5],
    "top_p": [0.0, -0.5, 1.0001, math.nan, 1e-60],
    "min_p": [-0.1, 1.0, math.nan, 1 - 1e-12],
    "repeat_penalty": [0.0, -1.0, math.inf, 1e-60],
    "repeat_last_n": [-2, 0.5],
    "frequency_penalty": [math.nan, math.inf],
    "presence_penalty": [math.nan, -math.inf],
    "seed": [-1, 2**64, "x"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_an_option_out_of_range_names_itself(name, value):
    with pytest.raises(ConfigError, match=rf"option {name}: got .*, expected "):
        SamplingParams(**{name: value})


def test_native_call_refuses_what_python_would(context):
    token, logits = ffi.new("int32_t *"), some_logits(0, 10)
    history = np.array([1, 2, 10], np.int32)

    def status(length=0, vocab_size=10, **options):
        given = {"temperature": 1.0, "top_p": 1.0, "repeat_penalty": 1.0, **options}
        sampling = ffi.new("struct moe_sampling *", given)
        pointers = (address(logits, "float *"), vocab_size, sampling, address(history, "int32_t *"), length, 0)
        return lib.moe_sample(context.handle, token, *pointers)

    assert status() == status(length=2) == status(min_p=0.5) == lib.MOE_OK
    assert status(length=3) == status(length=-1) == status(vocab_size=0) == lib.MOE_BAD_ARGUMENT
    for name, values in BAD.items():
        for value in values:
            if isinstance(value, float) and name not in ("top_k", "seed", "repeat_last_n") and abs(value) < 1e38:
                assert status(**{name: value}) == lib.MOE_BAD_ARGUMENT, (name, value)
    assert status(top_k=-1) == status(temperature=math.inf) == lib.MOE_BAD_ARGUMENT


def test_python_refuses_wrong_arrays_and_ids(context):
    sampler = Sampler(context, SamplingParams(repeat_penalty=1.2))
    for logits in (np.zeros(5), np.zeros((1, 5), np.float32), np.zeros(10, np.float32)[::2]):
        with pytest.raises(KernelError):
            sampler.pick(logits, [], 0)
    for history in ([5], [-1]):
        with pytest.raises(KernelError, match="vocabulary of 5"):
            sampler.pick(np.zeros(5, np.float32), history, 0)


def test_history_window(context):
    logits = np.array([1.0, 0.9, 0.0], np.float32)
    for last_n, token in ((0, 0), (1, 0), (2, 1), (-1, 1), (64, 1)):
        sampler = Sampler(context, SamplingParams(presence_penalty=0.5, repeat_last_n=last_n))
        assert sampler.pick(logits, [0, 2], 0) == token
        assert sampler.pick(logits, np.array([0, 2]), 0) == token


def test_logits_stay_untouched(context):
    logits = some_logits(0, 400)
    before = logits.copy()
    Sampler(context, SamplingParams(temperature=1.0, repeat_penalty=2.0, presence_penalty=1.0)).pick(logits, [1, 2], 0)
    np.testing.assert_array_equal(logits, before)


def test_defaults_of_a_model():
    read = SamplingParams.from_generation_config
    assert read({}) == SamplingParams(repeat_last_n=-1)
    assert read({"temperature": 0.7, "top_p": 0.9}).temperature == 0  # without do_sample these are not used
    shipped = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert read(shipped) == SamplingParams(0.6, 20, 0.95, repeat_penalty=1.05, repeat_last_n=-1)
    assert read({"do_sample": True}).temperature == 1
    assert read({"num_beams": 1, "typical_p": 1.0, "top_h": None}) == read({})
    for config in ({"num_beams": 4}, {"typical_p": 0.5}, {"do_sample": True, "top_p": 0}):
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            read(config)
