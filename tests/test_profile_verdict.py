"""Verdicts in made-up profiles: what bounds a run is named, with a setting that is not in use already; percentiles."""

import pytest

from engine.profile.report import STAGE_PHASES, _distribution
from engine.profile.verdict import setup, verdict

USED = {
    "threads": 2, "usable_cores": 2, "isa": "avx2", "best_isa": "avx2", "arith": "canonical", "expert_layout": "fast",
    "expert_slots": None, "readers": 4, "lookahead": "auto", "spec": None,
}  # fmt: skip


def made_up(phases, stage="decode", gb_s=1.0, draft_s=0.0, faults=99, **used):
    """A profile of one second, with what is not in `phases` computed by experts."""
    shares = {name: 0.0 for name in STAGE_PHASES} | phases
    shares["expert_gate_up"] += 1.0 - sum(shares.values())
    nothing = {"wall_s": 0.0, "phases": {name: 0.0 for name in STAGE_PHASES}}
    some = {"wall_s": 1.0, "phases": shares, "weight_gb_s": gb_s}
    detail = {name: {"draft": {"linear": draft_s}} for name in ("decode", "prefill", "other")}
    profile = {"prefill": nothing, "decode": nothing, "detail": detail, "setup": USED | used, "page_faults": faults}
    return verdict(profile | {stage: some}, 10.0)


DISK = {"read_wait": 0.31}
PYTHON = {"python": 0.16}


@pytest.mark.parametrize(
    ("made", "bound", "knob", "useless"),
    [
        ({"phases": DISK}, "the disk: 31% of decoding waits", "--ram", "--expert-slots"),
        ({"phases": DISK, "readers": 1}, "the disk", "--readers 4", "--lookahead"),
        ({"phases": DISK, "lookahead": "off"}, "the disk", "--lookahead auto", "--readers"),
        ({"phases": DISK, "expert_slots": 9}, "the disk", "--expert-slots", "--ram"),
        ({"phases": DISK, "stage": "prefill"}, "the disk: 31% of the prefill waits", "--ram", "--spec"),
        ({"phases": DISK | PYTHON}, "the disk", "--ram", "--spec"),
        ({"phases": {"draft": 0.5}, "draft_s": 0.4, "spec": 4}, "drafting: 50%", "--spec auto", "--threads"),
        ({"phases": {"draft": 0.5}, "draft_s": 0.4, "spec": "auto"}, "drafting", "--draft lookup", "--spec auto"),
        ({"phases": {"load": 0.31} | PYTHON}, "loading: 31% of decoding", "a longer run", "--spec"),
        ({"phases": {}, "faults": 100}, "compute", "100 page faults", "--threads"),
        ({"phases": {}}, "compute", "--spec auto", "page faults"),
        ({"phases": PYTHON}, "Python: 16%", "--spec auto makes several", "--threads"),
        ({"phases": {"draft": 0.2}, "draft_s": 0.01, "spec": 4}, "Python: 19%", "--spec auto keeps", "--threads"),
        ({"phases": PYTHON, "spec": "auto"}, "Python", "the model is small", "--spec"),
        ({"phases": PYTHON, "stage": "prefill"}, "Python: 16% of the prefill", "the model is small", "--spec"),
        ({"phases": {}, "gb_s": 6.1}, "memory bandwidth: weights come at 6.1 GB/s, this machine reads 10.0",
         "a smaller format", "--threads"),
        ({"phases": {}, "gb_s": 12.0}, "memory", "no slower than this machine read after the run", "machine reads"),
        ({"phases": {}, "gb_s": 8.0, "threads": 1}, "memory", "more threads at most 1.2 x", "do not"),
        ({"phases": {}, "gb_s": 6.1, "spec": "auto"}, "memory bandwidth", "a smaller format", "--spec"),
        ({"phases": {}, "gb_s": 5.9}, "compute: expert_gate_up takes 100%", "--spec auto", "--threads"),
        ({"phases": {"attention": 0.6}, "threads": 1}, "compute: attention takes 60%", "--threads 2", "isa"),
        ({"phases": {}, "threads": 7}, "compute", "threads share 2 cores: --threads 2", "isa"),
        ({"phases": {}, "isa": "scalar"}, "compute", "this CPU runs tier avx2: leave --isa out", "--threads"),
        ({"phases": {}, "arith": "float"}, "compute", "--arith canonical", "--threads"),
        ({"phases": {}, "expert_layout": "compact"}, "compute", "--expert-layout fast", "--threads"),
        ({"phases": {}, "spec": "auto"}, "compute", "every core is in use", "--spec"),
        ({"phases": {}, "stage": "prefill", "gb_s": 9.0}, "compute: expert_gate_up takes 100% of the prefill",
         "every core is in use", "--spec"),
    ],
)  # fmt: skip
def test_the_bound_and_a_setting_that_helps(made, bound, knob, useless):
    found = made_up(**made)
    assert found.startswith(f"bound by {bound}"), found
    assert knob in found and useless not in found, found


def test_a_run_that_did_nothing_has_no_bound():
    assert made_up({}, stage="other") == "nothing was computed"


def test_setup_is_that_of_the_run():
    import engine
    from engine.hardware import usable_cpus
    from engine.kernels import tiers

    loaded = engine.load(threads=1, isa="scalar", arith="float", expert_slots=9, history=False, readers=3)
    assert setup(loaded, {"policy": "auto"}) == {
        "threads": 1, "usable_cores": usable_cpus().count, "isa": "scalar",
        "best_isa": [name for name, supported, _ in tiers() if supported][-1], "arith": "float",
        "expert_layout": loaded.expert_layout.name, "expert_slots": 9, "readers": 3,
        "lookahead": "auto", "spec": "auto",
    }  # fmt: skip
    assert setup(loaded, None)["spec"] is None
    assert setup(engine.load(threads=1), None)["readers"] is None


def test_page_faults_are_those_of_the_run(tmp_path, monkeypatch):
    from types import SimpleNamespace

    import engine
    from engine.profile import Profiler, recorder

    counts = iter((1000, 1234))
    monkeypatch.setattr(recorder.resource, "getrusage", lambda who: SimpleNamespace(ru_majflt=next(counts)))
    with Profiler(engine.load(threads=1)) as profiler:
        pass
    assert profiler.page_faults == 234


def test_percentiles_count_tokens():
    """Nearest rank, and a round of four tokens is four of them."""
    rounds = [{"start": 0, "end": ms * 1_000_000, "tokens": 1} for ms in range(1, 21)]
    assert _distribution(rounds) == {"p50": 10.5, "p95": 19.0, "max": 20.0}
    rounds = [{"start": 0, "end": 4_000_000, "tokens": 4}, {"start": 0, "end": 3_000_000, "tokens": 1}]
    assert _distribution(rounds) == {"p50": 1.0, "p95": 3.0, "max": 3.0}
    assert _distribution([]) == {"p50": None, "p95": None, "max": None}
