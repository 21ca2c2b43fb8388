"""`millstream inspect`: what a model directory holds."""

import click

from . import _options
from ._output import note, size, table, write, write_json

# What the text form shows of config.json; --json has all of it.
CONFIG_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
               "num_experts", "num_experts_per_tok", "norm_topk_prob", "vocab_size", "max_position_embeddings",
               "rope_theta", "tie_word_embeddings")  # fmt: skip


def _roles(found: dict) -> str:
    rows = [
        (role, group["tensors"], group["parameters"], size(group["nbytes"]), f"{group['bits_per_weight']:.2f}",
         ", ".join(group["formats"]), ", ".join(group["layouts"]))
        for role, group in found["roles"].items()
    ]  # fmt: skip
    return table(rows, ("role", "tensors", "parameters", "bytes", "bits/weight", "format", "stored as"))


def _layers(found: dict) -> str:
    """One line per run of layers with equal formats."""
    runs: list[list] = []
    for layer, roles in found["layers"].items():
        text = ", ".join(f"{role} {'+'.join(formats)}" for role, formats in roles.items())
        if runs and runs[-1][2] == text:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer, text])
    return "\n".join(f"layers {a}-{b}: {text}" if a != b else f"layer {a}: {text}" for a, b, text in runs)


def _tokenizer(found: dict) -> str:
    facts = found["tokenizer"]
    if facts is None:
        return "tokenizer: none"
    if "error" in facts:
        return f"tokenizer: {facts['error']}"
    eos = ", ".join(map(str, facts["eos_ids"])) or "none"
    return (
        f"tokenizer: {facts['vocab_size']} ids (+ {facts['padding_ids']} padding), "
        f"bos {facts['bos_id'] if facts['bos_id'] is not None else 'none'}"
        f"{' (added)' if facts['adds_bos'] else ''}, eos {eos}, "
        f"chat template: {'yes' if facts['chat_template'] else 'no'}"
    )


def _metadata(facts: dict) -> str:
    """One line per key; long texts cut."""
    lines = [f"GGUF version {facts['version']}, alignment {facts['alignment']}, {len(facts['metadata'])} keys:"]
    for key, value in facts["metadata"].items():
        text = f"{value['items']} items" if isinstance(value, dict) else repr(value)
        lines.append(f"  {key} = {text if len(text) <= 80 else text[:77] + '...'}")
    return "\n".join(lines)


def as_text(found: dict) -> str:
    """The report for people."""
    per_token = found["bytes_per_token"]
    config = [f"{key} {found['config'][key]}" for key in CONFIG_KEYS if found["config"].get(key) is not None]
    lines = [
        f"{found['path']}: {found['kind']}, architecture {found['architecture']}",
        "config: " + ", ".join(config),
        f"parameters: {found['parameters']:,} ({found['active_parameters']:,} active per token), "
        f"{found['bits_per_weight']:.2f} bits per weight",
        f"bytes: {size(found['file_bytes'])} in {len(found['files'])} files, "
        f"{size(found['memory_bytes'])} in memory",
        f"read per token: {size(per_token['total'])} = {size(per_token['dense'])} dense + "
        f"{size(per_token['active_experts'])} active experts",
        _tokenizer(found),
        "",
        _roles(found),
        "",
        _layers(found),
    ]  # fmt: skip
    if found["gguf"]:
        lines += ["", _metadata(found["gguf"])]
    return "\n".join(lines) + "\n"


def _verify(files) -> int:
    from ._progress import Meter

    with Meter("verify") as meter:
        return files.verify(progress=lambda p: meter.update(p.done_bytes, p.total_bytes, p.name))


@click.command()
@click.argument("path")
@click.option("--verify", is_flag=True, help="Read every byte: checksums where there are any, all scales.")
@_options.json_option
def inspect(path, verify, as_json):
    """Show config, formats, sizes and tokenizer of the model in PATH."""
    from ..inspect import inspect_model
    from ..kernels import Context
    from ..weights import open_model

    context = Context(num_threads=1)
    files = open_model(path)
    found = inspect_model(files, context)
    found["verified_bytes"] = _verify(files) if verify else None
    if as_json:
        write_json(found)
    else:
        write(as_text(found))
        if verify:
            what = "all checksums match" if files.kind == "snapshot" else "all values and scales are finite"
            note(f"verified: {size(found['verified_bytes'])}, {what}")
