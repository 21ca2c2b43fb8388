"""What `bench` does with the options of profiling: every run's profile in one file, or one below the other."""

import json

from ._output import note
from ._profile import write_profile


class Profiling:
    """collector: for `bench.measure`, None when no option asks for a profile."""

    def __init__(self, wanted: dict):
        self._wanted, self.collector = wanted, None
        if any(wanted.values()):
            from ..bench_profile import Collector

            self.collector = Collector(trace=wanted["trace"] is not None)

    def finish(self) -> None:
        """Print and write what was asked for."""
        if self.collector is None:
            return
        from ..bench_profile import combined, combined_trace
        from ..profile.page import document, section
        from ..profile.text import format_report

        runs, wanted = self.collector.runs, self._wanted
        if wanted["profile"] or wanted["profile_layers"]:
            for run in runs:
                note(f"\n{run.title}:\n{format_report(run.report, wanted['profile_layers'], (run.kind,))}")
        if wanted["profile_json"]:
            write_profile(wanted, "profile_json", json.dumps(combined(runs), indent=1) + "\n")
        if wanted["profile_html"]:
            write_profile(
                wanted, "profile_html", document([section(run.report, run.profiler, run.title) for run in runs])
            )
        if wanted["trace"]:
            write_profile(wanted, "trace", json.dumps(combined_trace(runs)))
