"""`millstream convert`: a Hugging Face directory or a GGUF file to a snapshot."""

import json
import signal
import sys
from contextlib import contextmanager

import click

from ..errors import ConfigError
from . import _options
from ._output import note, size, write, write_json


def check_side_files(src) -> None:
    """Refuse a source whose tokenizer or sampler defaults `generate` would refuse later. Raises EngineError."""
    from pathlib import Path

    from ..sampler import SamplingParams
    from ..tokenizer import Tokenizer

    try:
        json.loads((Path(src) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # what is no model directory at all is the converter's to refuse
    Tokenizer.from_dir(src)
    defaults = Path(src) / "generation_config.json"
    if defaults.is_file():
        SamplingParams.from_generation_config(json.loads(defaults.read_text(encoding="utf-8")))


@contextmanager
def ended_by_sigterm():
    """SIGTERM unwinds like Ctrl-C, so that the half-written directory is removed; exit code 143."""

    def end(*_):
        note("terminated")
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _format_name(_context, _option, value: str | None) -> str | None:
    """Formats are written in lower case here and in capitals elsewhere; both are understood."""
    return value.lower() if value else value


def format_option(name: str, role: str, **options):
    return click.option(name, role, metavar="NAME", callback=_format_name, **options)


def refuse_given(click_context, formats: dict, src) -> None:
    """Format options do nothing for a GGUF, whose numbers stay what they are. Raises ConfigError."""
    given = [
        option.opts[0]
        for option in click_context.command.params
        if option.name in formats
        and click_context.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: {src} is a GGUF file, which is converted without requantizing; leave the option out, "
            "or convert the original checkpoint"
        )


def is_gguf_file(src) -> bool:
    from pathlib import Path

    from ..weights.gguf_header import is_gguf

    return Path(src).is_file() and (str(src).endswith(".gguf") or is_gguf(Path(src)))


def report(done, as_json: bool) -> None:
    """What was written, for people or programs."""
    roles = ", ".join(f"{role} {name}" for role, name in done.formats.items())
    how = f"{done.num_threads} threads, layout {done.layout}"
    note(f"converted {done.num_tensors} tensors in {done.seconds:.1f} s, {how}: {roles}")
    if as_json:
        write_json({
            "path": str(done.path),
            "source_bytes": done.source_bytes,
            "snapshot_bytes": done.snapshot_bytes,
            "tensors": done.num_tensors,
            "seconds": done.seconds,
            "formats": done.formats,
            "layout": done.layout,
            "threads": done.num_threads,
        })  # fmt: skip
    else:
        write(f"{done.path}: {size(done.snapshot_bytes)} from {size(done.source_bytes)}\n")


@click.command()
@click.argument("src", metavar="SRC")
@click.argument("out", metavar="OUT")
@format_option("--format", "experts", default="q8_0", show_default=True, help="Format of the experts.")
@format_option("--gate-up-format", "gate_up", help="Experts' gate and up, if not --format.")
@format_option("--down-format", "down", help="Experts' down, if not --format.")
@format_option("--dense-format", "dense", default="f16", show_default=True, help="Everything else.")
@format_option("--embed-format", "embed", help="Embedding, if not --dense-format.")
@format_option("--head-format", "head", help="Output head, if not --dense-format.")
@click.option("--layout", type=click.Choice(["auto", "storage", "compute"]), default="auto", show_default=True,
              help="Store the format's rows, or what kernels read; auto: that where it is hardly larger.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--force-tokenizer", metavar="NAME", help="Pre-tokenizer of a GGUF that names one that is not known.")
@_options.threads_option
@_options.json_option
@click.pass_context
def convert(click_context, src, out, layout, force, force_tokenizer, threads, as_json, **formats):
    """Convert SRC, a Hugging Face directory or a GGUF file, to a snapshot in OUT.

    Formats: see `millstream kernels`. Routers and norms stay float32. A GGUF keeps its formats, bit for bit.
    """
    from converters.hf import RoleFormats
    from converters.hf import convert as convert_hf

    from ._progress import Meter

    if is_gguf_file(src):
        from converters.gguf import convert_gguf

        refuse_given(click_context, formats, src)
        with ended_by_sigterm(), Meter("convert") as meter:
            done = convert_gguf(
                src,
                out,
                layout=layout,
                threads=threads,
                force=force,
                force_tokenizer=force_tokenizer,
                progress=lambda p: meter.update(p.done_bytes, p.total_bytes, p.name),
            )
        report(done, as_json)
        return
    if force_tokenizer is not None:
        raise ConfigError(f"--force-tokenizer {force_tokenizer}: only for GGUF files; {src} has a tokenizer of its own")
    given = click_context.get_parameter_source("experts") is click.core.ParameterSource.COMMANDLINE
    if given and formats["gate_up"] and formats["down"]:
        raise ConfigError(
            f"--format {formats['experts']} does nothing beside --gate-up-format and --down-format; leave it out"
        )
    check_side_files(src)
    with ended_by_sigterm(), Meter("convert") as meter:
        done = convert_hf(
            src,
            out,
            formats=RoleFormats(**formats),
            layout=layout,
            threads=threads,
            force=force,
            progress=lambda p: meter.update(p.done_bytes, p.total_bytes, p.name),
        )
    report(done, as_json)
