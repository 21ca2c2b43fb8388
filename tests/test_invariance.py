"""Whole forward passes give the same bits for every number of tokens per call, thread count and tier.

Quantized snapshots of the `wide` tiny model (rows of 256) and float ones; logits are compared as bits, greedy and
sampled text as token ids.
"""

import numpy as np
import pytest
from conftest import supported_tiers

import engine
from engine.sampler import SamplingParams

FORMATS = {
    "f32": {"experts": "f32", "dense": "f32"},
    "f16 and bf16": {"experts": "bf16", "dense": "f16"},
    "q8_0": {"experts": "q8_0", "dense": "q8_0"},
    "e8-iq3": {"experts": "e8-iq3", "dense": "e8-iq3", "embed": "q8_0", "head": "e8-iq3"},
    "q4_0, iq4_xs": {"experts": "q4_0", "down": "iq4_xs", "dense": "iq4_xs", "head": "q8_0"},
}
NUM_TOKENS = 75  # more than one attention chunk
TIERS = supported_tiers()


def ids():
    return np.random.default_rng(5).integers(0, 320, NUM_TOKENS).astype(np.int32)


def logits_in_parts(loaded, parts):
    """Logits [NUM_TOKENS, V] of a prefill cut into calls of the given sizes."""
    model, kv, tokens, done, rows = loaded.model, loaded.new_kv(), ids(), 0, []
    for size in parts:
        rows.append(model.forward(tokens[done : done + size], kv, done, logits="all").copy())
        done += size
    assert done == NUM_TOKENS
    return np.concatenate(rows)


@pytest.fixture(params=FORMATS)
def snapshot(request, tiny_snapshot):
    return tiny_snapshot("wide", **FORMATS[request.param])


def test_prefill_splits_and_single_steps_give_the_same_bits(snapshot):
    loaded = engine.load(snapshot)
    whole = logits_in_parts(loaded, [NUM_TOKENS])
    assert np.isfinite(whole).all()
    assert np.ptp(whole) > 1
    rng = np.random.default_rng(1)
    cuts = [*np.sort(rng.choice(np.arange(1, NUM_TOKENS), 9, replace=False)).tolist(), NUM_TOKENS]
    for parts in ([1] * NUM_TOKENS, [8] * 9 + [3], [70, 5], np.diff([0, *cuts]).tolist()):
        np.testing.assert_array_equal(logits_in_parts(loaded, parts).view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_thread_count_gives_the_same_bits(snapshot, threads):
    one = logits_in_parts(engine.load(snapshot, threads=1), [60, *[1] * 15])
    many = logits_in_parts(engine.load(snapshot, threads=threads), [60, *[1] * 15])
    np.testing.assert_array_equal(many.view(np.uint32), one.view(np.uint32))


@pytest.mark.parametrize("tier", TIERS[1:])
def test_every_tier_gives_the_bits_of_the_scalar_tier(snapshot, tier):
    scalar = logits_in_parts(engine.load(snapshot, isa="scalar"), [60, 8, *[1] * 7])
    got = logits_in_parts(engine.load(snapshot, isa=tier), [60, 8, *[1] * 7])
    np.testing.assert_array_equal(got.view(np.uint32), scalar.view(np.uint32))


def test_text_does_not_depend_on_threads_or_tier(tiny_snapshot):
    path = tiny_snapshot("wide", **FORMATS["q4_0, iq4_xs"])
    for sampling in (SamplingParams(temperature=0), SamplingParams(temperature=0.9, top_p=0.95, seed=11)):
        texts = set()
        for tier in TIERS:
            for threads in (1, 2):
                generation = engine.load(path, isa=tier, threads=threads).generate(
                    ids()[:20].tolist(), max_tokens=48, sampling=sampling, ignore_eos=True
                )
                "".join(generation)
                texts.add(tuple(generation.token_ids))
        assert len(texts) == 1


def test_seeds_change_sampled_text(tiny_snapshot):
    loaded = engine.load(tiny_snapshot("wide", **FORMATS["q8_0"]))

    def sample(seed):
        generation = loaded.generate(
            ids()[:20].tolist(), max_tokens=32, sampling=SamplingParams(temperature=1.0, seed=seed), ignore_eos=True
        )
        "".join(generation)
        return generation.token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
