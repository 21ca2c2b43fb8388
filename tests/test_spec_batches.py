"""The automatic policy learns from several windows at once; what windows cost; a budget that pays for fewer rows."""

import numpy as np
import pytest

from engine.spec import AutoPolicy
from engine.spec.acceptance import Acceptance
from engine.spec.policy import BATCH, SETTLED, STARTING_LOSS_TOKENS
from engine.spec.window_costs import STALE, WindowCosts

KEY = ("test", 0)


def flat(rows):
    return 1 + 0.1 * (rows - 1)


def settled_policy(monkeypatch, windows=40):
    """A policy that has seen plain steps and so many windows of 8 rows that were right; the list of its updates."""
    updates, update = [], WindowCosts.update
    monkeypatch.setattr(WindowCosts, "update", lambda self, now: (updates.append(now), update(self, now)))
    policy = AutoPolicy()
    for _ in range(8):
        policy.record_plain(1.0)
    for _ in range(windows):
        rows = policy.rows(KEY, 7, 0.0, 0.9)
        policy.use(rows)
        policy.record(KEY, rows, rows - 1, flat(rows), rows - 1)
    assert rows == 8
    return policy, updates


def test_windows_that_hit_are_learned_from_in_batches(monkeypatch):
    windows = 40
    _, updates = settled_policy(monkeypatch, windows)
    assert len(updates) <= (windows - SETTLED) / BATCH + SETTLED + 2


def test_a_batch_is_learned_from_at_once(monkeypatch):
    """Every window of it counts, and with its own number of rows."""
    policy, _ = settled_policy(monkeypatch)
    while policy._new:  # to the end of a batch
        policy.record(KEY, 8, 7, flat(8), 7)
    before, windows = policy._loss, policy._acceptance[KEY].windows
    for rows, ms in ((2, 1.1), *[(8, 1.7)] * (BATCH - 3), (2, 1.1), (3, 1.2)):
        assert policy._loss == before
        policy.record(KEY, rows, 1, ms, rows - 1)
    assert policy._acceptance[KEY].windows == windows + BATCH and not policy._new
    assert policy._costs[2] == pytest.approx(1.1, abs=0.02) and policy._costs[3] == pytest.approx(1.2, abs=0.02)


def test_what_was_learned_changes_the_choice(monkeypatch):
    policy, _ = settled_policy(monkeypatch)
    for _ in range(30):
        if (rows := policy.rows(KEY, 7, 0.0, 0.9)) > 1:
            policy.record(KEY, rows, 0, flat(rows), rows - 1)
    assert rows < 8


@pytest.mark.parametrize("credit", [0.0, 10.0])
def test_a_miss_counts_at_once_unless_the_budget_is_ample(monkeypatch, credit):
    policy, _ = settled_policy(monkeypatch)
    while policy._new:
        policy.record(KEY, 8, 7, flat(8), 7)
    policy._loss = -credit
    policy.record(KEY, 8, 0, flat(8), 7)
    assert len(policy._new) == (1 if credit else 0)


def test_a_window_that_was_held_up_counts_at_once(monkeypatch):
    policy, _ = settled_policy(monkeypatch)
    while policy._new:
        policy.record(KEY, 8, 7, flat(8), 7)
    policy.record(KEY, 8, 7, 9 * flat(8), 7)
    assert not policy._new


def test_fewer_drafts_than_were_chosen_are_a_choice_of_their_own(monkeypatch):
    policy, _ = settled_policy(monkeypatch)
    for count in (3, 1, 7):
        assert policy.rows(KEY, count, 0.0, 0.9) == count + 1


def test_a_budget_that_cannot_pay_for_eight_rows_pays_for_fewer(monkeypatch):
    """A window that was held up must not end speculation before it has begun."""
    policy, _ = settled_policy(monkeypatch)
    policy._learn()
    policy._loss = STARTING_LOSS_TOKENS - 0.25  # room for two further rows of 0.1 steps
    policy._held.pop(KEY, None)
    assert policy.rows(KEY, 7, 0.0, 0.9) == 3
    policy._loss = STARTING_LOSS_TOKENS - 0.05
    policy._held.pop(KEY, None)
    assert policy.rows(KEY, 7, 0.0, 0.9) == 1 and "budget" in policy.reason


def test_costs_are_a_line_drawn_to_what_was_measured():
    costs = WindowCosts()
    for _ in range(5):
        costs.add_plain(2.0)
    costs.update(5)
    assert costs[1] == 2.0 and costs[4] == pytest.approx(2.0 + 3 * 2.0 / 3)  # a third of a step per row is assumed
    for _ in range(15):
        costs.add(4, 2.6, 6)
    costs.update(6)
    assert costs[4] == pytest.approx(2.6, abs=0.05)  # its own median, the line weighs little
    assert costs[1] < costs[2] < costs[3] < costs[4] < costs[8] < 4.0
    costs.add(8, 1.0, 6 + STALE + 1)  # cheaper than a plain step: not believed; the others are stale and left out
    costs.update(6 + STALE + 1)
    assert costs[8] >= 2.0 * (1 + 0.03 * 7) and costs[4] < 2.5


def test_plain_decode_keeps_its_cost_until_it_is_known_anew():
    costs = WindowCosts()
    for _ in range(5):
        costs.add_plain(2.0)
    costs.update(5)
    costs.forget_plain()
    costs.update(6)
    assert costs[1] == 2.0 and costs.plain_samples == 0
    costs.add_plain(1.0)
    costs.update(7)
    assert costs[1] == 1.0


def test_counts_of_hits_forget_and_never_overflow():
    """The same as counts that are shrunk at every window, over more windows than a float's range holds weights."""
    acceptance, hits, tries = Acceptance(0.4), [0.0] * 7, [0.0] * 7
    random = np.random.default_rng(1)
    for _ in range(20000):
        drafts = int(random.integers(1, 8))
        accepted = int(random.integers(0, drafts + 1))
        acceptance.update(drafts, accepted)
        for i in range(7):
            hits[i] = 0.95 * hits[i] + (i < accepted)
            tries[i] = 0.95 * tries[i] + (i < min(accepted + 1, drafts))
    chance, all_right, expected = 0.4, 1.0, [1.0, 1.0]
    for hit, tried in zip(hits, tries, strict=True):
        chance = (hit + 2 * chance) / (tried + 2)
        all_right *= chance
        expected.append(expected[-1] + all_right)
    assert acceptance.tokens == pytest.approx(expected, rel=1e-9)


def test_a_switch_is_put_down_to_the_source_that_made_it():
    """Two sources in turns, one always right, one never: answers that are held or refused have their own reasons."""
    random, policy = np.random.default_rng(1), AutoPolicy()
    for _ in range(600):
        right = bool(random.integers(2))
        key = ("lookup", 3 if right else 0)
        rows, before = policy.rows(key, 7, 0.0, 0.9 if right else 0.4), len(policy.switches)
        policy.use(rows)
        for _, _, after, why in policy.switches[before:]:
            assert ("expected" in why or why == "trying again") == (after > 1), why
        if rows == 1:
            policy.record_plain(1.0)
        else:
            policy.record(key, rows, (rows - 1) * right, flat(rows), rows - 1)
    assert len(policy.switches) > 50
