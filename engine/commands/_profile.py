"""Options of profiling: --profile, --profile-layers, --profile-json, --profile-html, --trace."""

import json
import time
from contextlib import contextmanager

import click

from ._output import note, refuse_same_file, require_writable, size, write_file

FILES = ("profile_json", "profile_html", "trace")
NAMES = ("profile", "profile_layers", *FILES)


def options(command):
    """The five options; take them out of a command's keywords with `take`."""
    for decorate in (
        click.option("--trace", metavar="FILE", help="Write every native call as a Chrome trace (Perfetto)."),
        click.option("--profile-html", metavar="FILE", help="Write the profile as a page to look at."),
        click.option("--profile-json", metavar="FILE", help="Write the profile as JSON."),
        click.option("--profile-layers", is_flag=True, help="Print the profile with a line per layer."),
        click.option("--profile", is_flag=True, help="Print where the time went."),
    ):
        command = decorate(command)
    return command


def take(options: dict) -> dict:
    """Remove the options from a command's keywords, and return them. Raises ConfigError for a file nobody can write,
    or that two options name."""
    wanted = {name: options.pop(name) for name in NAMES}
    for flag, path in files(wanted).items():
        if path is not None:
            require_writable(flag, path)
    refuse_same_file(files(wanted))
    return wanted


def files(wanted: dict) -> dict:
    """Option -> the file that it names, or None, of what `take` returned."""
    return {_flag(name): wanted[name] for name in FILES}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def write_profile(wanted: dict, name: str, text: str) -> None:
    """Write the file that option `name` asks for, and say so. wanted: what `take` returned."""
    num_bytes = write_file(_flag(name), wanted[name], text)
    note(f"{name.replace('_', ' ')}: {wanted[name]}, {size(num_bytes)}")


class Profiling:
    """One profiled run: `around` the generation, then `finish`. Does nothing when no option asks for it."""

    def __init__(self, wanted: dict):
        self._wanted, self._started, self._profiler = wanted, time.perf_counter(), None
        self._printing_s = 0.0

    def timed(self, write):
        """`write`, with the time that it takes counted: who reads the text may be slow."""
        if not any(self._wanted.values()):
            return write

        def call(text: str) -> None:
            started = time.perf_counter()
            write(text)
            self._printing_s += time.perf_counter() - started

        return call

    @contextmanager
    def around(self, loaded, generation):
        """Record while the generation runs."""
        if not any(self._wanted.values()):
            yield
            return
        from ..profile import Profiler

        self._profiler = Profiler(loaded, trace=self._wanted["trace"] is not None)
        with self._profiler as profiler:
            profiler.attach(generation)
            self._load_s = time.perf_counter() - self._started - generation.stats.tokenize_s
            yield

    def finish(self, generation) -> None:
        """Print and write what was asked for. generation: None where the run ended before there was one."""
        if self._profiler is None:
            if any(self._wanted.values()):
                note("profile: nothing was recorded, the run ended before its first token")
            return
        wall_s, wanted = time.perf_counter() - self._started, self._wanted  # what follows is no part of the run
        from ..bandwidth import machine_bandwidth
        from ..profile.report import profile_report
        from ..profile.text import format_report

        report = profile_report(self._profiler, generation, wall_s, self._load_s, machine_bandwidth())
        report["detail"]["other"] = {"printing": self._printing_s}
        if wanted["profile"] or wanted["profile_layers"]:
            note(format_report(report, wanted["profile_layers"]))
        if wanted["profile_json"]:
            write_profile(wanted, "profile_json", json.dumps(report, indent=1) + "\n")
        if wanted["profile_html"]:
            from ..profile.page import page

            write_profile(wanted, "profile_html", page(report, self._profiler))
        if wanted["trace"]:
            from ..profile.trace import chrome_trace

            write_profile(wanted, "trace", json.dumps(chrome_trace(self._profiler)))
