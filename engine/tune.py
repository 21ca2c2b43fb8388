"""Finds the settings that are fastest for a model on this machine, and remembers them beside the model.

One candidate after the other runs against the best so far, both in turns on the user's prompt. It stays only if it is
at least 3 % faster, faster in every round, and decodes the same tokens. At the end the winner meets the defaults.
"""

import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from .atomic_file import AtomicFile, beside
from .bench import EngineArm
from .config import TUNE_ENDING
from .errors import ConfigError
from .experts.history import model_fingerprint
from .hardware import cpu_model

MAGIC, VERSION = "millstream-tune", 1
MIN_GAIN = 1.03
HOPELESS = 0.97  # of the best so far: slower in the first round, and there is no second
SPECULATION = ("spec", "draft", "draft_model")  # these belong together
TUNED = ("threads", "expert_layout", "io", "readers", "cache_policy", "lookahead", *SPECULATION)
WINDOWS = (2, 4, 8)
MEASURE_SECONDS, FEWEST_TOKENS, MOST_TOKENS = 4.0, 16, 64  # of one measurement


def label(changes: dict) -> str:
    """ "spec 4, draft mtp" for people."""
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in changes.items())


@dataclass
class Trial:
    """One comparison. changes: the candidate's settings, beside those of the best so far. before, after: median tok/s
    of the best so far and of the candidate; ratio: median of the rounds' ratios. 0.0 when it could not run."""

    changes: dict
    before: float = 0.0
    after: float = 0.0
    ratio: float = 0.0
    kept: bool = False
    why: str = ""


@dataclass
class Outcome:
    """settings: what differs from the defaults. trials: of the candidates. final: the winner against the defaults,
    measured again at the end; gain: its ratio."""

    settings: dict = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    final: Trial | None = None
    gain: float = 1.0


def streams(engine) -> bool:
    """Are there fewer slots than experts? (A file that is not in the page cache is read into slots for all of them.)"""
    return engine.stream is not None and engine.stream.plan.num_slots < engine.stream.plan.num_experts


def candidates(engine, draft_model: str | None = None) -> list[dict]:
    """Settings to try, in order; what only matters when experts are streamed is left out otherwise. A candidate of one
    draft source names it, as those that run after it could not tell."""
    cpus = os.cpu_count() or 1
    threads = sorted({1, max(1, cpus // 2), cpus, engine.context.num_threads} - {engine.context.num_threads})
    found = [{"threads": n} for n in threads]
    if streams(engine):
        now = engine.stream.expert_files.mode
        found += [{"io": mode} for mode in ("direct", "buffered", "mmap") if mode != now]
        found += [{"readers": n} for n in (2, 8, 16)]
        found += [{"cache_policy": name} for name in ("lru", "lfu")]
        found += [{"lookahead": mode} for mode in ("on", "off")]
    elif engine.expert_layout.name == "compact":
        found.append({"expert_layout": "fast"})
    found += [{"spec": rows} for rows in ("auto", *WINDOWS)]
    if engine.files.mtp_names:
        found += [{"spec": "auto", "draft": "lookup,mtp"}, *({"spec": n, "draft": "mtp"} for n in WINDOWS[:2])]
    if draft_model is not None:
        given = {"draft_model": str(Path(draft_model).resolve())}
        found += [{"spec": "auto", "draft": "lookup,model"} | given]
        found += [{"spec": n, "draft": "model"} | given for n in WINDOWS]
    return found


def tokens_to_decode(engine, ids) -> int:
    """Tokens of a measurement that takes about MEASURE_SECONDS, from a short run."""
    generation = engine.generate(list(ids), max_tokens=5, temperature=0.0, ignore_eos=True)
    for _ in generation:
        pass
    wanted = int(MEASURE_SECONDS * generation.stats.decode_tok_s)
    return max(FEWEST_TOKENS, min(MOST_TOKENS, wanted, engine.max_context - len(ids) - 1))


class Arms:
    """Two engines with settings of their own, side by side. Those that are wanted again stay open: the best so far."""

    def __init__(self, model, ids, tokens: int, repeat: int):
        self.model, self.ids, self.tokens, self.repeat = model, ids, tokens, repeat
        self._open: dict[str, EngineArm] = {}

    def compare(self, best: dict, changed: dict, progress, loading=None, patient=False) -> list[tuple[float, float]]:
        """(tok/s of the best, of the candidate) of every round; of the first only where the candidate is hopeless. Not
        when patient.

        progress: called with how many of the 2 * (repeat + 1) measurements are done. loading: with bytes done and bytes
        in all while experts are read before. Raises ConfigError when they decode different tokens, or one cannot run.
        """
        arms = self._arms(best, changed, loading=loading)
        rounds, done = [], 0
        for turn in range(self.repeat + 1):
            found = {}
            for number in (0, 1) if turn % 2 else (1, 0):
                found[number] = arms[number].decode(self.ids, self.tokens)
                done += 1
                progress(done)
            if found[0][1] != found[1][1]:
                raise ConfigError("other tokens")
            if turn:  # the one before pays for first use
                rounds.append((self.tokens / found[0][0], self.tokens / found[1][0]))
                if not patient and turn == 1 and rounds[0][1] < HOPELESS * rounds[0][0]:
                    break
        return rounds

    def close(self, *but: str) -> None:
        """Give back the memory of all but those with such settings."""
        for name in [name for name in self._open if name not in but]:
            self._open.pop(name).close()

    def _arms(self, *settings: dict, loading=None) -> list[EngineArm]:
        self.close(*map(label, settings))
        if any(streams(arm.engine) for arm in self._open.values()):
            self.close()  # what a cache has seen of the text would count
        for one in settings:
            if label(one) not in self._open:
                options = one | ({"draft": one["draft"].split(",")} if "draft" in one else {})
                arm = EngineArm(label(one), self.model, options, len(self.ids) + self.tokens + 1, loading)
                self._open[label(one)] = arm
                if not streams(arm.engine):
                    arm.decode(self.ids, self.tokens)  # experts are re-coded at their second use
        return [self._open[label(one)] for one in settings]


def _judged(changes: dict, rounds: list[tuple[float, float]]) -> Trial:
    before, after = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
    ratios = [candidate / best for best, candidate in rounds]
    ratio = statistics.median(ratios)
    if ratio < MIN_GAIN:
        return Trial(changes, before, after, ratio, False, f"not {MIN_GAIN - 1:.0%} faster")
    if min(ratios) <= 1:
        return Trial(changes, before, after, ratio, False, "not faster in every round")
    return Trial(changes, before, after, ratio, True, "faster")


def tune(model, trials: list[dict], ids, tokens: int, repeat: int, base: dict, say=lambda trial: None,
         progress=lambda done, total, what: None) -> Outcome:  # fmt: skip
    """Try every one of `trials` (see `candidates`) on the prompt `ids`. base: options that stay, such as ram.

    say: called with each Trial. progress: with measurements done, how many there are, and what is tried.
    """
    outcome, trial_size = Outcome(), 2 * (repeat + 1)
    total, arms = (len(trials) + 1) * trial_size, Arms(model, ids, tokens, repeat)

    def compare(number, best, changed, what, **more):
        start = number * trial_size
        progress(start, total, what)
        return arms.compare(
            best, changed, lambda done: progress(start + done, total, what),
            lambda done, nbytes: progress(start, total, f"{what}: loading, {100 * done // max(nbytes, 1)} %"), **more,
        )  # fmt: skip

    try:
        for number, changes in enumerate(trials):
            best = base | outcome.settings
            try:
                trial = _judged(changes, compare(number, best, best | changes, label(changes)))
            except ConfigError as error:  # it cannot run like this, or decodes something else
                trial = Trial(changes, why=str(error))
            outcome.trials.append(trial)
            say(trial)
            if trial.kept:
                outcome.settings |= changes
        if outcome.settings:
            what = "the winner against the defaults"
            rounds = compare(len(trials), base, base | outcome.settings, what, patient=True)
            outcome.final = last = _judged(outcome.settings, rounds)
            last.kept = last.ratio >= MIN_GAIN  # its parts won their rounds before
            say(last)
            outcome.gain = last.ratio
            if not last.kept:  # what looked better one by one is not better together
                outcome.settings = {}
    finally:
        arms.close()
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
    except (OSError, ValueError, RecursionError) as error:
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
    draft_model = settings.get("draft_model")
    if draft_model is not None and not Path(str(draft_model)).exists():
        return {}, f"note: {path}: not used: its draft model {draft_model} is not there"
    return settings, None
