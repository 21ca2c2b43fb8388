"""Profiles: phases add up and are those of the run, counts agree with the model, nothing stays behind."""

import itertools
import json
import re

import pytest
from cli_program import run
from click.testing import CliRunner

import engine
from engine.cli import cli
from engine.errors import ConfigError
from engine.kernels import Native, _compiled, lib
from engine.profile import PHASES, Profiler, profile_report
from engine.profile.page import page
from engine.profile.trace import chrome_trace

KEYS = [
    "load", "tokenize", "prefill", "embed", "attention", "router", "expert_gate_up", "quantize", "expert_down",
    "read_wait", "head", "sample", "draft", "verify", "python", "other",
]  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    return engine.load(threads=2)


@pytest.fixture(scope="module")
def profiled(loaded):
    """(profiler, generation, report) of 64 tokens with drafts."""
    return profile(loaded, spec=4)


def profile(loaded, **options):
    generation = loaded.generate("He said, He said, He said,", max_tokens=64, temperature=0, ignore_eos=True, **options)
    with Profiler(loaded, trace=True) as profiler:
        profiler.attach(generation)
        for _ in generation:
            pass
    stats = generation.stats
    wall = stats.load_s + stats.tokenize_s + stats.prefill_s + stats.decode_s
    return profiler, generation, profile_report(profiler, generation, wall, stats.load_s, 10.0)


def test_phases_have_the_agreed_names_and_add_up(profiled):
    report = profiled[2]
    assert list(PHASES) == KEYS == list(report["phases"])
    assert sum(report["phases"].values()) == pytest.approx(report["wall_s"], rel=1e-6)
    assert all(seconds >= 0 for seconds in report["phases"].values())
    for stage in ("prefill", "decode"):
        part = report[stage]
        assert sum(part["phases"].values()) == pytest.approx(part["wall_s"], rel=1e-6)
        for phase in ("embed", "attention", "router", "expert_gate_up", "expert_down", "head", "sample"):
            assert part["phases"][phase] > 0, (stage, phase)
    assert report["decode"]["phases"]["draft"] > 0 and report["decode"]["phases"]["verify"] > 0


def test_details_are_parts_of_their_phase(profiled):
    detail, phases = profiled[2]["detail"]["decode"], profiled[2]["decode"]["phases"]
    assert {"qkv_proj", "o_proj", "attention", "rope", "kv_store", "rmsnorm"} <= set(detail["attention"])
    # Activations that attention quantizes are counted under quantize.
    assert sum(detail["attention"].values()) == pytest.approx(phases["attention"], abs=phases["quantize"] + 1e-9)
    layers = profiled[2]["detail"]["layers"]
    assert list(layers) == [0, 1, 2]
    assert sum(row["attention"] for row in layers.values()) == pytest.approx(phases["attention"])


def test_counts_are_those_of_the_run(loaded, profiled):
    profiler, generation, report = profiled
    rounds, c = report["decode"]["rounds"], loaded.model.config
    assert rounds == generation.stats.spec.rounds == len(profiler.rounds)
    assert report["decode"]["tokens"] == 63 == sum(r["tokens"] for r in profiler.rounds)
    calls = {(stage, function): 0 for stage, _, _, _, function in profiler.times}
    for (stage, _, _, _, function), (_, count) in profiler.times.items():
        calls[stage, function] += count
    assert calls["decode", "moe_experts"] == calls["decode", "moe_attention"] == rounds * c.num_hidden_layers
    assert calls["decode", "moe_sample"] == 63
    rows = sum(r["rows"] for r in profiler.rounds) + len(generation.prompt_token_ids)
    for counts in profiler.experts.values():
        assert sum(counts) == rows * c.num_experts_per_tok
    head = next(row for row in report["decode"]["kernels"] if row["role"] == "head lm_head")
    assert head["bytes"] == rounds * loaded.model.lm_head.matrices[0].num_bytes
    experts = next(row for row in report["decode"]["kernels"] if row["role"] == "experts")
    one = sum(loaded.files.record(f"layers.0.mlp.experts.0.{p}_proj").nbytes for p in ("gate", "up", "down"))
    assert experts["bytes"] == one * sum(n for (stage, _), n in profiler.experts_run.items() if stage == "decode")
    assert len(report["threads"]["busy_s"]) == 2 and all(b > 0 for b in report["threads"]["busy_s"])


def test_nothing_stays_behind(loaded):
    before = {
        id(block): (type(block.attention.qkv_proj), dict(vars(block.mlp.routed))) for block in loaded.model.blocks
    }
    plain = loaded.generate("In the beginning", max_tokens=24, ignore_eos=True)
    text = "".join(plain)
    watched = loaded.generate("In the beginning", max_tokens=24, ignore_eos=True)
    with Profiler(loaded) as profiler:
        profiler.attach(watched)
        assert "".join(watched) == text and lib.moe_linear is not _compiled.moe_linear
    assert vars(lib) == vars(Native())
    for block in loaded.model.blocks:
        kind, routed = before[id(block)]
        assert type(block.attention.qkv_proj) is kind and not vars(block.mlp.routed)["observers"]
        assert set(vars(block.mlp.routed)) == set(routed)
    assert "attention" not in vars(loaded.model) and "embed" not in vars(loaded.model)
    taken = sum(ns for ns, _ in profiler.times.values())
    "".join(loaded.generate("In the beginning", max_tokens=4, ignore_eos=True))
    assert sum(ns for ns, _ in profiler.times.values()) == taken


def test_trace_is_what_perfetto_reads(profiled):
    profiler, _, report = profiled
    trace = json.loads(json.dumps(chrome_trace(profiler)))
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and e["name"] for e in spans)
    rounds = [e for e in spans if e["tid"] == 1]
    calls = [e for e in spans if e["tid"] == 2]
    assert len(rounds) == report["decode"]["rounds"] and len(calls) > 50 * len(rounds)
    # Native calls of one thread never overlap.
    calls.sort(key=lambda e: e["ts"])
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(calls))


def test_page_needs_nothing_else(profiled):
    profiler, _, report = profiled
    html = page(report, profiler)
    assert html.startswith("<!doctype html>") and html.rstrip().endswith("</html>")
    assert not re.search(r"https?://|<script|<link|@import|src=", html)
    for heading in ("An average token", "Time per token", "Experts used", "Drafts accepted", "Weights read"):
        assert heading in html
    assert html.count("<rect") > 24 + 8  # a cell per layer and expert, and the bars
    assert report["verdict"] in html


def test_command_line_writes_all_forms(tmp_path):
    files = {name: tmp_path / name for name in ("p.json", "p.html", "t.json")}
    done = run(
        "generate", "In the beginning", "-n", 20, "--profile", "--profile-json", files["p.json"],
        "--profile-html", files["p.html"], "--trace", files["t.json"],
    )  # fmt: skip
    assert done.returncode == 0
    for text in ("profile: whole run", "attention", "verdict:", "p50", "GB/s", "threads busy"):
        assert text in done.stderr
    report = json.loads(files["p.json"].read_text())
    assert sum(report["phases"].values()) == pytest.approx(report["wall_s"], rel=0.03)
    assert report["phases"]["other"] <= 0.2 * report["wall_s"]
    assert "<svg" in files["p.html"].read_text() and json.loads(files["t.json"].read_text())["traceEvents"]


def test_layers_on_request():
    done = run("generate", "In the", "-n", 4, "--profile-layers")
    assert "decode by layer" in done.stderr and re.search(r"^ +2 +\d", done.stderr, re.M)


@pytest.mark.parametrize("option", ["--profile-json", "--profile-html", "--trace"])
@pytest.mark.parametrize("path, why", [("no/p", "No such file"), ("", "Is a directory"), ("file/p", "Not a directory")])
def test_a_profile_that_cannot_be_written_is_an_error_before_any_work(tmp_path, option, path, why):
    (tmp_path / "file").touch()
    done = CliRunner().invoke(cli, ["generate", "In the", "-n", "2", option, str(tmp_path / path)])
    assert isinstance(done.exception, ConfigError) and done.stdout == ""
    assert str(done.exception).startswith(f"{option} {tmp_path / path}: cannot be written: {why}")


def test_unknown_options_are_errors():
    done = run("generate", "x", "--profil")
    assert done.returncode == 2 and "No such option" in done.stderr and done.stdout == ""
