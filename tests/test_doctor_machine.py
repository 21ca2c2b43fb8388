"""The machine checks of `millstream doctor`: what they find in made-up machines, and that something wrong is exit 1."""

import errno
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
from cli_program import ENVIRONMENT, ROOT
from click.testing import CliRunner

from engine import disk_bandwidth, doctor, kernels, machine_checks, runtime
from engine.cli import cli
from engine.errors import ConfigError


def make_root(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


CGROUP = {
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n",
    "sys/devices/system/cpu/online": "0-7\n",
    **{f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}\n" for n in range(8)},
}


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "words", "todo", "ok"),
    [
        (
            set(range(8)),
            "max 100000",
            ("4 threads on 4 physical cores (CPU 0-3)", "SMT on", "8 of 8", "no CPU quota"),
            "",
            True,
        ),
        (
            {0, 2, 4},
            "max 100000",
            ("2 threads on 2 physical cores (CPU 0,2)", "3 of 8"),
            "widen the affinity mask",
            True,
        ),
        ({3}, "max 100000", ("1 thread on 1 physical core (CPU 3)", "1 of 8"), "widen the affinity mask", True),
        ({0, 1}, "max 100000", ("2 threads on 2", "SMT off", "2 of 8"), "widen the affinity mask", True),
        (
            set(range(8)),
            "250000 100000",
            ("2 threads on 4", "quota 2.5 CPUs"),
            "raise the container's CPU quota to 4",
            True,
        ),
        (set(range(8)), "50000 100000", ("1 thread on 4", "quota 0.5 CPUs"), "at least one whole CPU", False),
    ],
)
def test_placement(tmp_path, affinity, cpu_max, words, todo, ok):
    root = make_root(tmp_path, {**CGROUP, "sys/fs/cgroup/cpu.max": cpu_max})
    check = machine_checks.thread_placement(root, affinity)
    assert all(word in check.found for word in words)
    assert todo in check.todo
    assert bool(check.todo) == bool(todo)
    assert check.ok == ok


def test_memory_limit_that_binds(tmp_path):
    root = make_root(tmp_path, CGROUP)
    assert machine_checks.memory_room(root).found == "4096 MiB can be used, which MemAvailable sets"
    make_root(tmp_path, {"sys/fs/cgroup/memory.max": f"{1 << 30}", "sys/fs/cgroup/memory.current": f"{900 << 20}"})
    check = machine_checks.memory_room(root)
    assert check.found == "124 MiB can be used, which memory.max of cgroup / sets"
    assert not check.ok
    assert "only 124 MiB of memory are available" in check.todo


@pytest.mark.parametrize(
    ("text", "found", "advice"),
    [
        ("always [madvise] never", "madvise", False),
        ("[always] madvise never", "always", False),
        ("always madvise [never]", "never", True),
    ],
)
def test_huge_pages(tmp_path, text, found, advice):
    root = make_root(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    check = machine_checks.huge_pages(root)
    assert (check.found, bool(check.todo), check.ok) == (found, advice, True)
    assert machine_checks.huge_pages(tmp_path / "nothing").figures == {"setting": None}


def test_lock_limit():
    assert "8 MiB" in machine_checks.lock_limit(8 << 20, unlimited=False).line()
    assert "ulimit -l" in machine_checks.lock_limit(8 << 20, unlimited=False).todo
    assert machine_checks.lock_limit(0, unlimited=True).todo == ""


def test_address_space():
    assert machine_checks.address_space(resource.RLIM_INFINITY).line() == "address space: no limit"
    for gib, ok in ((0.5, False), (1, True)):
        check = machine_checks.address_space(int(gib * (1 << 30)))
        assert check.ok == ok and f"{gib} GiB" in check.found and "ulimit -v unlimited" in check.todo


def test_memory_that_cannot_be_had_is_not_measured(monkeypatch):
    def none(context, size):
        raise MemoryError

    monkeypatch.setattr(machine_checks, "memory_bandwidth", none)
    check = machine_checks.read_memory(None, 1 << 30)
    assert check.ok and "not measured" in check.found and check.figures == {"gb_per_s": None}


def test_threads_that_cannot_be_started_end_the_measurement(tmp_path):
    """In a process of its own: readers that wait for one another would never let it end."""
    (tmp_path / "model.bin").write_bytes(os.urandom(1 << 20))
    script = """if 1:
        import sys, threading
        from engine.machine_checks import read_disk
        from engine.disk_bandwidth import disk_bandwidth
        real, started = threading.Thread.start, []
        def start(thread):
            started.append(thread)
            if len(started) > 9:  # two sizes at two depths are 10
                raise RuntimeError("can't start new thread")
            real(thread)
        threading.Thread.start = start
        print(read_disk(sys.argv[1]).line())
        print(read_disk(None, lambda none: disk_bandwidth(sys.argv[1])).line())"""
    command = [sys.executable, "-c", script, str(tmp_path / "model.bin")]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, timeout=20, text=True, check=True)
    wrong, advice = done.stdout.splitlines()
    assert "only 0 of 1 threads can be started" in advice
    assert "only 3 of 4 threads can be started -> raise the limits" in wrong


def test_disk_reads_cover_sizes_and_depths(tmp_path, monkeypatch):
    """Every combination reads: whole requests, inside the file, at the depth it names."""
    file = tmp_path / "model.bin"
    file.write_bytes(os.urandom(1 << 20))
    reads, real = [], os.preadv

    def preadv(descriptor, buffers, offset):
        reads.append((len(buffers[0]), offset))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(disk_bandwidth.os, "preadv", preadv)
    monkeypatch.setattr(disk_bandwidth, "SECONDS_EACH", 0.005)
    report = disk_bandwidth.measure_file(file)
    found = {(speed.request_bytes, speed.depth) for speed in report.speeds}
    assert found == {(size, depth) for size in (64 << 10, 1 << 20) for depth in (1, 4, 16)}
    assert any(note.endswith("4096 KiB x 1, 4096 KiB x 4, 4096 KiB x 16") for note in report.notes)
    assert {size for size, _ in reads[1:]} == {64 << 10, 1 << 20}
    assert {offset for size, offset in reads[1:] if size == 64 << 10} == set(range(0, 1 << 20, 64 << 10))
    assert all(speed.gb_per_s > 0 for speed in report.speeds)


def test_disk_falls_back_to_buffered_reads_with_a_note(tmp_path, monkeypatch):
    file = tmp_path / "model.bin"
    file.write_bytes(os.urandom(1 << 20))
    real = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *more)

    monkeypatch.setattr(disk_bandwidth.os, "open", refuse)
    monkeypatch.setattr(disk_bandwidth, "SECONDS_EACH", 0.005)
    check = machine_checks.read_disk(file)
    assert check.ok
    assert check.figures["mode"] == "buffered"
    assert "refuses direct reads" in check.found
    assert "direct reads" in check.todo


def test_bursts_are_read_one_after_the_other_in_whole_pages(tmp_path, monkeypatch):
    """What a plan measures: the pages of each burst's ranges, no request much longer than the streamer's, and none of
    a burst before all of the one before have ended."""
    file = tmp_path / "model.bin"
    file.write_bytes(os.urandom(1 << 20))
    log, real = [], os.preadv

    def preadv(descriptor, buffers, offset):
        log.append(("begin", offset, len(buffers[0])))
        done = real(descriptor, buffers, offset)
        log.append(("end", offset, len(buffers[0])))
        return done

    monkeypatch.setattr(disk_bandwidth.os, "preadv", preadv)
    bursts = [[(100, 4000), (8192, 36000)], [(61440, 10000)]]
    _, speed = disk_bandwidth.measure_bursts(file, bursts, 16384, 2, 0.02)
    first, second = [(0, 8192), (8192, 16384), (24576, 20480)], [(61440, 12288)]
    reads = [(what, at) for what, *at in log if at != [0, 4096]]  # that one asks whether direct reads work
    for burst in (first, second, first):
        some, reads = reads[: 2 * len(burst)], reads[2 * len(burst) :]
        assert sorted(tuple(at) for what, at in some if what == "begin") == burst
        assert sorted(tuple(at) for what, at in some if what == "end") == burst
    assert (speed.request_bytes, speed.depth) == (20480, 2)
    assert speed.gb_per_s > 0


def test_depth_that_is_enough():
    speeds = [disk_bandwidth.DiskSpeed(1 << 20, depth, speed) for depth, speed in ((1, 1.0), (4, 1.9), (16, 2.0))]
    report = disk_bandwidth.DiskReport("x", "direct", speeds)
    assert report.enough_depth(1 << 20) == 4
    assert report.enough_depth(4 << 20) is None


def test_the_largest_file_of_a_directory_is_read(tmp_path):
    make_root(tmp_path, {"config.json": "{}", "a/model.safetensors": "x" * (64 << 10)})
    assert disk_bandwidth.largest_file(tmp_path).name == "model.safetensors"
    with pytest.raises(ConfigError, match="no file of at least 64 KiB"):
        disk_bandwidth.largest_file(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        disk_bandwidth.largest_file(tmp_path / "nothing")


def run_doctor(monkeypatch, *args):
    monkeypatch.setattr(doctor, "check_formats", lambda tier, problems: ("scalar", []))
    monkeypatch.setattr(disk_bandwidth, "SECONDS_EACH", 0.002)
    monkeypatch.setattr(machine_checks, "memory_bandwidth", lambda context, size: 12.5)
    return CliRunner().invoke(cli, ["doctor", *args])


def test_command_prints_one_line_each_and_the_same_as_json(tmp_path, monkeypatch):
    file = tmp_path / "model.bin"
    file.write_bytes(os.urandom(4 << 20))
    done = run_doctor(monkeypatch, "--json", "--model", str(file))
    found = json.loads(done.stdout)
    names = [check["name"] for check in found["checks"]]
    assert names == [
        "placement",
        "memory limit",
        "address space",
        "huge pages",
        "lock limit",
        "memory bandwidth",
        "disk",
    ]
    assert found["checks"][-1]["figures"]["path"] == str(file)
    assert len(found["checks"][-1]["figures"]["speeds"]) == 9
    assert done.exit_code == (1 if found["problems"] else 0)
    text = run_doctor(monkeypatch, "--model", str(file)).stdout
    assert all(f"\n{name}: " in text for name in names)
    assert "12.5 GB/s" in text


def test_command_fails_when_the_disk_does(tmp_path, monkeypatch):
    def broken(descriptor, mode, bursts, depth, seconds):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "model.bin")

    file = tmp_path / "model.bin"
    file.write_bytes(os.urandom(1 << 20))
    monkeypatch.setattr(disk_bandwidth, "_measure", broken)
    done = run_doctor(monkeypatch, "--model", str(file))
    assert done.exit_code == 1
    assert "problem: disk: model.bin: Input/output error" in done.stdout


def test_command_fails_below_one_cpu(tmp_path, monkeypatch):
    placement = machine_checks.thread_placement(
        make_root(tmp_path, {**CGROUP, "sys/fs/cgroup/cpu.max": "50000 100000"}), {0, 1}
    )
    monkeypatch.setattr(machine_checks, "thread_placement", lambda root: placement)
    done = run_doctor(monkeypatch, "--json")
    assert done.exit_code == 1
    assert any("quota 0.5 CPUs" in problem for problem in json.loads(done.stdout)["problems"])


def one_format(monkeypatch):
    tables = [table for table in kernels.formats() if table.name == "q8_0"]
    monkeypatch.setattr(doctor.kernels, "formats", lambda: tables)
    for name in ("SPEED_BYTES", "COMPACT_SPEED_BYTES"):
        monkeypatch.setattr(doctor, name, 1)
    monkeypatch.setattr(doctor, "machine_report", lambda *_: [])


@pytest.mark.parametrize("tier", ["scalar", None])
def test_command_fails_on_a_wrong_kernel_and_says_what_to_do(monkeypatch, tier):
    right, calls = doctor._Product.__call__, itertools.count()

    def wrong(self, num_tokens):
        y = right(self, num_tokens)
        y[-1, -1] += next(calls)  # differs from call to call, on every tier
        return y

    one_format(monkeypatch)
    monkeypatch.setattr(doctor._Product, "__call__", wrong)
    if tier:
        monkeypatch.setenv("MILLSTREAM_ISA", tier)
    done = CliRunner().invoke(cli, ["doctor"])
    text = " ".join(done.stdout.split())
    assert done.exit_code == 1 and "does not compute what the scalar tier does: 1 of 264 values differ; " in text
    best = CliRunner().invoke(cli, ["doctor", "--json"])
    used = json.loads(best.stdout)["tier"]
    assert ("install the package again" if used == "scalar" else "run with --isa scalar") in text


def test_command_fails_on_a_broken_shipped_model(tmp_path, monkeypatch):
    broken = shutil.copytree(runtime.SHIPPED_MODEL, tmp_path / "model")
    weights = max(broken.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with weights.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff")
    one_format(monkeypatch)
    monkeypatch.setattr(runtime, "SHIPPED_MODEL", broken)
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 1 and "shipped model: NOT USABLE" in done.stdout
    assert "install the package again" in done.stdout


def test_a_tier_the_environment_asks_for_in_vain_says_so(monkeypatch):
    one_format(monkeypatch)
    monkeypatch.setenv("MILLSTREAM_ISA", "mmx")
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 1 and "MILLSTREAM_ISA asks for it: unset it" in done.stdout


def test_reports_are_no_wider_than_a_hundred_columns():
    from engine.commands._output import wrap

    text = "  tier: " + "word " * 60 + "\n\nshort\n" + "x" * 130
    lines = wrap(text).split("\n")
    assert max(map(len, lines[:-1])) <= 100 and lines[-1] == "x" * 130
    assert lines[0].startswith("  tier: word") and lines[1].startswith("    word")
    assert " ".join("\n".join(lines).split()) == " ".join(text.split())
