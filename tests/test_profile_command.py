"""Profiles from the command line: what ends early, what was only a prefill, what the clock covers."""

import json
import time

import pytest
from click.testing import CliRunner

from engine import bandwidth
from engine.cli import cli
from engine.commands import _streaming
from engine.hardware import usable_cpus
from engine.kernels import tiers


def generate(*args):
    return CliRunner().invoke(cli, ["generate", "He said,", "--ignore-eos", *map(str, args)])


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """(when the memory's bandwidth was asked for, tier, threads)"""
    asked = []

    def measure(context):
        asked.append((time.perf_counter(), context.tier, context.num_threads))
        time.sleep(0.02)
        return 10.0

    monkeypatch.setattr(bandwidth, "memory_bandwidth", measure)
    return asked


def test_a_run_that_ends_while_it_loads_says_that_there_is_no_profile(monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(_streaming, "load", interrupted)
    done = generate("--profile-json", tmp_path / "p.json")
    assert done.exit_code == 130 and "profile: nothing was recorded" in done.stderr
    assert not (tmp_path / "p.json").exists()
    assert "profile" not in generate().stderr


def test_what_follows_the_run_is_not_in_its_time(tmp_path, measured):
    started = time.perf_counter()
    assert generate("-n", 4, "--profile-json", tmp_path / "p.json").exit_code == 0
    assert 0 < json.loads((tmp_path / "p.json").read_text())["wall_s"] <= measured[0][0] - started


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_bandwidth_is_the_machines_whatever_the_run_uses(measured, command):
    """One thread, or plain C, reads less than the memory gives; bench asks once."""
    args = {
        "generate": ["In the", "-n", "2", "--threads", "1", "--isa", "scalar"],
        "bench": ["--prefill", "2", "--decode", "2", "--repeat", "1", "--arm", "threads=1,isa=scalar"],
    }
    done = CliRunner().invoke(cli, [command, *args[command], "--profile"])
    best = [name for name, supported, _ in tiers() if supported][-1]
    assert done.exit_code == 0 and [found[1:] for found in measured] == [(best, usable_cpus().count)]


def test_time_that_printing_takes_has_a_name(tmp_path, monkeypatch):
    from engine.commands import generate as command

    def slow(text):
        time.sleep(0.005)

    monkeypatch.setattr(command, "write", slow)
    assert generate("-n", 8, "--profile-json", tmp_path / "p.json").exit_code == 0
    report = json.loads((tmp_path / "p.json").read_text())
    assert 0.005 <= report["detail"]["other"]["printing"] <= report["phases"]["other"]


def test_a_prefill_alone_has_a_verdict(tmp_path):
    done = generate("-n", 1, "--profile", "--profile-html", tmp_path / "p.html")
    verdict = next(line for line in done.stderr.splitlines() if line.startswith("verdict: "))
    assert done.exit_code == 0 and " of the prefill" in verdict and "decoding" not in verdict
    assert " of the prefill" in (tmp_path / "p.html").read_text()


def test_a_run_of_no_tokens_has_a_profile(tmp_path):
    files = [f"--{name}={tmp_path / name}" for name in ("profile-json", "profile-html", "trace")]
    done = generate("-n", 0, "--profile-layers", *files)
    assert done.exit_code == 0, done.exception
    report = json.loads((tmp_path / "profile-json").read_text())
    assert report["verdict"] == "nothing was computed" and report["prefill"]["wall_s"] == 0.0
    assert sum(report["phases"].values()) == pytest.approx(report["wall_s"])
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"]
