"""`millstream tune`: find the fastest settings for a model here, and keep them beside it."""

import dataclasses
import gc

import click

from ..errors import ConfigError
from . import _options, _streaming
from ._output import note, write, write_json
from ._progress import Meter
from .generate import read_prompt

DEFAULT_PROMPT = "Once upon a time there was a miller who lived by a stream, and every morning he"


@click.command()
@_options.model_argument
@click.option("--prompt", metavar="TEXT", help="The prompt (default: the beginning of a tale).")
@click.option("--prompt-file", "-f", metavar="FILE", help="Read the prompt from a file.")
@click.option("--ram", type=click.FloatRange(min=0, min_open=True), metavar="GIB", help="As in generate.")
@click.option("--draft-model", metavar="DIR", help="A small model with the same tokens that may draft.")
@click.option("--max-tokens", "-n", type=click.IntRange(min=8), metavar="N",
              help="Tokens to decode in each measurement (default: those of about 4 s, 16 to 64).")  # fmt: skip
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
              help="Measured rounds.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print, write nothing.")
@_options.json_option
def tune(model_argument, model, prompt, prompt_file, ram, draft_model, max_tokens, repeat, dry_run, as_json):
    """Try threads, reading modes, cache policies and speculation on MODEL; keep what is at least 3 % faster.

    Every candidate must decode the same tokens. The settings are written beside the model, and `generate` uses them
    where an option is not given.
    """
    from .. import tune as tuning

    model = _options.one_model(model, model_argument)
    given = prompt is not None or prompt_file is not None
    text = read_prompt(prompt, prompt_file) if given else DEFAULT_PROMPT
    loaded = _streaming.load(model, ram=ram, draft_model=draft_model)  # a draft model that cannot be is refused here
    note(_options.describe(loaded))
    _streaming.print_plan(loaded)
    ids = loaded.tokenizer.encode(text) or [0]
    if max_tokens is None:
        max_tokens = tuning.tokens_to_decode(loaded, ids)
    if len(ids) + max_tokens + 1 > loaded.max_context:
        room = loaded.max_context
        raise ConfigError(f"tune: {len(ids)} prompt tokens and {max_tokens} more exceed the context of {room}")
    rounds = "1 measured round" if repeat == 1 else f"{repeat} measured rounds"
    note(f"prompt: {len(ids)} tokens, and {max_tokens} to decode, {rounds}")
    if dry_run:
        note("dry run: nothing is written")
    base, files = _base(loaded, ram, tuning.streams(loaded)), loaded.files
    trials = tuning.candidates(loaded, draft_model)
    del loaded  # its memory is for those that are compared
    gc.collect()
    with Meter("tune", "measurements") as meter:
        outcome = tuning.tune(model, trials, ids, max_tokens, repeat, base, lambda t: note(_line(t)), meter.update)
    path = None if dry_run or not outcome.settings else tuning.save(files, outcome)
    if as_json:
        write_json(dataclasses.asdict(outcome) | {"written": path and str(path)})
        return
    chosen = tuning.label(outcome.settings)
    if outcome.final and not chosen:
        note("what was faster one by one is not faster together: the machine may be busy; try again with more --repeat")
    write(f"{chosen}: {outcome.gain:.2f} x the defaults\n" if chosen else "the defaults are the fastest\n")
    if path is not None:
        note(f"written: {path}")


def _base(loaded, ram: float | None, streams: bool) -> dict:
    """Options of both that are compared. They are in memory together, so caches get at most half of it each."""
    if not streams:
        return {} if ram is None else {"ram": ram}
    from ..memory import GIB, make_budget

    half = make_budget(None).total_bytes / 2 / GIB
    if ram is not None and ram <= half:
        return {"ram": ram}
    note(f"note: two settings are in memory at a time, so each is measured with {half:.2f} GiB")
    return {"ram": half}


def _line(trial) -> str:
    from ..tune import label

    speeds = f"{trial.before:.2f} -> {trial.after:.2f} tok/s ({trial.ratio:.2f} x), " if trial.after else ""
    return f"{label(trial.changes)}: {speeds}{'kept' if trial.kept else trial.why}"
