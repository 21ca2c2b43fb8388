"""What this machine does with a model, measured in seconds: the model's own layers on random weights, the decode loop
around them, re-coding, and the disk at the size of the model's requests."""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from .bandwidth import memory_bandwidth
from .bench import fixed_ids
from .cut_model import LayerClock, choose_layers, cut_model
from .disk_bandwidth import DiskSpeed, measure_bursts
from .kernels import Context
from .models import family
from .synthetic import SyntheticLoader

STEP_SECONDS = 1.5  # about how long decode steps are repeated
DISK_SECONDS = 1.0
MAX_STEPS, MIN_STEPS, MAX_PROMPTS, MAX_WINDOWS = 64, 3, 9, 32
CALL_STEPS = 96  # of a layer call's costs when experts are streamed
READ_BYTES = 1 << 20  # readers take larger pieces in parts of this size


@dataclass(frozen=True)
class ModelSpeed:
    """step_s: mean of decode steps behind the prompt (a rate counts every delay). window_ratio: how many times as long
    as a step a verify window takes, where asked for. prefill_s: a prompt of prefill_tokens. own_bytes: of weights, what
    did not share memory with others. layers_run: how many stood for all layers."""

    step_s: float
    window_ratio: float | None
    prefill_s: float
    prefill_tokens: int
    own_bytes: int
    layers_run: int


def _timed(run) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


class _Passes:
    """Forward passes on random weights, timed as if all layers were run."""

    def __init__(self, files, context: Context, compact: bool, positions: int, *, prompt: int, max_tokens: int, kv: str,
                 pool_bytes: int, mapped: bool):  # fmt: skip
        self.prompt, stands_for = prompt, choose_layers(files, prompt)
        self.clock, self.layers_run = LayerClock(stands_for), len(stands_for)
        loader = SyntheticLoader(
            files, context, compact_experts=compact, pool_bytes=pool_bytes, mapped=mapped, layers=stands_for
        )
        model_class = cut_model(family(files.architecture).Model, self.clock)
        self.model = model_class(files.config, loader, context, positions, min(max_tokens, positions))
        self.own_bytes = loader.own_bytes
        self.cache, self.ids = self.model.new_kv(positions, kv), fixed_ids(positions, self.model.config.vocab_size)

    def prefill(self) -> float:
        """Seconds of the prompt in an empty cache."""
        from .generate import prefill

        self.cache.truncate(0)
        self.clock.restart()
        return self.clock.whole(_timed(lambda: prefill(self.model, self.cache, self.ids[: self.prompt])))

    def rows(self, count: int, at: int) -> float:
        """Seconds of a step (count 1) or a window behind `at` positions, which stay in the cache."""
        from .generate import decode_step

        self.cache.truncate(at)
        self.clock.restart()
        ids = self.ids[at : at + count]
        return self.clock.whole(_timed(lambda: decode_step(self.model, self.cache, ids, at)))


def model_speed(files, context: Context, compact: bool, *, prompt: int, max_tokens: int, kv: str, window: int,
                pool_bytes: int, mapped: bool = True) -> ModelSpeed:  # fmt: skip
    """Time the model's forward pass on random weights: a prompt, then single steps behind it."""
    passes = _Passes(files, context, compact, prompt + MAX_STEPS + 16, prompt=prompt, max_tokens=max_tokens, kv=kv,
                     pool_bytes=pool_bytes, mapped=mapped)  # fmt: skip
    # The first run pays for pages of buffers and for code, which is nothing beside a run of seconds.
    started = time.perf_counter()
    times = [passes.prefill()]
    while len(times) < MAX_PROMPTS and time.perf_counter() - started < STEP_SECONDS:
        times.append(passes.prefill())
    steps, started = [], time.perf_counter()
    while len(steps) < MAX_STEPS and (len(steps) < MIN_STEPS or time.perf_counter() - started < STEP_SECONDS):
        steps.append(passes.rows(1, prompt + len(steps)))
    ratio = _window_ratio(passes, window) if window > 1 else None
    prefill_s = statistics.median(times[1:] or times)
    return ModelSpeed(statistics.fmean(steps), ratio, prefill_s, prompt, passes.own_bytes, passes.layers_run)


def _window_ratio(passes: _Passes, window: int) -> float:
    """Time of a window over that of a step, both behind the prompt and in turns, so that a machine which becomes
    faster or slower does it to both. A window holds a step's row and more, so that less than 1 is noise."""
    pairs, started = [], time.perf_counter()
    while len(pairs) < MAX_WINDOWS and (len(pairs) < MIN_STEPS or time.perf_counter() - started < STEP_SECONDS):
        pairs.append((passes.rows(1, passes.prompt), passes.rows(window, passes.prompt)))
    step, rows = (statistics.median(times) for times in zip(*pairs, strict=True))
    return max(1.0, rows / step)


def loop_seconds(options) -> float:
    """Seconds a token of the decode loop outside the forward pass (choice of a token, text), on the shipped model."""
    from .runtime import load
    from .sampler import SamplingParams

    engine = load(threads=options.threads, isa=options.isa)
    spent, forward = 0.0, engine.model.forward

    def counted(*args, **named):
        nonlocal spent
        started = time.perf_counter()
        result = forward(*args, **named)
        spent += time.perf_counter() - started
        return result

    engine.model.forward = counted
    generation = engine.generate("The", max_tokens=48, sampling=SamplingParams(), ignore_eos=True)
    for _ in generation:
        pass
    stats = generation.stats
    return max(0.0, stats.decode_s + stats.prefill_s - spent) / max(stats.generated_tokens, 1)


def recode_gb_s(context: Context, record) -> float:
    """GB/s of storage bytes that all threads together re-code into strips."""
    from .doctor import finite_rows

    rows = record.rows
    seed = finite_rows(context, record.format, min(rows, 64) if not context.format(record.format).group_rows else rows,
                       record.cols, np.random.default_rng(2))  # fmt: skip
    storage = np.resize(seed, (rows, seed.shape[1]))
    context.encode(record.format, storage, rows, record.cols)
    return storage.nbytes / min(_timed(lambda: context.encode(record.format, storage, rows, record.cols))
                                for _ in range(5)) / 1e9  # fmt: skip


def disk_speed(path, bursts: list[list[tuple[int, int]]], depth: int) -> tuple[str, DiskSpeed]:
    """("direct" or "buffered", speed) of a moment's reads of a file, burst after burst, as a streamer reads."""
    return measure_bursts(path, bursts, READ_BYTES, depth, DISK_SECONDS)


def stream_call_seconds(options) -> tuple[float, float]:
    """(seconds that a layer call takes longer when its experts are in a cache, seconds more for each that was missing
    when it has arrived): Python and hand-over between threads, measured on the shipped model, waiting left out."""
    from .runtime import load

    chosen = {name: getattr(options, name) for name in ("threads", "isa", "readers", "io")}
    resident = load(**chosen)
    layers, experts = len(resident.model.blocks), resident.model.config.num_experts
    cached = load(**chosen, expert_slots=layers * experts)
    half = load(**chosen, expert_slots=layers * experts // 2)
    plain, hits = (statistics.median(seconds for seconds, _ in _steps(engine)) for engine in (resident, cached))
    missing = [(seconds - hits) / misses for seconds, misses in _steps(half) if misses]
    return max(0.0, hits - plain) / layers, max(0.0, statistics.median(missing) if missing else 0.0)


def _steps(engine) -> list[tuple[float, int]]:
    """(seconds without waits for the disk, experts missed) of decode steps on given tokens."""
    from .generate import decode_step

    kv, ids, found = engine.new_kv(CALL_STEPS), fixed_ids(CALL_STEPS, engine.model.config.vocab_size), []
    stats = engine.stream.stats if engine.stream else lambda: {"wait_s": 0.0, "misses": 0}
    for at in range(CALL_STEPS):
        before = stats()
        seconds = _timed(lambda at=at: decode_step(engine.model, kv, ids[at : at + 1], at))
        after = stats()
        waited = after["wait_s"] - before["wait_s"]
        found.append((seconds - waited, after["misses"] - before["misses"]))
    return found[CALL_STEPS // 4 :]  # experts of the first steps come for the first time


__all__ = ["DiskSpeed", "ModelSpeed", "disk_speed", "loop_seconds", "memory_bandwidth", "model_speed", "recode_gb_s",
           "stream_call_seconds"]  # fmt: skip
