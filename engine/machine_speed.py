"""What this machine does with a model, measured in seconds: the model's own layers on random weights, the decode loop
around them, re-coding, and the disk at the size of the model's requests."""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from .bandwidth import memory_bandwidth
from .bench import fixed_ids
from .cut_model import LayerClock, choose_layers, cut_model, head_part
from .disk_bandwidth import DiskSpeed, measure_bursts
from .kernels import Context
from .models import family
from .synthetic import EMBEDDED_IDS, SyntheticLoader

STEP_SECONDS = 1.5  # about how long prompts and decode steps are repeated
CUT_SECONDS = 1.0  # the same of a model of which some layers are run
FEW_LAYERS = 4  # so large that between two uses of a weight enough others are read to push it out of a cache
DISK_SECONDS = 1.0
MAX_STEPS, MIN_STEPS, MAX_PROMPTS, MAX_WINDOWS = 64, 3, 9, 32
CALL_STEPS = 96  # of a layer call's costs when experts are streamed
LOOP_TURNS, LOOP_STEPS = 5, 48  # of the loop around a model
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
        self.layers_run, head_rows = len(stands_for), files.model_config.vocab_size
        self.is_cut = self.layers_run < files.model_config.num_hidden_layers
        if self.is_cut:
            head_rows = head_part(files)
            pool_bytes //= 2 if self.layers_run <= FEW_LAYERS else 1
        self.clock = LayerClock(stands_for, files.model_config.vocab_size / head_rows)
        loader = SyntheticLoader(
            files, context, compact_experts=compact, pool_bytes=pool_bytes, mapped=mapped, layers=stands_for,
            head_rows=head_rows,
        )  # fmt: skip
        model_class = cut_model(family(files.architecture).Model, self.clock)
        self.model = model_class(files.config, loader, context, positions, min(max_tokens, positions))
        self.own_bytes = loader.own_bytes
        self.cache = self.model.new_kv(positions, kv)
        self.ids = fixed_ids(positions, min(self.model.config.vocab_size, EMBEDDED_IDS))

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
    seconds = CUT_SECONDS if passes.is_cut else STEP_SECONDS
    # The first prompt pays for memory and code that nobody used yet.
    prompts = _again(lambda _: passes.prefill(), seconds, 2, MAX_PROMPTS)[1:]
    steps = _again(lambda number: passes.rows(1, prompt + number), seconds, MIN_STEPS, MAX_STEPS)
    ratio = _window_ratio(passes, window) if window > 1 else None
    return ModelSpeed(statistics.fmean(steps), ratio, statistics.median(prompts), prompt, passes.own_bytes,
                      passes.layers_run)  # fmt: skip


def _again(run, seconds: float, at_least: int, at_most: int) -> list:
    """What run(0), run(1) ... return, for so many seconds."""
    found, started = [], time.perf_counter()
    while len(found) < at_most and (len(found) < at_least or time.perf_counter() - started < seconds):
        found.append(run(len(found)))
    return found


def _window_ratio(passes: _Passes, window: int) -> float:
    """Time of a window over that of a step, both behind the prompt and in turns, so that a machine which becomes
    faster or slower does it to both. A window holds a step's row and more, so that less than 1 is noise."""
    at = passes.prompt
    pairs = _again(lambda _: (passes.rows(1, at), passes.rows(window, at)), STEP_SECONDS, MIN_STEPS, MAX_WINDOWS)
    step, rows = (statistics.median(times) for times in zip(*pairs, strict=True))
    return max(1.0, rows / step)


def loop_seconds(options) -> float:
    """Seconds a token that the decode loop (choice of a token, text) adds to forward passes on end, on the shipped
    model: its own and those by which passes get slower, since caches and worker threads lose sight of them."""
    from .runtime import load
    from .sampler import SamplingParams

    engine = load(threads=options.threads, isa=options.isa)
    tokens = engine.tokenizer.encode("The")
    prompt = len(tokens)
    found = []
    for _ in range(LOOP_TURNS):
        generation = engine.generate(tokens[:prompt], max_tokens=LOOP_STEPS + 1, sampling=SamplingParams(),
                                     ignore_eos=True)  # fmt: skip
        for _ in generation:
            pass
        tokens = tokens[:prompt] + generation.token_ids
        steps = _steps(engine, np.asarray(tokens, np.int32))[prompt:][:LOOP_STEPS]
        found.append(generation.stats.decode_s / LOOP_STEPS - statistics.fmean(seconds for seconds, _ in steps))
    return max(0.0, statistics.median(found))


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
    ids = fixed_ids(CALL_STEPS, resident.model.config.vocab_size)
    first = CALL_STEPS // 4  # experts of the first steps come for the first time
    plain, hits = (statistics.median(seconds for seconds, _ in _steps(engine, ids)[first:])
                   for engine in (resident, cached))  # fmt: skip
    missing = [(seconds - hits) / misses for seconds, misses in _steps(half, ids)[first:] if misses]
    return max(0.0, hits - plain) / layers, max(0.0, statistics.median(missing) if missing else 0.0)


def _steps(engine, ids: np.ndarray) -> list[tuple[float, int]]:
    """(seconds without waits for the disk, experts missed) of a decode step for each of the tokens, one behind the
    other from the start of a context on."""
    from .generate import decode_step

    kv, found = engine.new_kv(len(ids)), []
    stats = engine.stream.stats if engine.stream else lambda: {"wait_s": 0.0, "misses": 0}
    for at in range(len(ids)):
        before = stats()
        seconds = _timed(lambda at=at: decode_step(engine.model, kv, ids[at : at + 1], at))
        after = stats()
        waited = after["wait_s"] - before["wait_s"]
        found.append((seconds - waited, after["misses"] - before["misses"]))
    return found


__all__ = ["DiskSpeed", "ModelSpeed", "disk_speed", "loop_seconds", "memory_bandwidth", "model_speed", "recode_gb_s",
           "stream_call_seconds"]  # fmt: skip
