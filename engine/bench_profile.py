"""Profiles of a benchmark: one more run of every test and arm, whose time does not count, and all of them as one."""

from dataclasses import dataclass

from .bench import EngineArm, Test


@dataclass
class ProfiledRun:
    """One test of one arm under the profiler. report: as --profile-json of `generate` has it."""

    test: str
    arm: str
    report: dict
    profiler: object

    @property
    def kind(self) -> str:
        return self.test.partition(" ")[0]

    @property
    def title(self) -> str:
        return f"{self.test}, {self.arm}"


class Collector:
    """Called by `measure` after the rounds of a test, when caches are as warm as they were for the figures."""

    def __init__(self, trace: bool = False):
        self.runs: list[ProfiledRun] = []
        self._trace, self._bandwidth = trace, None

    def __call__(self, test: Test, arm, ids) -> None:
        """Run `test` once more. Arms of other engines have no profile."""
        if not isinstance(arm, EngineArm):
            return
        from .bandwidth import machine_bandwidth
        from .profile import profile_report

        if self._bandwidth is None:
            self._bandwidth = machine_bandwidth()
        profiler, generation, wall_s = arm.profiled(test, ids, self._trace)
        report = profile_report(profiler, generation, wall_s, 0.0, self._bandwidth)
        self.runs.append(ProfiledRun(test.name, arm.name, report, profiler))


def add(a, b):
    """Sum of two figures, or of two nested tables of figures, key by key; lists (threads) item by item."""
    if isinstance(a, dict) or isinstance(b, dict):
        a, b = a or {}, b or {}
        return {key: add(a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b])}
    if isinstance(a, list) or isinstance(b, list):
        a, b = a or [], b or []
        return [add(*pair) for pair in zip(*(x + [0.0] * (max(len(a), len(b)) - len(x)) for x in (a, b)), strict=True)]
    return (a or 0) + (b or 0)


def combined(runs: list[ProfiledRun]) -> dict:
    """For --profile-json: seconds of all runs together under the keys of one run's profile, and each run in `runs`."""
    total: dict = {}
    for run in runs:
        r = run.report
        stages = {name: {key: r[name][key] for key in ("wall_s", "phases", "tokens")} for name in ("prefill", "decode")}
        detail = {name: table for name, table in r["detail"].items() if name != "kernels_by_layer"}  # a list: no sums
        total = add(total, {
            "wall_s": r["wall_s"], "phases": r["phases"], **stages, "detail": detail,
            "threads": {"busy_s": r["threads"]["busy_s"]},
        })  # fmt: skip
    return total | {"runs": [{"test": run.test, "arm": run.arm, **run.report} for run in runs]}


def combined_trace(runs: list[ProfiledRun]) -> dict:
    """A Chrome trace with a process per run, all from time 0 on, so that they can be looked at side by side."""
    from .profile.trace import chrome_trace

    events = []
    for number, run in enumerate(runs, 1):
        events.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": run.title}})
        events += [event | {"pid": number} for event in chrome_trace(run.profiler)["traceEvents"]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
