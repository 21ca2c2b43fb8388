"""`millstream kernels`: which table every (format or layout, tier) uses."""

import click

from . import _options
from ._output import table, write, write_json


def _rows(tables, kind: str) -> list[dict]:
    return [
        {"kind": kind, "name": t.name, "tier": t.tier, "same_as": t.same_as, "why": t.why} for t in tables
    ]  # fmt: skip


@click.command()
@_options.json_option
def kernels(as_json):
    """Show the kernel of every storage format and compute layout on every CPU tier.

    "own" is code written for that tier; "= scalar" reuses another tier's on purpose, with the reason below.
    """
    from .. import kernels as native

    entries = _rows(native.formats(), "format") + _rows(native.layouts(), "layout")
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
        rows.append((kind, name, *("own" if c["same_as"] is None else f"= {c['same_as']}" for c in cells)))
        reasons |= {f"{kind} {name} on {c['tier']} = {c['same_as']}: {c['why']}": None for c in cells if c["same_as"]}
    lines = [table(rows, ("kind", "name", *names)), ""]
    for tier in tiers:
        state = "runs here" if tier["supported"] else f"not used: this CPU has no {tier['missing']}"
        lines.append(f"tier {tier['tier']}: {state}" + (f" ({tier['reason']})" if tier["reason"] else ""))
    write("\n".join([*lines, "", *reasons] if reasons else lines) + "\n")
