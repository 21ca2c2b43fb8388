"""The streaming benchmark on a tiny file: what it counts, its memory limit, and that what cannot run is not passed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_models import write_gguf

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_streaming  # noqa: E402
from memory_cgroup import CgroupError, MemoryCgroup  # noqa: E402
from streaming_arms import measure  # noqa: E402

MIB = 1 << 20


def allocate(num_bytes: int) -> list[str]:
    return [sys.executable, "-c", f"x = bytearray({num_bytes}); x[::4096] = b'1' * len(x[::4096])"]


@pytest.fixture
def group():
    try:
        with MemoryCgroup(96 * MIB) as made:
            yield made
    except CgroupError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")


def test_the_limit_holds_and_is_reported(group):
    done = subprocess.run(allocate(32 * MIB), preexec_fn=group.enter, check=False)
    assert done.returncode == 0
    figures = group.figures()
    assert figures["limit_bytes"] == 96 * MIB and figures["oom_kills"] in (0, None)
    assert 32 * MIB < figures["peak_bytes"] <= 96 * MIB
    done = subprocess.run(allocate(256 * MIB), preexec_fn=group.enter, check=False)
    assert done.returncode == -9
    assert group.figures()["oom_kills"] in (1, None)


def test_measure_leaves_the_warm_up_out():
    seen, clock = [], {"n": 0}

    def step(token, position):
        seen.append((token, position))
        clock["n"] += 10

    job = {"warm_up_tokens": 3, "warm_up_s": 60, "seconds": 60}
    result = measure(step, [5, 6, 7, 8, 9], job, lambda: dict(clock))
    assert seen == [(5, 0), (6, 1), (7, 2), (8, 3), (9, 4)]
    assert result["warm_up"]["tokens"] == 3 and result["tokens"] == 2
    assert result["counted"] == {"n": 20}
    stopped = measure(step, [1, 2, 3, 4], {"warm_up_tokens": 1, "warm_up_s": 60, "seconds": 0})
    assert stopped["tokens"] == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "m.gguf"
    write_gguf(path, "wide")
    return path


def run_script(monkeypatch, capsys, model, out, *options):
    arguments = ["bench", model, "--json", out, "--tokens", "12", "--warm-up-tokens", "4", "--ctx", "64", *options]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    bench_streaming.main()
    return capsys.readouterr().out


def test_arms_are_added_to_the_file(model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    run_script(monkeypatch, capsys, model, out, "--arms", "resident")
    shown = run_script(monkeypatch, capsys, model, out, "--arms", "resident", "--option", "expert_slots=5")
    first, second = json.loads(out.read_text())
    assert first["result"]["tokens"] == second["result"]["tokens"] == 8
    assert first["result"]["counted"] == {} and second["result"]["counted"]["misses"] > 0
    assert "% hits" in shown and second["settings"]["option"] == ["expert_slots=5"]
    assert first["model"]["expert_bytes"] > 0


def test_without_a_cgroup_an_arm_is_not_run(model, tmp_path, monkeypatch, capsys):
    class Refused:
        def __init__(self, limit_bytes):
            raise CgroupError("no memory controller is mounted")

    monkeypatch.setattr(bench_streaming, "MemoryCgroup", Refused)
    out = tmp_path / "out.json"
    shown = run_script(monkeypatch, capsys, model, out, "--arms", "millstream,llama", "--percents", "50")
    assert shown.count("not run: no memory controller is mounted") == 2
    assert all(set(record["result"]) == {"not_run"} for record in json.loads(out.read_text()))


def test_an_arm_that_dies_is_a_failure(model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    shown = run_script(monkeypatch, capsys, model, out, "--arms", "resident", "--option", "io=bogus")
    assert "FAILED: exit code" in shown
    assert "tok_s" not in json.loads(out.read_text())[0]["result"]
