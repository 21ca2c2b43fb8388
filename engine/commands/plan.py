"""`millstream plan`: what a run would take and how fast it would be, before anything is loaded."""

import math

import click

from ..config import EXPERT_LAYOUTS, MAX_WINDOW_ROWS, parse_spec
from ..errors import ConfigError
from . import _options
from ._output import size, table, wrap, write, write_json


def as_text(found: dict) -> str:
    """The report for people."""
    demand, figures, layout = found["demand"], found["prediction"], found["expert_layout"]
    rows = [
        (role, size(g["nbytes"]), size(g["memory_bytes"]), ", ".join(g["formats"]))
        for role, g in found["roles"].items()
    ]
    lines = [
        f"{found['path']}: architecture {found['architecture']}; tier {found['tier']}, {found['threads']} threads",
        "",
        table(rows, ("role", "in the file", "in memory", "format")),
        "",
        f"budget: {size(found['budget_bytes'])} ({found['budget_source']})",
        f"resident: dense weights {size(found['dense_bytes'])}, keys and values of {found['positions']} positions "
        f"({found['kv']}) {size(found['kv_bytes'])}",
        f"experts: {layout['name']} ({layout['reason']}), {size(layout['bytes'])} for all",
    ]
    if found["budget_note"]:
        lines.append(found["budget_note"])
    if found["plan"]:
        parts = ", ".join(f"{role} {size(n)}" for role, n in found["plan"]["roles"].items())
        lines += [
            f"cache: {found['slots']} of {found['experts']} experts in slots of {size(found['plan']['slot_bytes'])}",
            f"plan: {size(found['plan']['planned_bytes'])}: {parts}",
        ]
    if demand["experts"]:
        lines.append(
            f"a token uses {demand['layers']} layers x {demand['top']} = {demand['experts']} experts of "
            f"{size(demand['expert_bytes'])}: {size(demand['bytes'])}"
        )
        lines.append(f"hit rate: {100 * found['hit_rate']:.1f} % ({found['hit_rate_source']})")
    if found["warning"]:
        lines.append(found["warning"])
    lines += _speeds(found, figures)
    lines += [f"assumption: {text}" for text in found["assumptions"]]
    return "\n".join([*lines, found["verdict"]]) + "\n"


def _speeds(found: dict, figures: dict) -> list[str]:
    lines = [
        f"memory: {found['memory_gb_s']:.1f} GB/s; a step reads {size(found['bytes_per_token']['total'])} of weights",
        f"a decode step behind {found['prompt_tokens']} tokens: {figures['step_ms']:.2f} ms, "
        f"{figures['loop_ms']:.2f} ms of it in the loop around the model",
    ]
    disk = found["disk"]
    if disk:
        how = "as given"
        if disk["measured"]:
            how = f"measured, {disk['depth']} {disk['mode']} requests of up to {size(disk['request_bytes'])} at a time"
        lines.append(
            f"disk: {disk['mb_s']:.0f} MB/s ({how}); {size(figures['missed_bytes_per_token'])} a token, "
            f"{figures['read_ms']:.1f} ms; bound by {figures['bound']}"
        )
    if found["recode_gb_s"]:
        lines.append(f"re-coding: {found['recode_gb_s']:.2f} GB/s, {figures['recode_ms']:.2f} ms a token")
    if found["spec"]:
        spec = found["spec"]
        lines.append(
            f"speculation: a window of {spec['rows']} rows takes {spec['window_ms']:.2f} ms; it pays from "
            f"{spec['pays_from_tokens_per_round']:.2f} tokens a round"
        )
    return lines


def _open(model: str | None, config: str | None, format_name: str | None):
    from ..planned_files import PlannedFiles
    from ..runtime import SHIPPED_MODEL
    from ..weights import open_model

    if config is None:
        if format_name is not None:
            raise ConfigError("--format does nothing without --config: the file says its formats")
        return open_model(SHIPPED_MODEL if model is None else model)
    if model is not None:
        raise ConfigError("give a model or --config, not both")
    if format_name is None:
        raise ConfigError("--config needs --format NAME (millstream kernels lists them)")
    return PlannedFiles(config, format_name)


@click.command()
@_options.model_argument
@click.option("--config", metavar="FILE", help="The config.json of a model that is not here, with --format.")
@click.option("--format", "format_name", metavar="NAME", help="Format of its matrices.")
@click.option("--ram", type=click.FloatRange(min=0, min_open=True), metavar="GIB", help="Memory of the process.")
@click.option("--ctx", type=click.IntRange(min=1), metavar="N", help="Positions (default: the model's).")
@click.option("--kv", type=click.Choice(["f16", "f32"]), default="f16", show_default=True, help="Keys and values.")
@click.option("--expert-layout", type=click.Choice(EXPERT_LAYOUTS), default="auto", show_default=True,
              help="Form of experts in memory.")  # fmt: skip
@click.option("--expert-slots", type=click.IntRange(min=1), metavar="N", help="Experts in memory.")
@click.option("--readers", type=click.IntRange(1, 64), metavar="N", help="Threads that read experts (default 4).")
@click.option("--disk", "disk_mb_s", type=click.FloatRange(min=0, min_open=True), metavar="MB/S",
              help="Disk bandwidth to assume (default: measured on the model's file, with --config on a "
              "temporary one in the current directory).")  # fmt: skip
@click.option("--prompt", type=click.IntRange(min=1), metavar="N", help="Prompt tokens (default 128, less in a short "
              "context).")  # fmt: skip
@click.option("--spec", metavar="N", help="Rows of a verify window to weigh, 2 to 8.")
@_options.threads_option
@_options.isa_option
@_options.json_option
def plan(model, model_argument, config, format_name, disk_mb_s, prompt, spec, as_json, **options):
    """Say what a run of MODEL takes and how fast it will be, from its headers and a few seconds of measuring."""
    from .. import machine_speed
    from .. import plan as planning
    from ..config import RuntimeConfig
    from ..kernels import Context

    window = 0 if spec is None else parse_spec(spec)
    if spec is not None and window in ("auto", 0, 1):
        raise ConfigError(f"--spec {spec}: a plan weighs a window of N rows; give a number from 2 to {MAX_WINDOW_ROWS}")
    if disk_mb_s is not None and not math.isfinite(disk_mb_s):
        raise ConfigError(f"--disk: got {disk_mb_s}, expected a number of MB/s")
    chosen = RuntimeConfig(**options)
    files = _open(_options.one_model(model, model_argument), config, format_name)
    context = Context(chosen.isa, chosen.threads)
    if prompt is None:
        prompt = max(1, min(128, planning.context_length(files, chosen.ctx) - 1))
    found = planning.make_report(
        files, context, chosen, prompt=prompt, window=window, disk_mb_s=disk_mb_s, measure=machine_speed
    )
    if as_json:
        write_json(found)
    else:
        write(wrap(as_text(found)))
