"""Turns what the recorder took into phases that add up, tables, and a verdict.

Phases are those of the decode thread. `python` is what is left of the prefill and of the rounds, each by its own clock,
when all native calls, drafting and verification are taken away, and in the whole run what the generation did between
rounds; `other` is what no clock of a part saw: printing, and what the caller did between tokens.
"""

import math
import statistics
from collections import defaultdict

from .kernel_table import kernels, kernels_by_layer
from .places import DRAFT, MTP
from .verdict import setup, verdict

STEP_PHASES = (
    "embed", "attention", "router", "expert_gate_up", "quantize", "expert_down", "read_wait", "head", "sample",
    "draft", "verify", "python",
)  # fmt: skip
PHASES = ("load", "tokenize", "prefill", *STEP_PHASES, "other")
STAGE_PHASES = tuple(name for name in PHASES if name != "prefill")  # of prefill and decode by themselves
_MLP_FUNCTIONS = {
    "moe_route": "router", "moe_route_plan": "router", "moe_streamer_next": "read_wait",
    "moe_streamer_request": "python", "moe_streamer_use": "python", "moe_encode": "load",
    "moe_experts_combine": "expert_down", "moe_check_finite": "expert_down", "moe_add_gated": "expert_down",
    "moe_rmsnorm": "router",
}  # fmt: skip


def _phase(section: str, tag: str, function: str) -> str:
    if section == "mlp":
        if tag in ("router", "shared gate"):
            return "router"
        if tag:
            return "expert_down" if tag.endswith("down") else "expert_gate_up"
        return _MLP_FUNCTIONS.get(function, "expert_gate_up")
    if section:
        return "draft" if section == MTP else section
    return "sample" if function == "moe_sample" else "python"


def _detail_name(tag: str, function: str) -> str:
    return tag or function.removeprefix("moe_")


def _waited(profiler, stage: str) -> float:
    """Share of the time in moe_streamer_next that the decode thread slept, by the streamer's own clock."""
    called = sum(
        ns for (found, *_, function), (ns, _) in profiler.times.items()
        if found == stage and function == "moe_streamer_next"
    )  # fmt: skip
    return min(profiler.io.get(stage, {}).get("wait_s", 0.0) * 1e9 / called, 1.0) if called else 0.0


def _add_parts(profiler, stage: str, tables) -> None:
    """Split what the native side timed inside its calls. tables(layer): those that layer's seconds stand in."""
    for (found, section, layer, tag, function), (quantize, _, down) in profiler.parts.items():
        phase = _phase(section, tag, function)
        if found != stage or section in (DRAFT, MTP) or phase == "python":
            continue
        for table in tables(layer):
            table[phase] -= (quantize + down) / 1e9
            table["quantize"] += quantize / 1e9
            table["expert_down"] += down / 1e9


def _native(profiler, stage: str) -> tuple[dict, dict, dict]:
    """(phases, detail, by layer): seconds in native calls of prefill or decode. What lies in none of the phases, such
    as asking for experts, has an entry under `python` in the detail only."""
    phases = defaultdict(float)
    detail, layers = (defaultdict(lambda: defaultdict(float)) for _ in range(2))
    waited = _waited(profiler, stage)
    for (found, section, layer, tag, function), (ns, _) in profiler.times.items():
        if found != stage:
            continue
        phase, seconds = _phase(section, tag, function), ns / 1e9
        if phase == "read_wait":
            detail["python"][_detail_name(tag, function)] += seconds * (1 - waited)
            seconds *= waited
        detail[phase][_detail_name(tag, function)] += seconds
        if phase != "python" and section != DRAFT:  # whose clock has its calls in it
            phases[phase] += seconds
            layers[layer][phase] += seconds
    _add_parts(profiler, stage, lambda layer: (phases, layers[layer]))
    layers.pop(-1, None)
    return phases, detail, layers


def _stage(profiler, stage: str, wall_s: float, clock_s: float) -> tuple[dict, dict, dict]:
    """(phases, detail, by layer) of prefill or decode, in seconds. clock_s: of wall_s, what lay within the prefill or
    the rounds."""
    phases, detail, layers = _native(profiler, stage)
    native, timed = sum(phases.values()), 0.0
    for (found, name), ns in profiler.python.items():
        if found == stage and name in STAGE_PHASES:
            phases[name] += ns / 1e9
            timed += ns / 1e9
        elif found == stage:
            detail["python"][name] += ns / 1e9
            clock_s += ns / 1e9  # the profiler's own, behind a round
    phases["python"] = max(clock_s - native - timed, 0.0)
    phases["other"] = max(wall_s - clock_s, 0.0)
    found = {name: phases[name] for name in STAGE_PHASES}
    return found, {k: dict(v) for k, v in detail.items()}, {n: dict(v) for n, v in sorted(layers.items())}


def _weights(rows: list[dict]) -> dict:
    """All products together; the rate is that within their calls, None where there were none."""
    num_bytes, seconds = (sum(row[key] for row in rows) for key in ("bytes", "seconds"))
    return {"weight_bytes": num_bytes, "weight_gb_s": num_bytes / seconds / 1e9 if seconds else None}


def _io(counts: dict) -> dict | None:
    """The streamer's work in a stage; times in seconds, mb_per_s while it read."""
    if not counts:
        return None
    asked, busy = counts["hits"] + counts["misses"], counts["busy_s"]
    return counts | {
        "hit_rate": counts["hits"] / asked if asked else 0.0,
        "mb_per_s": counts["bytes"] / busy / 1e6 if busy else 0.0,
    }


def _distribution(rounds: list[dict]) -> dict:
    """ms per token; each token of a round took an equal part of it."""
    times = sorted(t for r in rounds for t in [(r["end"] - r["start"]) / 1e6 / r["tokens"]] * r["tokens"])
    if not times:
        return {"p50": None, "p95": None, "max": None}
    return {"p50": statistics.median(times), "p95": times[math.ceil(0.95 * len(times)) - 1], "max": times[-1]}


def profile_report(profiler, generation, wall_s: float, load_s: float, bandwidth_gb_s: float | None = None) -> dict:
    """The profile as --profile-json writes it. wall_s: seconds of the whole run, of which load_s before the generation
    could start (imports, loading), tokenizing left out.

    Top level: wall_s and phases (seconds, sum = wall_s; prefill as a whole, decode by phase), objects `prefill` and
    `decode` with the same two keys (phases without `prefill`), sub-phases in `detail` (not summed), worker time in
    `threads`.
    """
    stats, engine = generation.stats, profiler.engine
    open_s = {name: ns / 1e9 for name, ns in profiler.unfinished_ns.items()}  # when interrupted
    prefill_s = stats.prefill_s or (open_s["prefill"] if any(stage == "prefill" for stage, *_ in profiler.times) else 0)
    decode_s = stats.decode_s + open_s["decode"]
    rounds_s = sum(r["end"] - r["start"] for r in profiler.rounds) / 1e9 + open_s["decode"]
    prefill, prefill_detail, prefill_layers = _stage(profiler, "prefill", prefill_s, prefill_s)
    decode, detail, layers = _stage(profiler, "decode", decode_s, rounds_s)
    tokenize_s = stats.tokenize_s + profiler.text_ns / 1e9
    phases = decode | {"load": load_s + decode["load"], "tokenize": tokenize_s, "prefill": prefill_s, "other": 0.0}
    if profiler.engine_ns:  # the loop between rounds: stop texts, making the session
        phases["python"] += max(profiler.engine_ns / 1e9 - prefill_s - decode_s - profiler.text_ns / 1e9, 0.0)
    phases["other"] = max(wall_s - sum(phases.values()), 0.0)
    tokens = sum(r["tokens"] for r in profiler.rounds)
    num_rounds = len(profiler.rounds)
    busy = [ns / 1e9 for ns in profiler.busy_ns]
    computing = prefill_s + decode_s
    weights, spec = kernels(profiler, "decode"), stats.spec and stats.spec.report()
    report = {
        "wall_s": wall_s,
        "phases": {name: phases[name] for name in PHASES},
        "prefill": {
            "wall_s": prefill_s,
            "phases": prefill,
            "tokens": stats.prompt_tokens - stats.reused_tokens,
            "kernels": kernels(profiler, "prefill"),
            "io": _io(profiler.io.get("prefill", {})),
        },
        "decode": {
            "wall_s": decode_s,
            "phases": decode,
            "rounds": num_rounds,
            "tokens": tokens,
            "ms_per_round": decode_s * 1e3 / num_rounds if num_rounds else None,
            "tokens_per_round": tokens / num_rounds if num_rounds else None,
            "ms_per_token": _distribution(profiler.rounds),
            "kernels": weights,
            **_weights(weights),
            "io": _io(profiler.io.get("decode", {})),
        },
        "detail": {
            "prefill": prefill_detail,
            "decode": detail,
            "layers": {"prefill": prefill_layers, "decode": layers},
            "kernels_by_layer": {stage: kernels_by_layer(profiler, stage) for stage in ("prefill", "decode")},
        },
        "threads": {"busy_s": busy, "utilisation": [b / computing if computing else 0.0 for b in busy]},
        "experts": profiler.experts,
        "streamer": engine.stream.stats() if engine.stream else None,
        "spec": spec,
        "setup": setup(engine, spec),
        "page_faults": profiler.page_faults,
        "memory_gb_s": bandwidth_gb_s,
        "model": str(engine.files.path),
        "isa": engine.context.tier,
    }
    report["verdict"] = verdict(report, bandwidth_gb_s)
    return report
