"""A damaged file of tuned settings is not used, with a note that says so; the run is the one without it."""

import json
import shutil

import click
import pytest
from click.testing import CliRunner

import engine
from engine import tune
from engine.cli import cli
from engine.commands import _tuned
from engine.runtime import SHIPPED_MODEL


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return shutil.copytree(SHIPPED_MODEL, tmp_path_factory.mktemp("tuned") / "model")


@pytest.fixture(scope="module")
def good(model):
    """The file, and what is in a good one."""
    path = tune.save(engine.load(model, threads=1).files, tune.Outcome(settings={"threads": 1}, gain=1.2))
    return path, json.loads(path.read_text())


def generate(model, *args):
    return CliRunner().invoke(cli, ["generate", "In the", "-m", str(model), "-n", "2", *args])


def test_a_good_one_is_used(model, good):
    path, content = good
    settings = {"threads": 1, "spec": 4, "draft": "lookup", "readers": 8, "cache_policy": "lru", "lookahead": "on"}
    path.write_text(json.dumps(content | {"settings": settings}))
    done = generate(model)
    assert done.exit_code == 0 and "tuned: threads 1, spec 4, draft lookup, readers 8" in done.stderr
    path.write_text(json.dumps(content | {"settings": {"spec": "auto"}}))
    assert "tuned: spec auto" in generate(model).stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"threads": "abc"}, {"threads": "1"}, {"threads": 0}, {"threads": -3}, {"threads": 1.5}, {"threads": None},
        {"threads": [1]}, {"threads": True}, {"threads": {}}, {"spec": 99}, {"spec": "all"}, {"spec": None},
        {"spec": True}, {"io": "foo"}, {"io": 1}, {"readers": 65}, {"expert_layout": "x"}, {"cache_policy": ""},
        {"lookahead": 1}, {"spec": 4, "draft": "x"}, {"spec": 4, "draft": ["lookup"]}, {"draft": "lookup"},
        {"spec": 4, "draft_model": 7}, {"draft_model": "."},
    ],
    ids=str,
)  # fmt: skip
def test_values_no_option_takes(settings):
    context = click.Context(cli.commands["generate"])
    assert _tuned._damaged(context, json.loads(json.dumps(settings)))
    assert _tuned._damaged(context, {"threads": 3, "spec": 4, "draft": "lookup"}) is None


@pytest.mark.parametrize("settings", [{"threads": "abc"}, {"spec": 99}])
def test_a_run_goes_on_without_them(model, good, settings):
    path, content = good
    path.write_text(json.dumps(content | {"settings": settings}))
    done = generate(model)
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert f"note: {path}: not used: " in done.stderr and "tuned: " not in done.stderr


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[1, 2", b"[]", b"[" * 100_000, b'{"magic": "millstream-tune"}'])
def test_files_that_are_none(model, good, text):
    path, _ = good
    path.write_bytes(text)
    done = generate(model)
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert f"note: {path}: not used: " in done.stderr


def test_a_directory_in_its_place(model, good):
    path, _ = good
    path.unlink()
    path.mkdir()
    done = generate(model)
    path.rmdir()
    assert done.exit_code == 0 and f"note: {path}: not used: " in done.stderr and "directory" in done.stderr
