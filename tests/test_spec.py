"""Speculation never changes a token, a logit or a finish reason; it counts what happened; auto gives up in time.

scripts/prove_spec.py runs the whole matrix of window lengths, sources, prompts and samplers.
"""

import itertools
import json

import numpy as np
import pytest
import spec_tools
from cli_program import assert_error, run

import engine
from engine.commands.generate import describe_spec
from engine.runtime import SHIPPED_MODEL
from engine.sampler import SamplingParams
from engine.spec import AutoPolicy, FixedPolicy, LookupSource, SpecStats, Speculator, make_speculator
from engine.spec.probes import OracleSource, RandomSource
from engine.spec.speculator import SourceStats

GREEDY = spec_tools.GREEDY
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, repeat_penalty=1.1, seed=7)
PROMPTS = [
    "In the beginning", "And it came to pass", "The Lord said unto Moses,", "a a a a a a a a a a a a", "1, 2, 3, 4, 5,",
    "The :func:`open`", "NAME\n       ls - list", "=====\n=====\n", "- one\n- two\n- three\n", "hacker: n.",
    "if x:\n    return x\nelse:\n", "Verily I say unto you", "x", "\n\n\n\n", ".. function:: f(x)\n", "SYNOPSIS\n",
    "He said, He said, He said,", "The quick brown fox", "Python 3", "0 0 0 1 0 0 0 1 0 0 0 1",
]  # fmt: skip


@pytest.fixture(scope="module")
def shipped():
    return engine.load(threads=1)


@pytest.fixture(scope="module")
def plain(shipped):
    """plain(prompt, sampling, options ...) -> the run without drafts, once each."""
    made = {}

    def call(prompt, sampling=GREEDY, **options):
        key = (prompt, sampling, *options.items())
        if key not in made:
            made[key] = spec_tools.run(shipped, prompt, sampling=sampling, **options)
        return made[key]

    return call


# ---- the text never changes --------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_tokens_and_logits_are_those_of_plain_decode(shipped, plain, index):
    """256 tokens; window length, source and sampler go round with the prompt; scripts/prove_spec.py runs them all."""
    prompt, length = PROMPTS[index], {"max_tokens": 256, "ignore_eos": True}
    for turn in (index % 2, 2 + index // 2 % 2):
        name = spec_tools.SOURCES[turn]
        rows = (*range(2, 9), "auto")[(index + 3 * turn) % 8]
        sampling = (GREEDY, DRAWN)[(index // 2 + turn) % 2]
        expected = plain(prompt, sampling, **length)
        stats = spec_tools.assert_same(shipped, prompt, rows, name, expected, sampling=sampling, **length)
        assert stats.tokens == 255
        if name == "oracle" and rows != "auto":
            assert stats.accepted == stats.drafted > 0
        if name == "random" and rows != "auto":
            assert stats.drafted > 100 and stats.accepted < 5


@pytest.mark.parametrize("rows", range(2, 9))
def test_every_length_ends_where_plain_decode_ends(shipped, plain, rows):
    """--max-tokens that are no multiple of the window, the end of the context, a stop text, an end-of-text token."""
    for max_tokens in (1, 2, rows, rows + 1, 3 * rows - 1):
        options = {"max_tokens": max_tokens, "ignore_eos": True}
        stats = spec_tools.assert_same(shipped, "In the", rows, "oracle", plain("In the", **options), **options)
        assert stats.tokens == max_tokens - 1
    long = list(range(2, 2 + shipped.max_context - 11))
    spec_tools.assert_same(shipped, long, rows, "oracle", plain_run := spec_tools.run(shipped, long))
    assert plain_run[1] in ("context", "eos")
    options = {"max_tokens": 64, "stop": "the LORD", "ignore_eos": True}
    expected = plain("And the word", **options)
    assert expected[1] == "stop"
    spec_tools.assert_same(shipped, "And the word", rows, "oracle", expected, **options)


@pytest.mark.parametrize("length", [1, 2, 53, 62, 63])
def test_the_room_of_a_small_context(length):
    """A prompt of one token, and one that leaves room for one; limits below, at and beyond what is left."""
    loaded, prompt = engine.load(threads=1, ctx=64), list(range(2, 2 + length))
    room = 64 - length
    for max_tokens in {1, room - 1, room, room + 1, None} - {0}:
        options = {"max_tokens": max_tokens, "ignore_eos": True}
        expected = spec_tools.run(loaded, prompt, **options)
        assert len(expected[0]) == min(max_tokens or room, room)
        assert expected[1] == ("context" if max_tokens is None or max_tokens > room else "length")
        for rows in (2, 8):
            spec_tools.assert_same(loaded, prompt, rows, "oracle", expected, **options)


def test_an_end_of_text_token_inside_a_window_ends_the_text(shipped, monkeypatch):
    expected = spec_tools.run(shipped, "In the", max_tokens=64)
    monkeypatch.setattr(shipped.tokenizer, "eos_ids", {expected[0][9]})
    ended = spec_tools.run(shipped, "In the", max_tokens=64)
    assert ended[1] == "eos" and ended[0] == expected[0][: len(ended[0])] and len(ended[0]) <= 9
    known = expected[4]
    speculator = Speculator([OracleSource([*known.prompt_token_ids, *known.token_ids])], FixedPolicy(8))
    assert spec_tools.run(shipped, "In the", speculator, max_tokens=64)[:4] == ended[:4]


def test_a_draft_model_changes_nothing(shipped, plain):
    drafting = engine.load(threads=1, draft_model=SHIPPED_MODEL)
    for sampling in (GREEDY, DRAWN):
        expected = plain("In the beginning", sampling, max_tokens=96, ignore_eos=True)
        generation = drafting.generate(
            "In the beginning", sampling=sampling, max_tokens=96, ignore_eos=True, spec=4, draft=["model"]
        )
        assert "".join(generation) == expected[2] and generation.token_ids == expected[0]
        stats = generation.stats.spec
        # The model itself, with the same draws: every draft is right.
        assert stats.accepted == stats.drafted > 60 and stats.sources["model"].accepted == stats.accepted


def test_two_generations_of_one_engine_do_not_disturb_each_other(shipped, plain):
    options = {"max_tokens": 60, "ignore_eos": True}
    prompts = ("In the beginning", "SYNOPSIS\n")
    running = [shipped.generate(p, sampling=GREEDY, spec=8, **options) for p in prompts]
    texts = ["", ""]
    for pieces in itertools.zip_longest(*running, fillvalue=""):
        texts = [a + b for a, b in zip(texts, pieces, strict=True)]
    assert texts == [plain(p, GREEDY, **options)[2] for p in prompts]


# ---- policy ------------------------------------------------------------------------------------------------


def simulate(policy, right, rounds=2000, ms=lambda rows: 1 + 0.2 * (rows - 1), draft_ms=0.0):
    """Decode with made-up costs; right(i): whether the draft for token i is right; draft_ms: cost of making a draft.
    (ms, tokens, rows of each round)."""
    total, tokens, used = 0.0, 0, []
    for _ in range(rounds):
        rows = policy.rows(("test", 0), 7, draft_ms, 0.5)
        policy.use(rows)
        accepted = 0
        while accepted < rows - 1 and right(tokens + accepted):
            accepted += 1
        drafting = draft_ms * (rows - 1)
        spent = ms(rows) + drafting
        if rows == 1:
            policy.record_plain(spent)
        else:
            policy.record(("test", 0), rows, accepted, spent, rows - 1, drafting)
        total, tokens = total + spent, tokens + accepted + 1
        used.append(rows)
    return total, tokens, used


@pytest.mark.parametrize("rounds", [50, 200, 2000])
@pytest.mark.parametrize("row_ms", [0.05, 0.3, 1.0, 3.0])
def test_auto_loses_little_where_drafts_never_hit(rounds, row_ms):
    total, tokens, _ = simulate(AutoPolicy(), lambda i: False, rounds, lambda rows: 1 + row_ms * (rows - 1))
    assert total <= 1.03 * tokens + 4 * max(row_ms, 1)


@pytest.mark.parametrize("row_ms", [0.05, 0.15, 0.3])
def test_auto_comes_close_to_the_best_fixed_length(row_ms):
    random = np.random.default_rng(1).random(20000)

    def rate(policy, chance):
        total, tokens, _ = simulate(policy, lambda i: random[i % 20000] < chance, ms=lambda n: 1 + row_ms * (n - 1))
        return tokens / total

    for chance in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0):
        best = max(rate(FixedPolicy(n), chance) for n in range(1, 9))
        assert rate(AutoPolicy(), chance) >= 0.95 * best, chance


@pytest.mark.parametrize("slow", range(2, 9))
@pytest.mark.parametrize("which", [0, 1, 5])
def test_one_window_that_the_machine_held_up_decides_nothing(slow, which):
    """The first, second or sixth window of a length takes ten times as long; 150 rounds make good for it."""
    seen = [0] * 9

    def ms(rows):
        seen[rows] += 1
        return (1 + 0.1 * (rows - 1)) * (10 if rows == slow and seen[rows] - 1 == which else 1)

    def rate(policy, ms):
        total, tokens, used = simulate(policy, lambda i: True, 150, ms)
        return tokens / total, used

    found, used = rate(AutoPolicy(), ms)
    assert used[-1] == 8 and used.count(1) < 10
    best, _ = rate(FixedPolicy(8), lambda rows: 1 + 0.1 * (rows - 1))
    assert found >= 0.75 * best


def test_auto_returns_when_drafts_begin_to_hit():
    policy = AutoPolicy()
    _, turned, _ = simulate(policy, lambda i: False, 1000)
    _, _, used = simulate(policy, lambda i: True, 1000)
    assert used[-1] == 8 and np.mean(used) > 6 and turned >= 1000
    assert any(after > 1 for _, _, after, _ in policy.switches) and policy.reason


def test_a_draft_that_costs_more_than_it_gives_is_not_made():
    policy = AutoPolicy()
    for _ in range(300):
        rows = policy.rows(("slow", 0), 7, 2.0, 0.5)
        if rows == 1:
            policy.record_plain(1.0)
        else:
            policy.record(("slow", 0), rows, rows - 1, 1 + 2.1 * (rows - 1), rows - 1)
    assert policy.rows(("slow", 0), 7, 2.0, 0.5) == 1


# ---- figures and refusals ----------------------------------------------------------------------------------


def test_report_counts_what_happened(shipped):
    expected = spec_tools.run(shipped, "In the", max_tokens=81, ignore_eos=True)[4]
    known = [*expected.prompt_token_ids, *expected.token_ids]
    speculator = Speculator([OracleSource(known)], FixedPolicy(5))
    spec_tools.run(shipped, "In the", speculator, max_tokens=81, ignore_eos=True)
    found = speculator.stats.report()
    assert (found["rounds"], found["drafted"], found["accepted"]) == (16, 64, 64)
    assert found["tokens_per_round"] == 5 and found["windows"] == {5: 16} and list(found["ms_by_window"]) == [5]
    assert found["acceptance_by_position"] == [1.0] * 4 + [None] * 3
    assert found["sources"] == {"oracle": {"drafted": 64, "accepted": 64}} and found["gain"] is None
    # 3 layers of 8 experts, 2 per token: 5 rows use at least 2 and at most 8 of each layer.
    assert 6 <= found["experts_per_round"] <= 24 and found["experts_by_window"] == {5: found["experts_per_round"]}


def test_rates_of_the_report():
    """Ten plain steps of 2 ms and five windows of four rows and 5 ms, of which nine drafts were right."""
    stats = SpecStats(FixedPolicy(4), expert_bytes=1000)
    stats.windows[1], stats.window_ms[1], stats.window_experts[1] = 10, 20.0, 60
    stats.windows[4], stats.window_ms[4], stats.window_experts[4] = 5, 25.0, 70
    stats.sources = {"lookup": SourceStats(10, 7), "model": SourceStats(5, 2)}
    found = stats.report()
    assert (found["rounds"], found["drafted"], found["accepted"], stats.tokens) == (15, 15, 9, 24)
    assert found["ms_per_round"] == pytest.approx(3.0) and found["tokens_per_round"] == pytest.approx(1.6)
    assert found["plain_ms_per_token"] == 2.0 and found["ms_by_window"] == {1: 2.0, 4: 5.0}
    assert found["gain"] == pytest.approx(1.6 / (3.0 / 2.0))
    assert found["experts_per_round"] == pytest.approx(130 / 15) and found["experts_by_window"] == {1: 6, 4: 14}
    assert found["extra_expert_bytes"] == 1000 * (70 - 5 * 6)


def test_what_was_not_measured_or_not_used_is_said(shipped):
    """A gain needs a plain step; a source that was asked and never taken stands there with nothing."""
    expected = spec_tools.run(shipped, "In the", max_tokens=41, ignore_eos=True)[4]
    known = [*expected.prompt_token_ids, *expected.token_ids]
    speculator = Speculator([OracleSource(known), LookupSource()], FixedPolicy(5))
    spec_tools.run(shipped, "In the", speculator, max_tokens=41, ignore_eos=True)
    found = speculator.stats.report()
    assert found["gain"] is found["extra_expert_bytes"] is None and found["gain_reason"] == "no plain step"
    assert found["sources"] == {
        "oracle": {"drafted": 32, "accepted": 32}, "lookup": {"drafted": 0, "accepted": 0}
    }  # fmt: skip
    line = describe_spec(speculator.stats)
    assert "oracle 32/32, lookup 0/0 (by position 1: 100%, 2: 100%, 3: 100%, 4: 100%)" in line
    assert line.endswith("gain and extra bytes not measured: no plain step")

    idle = Speculator([LookupSource()], FixedPolicy(5))  # nothing to look up, so all steps are plain
    assert describe_spec(idle.stats).endswith("lookup 0/0; windows: none; gain not measured: no round")
    spec_tools.run(shipped, "In the", idle, max_tokens=4, ignore_eos=True)
    found = idle.stats.report()
    assert found["gain"] == pytest.approx(1.0) and found["gain_reason"] is None and found["extra_expert_bytes"] == 0
    assert "lookup 0/0; windows: 1 rows 3; " in describe_spec(idle.stats)


def test_distinct_experts_and_the_bytes_they_cost(shipped):
    """Counted again from what the router chose."""
    chosen = []
    generation = shipped.generate("He said, He said, He said,", max_tokens=80, temperature=0, ignore_eos=True, spec=4)
    for block in shipped.model.blocks:
        block.mlp.routed.observers.append(lambda ids, weights: chosen.append(set(ids.ravel().tolist())))
    try:
        "".join(generation)
    finally:
        for block in shipped.model.blocks:
            block.mlp.routed.observers.clear()
    stats = generation.stats.spec
    distinct = sum(map(len, chosen[len(shipped.model.blocks) :]))  # the prefill comes first
    assert sum(stats.window_experts) == distinct and stats.windows[1] and stats.windows[4]
    assert stats.window_experts[1] == 6 * stats.windows[1]  # 2 of each of the 3 layers
    record = [shipped.files.record(f"layers.0.mlp.experts.0.{part}_proj").nbytes for part in ("gate", "up", "down")]
    assert stats.report()["extra_expert_bytes"] == (distinct - 6 * stats.rounds) * sum(record)


def test_acceptance_by_position_counts_only_drafts_that_were_reached():
    speculator = Speculator([RandomSource(100)], FixedPolicy(4))
    for picked in (1, 2, 4):
        speculator.commit(speculator.window(np.array([1, 2], np.int32), 9), picked)
    assert speculator.stats.report()["acceptance_by_position"][:3] == [2 / 3, 1 / 2, 1.0]


def test_command_line(tmp_path):
    args, profile = ["generate", "He said, He said,", "-n", 40, "--temperature", 0, "--json"], tmp_path / "profile.json"
    plain_run, done = run(*args), run(*args, "--spec", "4", "--profile-json", profile)
    ours, theirs = json.loads(done.stdout), json.loads(plain_run.stdout)
    assert ours["token_ids"] == theirs["token_ids"] and theirs["stats"]["spec"] is None
    found = ours["stats"]["spec"]
    assert found["rounds"] + found["accepted"] == ours["stats"]["generated_tokens"] - 1 == 39
    windows = {int(n): count for n, count in found["windows"].items()}
    assert sum(windows.values()) == found["rounds"] and set(windows) <= {1, 2, 3, 4}
    assert sum((n - 1) * count for n, count in windows.items()) == found["drafted"] > 0
    assert found["sources"] == {"lookup": {"drafted": found["drafted"], "accepted": found["accepted"]}}
    assert found["ms_per_round"] == pytest.approx(
        sum(found["ms_by_window"][n] * count for n, count in found["windows"].items()) / found["rounds"]
    )
    assert found["gain"] == pytest.approx(
        found["tokens_per_round"] * found["plain_ms_per_token"] / found["ms_per_round"]
    )
    assert json.loads(profile.read_text())["spec"] == found
    line = next(line for line in done.stderr.splitlines() if line.startswith("spec: "))
    assert line.startswith(f"spec: {found['rounds']} rounds of {found['ms_per_round']:.2f} ms, ")
    assert f"lookup {found['accepted']}/{found['drafted']} (by position 1: " in line
    assert "; windows: " + ", ".join(f"{n} rows {count}" for n, count in windows.items()) in line
    assert f"; {found['experts_per_round']:.1f} experts a round, " in line
    assert line.endswith(f"; {found['gain']:.2f} x plain decode")
    auto = run(*args, "--spec", "auto")
    report = json.loads(auto.stdout)["stats"]["spec"]
    assert report["policy"] == "auto" and report["reason"] in auto.stderr and "switched" in auto.stderr
    assert all(s["why"] and s["from_rows"] != s["to_rows"] for s in report["switches"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--spec", "9"), "expected 0 to 8"),
        (("--spec", "-1"), "expected 0 to 8"),
        (("--spec", "fast"), "expected 0 to 8"),
        (("--draft", "lookup"), "do nothing without --spec"),
        (("--spec", "4", "--draft", "oracle"), "expected one or more of lookup, mtp, model"),
        (("--spec", "4", "--draft", "model"), "needs --draft-model"),
        (("--spec", "4", "--draft", "lookup", "--draft-model", "x"), "does nothing with --draft lookup"),
    ],
)
def test_refusals(options, text):
    assert_error(run("generate", "x", "-n", 1, *options), text)


def test_zero_and_one_are_plain_decode():
    assert make_speculator(0, []) is make_speculator("1", []) and make_speculator(0, []).stats is None
