"""Finds the settings that are fastest for a model on this machine, and remembers them beside the model.

One setting after the other is tried against the best so far, both arms in turns on the user's prompt; a candidate
stays only if it is at least 3 % faster and decodes the same tokens. At the end the winner runs against the defaults.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from .atomic_file import AtomicFile, beside
from .bench import EngineArm, Result, Test, measure
from .config import TUNE_ENDING
from .errors import ConfigError
from .experts.history import model_fingerprint
from .hardware import cpu_model

MAGIC, VERSION = "millstream-tune", 1
MIN_GAIN = 1.03
TUNED = ("threads", "expert_layout", "io", "readers", "cache_policy", "lookahead", "spec")


@dataclass
class Trial:
    """One comparison: median tok/s of the best so far and of the candidate."""

    setting: str
    value: object
    before: float
    after: float
    kept: bool
    why: str


@dataclass
class Outcome:
    """settings: what differs from the defaults. gain: winner against defaults, measured again at the end."""

    settings: dict = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    gain: float = 1.0


def streams(engine) -> bool:
    """Are there fewer slots than experts? (A file that is not in the page cache is read into slots for all of them.)"""
    return engine.stream is not None and engine.stream.plan.num_slots < engine.stream.plan.num_experts


def candidates(engine) -> list[tuple[str, list]]:
    """(setting, values to try) in order; what only matters when experts are streamed is left out otherwise."""
    cpus = os.cpu_count() or 1
    threads = sorted({1, max(1, cpus // 2), cpus, engine.context.num_threads} - {engine.context.num_threads})
    found = [("threads", threads)]
    if streams(engine):
        found += [
            ("io", [mode for mode in ("direct", "buffered", "mmap") if mode != engine.stream.expert_files.mode]),
            ("readers", [2, 8, 16]),
            ("cache_policy", ["lru", "lfu"]),
            ("lookahead", ["on", "off"]),
        ]
    elif engine.expert_layout.name == "compact":
        found.append(("expert_layout", ["fast"]))
    return [*found, ("spec", ["auto"])]


class _PromptArm(EngineArm):
    """Decodes behind the user's prompt in place of fixed ids."""

    def __init__(self, name, model, options, positions, prompt_ids):
        super().__init__(name, model, options, positions)
        self._prompt = prompt_ids

    def decode(self, ids, tokens):
        return super().decode(self._prompt, tokens)


def _compare(model, best: dict, changed: dict, ids, tokens: int, repeat: int, progress) -> tuple[Result, Result]:
    positions, arms = len(ids) + tokens + 1, []
    try:
        for name, options in (("best", best), ("candidate", changed)):
            arms.append(_PromptArm(name, model, dict(options), positions, ids))
        before, after = measure(arms, [Test("decode", tokens, len(ids))], repeat, progress)
    finally:
        for arm in arms:
            arm.close()
    return before, after


def tune(model, choices: list[tuple[str, list]], ids, tokens: int, repeat: int, base: dict, say=lambda trial: None,
         progress=lambda done, total, what: None) -> Outcome:  # fmt: skip
    """Try every one of `choices` (see `candidates`) on the prompt `ids`. base: options that stay, such as ram.

    say: called with each Trial. progress: with measurements done, how many there are, and what is tried.
    """
    outcome, trial_size = Outcome(), 2 * (repeat + 1)
    trials = [(setting, value) for setting, values in choices for value in values]
    total = (len(trials) + 1) * trial_size

    def compare(number, best, changed, what):
        def report(done, _total):
            progress(number * trial_size + done, total, what)

        report(0, total)
        return _compare(model, best, changed, ids, tokens, repeat, report)

    for number, (setting, value) in enumerate(trials):
        best, changed = base | outcome.settings, base | outcome.settings | {setting: value}
        try:
            before, after = compare(number, best, changed, f"{setting} {value}")
        except ConfigError as error:  # it cannot run like this, or decodes something else
            trial = Trial(setting, value, 0.0, 0.0, False, str(error))
        else:
            faster = after.median >= MIN_GAIN * before.median
            why = "faster" if faster else f"not {MIN_GAIN - 1:.0%} faster"
            trial = Trial(setting, value, before.median, after.median, faster, why)
        outcome.trials.append(trial)
        say(trial)
        if trial.kept:
            outcome.settings[setting] = value
    if outcome.settings:
        before, after = compare(len(trials), base, base | outcome.settings, "the winner against the defaults")
        outcome.gain = after.median / before.median
        if outcome.gain < MIN_GAIN:  # what looked better one by one is not better together
            outcome.settings = {}
    else:
        progress(total, total, "done")
    return outcome


def save(files, outcome: Outcome) -> Path:
    """Write the settings. Raises ConfigError where the directory cannot be written."""
    path = beside(files.path, TUNE_ENDING)
    content = {
        "magic": MAGIC, "version": VERSION, "fingerprint": model_fingerprint(files), "cpu": cpu_model(),
        "cpus": os.cpu_count(), "gain": round(outcome.gain, 4), "settings": outcome.settings,
    }  # fmt: skip
    try:
        with AtomicFile(path) as file:
            file.handle.write((json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path}: the settings cannot be written: {error.strerror or error}") from None
    return path


def load_settings(files) -> tuple[dict, str | None]:
    """(settings for this model and machine, a note on a file that is not for them or damaged, or None)."""
    path = beside(files.path, TUNE_ENDING)
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError) as error:
        return {}, f"note: {path}: not used: {error}"
    if not isinstance(content, dict) or content.get("magic") != MAGIC or content.get("version") != VERSION:
        return {}, f"note: {path}: not used: it is no settings file of this version"
    expected = {"fingerprint": model_fingerprint(files), "cpu": cpu_model(), "cpus": os.cpu_count()}
    for key, value in expected.items():
        if content.get(key) != value:
            what = "model" if key == "fingerprint" else "machine"
            return {}, f"note: {path}: not used: it was made for another {what}"
    settings = content.get("settings")
    if not isinstance(settings, dict) or set(settings) - set(TUNED):
        return {}, f"note: {path}: not used: unknown settings"
    return settings, None
