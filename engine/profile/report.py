"""Turns what the recorder took into phases that add up, tables, and a verdict.

Phases are those of the decode thread. `python` is what is left of prefill and decode when all native calls, drafting
and verification are taken away; `other` is what is left of the whole run: printing, and what the caller did between
tokens.
"""

import statistics
from collections import defaultdict

from ..experts.layout import expert_bytes

STEP_PHASES = (
    "embed", "attention", "router", "expert_gate_up", "quantize", "expert_down", "read_wait", "head", "sample",
    "draft", "verify", "python",
)  # fmt: skip
PHASES = ("load", "tokenize", "prefill", *STEP_PHASES, "other")
_MLP_FUNCTIONS = {
    "moe_route": "router", "moe_route_plan": "router", "moe_streamer_next": "read_wait",
    "moe_streamer_request": "read_wait", "moe_streamer_use": "read_wait", "moe_encode": "load",
    "moe_experts_combine": "expert_down", "moe_check_finite": "expert_down", "moe_add_gated": "expert_down",
    "moe_rmsnorm": "router",
}  # fmt: skip
DISK_BOUND, PYTHON_BOUND, MEMORY_BOUND = 0.3, 0.15, 0.6  # shares of the decode time; of the bandwidth


def _phase(section: str, tag: str, function: str) -> str:
    if section == "mlp":
        if tag in ("router", "shared gate"):
            return "router"
        if tag:
            return "expert_down" if tag.endswith("down") else "expert_gate_up"
        return _MLP_FUNCTIONS.get(function, "expert_gate_up")
    if section:
        return section
    return "sample" if function == "moe_sample" else "python"


def _detail_name(tag: str, function: str) -> str:
    return tag or function.removeprefix("moe_")


def _stage(profiler, stage: str, wall_s: float) -> tuple[dict, dict, dict]:
    """(phases, detail, by layer) of prefill or decode, in seconds."""
    phases, detail, layers = (
        defaultdict(float),
        defaultdict(lambda: defaultdict(float)),
        defaultdict(lambda: defaultdict(float)),
    )
    native = 0.0
    for (found, section, layer, tag, function), (ns, _) in profiler.times.items():
        if found != stage:
            continue
        phase = _phase(section, tag, function)
        native += ns / 1e9 if section or function == "moe_sample" else 0.0
        if phase == "python":
            continue
        for table in (phases, layers[layer]):
            table[phase] += ns / 1e9
        detail[phase][_detail_name(tag, function)] += ns / 1e9
    for (found, section, layer), (quantize, _, down) in profiler.parts.items():
        if found != stage:
            continue
        for table in (phases, layers[layer]):
            # Inside moe_experts, whose whole time is under expert_gate_up so far; dense products under their section.
            table["expert_gate_up"] -= down / 1e9
            table["expert_down"] += down / 1e9
            table["quantize"] += quantize / 1e9
            table["expert_gate_up" if section == "mlp" else section] -= quantize / 1e9
    for (found, phase), ns in profiler.python.items():
        if found == stage:
            phases[phase] += ns / 1e9
    named = sum(profiler.python[stage, p] / 1e9 for p in ("draft", "verify"))
    phases["python"] = max(wall_s - native - named, 0.0)
    layers.pop(-1, None)
    found = {name: phases.get(name, 0.0) for name in STEP_PHASES}
    if phases.get("load"):
        found["load"] = phases["load"]  # experts re-coded when they were first used
    return found, {k: dict(v) for k, v in detail.items()}, {n: dict(v) for n, v in sorted(layers.items())}


def kernels(profiler, stage: str) -> list[dict]:
    """Seconds, bytes and GB/s by (role, format), all layers together, slowest first."""
    rows: dict = defaultdict(lambda: {"calls": 0, "seconds": 0.0, "bytes": 0})
    for (found, section, layer, tag, function), (ns, calls) in profiler.times.items():
        if found != stage:
            continue
        if (section, layer, tag) in profiler.bytes and function == "moe_linear":
            nbytes, fmt = profiler.bytes[section, layer, tag]
            row = rows[f"{section} {tag}" if section != tag else tag, fmt]
            row["bytes"] += nbytes * calls
        elif function == "moe_experts":
            nbytes, fmt = expert_bytes(profiler.engine, layer)
            row = rows["experts", fmt]
            row["bytes"] += nbytes * profiler.experts_run[stage, layer]
        else:
            continue
        row["calls"] += calls
        row["seconds"] += ns / 1e9
    found = [
        {"role": role, "format": fmt, **row, "gb_s": row["bytes"] / row["seconds"] / 1e9 if row["seconds"] else 0.0}
        for (role, fmt), row in rows.items()
    ]
    return sorted(found, key=lambda row: -row["seconds"])


def _distribution(rounds: list[dict]) -> dict:
    times = sorted((r["end"] - r["start"]) / 1e6 / r["tokens"] for r in rounds)
    if not times:
        return {"p50": None, "p95": None, "max": None}
    return {
        "p50": statistics.median(times),
        "p95": times[min(len(times) - 1, int(0.95 * len(times)))],
        "max": times[-1],
    }


def verdict(profile: dict, bandwidth_gb_s: float | None) -> str:
    """What bounds decoding, and what to change."""
    decode = profile["decode"]
    wall, phases = decode["wall_s"], decode["phases"]
    if not wall:
        return "nothing was decoded"
    share = {name: seconds / wall for name, seconds in phases.items()}
    if share["read_wait"] > DISK_BOUND:
        return (
            f"bound by the disk: {share['read_wait']:.0%} of decoding waits for experts; give more memory (--ram), or "
            "convert to a smaller format"
        )
    if share["python"] + share["draft"] > PYTHON_BOUND:
        return (
            f"bound by Python: {share['python'] + share['draft']:.0%} of decoding; the model is small, --spec auto "
            "makes several tokens per step"
        )
    weights = sum(row["bytes"] for row in decode["kernels"])
    seconds = sum(row["seconds"] for row in decode["kernels"])
    rate = weights / seconds / 1e9 if seconds else 0.0
    if bandwidth_gb_s and rate > MEMORY_BOUND * bandwidth_gb_s:
        return (
            f"bound by memory bandwidth: weights come at {rate:.1f} GB/s, this machine reads {bandwidth_gb_s:.1f}; a "
            "smaller format or --spec auto helps, more threads do not"
        )
    largest = max(("attention", "expert_gate_up", "expert_down", "head", "router"), key=lambda p: share[p])
    return (
        f"bound by compute: {largest} takes {share[largest]:.0%}, weights come at {rate:.1f} GB/s; more threads "
        "(--threads) help while cores are free, --spec auto shares the work of a step"
    )


def profile_report(profiler, generation, wall_s: float, load_s: float, bandwidth_gb_s: float | None = None) -> dict:
    """The profile as --profile-json writes it. wall_s: seconds of the whole run, of which load_s before the generation
    could start (imports, loading), tokenizing left out.

    Top level: wall_s and phases (seconds, sum = wall_s; prefill as a whole, decode by phase), objects `prefill` and
    `decode` with the same two keys, sub-phases in `detail` (not summed), worker time in `threads`.
    """
    stats, engine = generation.stats, profiler.engine
    prefill, prefill_detail, _ = _stage(profiler, "prefill", stats.prefill_s)
    decode, detail, layers = _stage(profiler, "decode", stats.decode_s)
    phases = {"load": load_s, "tokenize": stats.tokenize_s, "prefill": stats.prefill_s, **decode}
    phases["load"] += decode.get("load", 0.0)
    phases["other"] = max(wall_s - sum(phases.values()), 0.0)
    tokens = sum(r["tokens"] for r in profiler.rounds)
    num_rounds = len(profiler.rounds)
    busy = [ns / 1e9 for ns in profiler.busy_ns]
    computing = stats.prefill_s + stats.decode_s
    report = {
        "wall_s": wall_s,
        "phases": {name: phases.get(name, 0.0) for name in PHASES},
        "prefill": {"wall_s": stats.prefill_s, "phases": prefill, "tokens": stats.prompt_tokens - stats.reused_tokens},
        "decode": {
            "wall_s": stats.decode_s,
            "phases": decode,
            "rounds": num_rounds,
            "tokens": tokens,
            "ms_per_round": stats.decode_s * 1e3 / num_rounds if num_rounds else None,
            "tokens_per_round": tokens / num_rounds if num_rounds else None,
            "ms_per_token": _distribution(profiler.rounds),
            "kernels": kernels(profiler, "decode"),
        },
        "detail": {"prefill": prefill_detail, "decode": detail, "layers": layers},
        "threads": {"busy_s": busy, "utilisation": [b / computing if computing else 0.0 for b in busy]},
        "experts": profiler.experts,
        "streamer": engine.stream.stats() if engine.stream else None,
        "spec": stats.spec and stats.spec.report(),
        "memory_gb_s": bandwidth_gb_s,
        "model": str(engine.files.path),
        "isa": engine.context.tier,
    }
    report["prefill"]["kernels"] = kernels(profiler, "prefill")
    report["verdict"] = verdict(report, bandwidth_gb_s)
    return report


def _table(title: str, wall_s: float, phases: dict, per: int, unit: str) -> list[str]:
    lines = [f"{title}: {wall_s:.3f} s"]
    for name, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        if seconds >= 0.0005 * wall_s:
            each = f"{seconds * 1e3 / per:10.3f} ms/{unit}" if per else ""
            lines.append(f"  {name:16}{seconds:9.3f} s {seconds / wall_s if wall_s else 0:6.1%}{each}")
    return lines


def format_report(report: dict, by_layer: bool = False, parts: tuple = ("run", "prefill", "decode")) -> str:
    """The profile as text for a terminal. parts: what of it; the verdict is one on decoding."""
    decode, prefill = report["decode"], report["prefill"]
    lines = _table("profile: whole run", report["wall_s"], report["phases"], 0, "") if "run" in parts else []
    if "prefill" in parts:
        lines += _table(f"prefill of {prefill['tokens']} tokens", prefill["wall_s"], prefill["phases"], 0, "")
    if decode["rounds"] and "decode" in parts:
        title = f"decode of {decode['tokens']} tokens in {decode['rounds']} rounds"
        lines += _table(title, decode["wall_s"], decode["phases"], decode["tokens"], "token")
        spread = decode["ms_per_token"]
        lines.append(f"  ms per token: p50 {spread['p50']:.3f}, p95 {spread['p95']:.3f}, max {spread['max']:.3f}")
        lines.append("weights read while decoding:")
        for row in decode["kernels"]:
            lines.append(
                f"  {row['role']:28}{row['format']:12}{row['seconds']:9.3f} s{row['bytes'] / 1e9:9.2f} GB"
                f"{row['gb_s']:8.2f} GB/s"
            )
    if by_layer:
        names = [p for p in STEP_PHASES if any(p in row for row in report["detail"]["layers"].values())]
        lines.append("decode by layer, ms")
        lines.append("  layer" + "".join(f"{p:>16}" for p in names))
        for layer, row in report["detail"]["layers"].items():
            lines.append(f"  {layer:5}" + "".join(f"{row.get(p, 0) * 1e3:16.2f}" for p in names))
    use = ", ".join(f"{u:.0%}" for u in report["threads"]["utilisation"])
    lines.append(f"threads busy: {use}")
    if "decode" in parts:
        lines.append(f"verdict: {report['verdict']}")
    return "\n".join(lines)
