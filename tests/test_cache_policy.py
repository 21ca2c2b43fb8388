"""Cache policies against naive models that look at every held key, and their work counted in steps."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import CACHE_POLICIES, RuntimeConfig
from engine.errors import ConfigError
from engine.experts.policy import DEFAULT_POLICY, POLICIES, make_policy
from engine.experts.policy_decay import RESOLUTION, SPAN, DecayedUse

NUM_KEYS = 24
DECAYED = [name for name, policy in POLICIES.items() if issubclass(policy, DecayedUse)]

key = st.integers(0, NUM_KEYS - 1)
uses = st.dictionaries(key, st.floats(0.001, 4.0), min_size=1, max_size=6)
operation = st.one_of(
    st.tuples(st.just("touch"), uses),
    st.tuples(st.just("admit"), key),
    st.tuples(st.just("remove"), key),
    st.tuples(st.just("victim"), st.sets(key, max_size=8)),
)


class Naive:
    """What every policy must keep: the held keys, oldest use first, and every use with its forward call."""

    def __init__(self):
        self.held: list[int] = []
        self.uses: dict[int, list[tuple[int, float]]] = {}  # key -> (call, gain)
        self.last: dict[int, tuple[int, int]] = {}  # key -> (call, highest key of that touch)
        self.admitted: dict[int, int] = {}
        self.now = (0, -1)

    def apply(self, policy, name, argument):
        if name == "touch":
            keys, weights = list(argument), list(argument.values())
            policy.touch(keys, weights)
            # Layers come in order, so keys that do not lie above the ones before begin a forward call.
            self.now = (self.now[0] + (min(keys) <= self.now[1]), max(keys))
            for k, weight in argument.items():
                gain = policy.gain(weight, sum(weights) / len(weights)) if hasattr(policy, "gain") else 1
                self.uses.setdefault(k, []).append((self.now[0], gain))
                self.last[k] = self.now
                if k in self.held:
                    self.held.remove(k)
                    self.held.append(k)
        elif name == "admit" and argument not in self.held:
            policy.admit(argument)
            self.held.append(argument)
            self.admitted[argument] = self.now[0]
        elif name == "remove" and argument in self.held:
            policy.remove(argument)
            self.held.remove(argument)
        assert len(policy) == len(self.held)

    def value(self, policy, k):
        half, now = policy.half_life, self.now[0]
        used = sum(gain * 2.0 ** ((call - now) / half) for call, gain in self.uses.get(k, ()))
        used = max(used, 2.0 ** ((self.admitted[k] - now) / half - SPAN / RESOLUTION))
        if policy.name != "score":
            return used
        recent = k in self.last and self.last[k] > (now - policy.recent_calls - 1, self.now[1])
        return used * (1 - 2.0 ** (-1 / half)) + recent * policy.recent_bonus


def check_victim(policy, naive, busy):
    free = [k for k in naive.held if k not in busy]
    chosen = policy.victim(busy)
    assert (chosen is None) == (not free)
    if free:
        assert chosen in free
        least = min(naive.value(policy, k) for k in free)
        assert naive.value(policy, chosen) <= least * 2.0 ** (1 / RESOLUTION) * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(st.lists(operation, max_size=60))
def test_lru_victim_is_the_oldest_that_is_not_busy(operations):
    policy, naive = make_policy("lru", 8, NUM_KEYS), Naive()
    for name, argument in operations:
        naive.apply(policy, name, argument)
        if name == "victim":
            assert policy.victim(argument) == next((k for k in naive.held if k not in argument), None)


@pytest.mark.parametrize("policy_name", DECAYED)
@settings(max_examples=300, deadline=None)
@given(first=st.sets(key, min_size=4), operations=st.lists(operation, max_size=60), busy=st.sets(key, max_size=8))
def test_victim_by_decayed_use_is_within_a_bucket_of_the_least(policy_name, first, operations, busy):
    policy, naive = make_policy(policy_name, 8, NUM_KEYS), Naive()
    for name, argument in [*(("admit", k) for k in first), *operations]:
        naive.apply(policy, name, argument)
        busy = argument if name == "victim" else busy
        check_victim(policy, naive, busy)


@pytest.mark.parametrize("policy_name", DECAYED)
def test_victims_of_a_long_run(policy_name):
    """Like the test above, on many uses of few keys, where scores come close to each other."""
    policy, naive, draw = make_policy(policy_name, 8, NUM_KEYS), Naive(), random.Random(7)
    for k in range(0, NUM_KEYS, 3):
        naive.apply(policy, "admit", k)
    for _ in range(1500):
        keys = {int(NUM_KEYS * draw.random() ** 2) for _ in range(3)}
        naive.apply(policy, "touch", {k: draw.random() + 0.01 for k in sorted(keys)})
        check_victim(policy, naive, {draw.randrange(NUM_KEYS) for _ in range(4)})
        gone, come = draw.choice(naive.held), draw.randrange(NUM_KEYS)
        if come not in naive.held:
            naive.apply(policy, "remove", gone)
            naive.apply(policy, "admit", come)


@pytest.mark.parametrize(("policy_name", "expected"), [("lru", [3, 1, 2]), ("lfu", [2, 1, 3]), ("score", [2, 1, 3])])
def test_order_of_equal_use(policy_name, expected):
    """LRU: oldest first. By use: the last filed, whose layer has the longest to go until its turn."""
    policy = make_policy(policy_name, 4, 8)
    policy.touch([3, 1, 2], [0.5, 0.5, 0.5])
    for k in (3, 1, 2):
        policy.admit(k)
    out = []
    while (k := policy.victim()) is not None:
        policy.remove(k)
        out.append(k)
    assert out == expected and len(policy) == 0


@pytest.mark.parametrize("policy_name", list(POLICIES))
def test_busy_may_be_a_callable(policy_name):
    policy = make_policy(policy_name, 4, 8)
    policy.touch([0, 1], [1.0, 1.0])
    policy.admit(0)
    policy.admit(1)
    assert policy.victim(lambda k: k == 0) == 1
    assert policy.victim(lambda k: True) is None


def test_frequency_outlives_a_burst_of_strangers_only_where_it_counts():
    # Key 0 is used ten times, then each of 1..4 once: recency gives it up first, frequency keeps it.
    for name, stays in (("lru", False), ("lfu", True), ("score", True)):
        policy = make_policy(name, 8, 16)
        policy.admit(0)
        for _ in range(10):
            policy.touch([0], [1.0])
        for k in range(1, 5):
            policy.touch([k], [1.0])
            policy.admit(k)
        assert (policy.victim() != 0) == stays, name


def test_what_its_layer_used_last_is_worth_more_than_its_frequency_says():
    """Keys 0..7 are one layer, 8..15 the next; key 1 was used twice long ago, key 0 once in the last call."""
    for name, expected in (("lfu", 0), ("score", 1)):
        policy = make_policy(name, 8, 16)
        policy.admit(0)
        policy.admit(1)
        for keys in ([1], [8], [1], [8], [2], [8], [0], [8]):
            policy.touch(keys, [1.0])
        assert policy.victim() == expected, name
        policy.touch([2], [1.0])  # the layer's turn again: the bonus of key 0 is gone
        assert policy.victim() == 0, name


def test_only_the_score_looks_at_the_router_weight():
    for name, expected in (("lfu", 1), ("score", 0)):
        policy = make_policy(name, 8, 16)
        policy.touch([0, 1], [0.1, 0.9])
        policy.admit(0)
        policy.admit(1)
        assert policy.victim() == expected, name


def test_a_speculative_read_goes_before_anything_used():
    for name in DECAYED:
        policy = make_policy(name, 8, 16)
        policy.touch([0], [1.0])
        policy.admit(0)
        policy.admit(5)
        assert policy.victim() == 5, name


@pytest.mark.parametrize("policy_name", list(POLICIES))
@pytest.mark.parametrize("capacity", [64, 4096])
def test_steps_per_victim_do_not_grow_with_the_capacity(policy_name, capacity):
    num_keys, busy = 4 * capacity, set()
    policy = make_policy(policy_name, capacity, num_keys)
    held, state, evictions = set(), 12345, 0
    for _ in range(6000):
        keys = []
        for _ in range(8):  # a skewed stream: the square of a uniform draw
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            keys.append(int(num_keys * (state / 2**64) ** 2))
        keys = list(dict.fromkeys(keys))
        policy.touch(keys, [1.0] * len(keys))
        busy = set(keys)
        for k in busy - held:
            if len(held) == capacity:
                gone = policy.victim(busy)
                policy.remove(gone)
                held.remove(gone)
                evictions += 1
            policy.admit(k)
            held.add(k)
    assert evictions > 1000
    assert policy.steps <= 12 * evictions


@pytest.mark.parametrize("policy_name", DECAYED)
def test_what_nobody_uses_does_not_cost_a_long_walk(policy_name):
    policy = make_policy(policy_name, 8, 16)
    policy.admit(0)
    for _ in range(int(50 * policy.half_life)):
        policy.touch([0], [1.0])
    policy.admit(5)
    policy.victim()
    policy.remove(5)
    before = policy.steps
    assert policy.victim() == 0
    assert policy.steps - before <= SPAN + 8 * RESOLUTION


@pytest.mark.parametrize("policy_name", list(POLICIES))
def test_removing_what_is_not_held_is_an_error(policy_name):
    with pytest.raises(KeyError):
        make_policy(policy_name, 4, 8).remove(1)


def test_options_name_the_policies_that_there_are():
    assert set(CACHE_POLICIES) == set(POLICIES)
    assert CACHE_POLICIES[0] == RuntimeConfig().cache_policy == DEFAULT_POLICY
    with pytest.raises(ConfigError, match="cache_policy: got 'fifo'"):
        RuntimeConfig(cache_policy="fifo")


def test_unknown_policy_and_empty_cache_are_refused():
    with pytest.raises(ConfigError, match=r"got 'fifo', expected one of lru, lfu, score"):
        make_policy("fifo", 4, 8)
    with pytest.raises(ConfigError, match="capacity of 0"):
        make_policy(DEFAULT_POLICY, 0, 8)
