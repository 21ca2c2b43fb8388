"""Side-by-side measurements: arms interleaved, their order rotated, one unmeasured round, medians with their range.

An arm is a set of options of one engine (or another engine). A test is a prefill of n tokens, or a decode of n tokens
behind a context of d. Token ids are fixed, so every arm does the same work; what they decode must be equal.
"""

import csv
import gc
import io
import math
import statistics
import time
from dataclasses import asdict, dataclass, field

import numpy as np

from .bench_arms import settings, split_options
from .errors import ConfigError
from .hardware import cpu_model
from .sampler import SamplingParams

MIN_NOISE = 0.03  # a difference below this is none


@dataclass(frozen=True)
class Test:
    """kind: "prefill" or "decode"; tokens: how many; depth: positions that are filled before."""

    kind: str
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.tokens}" + (f" @ {self.depth}" if self.depth else "")

    def ids(self, vocab_size: int) -> np.ndarray:
        """int32 tokens of the prompt, or before those that are decoded."""
        return fixed_ids(self.tokens if self.kind == "prefill" else max(self.depth, 1), vocab_size)


@dataclass
class Result:
    """Tokens per second of one test and arm, one sample a round."""

    test: str
    arm: str
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the range, as a share of the median."""
        return (max(self.samples) - min(self.samples)) / 2 / self.median


class EngineArm:
    """millstream with some options. progress: called with bytes done and bytes in all while experts are read."""

    note = None  # what a reader of the figures must know

    def __init__(self, name: str, model, options: dict, positions: int, progress=None):
        from .runtime import load

        runtime, sampling, self.speculation = split_options(options)
        self.name, self.sampling = name, SamplingParams(**sampling)
        self.engine = load(model, progress, **runtime)
        self.positions = min(positions, self.engine.max_context)
        self.vocab_size = self.engine.model.config.vocab_size
        self._session = None

    @property
    def text_settings(self) -> tuple:
        """What decides which tokens are decoded: arms that agree in it must decode the same."""
        return self.engine.context.arith, self.engine.options.kv, self.sampling

    def describe(self) -> dict:
        return settings(self.engine, self.sampling, **self.speculation)

    def prefill(self, ids: np.ndarray) -> float:
        """Seconds for a prefill of ids [T] into an empty cache."""
        return _run(self._start(Test("prefill", len(ids)), ids)).stats.prefill_s

    def decode(self, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
        """Seconds for `tokens` tokens behind ids, and the tokens. The context is computed once."""
        generation = _run(self._start(Test("decode", tokens), ids))
        return generation.stats.decode_s, generation.token_ids

    def profiled(self, test: Test, ids: np.ndarray, trace: bool) -> tuple:
        """The same once more: (profiler, generation, seconds from the prompt's tokens on)."""
        from .profile import Profiler

        with Profiler(self.engine, trace=trace) as profiler:
            generation = self._start(test, ids)
            profiler.attach(generation)
            started = time.perf_counter() - generation.stats.tokenize_s
            _run(generation)
            return profiler, generation, time.perf_counter() - started

    def close(self) -> None:
        """Give the memory back now: slots of a cache hang in a circle of references."""
        self.engine = self._session = None
        gc.collect()

    def _start(self, test: Test, ids):
        """The generation of a test. All of them share one session: a plan has room for one."""
        from .session import Session

        if self._session is None:
            self._session = Session(self.engine, self.positions)
        if test.kind == "prefill":
            self._session.clear()
        return self.engine.generate(
            ids, max_tokens=1 if test.kind == "prefill" else test.tokens + 1, sampling=self.sampling,
            ignore_eos=True, session=self._session, **self.speculation,
        )  # fmt: skip


def _run(generation):
    for _ in generation.tokens():
        pass
    return generation


def fixed_ids(count: int, vocab_size: int) -> np.ndarray:
    """int32 [count], the same for every arm and run."""
    return ((np.arange(count, dtype=np.int64) * 7919 + 1013) % max(vocab_size - 8, 1) + 4).astype(np.int32) % vocab_size


def measure(
    arms: list, tests: list[Test], repeat: int, progress=lambda done, total, what: None, afterwards=None
) -> list[Result]:
    """One Result per test and arm. Raises ConfigError when two arms of this engine decode different tokens, although
    they are alike in arithmetic, keys and values and settings of draws.

    progress: called with measurements done, how many there are, and the name of the test. afterwards: with (test, arm,
    ids) when a test's rounds are done, for each arm.
    """
    results = {(t.name, a.name): Result(t.name, a.name) for t in tests for a in arms}
    texts: dict[tuple, tuple[str, list[int]]] = {}
    total, done = len(tests) * len(arms) * (repeat + 1), 0
    for test in tests:
        for turn in range(repeat + 1):
            for arm in [*arms[turn % len(arms) :], *arms[: turn % len(arms)]]:
                ids = test.ids(arm.vocab_size)
                if test.kind == "prefill":
                    seconds = arm.prefill(ids)
                else:
                    seconds, found = arm.decode(ids, test.tokens)
                    alike = (test.name, arm.text_settings) if isinstance(arm, EngineArm) else (arm.name,)
                    first, expected = texts.setdefault(alike, (arm.name, found))
                    if found != expected and isinstance(arm, EngineArm):
                        raise ConfigError(f"{test.name}: {arm.name} and {first} decode different tokens")
                if turn:
                    results[test.name, arm.name].samples.append(test.tokens / seconds)
                done += 1
                progress(done, total, test.name)
        for arm in arms if afterwards else ():
            afterwards(test, arm, test.ids(arm.vocab_size))
    return list(results.values())


def report(results: list[Result], arms: list, command: str) -> dict:
    """For --json: machine, arms, every sample, and the ratio to the first arm: the median of the rounds' ratios, since
    a machine that gets slower or faster from round to round does it to all arms."""
    first = arms[0].name
    base = {r.test: r.samples for r in results if r.arm == first}
    return {
        "command": command,
        "cpu": cpu_model(),
        "arms": {arm.name: arm.describe() for arm in arms},
        "results": [
            asdict(r) | {"median": r.median, "spread": r.spread, "ratio": _ratio(r.samples, base[r.test])}
            for r in results
        ],
    }


def _ratio(samples: list[float], base: list[float]) -> float:
    return statistics.median(own / other for own, other in zip(samples, base, strict=True))


def table(content: dict) -> list[list[str]]:
    """Header and rows as text."""
    rows = [["test", "arm", "tok/s", "lowest", "highest", "ratio"]]
    for r in content["results"]:
        figures = (r["median"], min(r["samples"]), max(r["samples"]))
        rows.append([r["test"], r["arm"], *(f"{x:.2f}" for x in figures), f"{r['ratio']:.3f}"])
    return rows


def as_csv(content: dict) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table(content))
    return out.getvalue()


def as_markdown(content: dict) -> str:
    head, *rows = table(content)
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def as_text(content: dict) -> str:
    rows = table(content)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join(
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))) + "\n"
        for row in rows
    )


def check_result(content, where: str) -> None:
    """Raise ConfigError for what is no result of `report`, as far as `compare` looks at it."""
    try:
        for r in content["results"]:
            figures = r["median"], r["spread"], *r["samples"]
            sound = isinstance(r["test"], str) and isinstance(r["arm"], str) and r["median"] > 0
            if not sound or not all(isinstance(x, int | float) and 0 <= x < math.inf for x in figures):
                raise ValueError
        arms = content.get("arms", {})
        if not content["results"] or not all(isinstance(settings, dict) for settings in arms.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{where}: not a result of millstream bench --json, or damaged") from None


def only_in(before: dict, after: dict) -> list[tuple[str, str]]:
    """(test, arm) of the first result that the second has not."""
    names = {(r["test"], r["arm"]) for r in after["results"]}
    return [(r["test"], r["arm"]) for r in before["results"] if (r["test"], r["arm"]) not in names]


def compare(before: dict, after: dict) -> tuple[list[dict], bool]:
    """Rows for every test and arm that both results have, and whether one dropped beyond the noise.

    Noise is the larger spread of the two, at least 3 %. Raises ConfigError when they have nothing in common.
    """
    old = {(r["test"], r["arm"]): r for r in before["results"]}
    rows = []
    for r in after["results"]:
        was = old.get((r["test"], r["arm"]))
        if was is None:
            continue
        noise, ratio = max(MIN_NOISE, was["spread"], r["spread"]), r["median"] / was["median"]
        judged = "slower" if ratio < 1 - noise else "faster" if ratio > 1 + noise else "same"
        rows.append({
            "test": r["test"], "arm": r["arm"], "before": was["median"], "after": r["median"], "ratio": ratio,
            "noise": noise, "verdict": judged,
        })  # fmt: skip
    if not rows:
        raise ConfigError("--compare: the two results have no test and arm in common")
    return rows, any(row["verdict"] == "slower" for row in rows)
