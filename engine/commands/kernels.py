"""`millstream kernels`: which table every (format or layout, tier) uses."""

import click

from . import _options
from ._output import table, write, write_json


def _cell(entry: dict) -> str:
    own = "own" if entry["same_as"] is None else f"= {entry['same_as']}"
    return own + (", tile" if entry.get("tile") else "")


def _no_tile_lines(entries: list[dict]) -> list[str]:
    """A line per reason, with the layouts it holds for on each tier."""
    found: dict[str, dict[str, list[str]]] = {}
    for entry in entries:
        if entry.get("no_tile"):
            found.setdefault(entry["no_tile"], {}).setdefault(entry["name"], []).append(entry["tier"])
    lines = []
    for reason, layouts in found.items():
        tiers: dict[str, list[str]] = {}
        for name, where in layouts.items():
            tiers.setdefault(", ".join(where), []).append(name)
        lines += [f"no tile on {where}: {', '.join(names)}: {reason}" for where, names in tiers.items()]
    return lines


def _rows(tables, kind: str, more) -> list[dict]:
    """more(table) -> what this kind of table has besides."""
    return [
        {"kind": kind, "name": t.name, "tier": t.tier, "same_as": t.same_as, "why": t.why} | more(t) for t in tables
    ]


@click.command()
@_options.json_option
def kernels(as_json):
    """Show the kernel of every storage format and compute layout on every CPU tier.

    "own" is code written for that tier (on the scalar tier: portable C); "= avx2" reuses that tier's on purpose, with
    the reason below. "tile": a kernel of its own for more than eight tokens; where there is none, the reason is below,
    too.
    """
    from .. import kernels as native

    layouts = {t.name: native.text(t.cdata.layout) for t in native.formats() if not t.same_as}
    entries = _rows(native.formats(), "format", lambda t: {"layout": layouts[t.name]})
    entries += _rows(
        native.layouts(), "layout", lambda t: {"tile": native.has_tile(t), "no_tile": native.no_tile_reason(t)}
    )
    tiers = [
        {"tier": name, "supported": ok, "missing": missing, "reason": native.tier_reason(missing)}
        for name, ok, missing in native.tiers()
    ]
    if as_json:
        write_json({"tiers": tiers, "kernels": entries})
        return
    names = [tier["tier"] for tier in tiers]
    # A build with an emulated tier lists it, too.
    names += [name for name in dict.fromkeys(entry["tier"] for entry in entries) if name not in names]
    by_cell = {(e["kind"], e["name"], e["tier"]): e for e in entries}
    rows, reasons = [], {}
    for kind, name in dict.fromkeys((entry["kind"], entry["name"]) for entry in entries):
        cells = [by_cell[kind, name, tier] for tier in names]
        rows.append(
            (
                kind,
                name,
                cells[0].get("layout", ""),
                *map(_cell, cells),
            )
        )
        reasons |= {f"{kind} {name} on {c['tier']} = {c['same_as']}: {c['why']}": None for c in cells if c["same_as"]}
    lines = [table(rows, ("kind", "name", "layout", *names)), ""]
    for tier in tiers:
        state = "runs here" if tier["supported"] else f"not used: this CPU has no {tier['missing']}"
        lines.append(f"tier {tier['tier']}: {state}" + (f" ({tier['reason']})" if tier["reason"] else ""))
    notes = [*reasons, *_no_tile_lines(entries)]
    write("\n".join([*lines, "", *notes] if notes else lines) + "\n")
