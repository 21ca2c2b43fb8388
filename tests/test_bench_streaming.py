"""The streaming benchmark on a tiny file: what it counts, its memory limit, that what cannot run is not passed, and
what its report makes of a file of results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_models import write_gguf

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_streaming  # noqa: E402
import streaming_report  # noqa: E402
from memory_cgroup import CgroupError, MemoryCgroup  # noqa: E402
from streaming_arms import measure  # noqa: E402
from streaming_disk import burst_read_rate, direct_read_rate, requests_of  # noqa: E402

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

    def step(position):
        seen.append(position)
        clock["n"] += 10

    job = {"warm_up_tokens": 3, "warm_up_s": 60, "tokens": 2, "seconds": 60}
    result = measure(step, job, lambda: dict(clock))
    assert seen == [0, 1, 2, 3, 4]
    assert (result["warm_up_tokens"], result["tokens"], len(result["each_ms"])) == (3, 2, 2)
    assert result["counted"] == {"n": 20}
    stopped = measure(step, {"warm_up_tokens": 5, "warm_up_s": 0, "tokens": 9, "seconds": 0})
    assert (stopped["warm_up_tokens"], stopped["warm_up_asked"], stopped["tokens"], stopped["asked"]) == (1, 5, 1, 9)
    assert streaming_report.progress_of(stopped) == "1 of 5 warm-up tokens (time is up), 1 measured of 9 (cap 0 s)"


def test_the_device_is_asked_as_the_readers_ask(tmp_path):
    mib = MIB
    assert requests_of(4096 + 7, mib, mib) == [(4096, mib + 4096)]
    assert requests_of(0, 2 * mib + 4096, mib) == [(0, mib), (mib, mib + 4096)]
    assert requests_of(100, 3 * mib, mib) == [(0, mib), (mib, mib), (2 * mib, mib + 4096)]
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * mib))
    try:
        assert direct_read_rate(path, [[(0, mib), (2 * mib, mib)]], mib, 2, 0.05, 1) > 0
        assert burst_read_rate(path, [[(0, mib)], [(2 * mib, mib)]], mib, 2, 0.05, 1, 1.5) > 0
    except OSError as error:
        pytest.skip(f"no direct reads here: {error}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "m.gguf"
    write_gguf(path, "wide")
    return path


def run_script(monkeypatch, capsys, model, out, *options):
    arguments = ["bench", model, "--json", out, "--tokens", "8", "--warm-up-tokens", "4", "--ctx", "64", *options]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    monkeypatch.setattr(bench_streaming, "git", lambda *_: "")
    bench_streaming.main()
    return capsys.readouterr().out


def test_calls_are_added_to_one_file_and_reported(model, tmp_path, monkeypatch, capsys):
    """Arms without a limit, so that it works where no cgroup can be made."""
    out = tmp_path / "out.json"
    run_script(monkeypatch, capsys, model, out, "--arms", "resident")
    shown = run_script(
        monkeypatch, capsys, model, out, "--arms", "resident", "--option", "expert_slots=5", "--isa", "scalar"
    )
    first, second = json.loads(out.read_text())
    assert first["result"]["tokens"] == second["result"]["tokens"] == 8
    assert first["result"]["counted"] == {} and second["result"]["counted"]["misses"] > 0
    assert "% hits" in shown and second["option"] == ["expert_slots=5"]
    assert second["result"]["isa"] == "scalar" and "m resident scalar" in shown
    assert first["run"] == second["run"] and "--expert_slots" not in first["command"]
    assert first["model"]["expert_bytes"] > 0 and first["model"]["experts"] == 16


def test_a_file_holds_one_revision_and_one_machine(tmp_path):
    out, run = tmp_path / "out.json", arm("resident", None, [1])["run"]
    out.write_text(json.dumps([arm("resident", None, [1])]))
    assert len(bench_streaming.read_records(out, run)) == len(bench_streaming.read_records(out)) == 1
    with pytest.raises(SystemExit, match=r"holds results of revision abc, this is def; give another --json"):
        bench_streaming.read_records(out, {**run, "revision": "def"})
    with pytest.raises(SystemExit, match=r"holds results of settings {'threads': 2}, this is {'threads': 1}"):
        bench_streaming.read_records(out, {**run, "settings": {"threads": 1}})
    assert bench_streaming.read_records(tmp_path / "none.json", run) == []


def test_without_a_cgroup_an_arm_is_not_run(model, tmp_path, monkeypatch, capsys):
    class Refused:
        def __init__(self, limit_bytes):
            raise CgroupError("no memory controller is mounted")

    monkeypatch.setattr(bench_streaming, "MemoryCgroup", Refused)
    monkeypatch.setattr(bench_streaming.Subject, "device_mb_s", lambda *_: 1.0)
    out = tmp_path / "out.json"
    shown = run_script(monkeypatch, capsys, model, out, "--arms", "millstream,llama", "--share", "50")
    assert shown.count("not run: no memory controller is mounted") == 2
    records = json.loads(out.read_text())
    assert all(set(record["result"]) == {"not_run", "call"} for record in records)
    assert streaming_report.markdown(records).count("not run: no memory controller") == 2


def test_an_arm_that_dies_is_a_failure(model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    shown = run_script(monkeypatch, capsys, model, out, "--arms", "resident", "--option", "io=bogus")
    assert "FAILED: exit code" in shown
    assert "tok_s" not in json.loads(out.read_text())[0]["result"]


def arm(name, share, each_ms, warm=4, **result):
    """A record of tokens that took each_ms each."""
    seconds = sum(each_ms) / 1000
    base = {"warm_up_tokens": warm, "warm_up_asked": warm, "tokens": len(each_ms), "asked": len(each_ms), "cap_s": 90.0,
            "seconds": seconds, "tok_s": len(each_ms) / seconds, "cpu_ms": 1.0, "each_ms": each_ms, "isa": "avx2",
            "read_bytes_per_token": 5e6, "counted": {}, "call": 1}  # fmt: skip
    run = {
        "revision": "abc",
        "machine": {"cpu": "X", "cpus": 2, "memory_mib": 2048, "kernel": "6"},
        "settings": {"threads": 2},
    }
    return {"run": run, "time": "now", "command": "python x", "router": "uniform", "arm": name, "share": share,
            "isa": None, "model": {"expert_bytes": 16e6, "experts": 16}, "result": {**base, **result}}  # fmt: skip


def test_report_splits_a_token_and_judges(model):
    counted = {"hits": 30, "misses": 10, "bytes": 10_200_000, "busy_s": 0.01, "wait_s": 0.08, "recode_s": 0.0}
    records = [
        arm("resident", None, [900, 900, 20, 20, 30, 30], warm=2),
        arm("millstream", 50.0, [70, 70], counted=counted, device_mb_s=[1000, 1200], burst_mb_s=1020),
        arm("llama", 50.0, [1000], asked=2, tok_s=1.0),
        arm("llama-128k", 50.0, [250, 250]),
        arm("resident", None, [900, 900, 20, 20, 30, 30], warm=2),
        arm("resident", None, [900, 900, 70, 70, 30, 30], warm=2, call=2),
    ]
    text = streaming_report.markdown(records)

    def cells(name):
        return [line.split("|")[2].strip() for line in text.splitlines() if line.startswith(f"| {name} ")]

    assert cells("ms/token") == ["70.0"]
    assert cells("of it: resident, ms") == ["20.0"]  # of the positions that the streamed arm measured: 4 and 5
    assert cells("of it: read wait, ms") == ["40.0"] and cells("of it: the rest, ms") == ["10.0"]
    assert cells("the rest, %") == ["14.3"]
    assert cells("of the device in bursts") == ["1.00"]
    assert cells("of the device in a steady stream") == ["0.93"]
    assert cells("bytes / bytes of the misses") == ["1.020"]
    assert cells("llama.cpp as found, tok/s") == ["1.00 (5 MB; 1 in 90 s after 4)"]
    assert cells("millstream / better llama.cpp") == ["3.57"]
    assert "explains the difference to resident (rest within 5 %): 50 % missed" in text
    assert ">= 2 x the better llama.cpp, never slower at 100 %: 50 % reached" in text
    assert "- >= 10 x llama.cpp as found: 50 % reached" in text
    without = streaming_report.markdown(records[:2])
    assert ">= 2 x the better llama.cpp, never slower at 100 %: 50 % not run" in without
