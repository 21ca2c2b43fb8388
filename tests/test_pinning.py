"""Usage history and pinning: counts are right and survive runs, foreign and broken files are refused or left alone,
pinned experts are loaded first and stay.
"""

import json
import os
import shutil

import numpy as np
import pytest
from cli_program import assert_error, run

import engine
from engine.errors import ConfigError
from engine.experts import history
from engine.experts.history import Usage, UsageRecorder, history_path, model_fingerprint, update_history
from engine.experts.route_trace import RecordedTrace, RouteTrace

TOP, NUM_EXPERTS, LAYERS = 2, 8, 2
IDS = np.random.default_rng(3).integers(0, 320, 40).astype(np.int32)


@pytest.fixture
def model(tiny_snapshot, tmp_path):
    return shutil.copytree(tiny_snapshot("wide", experts="q8_0", dense="q8_0"), tmp_path / "model")


def forward(loaded, parts=(11, 9, *[1] * 20)):
    kv, done, rows = loaded.new_kv(), 0, []
    for size in parts:
        rows.append(loaded.model.forward(IDS[done : done + size], kv, done, logits="all").copy())
        done += size
    return np.concatenate(rows)


def recorded(path, folder):
    """The trace and the recorder's usage of the same run."""
    loaded = engine.load(path)
    recorder = UsageRecorder(loaded.model, model_fingerprint(loaded.files))
    with RouteTrace(folder / "routes", loaded.model, "olmoe", model_fingerprint(loaded.files)):
        recorder.start()
        forward(loaded)
        recorder.stop()
    return folder / "routes", recorder.usage


def test_usage_counts_what_a_trace_holds(model, tmp_path):
    path, usage = recorded(model, tmp_path)
    expected = np.zeros((LAYERS, NUM_EXPERTS))
    for record in RecordedTrace(path):
        for expert in record.ids.ravel():
            expected[record.layer, expert] += 1
    assert np.array_equal(usage.uses, expected)
    assert usage.tokens == 40 and usage.uses.sum() == 40 * TOP * LAYERS
    assert np.array_equal(Usage.read(path).uses, expected)


def test_history_adds_up_over_runs_and_ages(model, tmp_path, monkeypatch):
    _, usage = recorded(model, tmp_path)
    path = tmp_path / "h.json"
    assert "40 tokens added, 40 in all" in update_history(path, usage)
    assert "40 tokens added, 80 in all" in update_history(path, usage)
    assert np.array_equal(Usage.read(path).uses, 2 * usage.uses)
    monkeypatch.setattr(history, "HISTORY_TOKENS", 60)
    update_history(path, usage)
    read = Usage.read(path)
    assert read.tokens == 60
    assert np.allclose(read.uses, usage.uses * 1.5, rtol=1e-4)
    assert [p.name for p in tmp_path.glob(".h.json*")] == []


def test_command_line_keeps_a_history_and_pins_by_it(model):
    beside = model.with_name("model.usage.json")
    args = ["generate", "x", "-m", model, "-n", "12", "--temperature", "0", "--ignore-eos", "--expert-slots", "8"]
    first = run(*args, "--pin", "auto", "--history", "off")
    assert "pinned: nothing" in first.stderr and not beside.exists()
    second = run(*args)
    assert f"usage history: {beside}" in second.stderr
    third = run(*args, "--pin", "auto", "--json")
    assert "pinned: 4 experts in 4 of 8 slots" in third.stderr
    content = json.loads(third.stdout)
    assert content["text"] in first.stdout and first.stdout == second.stdout
    assert content["stats"]["streamer"]["pinned"] == 4
    resident = run(*args[:-2], "--pin", "auto")
    assert resident.stdout == first.stdout and "usage history" not in resident.stderr


def test_pinned_experts_are_loaded_first_and_stay(model, tmp_path):
    path, usage = recorded(model, tmp_path)
    want = forward(engine.load(model))
    loaded = engine.load(model, expert_slots=7, pin=str(path), lookahead="off")
    cache = loaded.stream.cache
    by_use = sorted(np.ndindex(LAYERS, NUM_EXPERTS), key=lambda at: (-usage.uses[at], at))[:3]
    pinned = {layer * NUM_EXPERTS + expert for layer, expert in by_use}
    assert cache.pinned == pinned
    assert {key for key, slot in enumerate(cache.slot_of) if slot >= 0} == pinned
    assert cache.stats()["reads"] == 3 and cache.stats()["misses"] == 0
    slots = {key: cache.slot_of[key] for key in pinned}
    got = forward(loaded)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    assert {key: cache.slot_of[key] for key in pinned} == slots
    assert cache.stats()["evictions"] > 0
    assert cache.stats()["reads"] == cache.stats()["misses"] + 3


@pytest.mark.parametrize("slots", [TOP, TOP + 1])
def test_pins_leave_the_slots_of_a_token(model, tmp_path, slots):
    path, _ = recorded(model, tmp_path)
    loaded = engine.load(model, expert_slots=slots, pin=str(path))
    assert len(loaded.stream.cache.pinned) == min(slots - TOP, slots // 2)
    forward(loaded)


def test_another_models_history_is_refused_and_left_alone(model, tmp_path):
    path, usage = recorded(model, tmp_path)
    with pytest.raises(ConfigError, match="recorded with another model"):
        Usage("0" * 64, usage.uses).check(path, usage.fingerprint, usage.uses.shape)
    with pytest.raises(ConfigError, match="2 layers of 8 experts"):
        usage.check(path, usage.fingerprint, (2, 9))
    beside = model.with_name("model.usage.json")
    Usage("0" * 64, usage.uses, 5).save(beside)
    before = beside.read_bytes()
    assert_error(
        run("generate", "x", "-m", model, "--expert-slots", "8", "--pin", "auto"), str(beside), "another model"
    )
    done = run("generate", "x", "-m", model, "-n", "2", "--expert-slots", "8")
    assert done.returncode == 0 and "usage history not kept" in done.stderr
    assert beside.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"not json", b'{"magic": "millstream-usage"}',
    b'{"magic": "millstream-usage", "version": 1, "fingerprint": "", "tokens": 1, "uses": [[1], [1, 2]]}',
    b'{"magic": "millstream-usage", "version": 1, "fingerprint": "", "tokens": 1, "uses": [[-1]]}',
    b'{"magic": "millstream-usage", "version": 1, "fingerprint": "", "tokens": 1, "uses": [[NaN]]}',
    b'{"magic": "millstream-usage", "version": 1, "fingerprint": "", "tokens": NaN, "uses": [[1]]}',
    b'{"magic": "millstream-usage", "version": 1, "fingerprint": "", "tokens": -1, "uses": [[1]]}',
    b'{"magic": "millstream-usage", "version": 1, "fingerprint": "", "tokens": 1' + b"0" * 400 + b', "uses": [[1]]}',
    b"[" * 200000])  # fmt: skip
def test_a_broken_history_is_an_error_by_name(model, tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.json: is no usage history and no route trace, or broken"):
        engine.load(model, expert_slots=8, pin=str(path))


def test_a_pin_file_is_checked_when_nothing_streams(model, tmp_path):
    path, usage = recorded(model, tmp_path)
    assert engine.load(model, pin=str(path)).stream is None
    for name, content in (("broken.json", b"{}"), ("foreign.json", None)):
        if content is None:
            Usage("0" * 64, usage.uses, 5).save(tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name}: (is no usage history|recorded with another model)"):
            engine.load(model, pin=str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"--pin .*none: no such file"):
        engine.load(model, pin=str(tmp_path / "none"))
    done = run("generate", "x", "-m", model, "-n", "1", "--pin", path)
    assert done.returncode == 0 and "nothing is streamed, so --pin changes nothing" in done.stderr
    Usage("0" * 64, usage.uses, 5).save(model.with_name("model.usage.json"))
    with pytest.raises(ConfigError, match="another model"):
        engine.load(model, pin="auto")


def test_a_newer_history_and_a_missing_one_are_named(model, tmp_path):
    path = tmp_path / "new.json"
    path.write_text('{"magic": "millstream-usage", "version": 9}')
    with pytest.raises(ConfigError, match="usage history version 9, this millstream reads version 1"):
        Usage.read(path)
    with pytest.raises(ConfigError, match="no such file"):
        engine.load(model, expert_slots=8, pin=str(tmp_path / "none"))


def test_a_directory_that_cannot_be_written_is_only_noted(model, tmp_path, monkeypatch):
    """As root every directory can be written, so the open is what fails here."""
    _, usage = recorded(model, tmp_path)

    def refuse(self, mode):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(PermissionError):
        usage.save(tmp_path / "h.json")
    monkeypatch.undo()
    monkeypatch.setattr(Usage, "save", lambda self, path: refuse(None, None))
    line = update_history(tmp_path / "h.json", usage)
    assert "usage history not kept" in line and "Permission denied" in line and "--history off" in line


def test_the_history_lies_beside_the_model(model):
    files = engine.load(model).files
    assert history_path(files) == model.with_name("model.usage.json")
    assert model_fingerprint(files) == json.loads((model / "millstream.json").read_text())["source"]["sha256"]
