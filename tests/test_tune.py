"""`millstream tune`: keeps what is faster and decodes the same, writes it down, and generate uses and prints it."""

import json
import shutil
import weakref

import pytest
from cli_program import run

import engine
from engine import tune
from engine.bench import Result
from engine.experts.cache import ExpertCache
from engine.runtime import SHIPPED_MODEL


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(SHIPPED_MODEL, tmp_path / "model")


def fake(speeds):
    """A _compare in which a set of options has the speed `speeds` says."""

    def compare(model, best, changed, ids, tokens, repeat, progress):
        pair = []
        for name, options in (("best", best), ("candidate", changed)):
            speed = speeds(options)
            if speed is None:
                raise tune.ConfigError("other tokens")
            pair.append(Result("decode", name, [speed]))
        return tuple(pair)

    return compare


def outcome(monkeypatch, speeds):
    loaded = engine.load(threads=2)
    monkeypatch.setattr(tune, "_compare", fake(speeds))
    return tune.tune(None, tune.candidates(loaded), [1], 8, 1, {})


def test_what_is_faster_is_kept_and_measured_against_the_defaults_again(monkeypatch):
    found = outcome(monkeypatch, lambda o: 100 * (1.5 if o.get("spec") == "auto" else 1))
    assert found.settings == {"spec": "auto"} and found.gain == 1.5
    assert [t.setting for t in found.trials if t.kept] == ["spec"]


def test_less_than_three_percent_is_nothing(monkeypatch):
    found = outcome(monkeypatch, lambda o: 102.0 if o.get("spec") else 100.0)
    assert found.settings == {} and not any(t.kept for t in found.trials)


def test_what_decodes_something_else_is_not_kept(monkeypatch):
    found = outcome(monkeypatch, lambda o: None if o.get("spec") else 100.0)
    assert found.settings == {} and found.trials[-1].why == "other tokens"


def test_a_winner_that_does_not_win_again_is_dropped(monkeypatch):
    """speeds are asked for in pairs; from the pair after the last candidate on, auto is as slow as the rest."""
    asked, pairs = [], len(tune.candidates(engine.load(threads=2))[0][1]) + 1

    def speeds(options):
        asked.append(options)
        return 200.0 if options.get("spec") and len(asked) <= 2 * pairs else 100.0

    found = outcome(monkeypatch, speeds)
    assert found.trials[-1].kept and len(asked) == 2 * pairs + 2 and found.settings == {}


def write(model, **changes):
    files = engine.load(model, threads=1).files
    path = tune.save(files, tune.Outcome(settings={"threads": 1, "spec": "auto"}, gain=1.2))
    if changes:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_generate_uses_and_prints_the_settings_unless_told_otherwise(model):
    write(model)
    tuned = run("generate", "In the", "-m", model, "-n", 4)
    assert "tuned: threads 1, spec auto" in tuned.stderr and "1 threads" in tuned.stderr and "spec:" in tuned.stderr
    told = run("generate", "In the", "-m", model, "-n", 4, "--threads", 2, "--spec", "0")
    assert "tuned" not in told.stderr and "2 threads" in told.stderr
    assert tuned.stdout == told.stdout


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fingerprint": "x"}, "another model"),
        ({"cpu": "x"}, "another machine"),
        ({"version": 9}, "no settings file"),
        ({"settings": {"seed": 1}}, "unknown settings"),
    ],
)
def test_settings_for_something_else_are_left_alone(model, changes, why):
    path = write(model, **changes)
    done = run("generate", "In the", "-m", model, "-n", 2)
    assert done.returncode == 0 and why in done.stderr and str(path) in done.stderr and "tuned:" not in done.stderr


def test_command_line(model):
    done = run("tune", model, "--prompt", "In the beginning", "-n", 8, "--repeat", 1, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {t["setting"] for t in found["trials"]} == {"threads", "spec"}
    written = model.with_name("model.tune.json")
    assert written.exists() == bool(found["settings"]) and (found["written"] is not None) == written.exists()
    dry = run("tune", "-m", model, "-n", 8, "--repeat", 1, "--dry-run")
    assert dry.returncode == 0 and (": " in dry.stdout or "defaults are the fastest" in dry.stdout)


def test_a_model_with_settings_is_opened_once(model, monkeypatch):
    from click.testing import CliRunner

    from engine import runtime, weights
    from engine.cli import cli

    write(model)
    opened = []

    def counted(path):
        opened.append(path)
        return real(path)

    real = weights.open_model
    monkeypatch.setattr(weights, "open_model", counted)
    monkeypatch.setattr(runtime, "open_model", counted)
    done = CliRunner().invoke(cli, ["generate", "In the", "-m", str(model), "-n", "2"])
    assert done.exit_code == 0 and "tuned: threads 1" in done.stderr
    assert len(opened) == 1


def test_no_more_than_two_engines_are_in_memory(model, monkeypatch):
    """Caches of those that were compared are gone before the next ones are made."""
    alive, most = weakref.WeakSet(), []
    real = ExpertCache.__init__

    def made(cache, *args):
        alive.add(cache)
        most.append(len(alive))
        real(cache, *args)

    monkeypatch.setattr(ExpertCache, "__init__", made)
    tune.tune(model, [("readers", [2, 3, 5])], [1, 2, 3], 8, 1, {"expert_slots": 12, "threads": 1})
    assert len(most) >= 6 and max(most) == 2


def test_progress_counts_every_measurement(monkeypatch):
    seen, choices, each = [], [("threads", [1, 2]), ("spec", ["auto"])], 2 * (2 + 1)
    speeds = fake(lambda o: 200.0 if o.get("spec") else 100.0)

    def compare(*args):
        args[-1](each, each)
        return speeds(*args)

    monkeypatch.setattr(tune, "_compare", compare)
    tune.tune(None, choices, [1], 8, 2, {}, progress=lambda *found: seen.append(found))
    total, names = 4 * each, ["threads 1", "threads 2", "spec auto", "the winner against the defaults"]
    assert seen == [(n * each + done, total, what) for n, what in enumerate(names) for done in (0, each)]
    monkeypatch.setattr(tune, "_compare", fake(lambda o: 100.0))
    tune.tune(None, choices, [1], 8, 2, {}, progress=lambda *found: seen.append(found))
    assert seen[-1] == (total, total, "done")
