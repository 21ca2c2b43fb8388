"""Options that several commands share."""

import dataclasses
from contextlib import contextmanager, nullcontext

import click

from ..config import ARITHMETICS, EXPERT_LAYOUTS, RuntimeConfig
from ..errors import ConfigError
from ._output import note, size


def model_option(command):
    return click.option(
        "--model",
        "-m",
        "model",
        metavar="DIR",
        help="Snapshot, GGUF file or Hugging Face directory (default: the small model that is shipped).",
    )(command)


def model_argument(command):
    """MODEL as an argument as well as --model; `one_model` joins them."""
    return click.argument("model_argument", metavar="[MODEL]", required=False)(model_option(command))


def one_model(option: str | None, argument: str | None) -> str | None:
    """Raises ConfigError when both are given."""
    if option is not None and argument is not None:
        raise ConfigError(f"got MODEL {argument} and --model {option}; give one of them")
    return argument if option is None else option


def json_option(command):
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(command)


def threads_option(command):
    return click.option(
        "--threads",
        "-t",
        type=click.IntRange(min=1),
        metavar="N",
        help="Worker threads (default: one per usable core).",
    )(command)


def isa_option(command):
    return click.option(
        "--isa", metavar="TIER", help="Exact CPU tier: scalar, avx2 or avx512 (default: the best this CPU runs)."
    )(command)


def runtime_options(command):
    """--model, --threads, --isa, --kv, --expert-layout, --arith, --force-tokenizer."""
    kv = click.option(
        "--kv",
        type=click.Choice(["f16", "f32"]),
        default="f16",
        show_default=True,
        help="Element type of the KV cache.",
    )
    layout = click.option(
        "--expert-layout",
        type=click.Choice(EXPERT_LAYOUTS),
        default="auto",
        show_default=True,
        help="fast: re-code experts once; compact: in every call, less memory; auto: fast if it fits.",
    )
    force = click.option(
        "--force-tokenizer", metavar="NAME", help="Pre-tokenizer of a GGUF file, when it names one that is not known."
    )
    arith = click.option(
        "--arith",
        type=click.Choice(ARITHMETICS),
        default="canonical",
        show_default=True,
        help="Activations that meet quantized weights: int8 per block, or float32 (exact products, slower).",
    )
    return model_option(threads_option(isa_option(kv(layout(arith(force(command)))))))


def route_trace_option(command):
    return click.option(
        "--route-trace", metavar="FILE", help="Record the experts and router weights of every token and layer."
    )(command)


def route_trace(loaded, path: str | None, say=note):
    """Context manager that records the routing of a run to `path`; without a path it does nothing.

    say: takes the line about it at the end.
    """
    return nullcontext() if path is None else _recording(loaded, path, say)


@contextmanager
def _recording(loaded, path: str, say):
    from ..experts.history import model_fingerprint
    from ..experts.route_trace import RouteTrace

    with RouteTrace(path, loaded.model, loaded.files.architecture, model_fingerprint(loaded.files)) as trace:
        yield
    header = trace.header
    say(f"route trace: {path}: {header.num_tokens} tokens of {header.num_layers} layers, {size(trace.num_bytes)}")


def take_runtime(options: dict) -> dict:
    """Remove the fields of RuntimeConfig from a command's options, and return them."""
    names = [field.name for field in dataclasses.fields(RuntimeConfig) if field.name in options]
    return {name: options.pop(name) for name in names}


def format_notes(loaded) -> list[str]:
    """A line for each format with parameters of its own, which a model only has by explicit choice at conversion."""
    notes = {}
    for record in loaded.files.tensors.values():
        if record.params:
            values = ", ".join(f"{name} {value}" for name, value in record.params.items())
            notes[f"format: {record.format}, {values}"] = None
    return list(notes)


def describe(loaded) -> str:
    """One line on what an engine runs with."""
    files, context = loaded.files, loaded.context
    activations = {"canonical": "int8", "float": "float32"}[context.arith]
    formats = ", ".join(dict.fromkeys(record.format for record in files.tensors.values() if len(record.shape) == 2))
    return (
        f"model: {files.path} ({files.architecture}; {formats}); tier {context.tier}, "
        f"{context.num_threads} threads, context {loaded.max_context}, "
        f"kv {loaded.options.kv} ({loaded.kv_bytes / (1 << 20):.1f} MiB), "
        f"experts {loaded.expert_layout.name} ({loaded.expert_layout.reason}), "
        f"arithmetic {context.arith} ({activations} activations)"
    )
