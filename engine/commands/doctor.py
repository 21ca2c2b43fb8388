"""`millstream doctor`: is this machine ready, and what will the engine use of it?"""

import click

from . import _options
from ._output import size, table, wrap, write, write_json


def _tiers(found: dict) -> list[str]:
    lines = []
    for tier in found["tiers"]:
        state = "runs here" if tier["supported"] else f"not used: this CPU has no {tier['missing']}"
        state += f" ({tier['reason']})" if tier["reason"] else ""
        forced = f" (forced by {found['tier_forced_by']})" if found["tier_forced_by"] else ""
        used = f"  <- in use{forced}" if tier["tier"] == found["tier"] else ""
        lines.append(f"  {tier['tier']}: {state}{used}")
    return [*lines, f"  {found['machine_reason']}"] if found["machine_reason"] else lines


def _memory(memory: dict) -> list[str]:
    lines = [
        f"memory: {size(memory['available_bytes'])} usable; MemAvailable {size(memory['mem_available_bytes'])} "
        f"of {size(memory['total_bytes'])}"
    ]
    for limit in memory["limits"]:
        lines.append(
            f"  cgroup {limit['cgroup']} (v{limit['version']}, {limit['setting']}): "
            f"limit {size(limit['limit_bytes'])}, in use {size(limit['usage_bytes'])}, "
            f"of it droppable {size(limit['reclaimable_bytes'])}"
        )
    return lines if memory["limits"] else [*lines, "  no cgroup limit"]


def as_text(found: dict) -> str:
    """The report for people."""
    rows = [
        (
            f["format"],
            f["layout"],
            f["codec"],
            f["kernel"],
            f["parity"],
            f"{f['gb_per_s']:.1f}",
            f"{f['compact_gb_per_s']:.1f}",
        )
        for f in found["formats"]
    ]
    shipped = found["shipped_model"]
    lines = [
        f"millstream {found['version']}, Python {found['python']}, {found['machine']}",
        f"CPU: {found['cpu']}; {' '.join(found['features'])}",
        "tiers:",
        *_tiers(found),
        f"threads: {found['threads']['count']} ({found['threads']['reason']})",
        *_memory(found["memory"]),
        *(check["line"] for check in found["checks"]),
        f"shipped model: {'ok' if shipped['ok'] else 'NOT USABLE'} ({shipped['path']})",
        "",
        table(rows, ("format", "layout", "codec", "kernel", "against scalar", "GB/s", "compact GB/s")),
        "GB/s: bytes of weights that one thread multiplies with one token, strips and compact storage rows, in cache",
        "",
        *(f"problem: {problem}" for problem in found["problems"]),
        *([] if found["problems"] else ["no problems found"]),
    ]
    return "\n".join(lines) + "\n"


@click.command()
@click.option(
    "--model", "-m", metavar="FILE", help="Measure the disk that this model is on (default: a temporary file)."
)
@_options.isa_option
@_options.json_option
@click.pass_context
def doctor(click_context, model, isa, as_json):
    """Check CPU, threads, limits, disk, kernels and the shipped model. Exit code 1 when something is wrong."""
    from ..doctor import examine

    found = examine(model=model, isa=isa)
    if as_json:
        write_json(found)
    else:
        write(wrap(as_text(found)))
    if found["problems"]:
        click_context.exit(1)
