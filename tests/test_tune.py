"""`millstream tune`: keeps what is faster and decodes the same, writes it down, and generate uses and prints it."""

import json
import shutil
import weakref

import mtp_models
import pytest
from cli_program import run

import engine
from converters.hf import RoleFormats, convert
from engine import tune
from engine.experts.cache import ExpertCache
from engine.runtime import SHIPPED_MODEL


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(SHIPPED_MODEL, tmp_path / "model")


class Fake:
    """Arms in which a set of options has the speed `speeds` says, None: it decodes other tokens. A list: by round."""

    def __init__(self, speeds):
        self.speeds = speeds

    def __call__(self, model, ids, tokens, repeat):
        self.repeat = repeat
        return self

    def compare(self, best, changed, progress, loading=None, patient=False):
        found = [self.speeds(options) for options in (best, changed)]
        if None in found:
            raise tune.ConfigError("other tokens")
        progress(2 * (self.repeat + 1))
        return list(zip(*(x if isinstance(x, list) else [x] * self.repeat for x in found), strict=True))

    def close(self):
        pass


def outcome(monkeypatch, speeds, repeat=1):
    loaded = engine.load(threads=2)
    monkeypatch.setattr(tune, "Arms", Fake(speeds))
    return tune.tune(None, tune.candidates(loaded), [1], 8, repeat, {})


def test_what_is_faster_is_kept_and_measured_against_the_defaults_again(monkeypatch):
    found = outcome(monkeypatch, lambda o: 100 * (1.5 if o.get("spec") == "auto" else 1))
    assert found.settings == {"spec": "auto"} and found.gain == 1.5
    assert [t.changes for t in found.trials if t.kept] == [{"spec": "auto"}]


def test_a_candidate_meets_the_best_so_far(monkeypatch):
    found = outcome(monkeypatch, lambda o: 100 + 20 * {"auto": 1, 2: 0, 4: 2, 8: 2}.get(o.get("spec"), -1))
    assert found.settings == {"spec": 4} and found.gain == pytest.approx(140 / 80)
    assert [(t.changes["spec"], t.before) for t in found.trials[1:]] == [("auto", 80), (2, 120), (4, 120), (8, 140)]


def test_less_than_three_percent_is_nothing(monkeypatch):
    found = outcome(monkeypatch, lambda o: 102.0 if o.get("spec") else 100.0)
    assert found.settings == {} and not any(t.kept for t in found.trials)


@pytest.mark.parametrize(("rounds", "kept"), [([110.0, 130.0, 101.0], True), ([110.0, 130.0, 99.0], False)])
def test_a_candidate_wins_every_round(monkeypatch, rounds, kept):
    found = outcome(monkeypatch, lambda o: rounds if o.get("spec") == 2 else 100.0, repeat=3)
    trial = next(t for t in found.trials if t.changes == {"spec": 2})
    assert trial.kept == kept and trial.ratio == pytest.approx(1.1) and ("every round" in trial.why) != kept


def test_what_decodes_something_else_is_not_kept(monkeypatch):
    found = outcome(monkeypatch, lambda o: None if o.get("spec") else 100.0)
    assert found.settings == {} and found.trials[-1].why == "other tokens"


def test_a_winner_that_does_not_win_again_is_dropped(monkeypatch):
    """Windows of 8 are fast, but not when they meet the defaults after all."""
    asked, trials = [], len(tune.candidates(engine.load(threads=2)))

    def speeds(options):
        asked.append(options)
        return 200.0 if options.get("spec") == 8 and len(asked) <= 2 * trials else 100.0

    found = outcome(monkeypatch, speeds)
    assert found.trials[-1].kept and len(asked) == 2 * trials + 2 and found.settings == {} and found.gain == 1.0
    assert found.final.changes == {"spec": 8} and not found.final.kept


def test_the_winner_may_lose_a_round_to_the_defaults(monkeypatch):
    """Its parts won all of theirs; a busy moment does not undo that."""
    trials, asked = len(tune.candidates(engine.load(threads=2))), []

    def speeds(options):
        asked.append(options)
        last = len(asked) > 2 * trials
        return (
            [150.0, 90.0, 140.0] if options.get("spec") == 8 and last else 120.0 if options.get("spec") == 8 else 100.0
        )

    found = outcome(monkeypatch, speeds, repeat=3)
    assert found.settings == {"spec": 8} and found.gain == pytest.approx(1.4) and found.final.kept


def test_candidates_fit_the_model(model):
    """Drafts of the model's own layer where it has one, and of a draft model that is given."""
    loaded = engine.load(threads=1)
    found = tune.candidates(loaded)
    assert [c for c in found if "spec" in c] == [{"spec": n} for n in ("auto", 2, 4, 8)]
    assert not any("io" in c or "draft" in c for c in found)
    with_model = tune.candidates(loaded, str(model))[len(found) :]
    assert {c["draft_model"] for c in with_model} == {str(model)} and {"auto", 2, 4, 8} == {
        c["spec"] for c in with_model
    }
    loaded.files.mtp_names = frozenset({"layers.3.eh_proj"})
    assert {"spec": 2, "draft": "mtp"} in tune.candidates(loaded)
    streamed = tune.candidates(engine.load(threads=1, expert_slots=12))
    assert {"readers": 8} in streamed and {"cache_policy": "lru"} in streamed and {"lookahead": "off"} in streamed


def test_measurements_take_seconds(monkeypatch):
    loaded = engine.load(threads=1)
    assert tune.tokens_to_decode(loaded, [1, 2]) == tune.MOST_TOKENS
    monkeypatch.setattr(tune, "MEASURE_SECONDS", 1e-9)
    assert tune.tokens_to_decode(loaded, [1, 2]) == tune.FEWEST_TOKENS


class Clocked:
    """An arm that takes as long as it is told and decodes what it is told."""

    def __init__(self, seconds, tokens=(1, 2)):
        self.seconds, self.tokens, self.decoded = seconds, list(tokens), 0

    def decode(self, ids, tokens):
        self.decoded += 1
        return self.seconds, self.tokens


@pytest.mark.parametrize(("seconds", "decoded"), [(1.0, 4), (1.04, 2), (0.5, 4)])
def test_hopeless_candidates_run_once(monkeypatch, seconds, decoded):
    best, candidate, seen = Clocked(1.0), Clocked(seconds), []
    monkeypatch.setattr(tune.Arms, "_arms", lambda self, *settings, loading=None: [best, candidate])
    rounds = tune.Arms(None, [1], 8, 3).compare({}, {}, seen.append)
    assert best.decoded == candidate.decoded == decoded == len(rounds) + 1
    assert len(tune.Arms(None, [1], 8, 3).compare({}, {}, seen.append, patient=True)) == 3
    assert rounds[0] == (8.0, 8 / seconds) and seen[: 2 * decoded] == list(range(1, 2 * decoded + 1))


def test_other_tokens_are_an_error(monkeypatch):
    monkeypatch.setattr(tune.Arms, "_arms", lambda self, *settings, loading=None: [Clocked(1.0), Clocked(1.0, (1, 3))])
    with pytest.raises(tune.ConfigError, match="other tokens"):
        tune.Arms(None, [1], 8, 3).compare({}, {}, lambda done: None)


def test_the_best_stays_open_and_streamed_ones_do_not(model):
    arms = tune.Arms(model, [1, 2, 3], 8, 1)
    first, second = arms._arms({"threads": 1}, {"threads": 1, "spec": 2})
    kept, other = arms._arms({"threads": 1, "spec": 2}, {"threads": 1, "spec": 4})
    assert kept is second and first.engine is None and other.engine is not None
    slots = {"threads": 1, "expert_slots": 12}
    first = arms._arms(slots, slots | {"readers": 2})[0]
    assert second.engine is None and arms._arms(slots, slots | {"readers": 3})[0] is not first
    arms.close()
    assert first.engine is None and not arms._open


def test_drafts_of_the_layer_and_of_a_draft_model_run(tmp_path, model):
    """Real arms; what is faster is not looked at. generate takes what they were measured with."""
    mtp_models.checkpoint(tmp_path / "hf", "glm4_moe", mtp_models.knowing(mtp_models.weights("glm4_moe")))
    convert(tmp_path / "hf", tmp_path / "mtp", formats=RoleFormats(experts="f32", dense="f32"), threads=1)
    given = {"spec": 2, "draft": "model", "draft_model": str(SHIPPED_MODEL)}
    for path, changes in ((tmp_path / "mtp", {"spec": 2, "draft": "mtp"}), (model, given)):
        trial = tune.tune(path, [changes], [5, 6, 7], 8, 1, {"threads": 1}).trials[0]
        assert min(trial.before, trial.after, trial.ratio) > 0, trial.why
    write(tmp_path / "mtp", {"spec": 2, "draft": "mtp"})
    done = run("generate", "In", "-m", tmp_path / "mtp", "-n", 8)
    assert "tuned: spec 2, draft mtp" in done.stderr and "mtp" in done.stderr.partition("\nspec:")[2]


def write(model, settings=None, **changes):
    files = engine.load(model, threads=1).files
    path = tune.save(files, tune.Outcome(settings=settings or {"threads": 1, "spec": "auto"}, gain=1.2))
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


def test_generate_takes_windows_and_draft_sources_together_or_not_at_all(model):
    write(model, {"spec": 3, "draft": "model", "draft_model": str(SHIPPED_MODEL)})
    tuned = run("generate", "In the", "-m", model, "-n", 8)
    assert f"tuned: spec 3, draft model, draft-model {SHIPPED_MODEL}" in tuned.stderr
    assert "model" in next(line for line in tuned.stderr.splitlines() if line.startswith("spec:"))
    for given in (("--spec", "0"), ("--spec", "2"), ("--spec", "4", "--draft", "lookup")):
        told = run("generate", "In the", "-m", model, "-n", 8, *given)
        assert told.returncode == 0 and "tuned" not in told.stderr and told.stdout == tuned.stdout
    write(model, {"spec": 3, "draft": "model", "draft_model": str(model.with_name("gone"))})
    done = run("generate", "In the", "-m", model, "-n", 2)
    assert done.returncode == 0 and "not used: its draft model" in done.stderr and "tuned" not in done.stderr


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
    assert {name for t in found["trials"] for name in t["changes"]} == {"threads", "spec"}
    assert "8 to decode" in done.stderr and "spec 8: " in done.stderr
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
    tune.tune(model, [{"readers": n} for n in (2, 3, 5)], [1, 2, 3], 8, 1, {"expert_slots": 12, "threads": 1})
    assert len(most) >= 6 and max(most) == 2


def test_progress_counts_every_measurement(monkeypatch):
    seen, choices, each = [], [{"threads": 1}, {"threads": 2}, {"spec": "auto"}], 2 * (2 + 1)
    monkeypatch.setattr(tune, "Arms", Fake(lambda o: 200.0 if o.get("spec") else 100.0))
    tune.tune(None, choices, [1], 8, 2, {}, progress=lambda *found: seen.append(found))
    total, names = 4 * each, ["threads 1", "threads 2", "spec auto", "the winner against the defaults"]
    expected = [(n * each + done, total, what) for n, what in enumerate(names) for done in (0, each)]
    assert seen == [*expected, (total, total, "done")]
    monkeypatch.setattr(tune, "Arms", Fake(lambda o: 100.0))
    tune.tune(None, choices, [1], 8, 2, {}, progress=lambda *found: seen.append(found))
    assert seen[-1] == (total, total, "done")
