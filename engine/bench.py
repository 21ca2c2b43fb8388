"""Side-by-side measurements: arms interleaved, their order rotated, one unmeasured round, medians with their range.

An arm is a set of options of one engine (or another engine). A test is a prefill of n tokens, or a decode of n tokens
behind a context of d. Token ids are fixed, so every arm does the same work; what they decode must be equal.
"""

import csv
import io
import statistics
import time
from dataclasses import asdict, dataclass, field

import numpy as np

from .config import RuntimeConfig
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


def parse_arm(text: str) -> dict:
    """ "spec=4,threads=2" as a dictionary. Raises ConfigError for a name that is no option, or a bad value."""
    kinds = {name: str(f.type) for name, f in RuntimeConfig.__dataclass_fields__.items()} | {"spec": "int | str"}
    options = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in kinds:
            raise ConfigError(f"--arm {text}: got {part!r}, expected NAME=VALUE with one of {', '.join(sorted(kinds))}")
        options[name] = _value(kinds[name], value.strip(), text)
    return options


def _value(kind: str, value: str, where: str):
    if "bool" in kind:
        if value not in ("true", "false", "on", "off"):
            raise ConfigError(f"--arm {where}: got {value!r}, expected on or off")
        return value in ("true", "on")
    for number, name in ((int, "int"), (float, "float")):
        if name in kind and value != "auto":
            try:
                return number(value)
            except ValueError:
                if "str" not in kind:
                    raise ConfigError(f"--arm {where}: got {value!r}, expected a number") from None
    return value


class EngineArm:
    """millstream with some options."""

    def __init__(self, name: str, model, options: dict, positions: int):
        from .runtime import load

        self.name, self.spec = name, options.pop("spec", 0)
        self.engine = load(model, **({"ctx": None} | options))
        self.positions = min(positions, self.engine.max_context)
        self.vocab_size = self.engine.model.config.vocab_size
        self._session, self._depth = None, -1

    def describe(self) -> dict:
        context = self.engine.context
        return {"isa": context.tier, "threads": context.num_threads, "expert_layout": self.engine.expert_layout.name}

    def prefill(self, ids: np.ndarray) -> float:
        """Seconds for a prefill of ids [T] into an empty cache."""
        return self._generate(ids, 1, None).stats.prefill_s

    def decode(self, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
        """Seconds for `tokens` greedy tokens behind ids, and the tokens. The context is computed once."""
        from .session import Session

        if self._depth != len(ids):
            self._session, self._depth = Session(self.engine, self.positions), len(ids)
        generation = self._generate(ids, tokens + 1, self._session)
        return generation.stats.decode_s, generation.token_ids

    def _generate(self, ids, max_tokens, session):
        generation = self.engine.generate(
            ids, max_tokens=max_tokens, sampling=SamplingParams(), ignore_eos=True, session=session, spec=self.spec
        )
        for _ in generation.tokens():
            pass
        return generation


class LlamaCppArm:
    """llama.cpp on the same GGUF file, through llama-cpp-python (optional extra `peers`)."""

    def __init__(self, name: str, model, threads: int, positions: int):
        try:
            import llama_cpp
        except ImportError:
            raise ConfigError("--against llama.cpp needs llama-cpp-python: pip install 'millstream[peers]'") from None
        self.name, self._positions = name, positions
        self._llama = llama_cpp.Llama(
            str(model), n_ctx=positions, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
        )
        self.vocab_size = self._llama.n_vocab()

    def describe(self) -> dict:
        import llama_cpp

        return {"llama_cpp_python": llama_cpp.__version__, "threads": self._llama.n_threads}

    def _eval(self, ids) -> None:
        self._llama.eval([int(t) for t in ids])

    def prefill(self, ids: np.ndarray) -> float:
        self._llama.reset()
        started = time.perf_counter()
        self._eval(ids)
        return time.perf_counter() - started

    def decode(self, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
        self.prefill(ids)
        found = [self._llama.sample(temp=0.0)]
        started = time.perf_counter()
        for _ in range(tokens):
            self._eval(found[-1:])
            found.append(self._llama.sample(temp=0.0))
        return time.perf_counter() - started, found


def fixed_ids(count: int, vocab_size: int) -> np.ndarray:
    """int32 [count], the same for every arm and run."""
    return ((np.arange(count, dtype=np.int64) * 7919 + 1013) % max(vocab_size - 8, 1) + 4).astype(np.int32) % vocab_size


def measure(arms: list, tests: list[Test], repeat: int, progress=lambda done, total: None) -> list[Result]:
    """One Result per test and arm. Raises ConfigError when two arms of this engine decode different tokens."""
    results = {(t.name, a.name): Result(t.name, a.name) for t in tests for a in arms}
    texts: dict[str, tuple[str, list[int]]] = {}
    total, done = len(tests) * len(arms) * (repeat + 1), 0
    for test in tests:
        for turn in range(repeat + 1):
            for arm in [*arms[turn % len(arms) :], *arms[: turn % len(arms)]]:
                ids = fixed_ids(test.tokens if test.kind == "prefill" else max(test.depth, 1), arm.vocab_size)
                if test.kind == "prefill":
                    seconds = arm.prefill(ids)
                else:
                    seconds, found = arm.decode(ids, test.tokens)
                    first, expected = texts.setdefault(test.name, (arm.name, found))
                    if found != expected and isinstance(arm, EngineArm):
                        raise ConfigError(f"{test.name}: {arm.name} and {first} decode different tokens")
                if turn:
                    results[test.name, arm.name].samples.append(test.tokens / seconds)
                done += 1
                progress(done, total)
    return list(results.values())


def report(results: list[Result], arms: list, command: str) -> dict:
    """For --json: machine, arms, and every sample."""
    first = arms[0].name
    base = {r.test: r.median for r in results if r.arm == first}
    return {
        "command": command,
        "cpu": cpu_model(),
        "arms": {arm.name: arm.describe() for arm in arms},
        "results": [
            asdict(r) | {"median": r.median, "spread": r.spread, "ratio": r.median / base[r.test]} for r in results
        ],
    }


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
