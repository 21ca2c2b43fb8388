"""What a published figure has to say about its run: program and revision, machine, command, time."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def run_facts() -> dict:
    """Facts about this process. revision: of the source tree, with "+changes" when it has some, None without git."""
    from engine import __version__
    from engine.hardware import cpu_model

    return {
        "millstream": __version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "command": shlex.join(["python", *(sys.orig_argv[1:])]),
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
        "time": time.strftime("%F %T"),
    }


def _revision() -> str | None:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def require_writable(path: str | Path) -> None:
    """Before a run of minutes: end with one line when its result could not be written."""
    from engine.commands import _output
    from engine.errors import ConfigError

    try:
        _output.require_writable("--out", path)
    except ConfigError as error:
        raise SystemExit(f"{error}; give a file in a directory that exists and is yours") from None


def write_json(path: str | Path, content: dict) -> None:
    """The file appears when it is complete."""
    from engine.atomic_file import AtomicFile

    with AtomicFile(path) as file:
        file.handle.write(json.dumps(content, indent=1).encode() + b"\n")


def facts_text(facts: dict) -> str:
    """The facts as two lines for people; what a script adds to them (a version, the CPU features used) comes last."""
    known = ("millstream", "revision", "python", "command", "cpu", "cpus", "kernel", "load", "time")
    more = "".join(f", {key} {value}" for key, value in facts.items() if key not in known)
    return (
        f"millstream {facts['millstream']} ({facts['revision'] or 'no git revision'}), Python {facts['python']}{more}; "
        f"{facts['cpu']}, {facts['cpus']} CPUs, Linux {facts['kernel']}, load {facts['load']}, {facts['time']}\n"
        f"command: {facts['command']}"
    )
