"""`millstream kernels`: which table every (format or layout, tier) uses."""

import click

from . import _options
from ._output import table, write, write_json


def _rows(tables, kind: str, layouts: dict[str, str] | None = None) -> list[dict]:
    """layout: the compute layout that a format is re-coded to; its own line shows the kernel."""
    return [
        {"kind": kind, "name": t.name, "tier": t.tier, "same_as": t.same_as, "why": t.why}
        | ({"layout": layouts[t.name]} if layouts else {})
        for t in tables
    ]


@click.command()
@_options.json_option
def kernels(as_json):
    """Show the kernel of every storage format and compute layout on every CPU tier.

    "own" is code written for that tier; "= scalar" reuses another tier's on purpose, with the reason below.
    """
    from .. import kernels as native

    layouts = {t.name: native.text(t.cdata.layout) for t in native.formats() if not t.same_as}
    entries = _rows(native.formats(), "format", layouts) + _rows(native.layouts(), "layout")
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
                *("own" if c["same_as"] is None else f"= {c['same_as']}" for c in cells),
            )
        )
        reasons |= {f"{kind} {name} on {c['tier']} = {c['same_as']}: {c['why']}": None for c in cells if c["same_as"]}
    lines = [table(rows, ("kind", "name", "layout", *names)), ""]
    for tier in tiers:
        state = "runs here" if tier["supported"] else f"not used: this CPU has no {tier['missing']}"
        lines.append(f"tier {tier['tier']}: {state}" + (f" ({tier['reason']})" if tier["reason"] else ""))
    write("\n".join([*lines, "", *reasons] if reasons else lines) + "\n")
