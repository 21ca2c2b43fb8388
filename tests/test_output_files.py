"""Files that options name: complete or not at all, and nothing takes the place of what is no file."""

import json
import os
import subprocess

import pytest
from cli_program import ENVIRONMENT, PROGRAM, ROOT, assert_error, run

from engine.atomic_file import AtomicFile
from engine.commands._output import require_writable, write_file, write_json
from engine.errors import ConfigError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_there_when_it_is_complete(tmp_path):
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), AtomicFile(path) as file:
        file.handle.write(b"half")
        raise ZeroDivisionError
    assert path.read_text() == "before" and names(tmp_path) == ["a"]
    with AtomicFile(path) as file:
        file.handle.write(b"whole")
        assert path.read_text() == "before"
    assert path.read_text() == "whole" and names(tmp_path) == ["a"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    for text in ("first", "second"):  # a name that is free, and a file
        write_file("--x", str(tmp_path / "link"), text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "file").read_text() == text
    assert names(tmp_path) == ["link", "there"] and names(tmp_path / "there") == ["file"]


def test_a_pipe_and_a_descriptor_are_written_to(tmp_path):
    """As is a device: /dev/null would otherwise be a file for whoever may write to /dev."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    require_writable("--x", str(pipe))
    write_file("--x", str(pipe), "through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo() and names(tmp_path) == ["pipe"]
    os.close(reader)
    out, into = os.pipe()
    for name in ("/dev/fd", "/proc/self/fd"):
        require_writable("--x", f"{name}/{into}")
        write_file("--x", f"{name}/{into}", name)
        assert os.read(out, 100) == name.encode()
    os.close(into)
    os.close(out)
    with pytest.raises(ConfigError, match=f"--x /dev/fd/{into}: cannot be written: Bad file descriptor"):
        require_writable("--x", f"/dev/fd/{into}")
    with pytest.raises(ConfigError, match="--x /dev/full: cannot be written: No space left"):
        write_file("--x", "/dev/full", "x")


def test_a_name_nobody_can_have_is_refused():
    with pytest.raises(ConfigError, match="cannot be written: File name too long"):
        require_writable("--x", "x" * 300)


def test_stdout_as_a_file_keeps_its_place(tmp_path):
    """Redirected to a file: what comes before and after is there as well, in order."""
    out = tmp_path / "out"
    with out.open("wb") as stdout:
        command = [*PROGRAM, "bench", "--prefill", "2", "--decode", "0", "--repeat", "1", "--csv", "/dev/stdout"]
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr
    lines = out.read_text().splitlines()
    assert len(lines) == 4 and lines[0].startswith("test,arm,") and lines[3].startswith("prefill 2 ")


def test_a_recording_needs_a_file():
    done = run("generate", "In the", "-n", 2, "--route-trace", "/dev/null")
    assert_error(done, "--route-trace /dev/null", "needs a file")


def test_two_options_do_not_share_a_file(tmp_path):
    both = ("--trace", tmp_path / "a", "--profile-json", f"{tmp_path}/./a")
    assert_error(run("generate", "In the", "-n", 2, *both), "--profile-json and --trace both name")
    assert names(tmp_path) == []


def test_json_has_no_infinity_anywhere(capsys):
    write_json({"a": float("inf"), "b": [1.5, float("nan"), {"c": (float("-inf"), "x")}]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None, {"c": [None, "x"]}]}
