"""What this machine does with a model, measured in seconds: the model's own layers on random weights, the decode loop
around them, re-coding, and the disk at the size of the model's requests."""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from .bandwidth import memory_bandwidth
from .bench import fixed_ids
from .disk_bandwidth import DiskSpeed, measure_bursts
from .kernels import Context
from .models import family
from .synthetic import SyntheticLoader

STEP_SECONDS = 1.5  # about how long decode steps are repeated
DISK_SECONDS = 1.0
MAX_STEPS, MIN_STEPS, MAX_PROMPTS, MAX_WINDOWS = 64, 3, 9, 6
CALL_STEPS = 96  # of a layer call's costs when experts are streamed
READ_BYTES = 1 << 20  # readers take larger pieces in parts of this size


@dataclass(frozen=True)
class ModelSpeed:
    """step_s: mean of decode steps behind the prompt (a rate counts every delay). window_s: one verify window, where
    asked for. prefill_s: a prompt of prefill_tokens. own_bytes: of weights, what did not share memory with others."""

    step_s: float
    window_s: float | None
    prefill_s: float
    prefill_tokens: int
    own_bytes: int


def _timed(run) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def model_speed(files, context: Context, compact: bool, *, prompt: int, max_tokens: int, kv: str, window: int,
                pool_bytes: int, mapped: bool = True) -> ModelSpeed:  # fmt: skip
    """Time the model's forward pass on random weights: a prompt, then single steps behind it."""
    from .generate import decode_step, prefill

    loader = SyntheticLoader(files, context, compact_experts=compact, pool_bytes=pool_bytes, mapped=mapped)
    positions = prompt + MAX_STEPS + 16
    model = family(files.architecture).Model(files.config, loader, context, positions, min(max_tokens, positions))
    cache, ids = model.new_kv(positions, kv), fixed_ids(positions, model.config.vocab_size)

    def prompt_run():
        cache.truncate(0)
        prefill(model, cache, ids[:prompt])

    # The first run pays for pages of buffers and for code.
    times, started = [_timed(prompt_run)], time.perf_counter()
    while len(times) < 2 or (len(times) < MAX_PROMPTS and time.perf_counter() - started < STEP_SECONDS):
        times.append(_timed(prompt_run))
    prefill_s = statistics.median(times[1:])
    steps, started = [], time.perf_counter()
    while len(steps) < MAX_STEPS and (len(steps) < MIN_STEPS or time.perf_counter() - started < STEP_SECONDS):
        at = prompt + len(steps)
        steps.append(_timed(lambda at=at: decode_step(model, cache, ids[at : at + 1], at)))
    window_s = None
    if window > 1:
        cache.truncate(prompt)
        window_s = statistics.fmean(
            _timed(lambda at=at: decode_step(model, cache, ids[at : at + window], prompt)) for at in range(MAX_WINDOWS)
        )
    return ModelSpeed(statistics.fmean(steps), window_s, prefill_s, prompt, loader.own_bytes)


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
