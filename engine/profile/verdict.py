"""What bounds a run, and the setting that would help: one that is not in use already."""

from ..experts.cache import DEFAULT_READERS
from ..hardware import usable_cpus
from ..kernels import tiers

DISK_BOUND, LOAD_BOUND, PYTHON_BOUND, MEMORY_BOUND = 0.3, 0.3, 0.15, 0.6  # shares of time; of the bandwidth
FEW_FAULTS = 100
_COMPUTE = ("attention", "expert_gate_up", "expert_down", "head", "router", "quantize", "embed", "sample")
_DOING = {"decode": "decoding", "prefill": "the prefill"}


def setup(engine, spec: dict | None) -> dict:
    """What a run went with, as far as a verdict looks at it. spec: the report of speculation."""
    return {
        "threads": engine.context.num_threads,
        "usable_cores": usable_cpus().count,
        "isa": engine.context.tier,
        "best_isa": [name for name, supported, _ in tiers() if supported][-1],
        "arith": engine.context.arith,
        "expert_layout": engine.expert_layout.name,
        "expert_slots": engine.options.expert_slots,
        "readers": engine.stream.cache.readers if engine.stream else None,
        "lookahead": engine.options.lookahead,
        "spec": spec["policy"] if spec else None,
    }


def _disk(used: dict) -> str:
    memory = "more slots (--expert-slots)" if used["expert_slots"] else "more memory (--ram)"
    found = [f"{memory}, or a smaller format (convert), needs fewer reads"]
    if used["readers"] and used["readers"] < DEFAULT_READERS:
        found.append(f"--readers {DEFAULT_READERS} reads more at a time")
    if used["lookahead"] == "off":
        found.append("--lookahead auto reads ahead where that pays")
    return "; ".join(found)


def _spec(used: dict) -> str:
    if used["spec"] is None:
        return "--spec auto makes several tokens per step where drafts hold"
    if used["spec"] != "auto":
        return "--spec auto keeps to the window that is fastest"
    return ""


def _python(used: dict, stage: str) -> str:
    more = _spec(used) if stage == "decode" else ""
    return "the model is small for its number of calls" + (f"; {more}" if more else "")


def _memory(used: dict, room: float) -> str:
    """room: how much faster memory could be read."""
    threads = f"more threads {f'at most {room:.1f} x' if used['threads'] < used['usable_cores'] else 'do not'}"
    return "; ".join(filter(None, [f"a smaller format helps, {threads}", _spec(used)]))


def _compute(used: dict, stage: str) -> str:
    """The largest lever first."""
    found = []
    if used["isa"] != used["best_isa"]:
        found.append(f"this CPU runs tier {used['best_isa']}: leave --isa out")
    if used["arith"] == "float":
        found.append("--arith canonical computes in integers")
    if used["threads"] < used["usable_cores"]:
        found.append(f"{used['usable_cores']} threads can run here: --threads {used['usable_cores']}")
    if used["threads"] > used["usable_cores"]:
        found.append(f"threads share {used['usable_cores']} cores: --threads {used['usable_cores']}")
    if used["expert_layout"] == "compact":
        found.append("--expert-layout fast re-codes experts once instead of in every call, for more memory")
    if stage == "decode" and (more := _spec(used)):
        found.append(more)
    return "; ".join(found) or "every core is in use; a smaller or sparser model, or a faster CPU, is what is left"


def _mapped(faults: int) -> str:
    if faults < FEW_FAULTS:
        return ""
    return f"; {faults} page faults read mapped weights from disk in the run, --io direct reads them at load"


def verdict(profile: dict, bandwidth_gb_s: float | None) -> str:
    """What bounds decoding, or the prefill where nothing was decoded, and what to change. profile: of profile_report,
    with its `setup`."""
    stage = next((name for name in ("decode", "prefill") if profile[name]["wall_s"]), None)
    if stage is None:
        return "nothing was computed"
    found, used, doing = profile[stage], profile["setup"], _DOING[stage]
    wall = found["wall_s"]
    share = {name: seconds / wall for name, seconds in found["phases"].items()}
    if share["read_wait"] > DISK_BOUND:
        return f"bound by the disk: {share['read_wait']:.0%} of {doing} waits for experts; {_disk(used)}"
    drafting = sum(profile["detail"][stage].get("draft", {}).values()) / wall  # native: of a model that drafts
    if drafting > DISK_BOUND:
        auto = "" if used["spec"] == "auto" else "; --spec auto drafts only where it pays"
        return (
            f"bound by drafting: {share['draft']:.0%} of {doing}; fewer rows (--spec), a smaller draft model, or "
            f"--draft lookup{auto}"
        )
    if share["load"] > LOAD_BOUND:
        return (
            f"bound by loading: {share['load']:.0%} of {doing} re-codes experts used a second time, each once; "
            "a longer run has less of it, a snapshot (convert) none, --expert-layout compact keeps them as they are"
        )
    python = share["python"] + max(share["draft"] - drafting, 0.0)
    if python > PYTHON_BOUND:
        return f"bound by Python: {python:.0%} of {doing}; {_python(used, stage)}"
    rate = found.get("weight_gb_s") or 0.0  # only decoding has one
    if stage == "decode" and bandwidth_gb_s and rate > MEMORY_BOUND * bandwidth_gb_s:
        reads = f"this machine reads {bandwidth_gb_s:.1f}"
        if rate > bandwidth_gb_s:  # it was busier then, or weights stay in a cache
            reads = f"no slower than this machine read after the run ({bandwidth_gb_s:.1f})"
        room = max(bandwidth_gb_s / rate, 1.0)
        return f"bound by memory bandwidth: weights come at {rate:.1f} GB/s, {reads}; {_memory(used, room)}"
    largest = max(_COMPUTE, key=lambda phase: share[phase])
    came = f", weights come at {rate:.1f} GB/s" if stage == "decode" else ""
    return (
        f"bound by compute: {largest} takes {share[largest]:.0%} of {doing}{came}; {_compute(used, stage)}"
        f"{_mapped(profile['page_faults'])}"
    )
