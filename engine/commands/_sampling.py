"""Settings of a draw: the options, where each value comes from, and one line that says so."""

import dataclasses

import click

from ..errors import ConfigError
from ._output import note

# Option -> key of generation_config.json, where the two names differ.
CONFIG_KEYS = {"repeat_penalty": "repetition_penalty"}
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "frequency_penalty",
                    "presence_penalty", "seed")  # fmt: skip
DRAW_OPTIONS = ("top_k", "top_p", "min_p", "seed")

_OPTIONS = (
    click.option("--temperature", type=float, metavar="X", help="0 takes the most likely token."),
    click.option("--top-k", type=int, metavar="N", help="Keep the N most likely tokens; 0: off."),
    click.option("--top-p", type=float, metavar="X", help="Keep the smallest set with this probability; 1: off."),
    click.option("--min-p", type=float, metavar="X", help="Keep tokens with X times the top probability; 0: off."),
    click.option("--repeat-penalty", type=float, metavar="X", help="Weaken tokens seen lately; 1: off."),
    click.option("--repeat-last-n", type=int, metavar="N", help="How many tokens the penalties look back."),
    click.option("--frequency-penalty", type=float, metavar="X", help="Subtracted per occurrence; 0: off."),
    click.option("--presence-penalty", type=float, metavar="X", help="Subtracted once when seen; 0: off."),
    click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Seed of the draws."),
)


def options(command):
    """--temperature ... --seed: the settings of a draw."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_flags(flags: dict) -> None:
    """Refuse an option out of range before a model is loaded for it. Raises ConfigError."""
    from ..sampler import SamplingParams

    SamplingParams(**{name: flags[name] for name in SAMPLING_OPTIONS if flags.get(name) is not None})


def _model_defaults(loaded, given: dict):
    """The model's own settings; where they are of a kind that is not computed here, options can replace them."""
    from ..sampler import SamplingParams

    try:
        return loaded.default_sampling(), loaded.files.generation_config
    except ConfigError as error:
        if not given:
            raise
        note(f"note: {error}; only the options given are used")
        return SamplingParams(), {}


def choose_sampling(loaded, flags: dict):
    """Return (SamplingParams, {setting: where it came from}): flags, then the model's own (generation_config.json, or
    general.sampling.* of a GGUF file), then defaults."""
    given = {name: value for name, value in flags.items() if value is not None}
    defaults, config = _model_defaults(loaded, given)
    sampling = dataclasses.replace(defaults, **given)
    file = "generation_config" if loaded.files.gguf_metadata is None else "gguf"
    sources = {}
    for name in SAMPLING_OPTIONS:
        # What only shapes the draw counts for nothing in a model that does not ask for draws.
        counts = name.startswith("repeat_") or config.get("do_sample")
        configured = counts and (name == "temperature" or config.get(CONFIG_KEYS.get(name, name)) is not None)
        sources[name] = "flag" if name in given else file if configured else "default"
    if sampling.temperature == 0:
        idle = [name for name in DRAW_OPTIONS if name in given]
        if idle:
            note(f"note: temperature is 0 (greedy), so {', '.join(idle)} changes nothing")
    return sampling, sources


def settings(sampling) -> dict:
    """Settings as a user writes them: the engine keeps float32, whose 0.7 prints as 0.699999988."""
    values = {name: getattr(sampling, name) for name in SAMPLING_OPTIONS}
    return {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in values.items()}


def describe_sampling(sampling, sources: dict) -> str:
    """One line with every setting that is in effect and its source."""
    used = [f"{name} {value} ({sources[name]})" for name, value in settings(sampling).items()]
    return "sampling: " + ("greedy; " if sampling.temperature == 0 else "") + ", ".join(used)
