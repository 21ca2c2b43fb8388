"""Router rules beyond softmax and top-k: sigmoid scores, a correction that selects only, groups of experts, epsilon.

The reference is written from the rules' definition in float64-free numpy: the native sigmoid and softmax (which have
their own float64 tests) give the scores, everything after them is single float32 operations.
"""

import numpy as np
import pytest
from engine._native import lib
from native_calls import TIERS, assert_same_bits, context, route, sigmoid, softmax

SIGMOID = lib.MOE_SIGMOID_THEN_TOPK
MAX, TOP2 = lib.MOE_GROUP_MAX, lib.MOE_GROUP_TOP2_SUM


def logits_of(seed, num_experts, num_tokens=200):
    x = (np.random.default_rng(seed).standard_normal((num_tokens, num_experts)) * 2).astype(np.float32)
    x[::4] = np.round(x[::4])  # ties
    x[7] = 0.5
    return x


def best(values, count):
    """Largest first, ties to the lowest index."""
    return np.argsort(-values, kind="stable")[:count]


def reference(logits, top, score, norm, scale, correction=None, num_groups=0, top_groups=0, group_score=0, eps=0.0):
    scores = (sigmoid if score == SIGMOID else softmax)(context("scalar"), logits)
    choice = scores + correction if correction is not None else scores.copy()
    ids = np.empty((len(logits), top), np.int32)
    for t, row in enumerate(choice):
        if num_groups:
            parts = row.reshape(num_groups, -1)
            judged = parts.max(1) if group_score == MAX else np.sort(parts, 1)[:, -2:].sum(1, dtype=np.float32)
            eligible = np.isin(np.arange(num_groups), best(judged, top_groups))
            row = np.where(np.repeat(eligible, parts.shape[1]), row, -np.inf)
        ids[t] = best(row, top)
    weights = np.take_along_axis(scores, ids, 1)
    if norm:
        total = weights[:, 0].copy()
        for rank in range(1, top):
            total += weights[:, rank]
        weights = weights / (total + np.float32(eps))[:, None]
    return ids, weights * np.float32(scale)


V3 = {"score": SIGMOID, "norm": 1, "scale": 2.5, "num_groups": 8, "top_groups": 4, "group_score": TOP2}
RULES = {
    "deepseek_v3": V3,
    "glm4_moe one group": {"score": SIGMOID, "norm": 1, "scale": 1.0},
    "v3 without norm": V3 | {"norm": 0},
    "deepseek_v2 group limited": {"score": lib.MOE_SOFTMAX_THEN_TOPK, "norm": 0, "scale": 16.0, "num_groups": 8,
                                  "top_groups": 3, "group_score": MAX},
    "one group of all": V3 | {"num_groups": 1, "top_groups": 1},
}  # fmt: skip


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_rules_give_the_defined_experts_and_weights(name, corrected):
    rule, logits = RULES[name], logits_of(1, 64)
    correction = (np.random.default_rng(2).standard_normal(64) * 0.4).astype(np.float32) if corrected else None
    want_ids, want_weights = reference(logits, 6, correction=correction, eps=1e-20, **rule)
    for tier in TIERS:
        status, ids, weights = route(context(tier, 2), logits, 6, correction=correction, norm_epsilon=1e-20, **rule)
        assert status == 0
        np.testing.assert_array_equal(ids, want_ids)
        assert_same_bits(weights, want_weights)


def test_correction_selects_but_does_not_weigh():
    logits = logits_of(3, 16)
    correction = np.zeros(16, np.float32)
    correction[11] = 5.0
    _, ids, weights = route(context(), logits, 2, SIGMOID, correction=correction)
    assert (ids[:, 0] == 11).all()
    np.testing.assert_allclose(weights[:, 0], 1 / (1 + np.exp(-logits[:, 11].astype(np.float64))), rtol=1e-6)


def test_group_scores_differ_as_the_rules_say():
    """One strong expert beats two good ones by maximum, and loses by the sum of the top two."""
    logits = np.full((1, 8), -4.0, np.float32)
    logits[0, 1], logits[0, 4:6] = 2.0, 1.5
    common = {"score": SIGMOID, "num_groups": 2, "top_groups": 1}
    assert route(context(), logits, 2, group_score=MAX, **common)[1].tolist() == [[1, 0]]
    assert route(context(), logits, 2, group_score=TOP2, **common)[1].tolist() == [[4, 5]]


def test_experts_of_other_groups_are_never_selected_even_below_zero():
    """A masked expert must lose against a negative corrected score too."""
    logits, correction = logits_of(4, 12), np.full(12, -3.0, np.float32)
    _, ids, _ = route(
        context(), logits, 4, SIGMOID, correction=correction, num_groups=3, top_groups=1, group_score=TOP2
    )
    top_two = np.sort(sigmoid(context(), logits).reshape(-1, 3, 4), axis=2)[:, :, 2:].sum(2)
    clear = np.sort(top_two, 1)[:, 2] > np.sort(top_two, 1)[:, 1] + 1e-4
    assert clear.sum() > 100
    np.testing.assert_array_equal(ids[clear] // 4, np.repeat(top_two.argmax(1)[clear, None], 4, 1))


def test_epsilon_is_part_of_the_sum():
    """Scores that have all but vanished are not blown up to one half each."""
    logits = np.full((2, 4), -100.0, np.float32)
    _, _, weights = route(context(), logits, 2, SIGMOID, norm=1, norm_epsilon=1e-20)
    assert (weights < 1e-15).all()
    assert (route(context(), logits, 2, SIGMOID, norm=1)[2] == 0.5).all()


@pytest.mark.parametrize(
    "rule",
    [
        {"num_groups": 3, "top_groups": 1},  # 8 experts
        {"num_groups": 4, "top_groups": 5},
        {"num_groups": 4, "top_groups": 0},
        {"num_groups": 4, "top_groups": 1},  # 2 experts for top 3
        {"num_groups": 8, "top_groups": 4, "group_score": 1},  # no top two in a group of one
        {"num_groups": 2, "top_groups": 1, "group_score": 2},
        {"num_groups": -1, "top_groups": 1},
        {"norm_epsilon": -1.0},
        {"correction": np.array([0, 0, np.nan, 0, 0, 0, 0, 0], np.float32)},
    ],
)
def test_impossible_rules_are_refused(rule):
    assert route(context(), logits_of(5, 8), 3, SIGMOID, **rule)[0] == lib.MOE_BAD_ARGUMENT
