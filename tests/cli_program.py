"""Runs the program in a subprocess, for the tests of the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import tiny_models

ROOT = Path(__file__).parent.parent
PROGRAM = [sys.executable, "-m", "engine"]
# As a user has it: PYTHONUNBUFFERED would hide a missing flush.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("MILLSTREAM_", "PYTHON"))}
ENVIRONMENT["PYTHONDONTWRITEBYTECODE"] = "1"
LONG_CONTEXT = 200_000  # a generation that lasts until it is interrupted


def run(*args, text_in=None, **env):
    """Run the program; returns the finished process, its streams decoded without touching line ends."""
    command, data = [*PROGRAM, *map(str, args)], (text_in or "").encode()
    env = {**ENVIRONMENT, **env}
    done = subprocess.run(command, cwd=ROOT, env=env, input=data, capture_output=True, timeout=60, check=False)
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done


def make_snapshot(folder, config, generation_config=None):
    from converters.hf import RoleFormats, convert

    tiny_models.make_hf_dir(folder / "hf", config)
    if generation_config is not None:
        (folder / "hf" / "generation_config.json").write_text(json.dumps(generation_config))
    convert(folder / "hf", folder / "snapshot", formats=RoleFormats("q8_0", dense="f32"), threads=1)
    return folder / "snapshot"


def assert_error(done, *texts, code=2):
    """One line on stderr that begins with "error:", nothing on stdout, no traceback."""
    assert done.returncode == code
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for text in texts:
        assert text in lines[0]


def start_long(long_model, *options):
    args = ["generate", "x", "-m", str(long_model), "-n", "190000", "--ignore-eos", *options]
    return subprocess.Popen(
        [*PROGRAM, *args], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip


def wait_for(stream, text):
    """Read lines of a binary stream until one contains `text`."""
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"{text} did not come")
