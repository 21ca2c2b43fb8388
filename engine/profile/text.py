"""The profile as text for a terminal, from what profile_report returned."""

from ..spec import describe
from .report import STAGE_PHASES


def _table(title: str, wall_s: float, phases: dict, per: int, unit: str) -> list[str]:
    lines = [f"{title}: {wall_s:.3f} s"]
    for name, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        if seconds >= 0.0005 * wall_s:
            each = f"{seconds * 1e3 / per:10.3f} ms/{unit}" if per else ""
            lines.append(f"  {name:16}{seconds:9.3f} s {seconds / wall_s if wall_s else 0:6.1%}{each}")
    return lines


def _io(io: dict | None) -> list[str]:
    if io is None:
        return []
    return [
        f"  experts from disk: {io['bytes'] / 1e6:.1f} MB, {io['mb_per_s']:.0f} MB/s while reading, "
        f"{io['hit_rate']:.1%} hits; service {io['service_s']:.3f} s, wait {io['wait_s']:.3f} s"
    ]


def _prefill(prefill: dict) -> list[str]:
    title = f"prefill of {prefill['tokens']} tokens"
    return _table(title, prefill["wall_s"], prefill["phases"], 0, "") + _io(prefill["io"])


def _spec(decode: dict, spec: dict | None) -> list[str]:
    if spec is None:
        return []
    accepted = describe.acceptance(spec)
    each = f"{decode['ms_per_round']:.3f} ms, {decode['tokens_per_round']:.2f} tokens each"
    positions = f"drafts accepted by position: {accepted}" if accepted else "no drafts"
    return [f"  rounds: {each}; {describe.gain(spec)}", f"  {positions}"]


def _decode(decode: dict, spec: dict | None) -> list[str]:
    title = f"decode of {decode['tokens']} tokens in {decode['rounds']} rounds"
    lines = _table(title, decode["wall_s"], decode["phases"], decode["tokens"], "token")
    spread = decode["ms_per_token"]
    lines.append(f"  ms per token: p50 {spread['p50']:.3f}, p95 {spread['p95']:.3f}, max {spread['max']:.3f}")
    lines += _spec(decode, spec) + _io(decode["io"])
    rate = f", {decode['weight_gb_s']:.2f} GB/s" if decode["weight_gb_s"] is not None else ""
    lines.append(f"weights read while decoding: {decode['weight_bytes'] / 1e9:.2f} GB{rate}")
    for row in decode["kernels"]:
        lines.append(
            f"  {row['role']:28}{row['format']:12}{row['seconds']:9.3f} s{row['bytes'] / 1e9:9.2f} GB"
            f"{row['gb_s']:8.2f} GB/s"
        )
    return lines


def _grid(title: str, rows: dict, columns: list[str]) -> list[str]:
    """rows: label -> column -> seconds."""
    widths = [max(8, len(name) + 2) for name in columns]
    lines = [title, "  layer" + "".join(f"{name:>{w}}" for name, w in zip(columns, widths, strict=True))]
    for label, row in rows.items():
        cells = (f"{row[name] * 1e3:.2f}" if name in row else "-" for name in columns)
        lines.append(f"  {label:>5}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    return lines


def _layers(report: dict, stage: str) -> list[str]:
    """What each layer took: by phase, then by product and format."""
    detail = report["detail"]
    layers, kernels = detail["layers"][stage], {}
    for row in detail["kernels_by_layer"][stage]:
        role = row["role"].removeprefix("attention ").removeprefix("mlp ").removeprefix("head ")
        name = f"{role.replace(' ', '.')}:{row['format'].replace(', ', '+')}"
        kernels.setdefault("-" if row["layer"] < 0 else row["layer"], {})[name] = row["seconds"]
    phases = [p for p in STAGE_PHASES if any(p in row for row in layers.values())]
    products = list(dict.fromkeys(name for row in kernels.values() for name in row))
    lines = _grid(f"{stage} by layer, ms", layers, phases)
    return lines + _grid(f"{stage} by layer, product and format, ms", kernels, products)


def format_report(report: dict, by_layer: bool = False, parts: tuple = ("run", "prefill", "decode")) -> str:
    """The profile as text for a terminal. parts: what of it; the verdict is one on decoding, where there was any."""
    decode = report["decode"]
    lines = _table("profile: whole run", report["wall_s"], report["phases"], 0, "") if "run" in parts else []
    if "prefill" in parts:
        lines += _prefill(report["prefill"])
    if decode["rounds"] and "decode" in parts:
        lines += _decode(decode, report["spec"])
    for stage in ("prefill", "decode"):
        if by_layer and stage in parts and report["detail"]["layers"][stage]:
            lines += _layers(report, stage)
    use = ", ".join(f"{u:.0%}" for u in report["threads"]["utilisation"])
    lines.append(f"threads busy: {use}")
    if "decode" in parts or not decode["rounds"]:
        lines.append(f"verdict: {report['verdict']}")
    return "\n".join(lines)
