"""The replay simulator: Belady against all possible evictions, counts by hand, waves, synthetic routing."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.policy import POLICIES, make_policy

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

from cache_replay import Access, Belady, LookAhead, Replay, schedule  # noqa: E402
from synthetic_routes import WORKLOADS, Shape, Workload, route, topic_of_tokens  # noqa: E402

SMALL = Shape("small", 3, 8, 2)


def decode(*key_lists):
    return [Access(list(keys), [1.0] * len(keys), True) for keys in key_lists]


def fewest_misses(sequence, capacity):
    """Tries every eviction. sequence: tuple of key tuples, each at most `capacity` long."""

    @cache
    def best(at, held):
        if at == len(sequence):
            return 0
        need = frozenset(sequence[at])
        choices, missing = {held}, sorted(need - held)
        for key in missing:
            step = set()
            for state in choices:
                if len(state) < capacity:
                    step.add(state | {key})
                else:
                    step.update((state - {gone}) | {key} for gone in state - need)
            choices = step
        return len(missing) + min(best(at + 1, state) for state in choices)

    return best(0, frozenset())


accesses = st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=2).map(lambda s: tuple(sorted(s))), max_size=9)


@settings(max_examples=150, deadline=None)
@given(sequence=accesses, capacity=st.integers(2, 4))
def test_belady_is_the_bound(sequence, capacity):
    found = decode(*sequence)
    counts = Replay(Belady(found), capacity).run(found)
    assert counts.decode_misses == fewest_misses(tuple(sequence), capacity)
    for name in POLICIES:
        assert Replay(make_policy(name, capacity, 6), capacity).run(found).decode_misses >= counts.decode_misses


def test_lru_counts_by_hand():
    # Two slots: 0 miss, 1 miss, 0 hit, 2 evicts 1, 1 evicts 0, 2 hit.
    found = decode([0], [1], [0], [2], [1], [2])
    counts = Replay(make_policy("lru", 2, 4), 2).run(found)
    assert (counts.decode_uses, counts.decode_misses) == (6, 4)
    assert counts.hit_rate == pytest.approx(2 / 6)


def test_lru_never_hits_below_the_demand_of_a_token():
    layers = [[0, 1], [8, 9], [16, 17]]
    found = decode(*layers * 10)
    for capacity, misses in ((4, 60), (6, 6)):
        assert Replay(make_policy("lru", capacity, 24), capacity).run(found).decode_misses == misses
    assert Replay(make_policy("score", 4, 24), 4).run(found).decode_misses <= 40


@pytest.mark.parametrize("capacity", [2, 3, 5, 24])
def test_prefill_reads_each_distinct_expert_once(capacity):
    ids, weights = route(SMALL, WORKLOADS["uniform"], 700, seed=1)
    blocks = ((0, 512), (512, 700))
    distinct = sum(len(np.unique(ids[layer, a:b])) for layer in range(3) for a, b in blocks)
    replay = Replay(make_policy("lru", capacity, 24), capacity)
    counts = replay.run(list(schedule(ids, weights, 8, 700)))
    assert counts.prefill_uses == distinct
    assert counts.prefill_misses <= distinct
    assert len(replay.resident) <= capacity
    assert counts.decode_uses == 0


def test_pinned_experts_never_miss_and_take_their_slots():
    found = decode([0], [1], [2], [0], [1], [2])
    counts = Replay(make_policy("lru", 1, 4), 2, pinned=[0]).run(found)
    assert counts.decode_misses == 4
    with pytest.raises(ValueError, match="no slot"):
        Replay(make_policy("lru", 1, 4), 1, pinned=[0])


@pytest.mark.parametrize("recall", [0.0, 0.5, 1.0])
def test_reads_ahead_add_up(recall):
    ids, weights = route(SMALL, WORKLOADS["zipf"], 300, seed=2)
    found = list(schedule(ids, weights, 8, 0))
    plain = Replay(make_policy("score", 12, 24), 12).run(found)
    counts = Replay(make_policy("score", 12, 24), 12, ahead=LookAhead(recall, 2, 8)).run(found)
    if recall == 1:
        # Each read ahead is of the next layer's own need and may not leave before its turn.
        assert counts.ahead_wasted == 0
        assert counts.decode_misses < plain.decode_misses
    if recall == 0:
        assert counts.ahead_wasted > counts.ahead_used
        assert counts.decode_misses + counts.ahead_used + counts.ahead_wasted > plain.decode_misses


def test_synthetic_routes_have_the_statistics_they_name():
    shape = Shape("one", 2, 16, 2)
    ids, weights = route(shape, Workload("z", 1.0, 0.0), 4000, seed=3)
    assert all(len(set(row)) == 2 for row in ids[0, :200])
    assert np.all(np.diff(weights, axis=2) <= 0)
    assert np.all(weights.sum(2) <= 1 + 1e-5) and np.all(weights > 0)
    # The first choice of a Gumbel-perturbed Zipf is a draw from it.
    frequency = np.sort(np.bincount(ids[0, :, 0], minlength=16))[::-1] / 4000
    expected = (1 / np.arange(1, 17)) / (1 / np.arange(1, 17)).sum()
    assert np.abs(frequency - expected).max() < 0.03
    assert np.bincount(ids[0, :, 0], minlength=16).argmax() != np.bincount(ids[1, :, 0], minlength=16).argmax()

    def repeats(locality):
        ids, _ = route(shape, Workload("l", 0.0, locality), 2000, seed=4)
        return np.mean([len(set(a) & set(b)) / 2 for a, b in zip(ids[0, 1:], ids[0, :-1], strict=True)])

    assert repeats(0.0) == pytest.approx(2 / 16, abs=0.02)
    assert repeats(0.8) > 0.5


def test_topics_change_at_the_rate_they_say():
    topic = topic_of_tokens(np.random.default_rng(5), Workload("t", 1.0, 0.0, topics=4, switch=50), 20000)
    assert np.sum(np.diff(topic) != 0) == pytest.approx(20000 / 50, rel=0.2)
    assert set(topic) == {0, 1, 2, 3}


def test_script_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "out.json"
    given = {"shapes": "mixtral", "workloads": "zipf", "tokens": 30, "prompt": 10, "capacities": "25,50", "recall": 0.5}
    options = [f"--{name}={value}" for name, value in given.items()]
    command = [sys.executable, SCRIPTS / "simulate_cache.py", *options, "--json", out]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "mixtral (32 x 8, top 2), zipf" in done.stdout and "default" in done.stdout
    content = json.loads(out.read_text())
    cells = content["results"][0]["cells"]
    assert [cell["capacity"] for cell in cells] == [64, 128]
    for cell in cells:
        rates = [entry["hit_rate"] for entry in cell["policies"].values()]
        assert max(rates) == cell["policies"]["belady"]["hit_rate"]
