"""Cache policies against naive models that look at every held key, and their work counted in steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    """What every policy must keep: the held keys in order of admission, and every use with its time."""

    def __init__(self):
        self.held: list[int] = []  # least recently used or admitted first
        self.uses: dict[int, list[tuple[float, float, float]]] = {}  # key -> (time, weight, mean weight)
        self.admitted: dict[int, float] = {}
        self.time = 0.0  # uses of the average key

    def apply(self, policy, name, argument):
        if name == "touch":
            keys, weights = list(argument), list(argument.values())
            policy.touch(keys, weights)
            self.time += len(keys) / NUM_KEYS
            for k, weight in argument.items():
                self.uses.setdefault(k, []).append((self.time, weight, sum(weights) / len(weights)))
                if k in self.held:
                    self.held.remove(k)
                    self.held.append(k)
        elif name == "admit" and argument not in self.held:
            policy.admit(argument)
            self.held.append(argument)
            self.admitted[argument] = self.time
        elif name == "remove" and argument in self.held:
            policy.remove(argument)
            self.held.remove(argument)
        assert len(policy) == len(self.held)

    def score(self, policy, k):
        half = policy.half_life
        used = sum(policy.gain(w, mean) * 2.0 ** ((t - self.time) / half) for t, w, mean in self.uses.get(k, ()))
        return max(used, 2.0 ** ((self.admitted[k] - self.time) / half - SPAN / RESOLUTION))


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
@given(operations=st.lists(operation, max_size=60))
def test_victim_by_decayed_use_is_within_a_bucket_of_the_least(policy_name, operations):
    policy, naive = make_policy(policy_name, 8, NUM_KEYS), Naive()
    for name, argument in operations:
        naive.apply(policy, name, argument)
        if name != "victim":
            continue
        free = [k for k in naive.held if k not in argument]
        chosen = policy.victim(argument)
        assert (chosen is None) == (not free)
        if free:
            assert chosen in free
            least = min(naive.score(policy, k) for k in free)
            assert naive.score(policy, chosen) <= least * 2.0 ** (1 / RESOLUTION) * (1 + 1e-9)


@pytest.mark.parametrize("policy_name", list(POLICIES))
def test_equal_use_goes_oldest_first(policy_name):
    policy = make_policy(policy_name, 4, 8)
    policy.touch([3, 1, 2], [0.5, 0.5, 0.5])
    for k in (3, 1, 2):
        policy.admit(k)
    out = []
    while (k := policy.victim()) is not None:
        policy.remove(k)
        out.append(k)
    assert out == [3, 1, 2] and len(policy) == 0


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
    for name, expected in (("lru", 0), ("lfu", 1), ("score", 1)):
        policy = make_policy(name, 8, 16)
        policy.admit(0)
        for _ in range(10):
            policy.touch([0], [1.0])
        for k in range(1, 5):
            policy.touch([k], [1.0])
            policy.admit(k)
        assert policy.victim() == expected, name


def test_only_the_score_looks_at_the_router_weight():
    for name, expected in (("lfu", 0), ("score", 1)):
        policy = make_policy(name, 8, 16)
        policy.touch([0, 1], [0.9, 0.1])
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
    assert policy.steps <= 4 * evictions


@pytest.mark.parametrize("policy_name", list(POLICIES))
def test_removing_what_is_not_held_is_an_error(policy_name):
    with pytest.raises(KeyError):
        make_policy(policy_name, 4, 8).remove(1)


def test_unknown_policy_and_empty_cache_are_refused():
    with pytest.raises(ConfigError, match=r"got 'fifo', expected one of lru, lfu, score"):
        make_policy("fifo", 4, 8)
    with pytest.raises(ConfigError, match="capacity of 0"):
        make_policy(DEFAULT_POLICY, 0, 8)
