"""`millstream perplexity`: how well a model predicts a text."""

import time

import click

from ..errors import ConfigError
from . import _options, _streaming
from ._output import decode_utf8, note, read_text_file, write, write_json


def _measure(loaded, text: str, ctx: int, stride: int | None, score: str):
    """Return (perplexity.Result, token ids of the text)."""
    from .. import perplexity as ppl
    from ._progress import Meter

    ids, num_lead = ppl.build_sequence(loaded.tokenizer, text, score)
    windows = ppl.plan_windows(len(ids), ctx, stride, score)
    bos = loaded.tokenizer.bos_id if score == "half" and loaded.tokenizer.adds_bos else None
    note(f"perplexity: {len(ids) - num_lead} tokens, {len(windows)} windows of {ctx}, scoring {score}")
    with Meter("perplexity", "tokens") as meter:

        def progress(done, total, so_far):
            meter.update(done, total, f"so far {so_far.perplexity:.4f}")

        return ppl.evaluate(loaded, ids, windows, bos_each_window=bos, progress=progress), ids[num_lead:]


def report(loaded, result, token_bytes: int, data: bytes, settings: dict, seconds: float) -> dict:
    """The --json object."""
    return {
        "perplexity": result.perplexity,
        "perplexity_error": result.perplexity_error,
        "bits_per_byte": result.bits_per_byte,
        "bits": result.bits,
        "scored_tokens": result.num_scored_tokens,
        "scored_bytes": result.num_scored_bytes,
        "windows": result.num_windows,
        "text_bytes": len(data),
        "text_bytes_as_tokens": token_bytes,
        **settings,
        "model": str(loaded.files.path),
        "architecture": loaded.files.architecture,
        "isa": loaded.context.tier,
        "threads": loaded.context.num_threads,
        "kv": loaded.options.kv,
        "arith": loaded.context.arith,
        "expert_layout": loaded.expert_layout.name,
        "expert_layout_reason": loaded.expert_layout.reason,
        "seconds": seconds,
        "tokens_per_second": result.num_scored_tokens / seconds,
    }


@click.command()
@_options.runtime_options
@_streaming.options
@click.option("--text", "text_file", required=True, metavar="FILE", help="The text, UTF-8.")
@click.option("--ctx", type=click.IntRange(min=2), metavar="N", help="Tokens of a window (default: 512).")
@click.option("--stride", type=click.IntRange(min=1), metavar="N",
              help="Start a window every N tokens, score its last N (default: half: ctx, all: ctx / 2).")  # fmt: skip
@click.option("--score", type=click.Choice(["half", "all"]), default="half", show_default=True,
              help="half: the second half of each window, as llama-perplexity; all: every byte once.")  # fmt: skip
@_options.route_trace_option
@_options.json_option
def perplexity(model, text_file, ctx, stride, score, route_trace, as_json, **runtime):
    """Print the perplexity of a text, and the bits per byte of exactly the tokens that were scored."""
    from ..perplexity import DEFAULT_CTX

    data = read_text_file(text_file)
    text = decode_utf8(data, text_file)
    if not text:
        raise ConfigError(f"{text_file}: the text is empty")
    loaded = _streaming.load(model, **runtime)
    ctx = ctx or min(DEFAULT_CTX, loaded.max_context)
    if ctx > loaded.max_context:
        raise ConfigError(f"--ctx {ctx} exceeds the {loaded.max_context} positions this model was made for")
    note(_options.describe(loaded))
    for line in _options.format_notes(loaded):
        note(line)
    _streaming.print_plan(loaded)
    started = time.perf_counter()
    with _options.route_trace(loaded, route_trace), _streaming.usage_history(loaded):
        result, ids = _measure(loaded, text, ctx, stride, score)
    seconds = time.perf_counter() - started
    _streaming.print_summary(loaded)
    token_bytes = loaded.tokenizer.decode_bytes(ids, skip_special=False)
    if token_bytes != data:
        note(f"note: the tokenizer changed the text ({len(data)} bytes became {len(token_bytes)}); "
             "bits per byte count the changed text")  # fmt: skip
    if as_json:
        settings = {"ctx": ctx, "stride": stride, "score": score}
        figures = report(loaded, result, len(token_bytes), data, settings, seconds)
        write_json({**figures, "streamer": _streaming.stats(loaded)})
        return
    write(
        f"perplexity {result.perplexity:.4f} +/- {result.perplexity_error:.4f}\n"
        f"bits per byte {result.bits_per_byte:.4f} ({result.bits:.1f} bits, {result.num_scored_bytes} bytes, "
        f"{result.num_scored_tokens} tokens, {result.num_windows} windows)\n"
    )
    note(f"{result.num_scored_tokens / seconds:.1f} scored tok/s, {seconds:.2f} s")
