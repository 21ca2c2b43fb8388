"""The automatic policy where times or hits change under it; what it believes of drafts that nobody looked at."""

from types import SimpleNamespace

import numpy as np
import pytest
import spec_tools
from test_spec import simulate

from engine.spec import AutoPolicy, FixedPolicy, Speculator
from engine.spec.acceptance import Acceptance
from engine.spec.policy import BATCH
from engine.spec.window_costs import WindowCosts


def flat(rows):
    return 1 + 0.1 * (rows - 1)


def test_gains_of_the_past_do_not_pay_for_a_text_without_hits():
    policy = AutoPolicy()
    simulate(policy, lambda i: True, 3000, flat)
    total, tokens, _ = simulate(policy, lambda i: False, 1000, flat)
    assert total <= 1.03 * tokens + 25


def test_a_small_gain_is_kept_but_not_switched_for():
    policy = AutoPolicy()
    for _ in range(30):
        policy.record_plain(1.0)
        policy.record(("any", 0), 2, 1, 1.5, 1)
    for gain, from_plain in ((1.015, False), (1.05, True)):
        chance = policy._costs[2] * gain - 1
        policy.use(1)
        policy.rows((f"gains {gain}", 0), 1, 0.0, chance)
        assert ("expected" in policy.reason) == from_plain
        policy.use(2)
        assert policy.rows((f"stays {gain}", 0), 1, 0.0, chance) == 2 and "expected" in policy.reason


def test_plain_decode_is_measured_again():
    """It becomes ten times as fast; windows do not, and only a plain step can tell."""
    policy = AutoPolicy()
    simulate(policy, lambda i: True, 300, flat)
    _, _, used = simulate(policy, lambda i: True, 3000, lambda rows: 0.1 if rows == 1 else flat(rows))
    assert used[-500:].count(1) > 450


def test_lengths_that_were_slow_for_a_while_are_tried_again():
    policy = AutoPolicy()
    simulate(policy, lambda i: True, 60, flat)
    simulate(policy, lambda i: True, 60, lambda rows: flat(rows) * (9 if rows > 4 else 1))
    _, _, used = simulate(policy, lambda i: True, 300, flat)
    assert used[-100:].count(8) > 90


def test_drafts_that_nobody_looked_at_are_not_wrong_ones():
    policy, key = AutoPolicy(), ("cut", 0)
    for _ in range(60):
        policy.record_plain(1.0)
        policy.rows(key, 3, 0.0, 0.9)
        policy.record(key, 4, 0, 1.0, 0)  # all dropped on the way
    assert policy.rows(key, 3, 0.0, 0.9) == 4
    for _ in range(60):
        policy.record_plain(1.0)
        policy.record(key, 4, 0, 1.0, 3)  # and all refused
    assert policy.rows(key, 3, 0.0, 0.9) < 4


@pytest.mark.parametrize("rounds", [20, 60])
def test_the_first_windows_lose_at_most_a_few_steps(rounds):
    """A source that is sure of itself and always wrong, rows that cost as much as steps."""
    policy = AutoPolicy()
    total = tokens = 0.0
    for _ in range(rounds):
        rows = policy.rows(("sure", 0), 7, 0.0, 0.99)
        policy.use(rows)
        total, tokens = total + 0.4 + 0.6 * rows, tokens + 1
        if rows == 1:
            policy.record_plain(1.0)
        else:
            policy.record(("sure", 0), rows, 0, 0.4 + 0.6 * rows, rows - 1)
    assert total - tokens < 7


def test_the_first_source_that_is_taken_drafts():
    known = list(range(20))
    speculator = Speculator([spec_tools.OracleSource(known), spec_tools.RandomSource(100)], FixedPolicy(4))
    assert speculator.window(np.array(known[:5], np.int32), 9).ids.tolist() == [4, 5, 6, 7]


def test_a_slow_start_is_not_the_yardstick_of_windows_that_miss():
    """The first steps after a prefill are slow; windows that never hit looked no worse than these, and went on."""
    policy, used = AutoPolicy(), []
    for _ in range(300):
        used.append(policy.rows(("wrong", 0), 7, 0.0, 0.5))
        policy.use(used[-1])
        if used[-1] == 1:
            policy.record_plain(1.0 if len(used) > 3 else 1.2)
        else:
            policy.record(("wrong", 0), used[-1], 0, 1.1 + 0.1 * (used[-1] - 2), used[-1] - 1)
    assert len(used) - used.count(1) <= 30


def test_sources_are_not_asked_every_round_where_none_is_of_use():
    asked = []
    source = SimpleNamespace(name="silent", ms_per_draft=0.0, offer=lambda text, limit: asked.append(len(text)))
    speculator, text = Speculator([source], AutoPolicy()), np.arange(100, dtype=np.int32)
    for n in range(1, 101):
        speculator.commit(speculator.window(text[:n], 50), 1)
    assert asked[:17] == list(range(1, 18)) and asked[17:] == list(range(21, 101, 4))
    assert speculator.stats.windows[1] == 100


def test_the_budget_holds_whatever_is_believed():
    """A source that is sure of itself in a new way every round, and always wrong: nothing can be learnt."""
    policy, total, used = AutoPolicy(), 0.0, []
    for turn in range(400):
        used.append(policy.rows(("sure", turn), 7, 0.0, 0.99))
        policy.use(used[-1])
        ms = 0.4 + 0.6 * used[-1]
        total += ms
        if used[-1] == 1:
            policy.record_plain(ms)
        else:
            policy.record(("sure", turn), used[-1], 0, ms, used[-1] - 1)
    # Two steps to start with, a fiftieth of the time, and what the first window took beyond what was expected of it.
    assert total - len(used) < 2 + 0.02 * total + 5.2 - (1 + 7 / 3)
    assert used.count(1) < len(used)


def test_windows_are_shorter_where_drafts_cost_something():
    """Of drafts of which 7 in 10 are right, two are worth 0.35 ms each and seven are not: 2.2 tokens for 1.9 ms, 3.1
    for 4.2 ms."""
    random, length = np.random.default_rng(1).random(20000), {}
    for draft_ms in (0.0, 0.35):
        _, _, used = simulate(AutoPolicy(), lambda i: random[i % 20000] < 0.7, 1500, flat, draft_ms)
        length[draft_ms] = np.mean(used[500:])
    assert length[0.0] > 4.5 and 1.5 < length[0.35] < 3.5


def test_a_draft_that_was_right_is_followed_up_at_once():
    """Long without hits, a window is tried now and then; where it was right, the next is not 32 rounds away."""
    policy = AutoPolicy()
    simulate(policy, lambda i: False, 1000, flat)
    _, _, used = simulate(policy, lambda i: True, 200, flat)
    first = next(i for i, rows in enumerate(used) if rows > 1)
    assert first < 70 and min(used[first : first + 10]) > 1


def test_one_slow_window_does_not_rule_out_its_length():
    """A length's median weighs as many samples as there are against four of the line through all of them."""
    costs = WindowCosts()
    for ms in (1.0, 1.0, 1.0, 5.0):
        costs.add_plain(ms)
    for ms in (1.4, 1.4, 1.3, 9.0):
        costs.add(5, ms, 1)
    costs.update(1)
    slope = (4 / 3 + 4 * 0.4) / (4 + 16)  # four further rows are assumed to cost a third of a step each
    assert costs[1] == 1.0 and costs[8] == pytest.approx(1 + 7 * slope)
    assert costs[5] == pytest.approx((4 * 1.4 + 4 * (1 + 4 * slope)) / 8)
    costs.add(8, 9.9, 2)  # no more than eight plain steps are believed
    costs.update(2)
    slope = (4 / 3 + 4 * 0.4 + 7) / (4 + 16 + 7)
    assert costs[8] == pytest.approx((8.0 + 4 * (1 + 7 * slope)) / 5)
    costs.add(5, 1.2, 50)  # what was measured 48 rounds ago or more does not bend the line
    costs.update(51)
    slope = (4 / 3 + 0.2) / (4 + 4)
    assert costs[5] == pytest.approx((1.2 + 4 * (1 + 4 * slope)) / 5) and costs[8] == pytest.approx(1 + 7 * slope)


def test_acceptance_is_believed_by_position():
    """Worked out by hand: two tries' worth of belief, a draft fares like the one before it."""
    acceptance = Acceptance(0.5)
    assert acceptance.tokens[:5] == [1, 1, 1.5, 1.75, 1.875]
    acceptance.update(3, 1)  # right, wrong, not looked at
    first, second = (1 + 2 * 0.5) / 3, (0 + 2 * 2 / 3) / 3
    expected = [1 + first, 1 + first + first * second, 1 + first + first * second + first * second * second]
    assert acceptance.tokens[2:5] == pytest.approx(expected)
    acceptance.update(1, 1)
    assert acceptance.tokens[2] == pytest.approx(1 + (0.95 + 1 + 2 * 0.5) / (0.95 + 1 + 2))
    acceptance.update(0, 0)  # all dropped
    assert acceptance.tokens[2] == pytest.approx(1 + (0.95 * 1.95 + 2 * 0.5) / (0.95 * 1.95 + 2))


def test_acceptance_follows_what_drafts_are_like_now():
    acceptance = Acceptance(0.5)
    for accepted, fewest, most in ((0, 1.0, 1.1), (7, 7.0, 8.0), (1, 1.9, 2.1), (0, 1.0, 1.1)):
        for _ in range(200):
            acceptance.update(7, accepted)
        assert fewest < acceptance.tokens[8] < most


def test_trials_become_rarer_until_one_succeeds():
    """32 rounds apart, then 64; a draft that was right starts that again."""

    def gaps(right, rounds):
        _, _, used = simulate(policy, right, rounds, lambda rows: 1 + 0.05 * (rows - 1))
        return np.diff(np.nonzero(np.array(used) > 1)[0]).tolist()

    policy = AutoPolicy()
    assert gaps(lambda i: False, 1500)[-8:] == [64] * 8
    assert gaps(lambda i: True, 100)[-8:] == [1] * 8
    again = [gap for gap in gaps(lambda i: False, 600) if gap >= 32]
    assert again[0] < 64 and set(again[1:]) == {64}


def test_the_costs_are_not_weighed_every_round_where_nothing_pays(monkeypatch):
    asked, choose = [], AutoPolicy._choose
    monkeypatch.setattr(AutoPolicy, "_choose", lambda *args: asked.append(1) or choose(*args))
    simulate(AutoPolicy(), lambda i: False, 1000, lambda rows: 1 + 3.0 * (rows - 1))
    assert 20 < len(asked) < 1000 / 8 + 20


def test_windows_come_after_plain_decode_is_known():
    """The first step after a prefill is slow: three are measured before anything is compared with them."""
    policy, key = AutoPolicy(), ("sure", 0)
    for ms in (9.0, 1.0, 1.0):
        assert policy.rows(key, 7, 0.0, 0.9) == 1 and policy.reason == "measuring plain decode"
        policy.record_plain(ms)
    assert policy.rows(key, 7, 0.0, 0.9) > 1 and policy._costs[1] == 1.0


def test_a_trial_waits_until_its_drafts_can_be_paid():
    """Twice the 5.1 ms that one may cost, at a fiftieth of the time: 510 steps of 1 ms."""
    for rounds, trials in ((450, 0), (700, 1)):
        _, _, used = simulate(AutoPolicy(), lambda i: False, rounds, flat, 5.0)
        assert rounds - used.count(1) == trials


def test_slow_drafting_is_charged_at_once():
    """It is what the source costs, not a window that was held up."""
    policy, key = AutoPolicy(), ("slow", 0)
    for _ in range(5):
        policy.record_plain(1.0)
    policy.rows(key, 1, 0.0, 0.9)
    policy.record(key, 2, 0, 1.1 + 50.0, 1, 50.0)
    assert policy._late == 0 and policy._loss > 45


def test_a_row_costs_something_whatever_was_measured():
    costs = WindowCosts()
    costs.add_plain(1.0)
    for _ in range(15):
        costs.add(2, 0.5, 1)
    costs.update(1)
    assert costs[8] == pytest.approx(1 + 7 * 0.03) and costs[2] == pytest.approx(1.03)


def test_lengths_that_were_measured_together_all_count_and_are_not_forgotten():
    costs, measured = WindowCosts(), {2: 1.2, 3: 1.5, 6: 2.0}
    costs.add_plain(1.0)
    for rows, ms in measured.items():
        costs.add(rows, ms, 1)
    slope = (4 / 3 + 0.2 + 0.5 + 1.0) / (4 + 1 + 2 + 5)
    for now in (1, 2, 500):  # long after, nothing newer is known
        costs.update(now)
        for rows, ms in measured.items():
            assert costs[rows] == pytest.approx((ms + 4 * (1 + (rows - 1) * slope)) / 5)
        assert costs[8] == pytest.approx(1 + 7 * slope)


def test_acceptance_of_a_long_text_is_that_of_decaying_counts():
    """5000 windows, against counts that shrink by 5 % a window; the weights behind them are brought down on the way."""
    random, acceptance = np.random.default_rng(4), Acceptance(0.6)
    hits, tries = np.zeros(7), np.zeros(7)
    for turn in range(5000):
        drafts = int(random.integers(0, 8))
        accepted = int(random.integers(0, drafts + 1))
        acceptance.update(drafts, accepted)
        hits, tries = 0.95 * hits, 0.95 * tries
        hits[:accepted] += 1
        tries[: min(accepted + 1, drafts)] += 1
        if turn % 50 == 0 or turn > 4950:
            chance, right, expected = 0.6, 1.0, [1.0, 1.0]
            for i in range(7):
                chance = (hits[i] + 2 * chance) / (tries[i] + 2)
                right *= chance
                expected.append(expected[-1] + right)
            assert acceptance.tokens == pytest.approx(expected)


def test_a_length_is_chosen_anew_once_a_batch(monkeypatch):
    """And for each of the first four windows of a source."""
    asked, choose = [], AutoPolicy._choose
    monkeypatch.setattr(AutoPolicy, "_choose", lambda *args: asked.append(policy._rounds) or choose(*args))
    policy = AutoPolicy()
    _, _, used = simulate(policy, lambda i: True, 200, flat)
    first = next(i for i, rows in enumerate(used) if rows > 1)
    assert asked[: first + 4] == list(range(first + 4))
    assert len(asked) < 200 / BATCH + 20
