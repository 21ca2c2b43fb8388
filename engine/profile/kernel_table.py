"""Which kernels took the time: products with weights, by part of the model and storage format."""

from collections import defaultdict
from collections.abc import Iterator

from ..experts.layout import expert_bytes
from ..weights.architectures import expert_matrix_name
from .recording import PARTS


def _products(profiler, stage: str) -> Iterator[tuple]:
    """(layer or -1, role, format, calls, ns, bytes) of every place that multiplies with weights."""
    for (found, section, layer, tag, function), (ns, calls) in profiler.times.items():
        if found != stage:
            continue
        if function == "moe_linear" and (section, layer, tag) in profiler.bytes:
            nbytes, fmt = profiler.bytes[section, layer, tag]
            yield layer, f"{section} {tag}" if section != tag else tag, fmt, calls, ns, nbytes * calls
        elif function == "moe_experts" and section == "mlp":
            nbytes, fmt = expert_bytes(profiler.engine, layer)
            yield layer, "experts", fmt, calls, ns, nbytes * profiler.experts_run[stage, layer]


def kernels(profiler, stage: str) -> list[dict]:
    """Seconds, bytes and GB/s by (role, format), all layers together, slowest first."""
    rows: dict = defaultdict(lambda: {"calls": 0, "seconds": 0.0, "bytes": 0})
    for _, role, fmt, calls, ns, nbytes in _products(profiler, stage):
        row = rows[role, fmt]
        row["calls"] += calls
        row["seconds"] += ns / 1e9
        row["bytes"] += nbytes
    found = [
        {"role": role, "format": fmt, **row, "gb_s": row["bytes"] / row["seconds"] / 1e9 if row["seconds"] else 0.0}
        for (role, fmt), row in rows.items()
    ]
    return sorted(found, key=lambda row: -row["seconds"])


def _expert_parts(profiler, stage: str, layer: int, calls: int) -> Iterator[tuple]:
    """gate and up, and down: one native call that times its two halves, whose formats may differ."""
    names = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    spent = profiler.parts[stage, "mlp", layer, "", "moe_experts"]
    for part, parts in names.items():
        records = [profiler.engine.files.record(expert_matrix_name(layer, 0, name)) for name in parts]
        fmt = ", ".join(dict.fromkeys(record.format for record in records))
        yield layer, f"experts {part}", fmt, calls, spent[PARTS.index(part)]


def kernels_by_layer(profiler, stage: str) -> list[dict]:
    """Calls and seconds by (layer, role, format), layer by layer; -1 stands for what lies outside of all layers.
    Experts are two rows, and what their call does besides (activations into integers) is in neither."""
    rows: dict = defaultdict(lambda: [0, 0])
    for layer, role, fmt, calls, ns, _ in _products(profiler, stage):
        parts = [(layer, role, fmt, calls, ns)]
        for *key, count, spent in _expert_parts(profiler, stage, layer, calls) if role == "experts" else parts:
            row = rows[tuple(key)]
            row[0] += count
            row[1] += spent
    return [
        {"layer": layer, "role": role, "format": fmt, "calls": calls, "seconds": ns / 1e9}
        for (layer, role, fmt), (calls, ns) in sorted(rows.items())
    ]
