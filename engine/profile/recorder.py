"""Takes the times of a run. Everything the decode thread does is either in a native call, which is timed and counted
under the part of the model that made it, or Python; nothing is sampled, so the parts add up.

Attaching replaces attributes of the loaded model's objects by ones that say which part is running. A run without a
profiler is untouched: no flag is looked at, nothing is counted.
"""

import time
from collections import defaultdict

from ..kernels import ffi, lib
from ..layers import Linear

NUM_EXPERTS_ARGUMENT = 6  # of moe_experts
UNTIMED = ("moe_timing", "moe_streamer_stats")  # of the profiler itself
PARTS = ("quantize", "gate_up", "down")  # enum moe_time


class _Tagged:
    """A callable that names itself while it runs."""

    def __init__(self, profiler, call, tag: str):
        self._profiler, self._call, self._tag = profiler, call, tag

    def __call__(self, *args, **options):
        profiler = self._profiler
        outer, profiler.tag = profiler.tag, self._tag
        try:
            return self._call(*args, **options)
        finally:
            profiler.tag = outer

    def __getattr__(self, name):
        return getattr(self._call, name)


class _TimedSpeculator:
    """Marks rounds: a window's making is drafting, its commit ends the round."""

    def __init__(self, profiler, speculator):
        self._profiler, self._speculator, self.stats = profiler, speculator, speculator.stats

    def start(self, experts_used):
        self._speculator.start(experts_used)

    def window(self, text, room):
        profiler = self._profiler
        started = profiler.begin_round(len(text))
        window = self._speculator.window(text, room)
        profiler.add_python("draft", started)
        return window

    def commit(self, window, num_picked, experts_used):
        profiler = self._profiler
        started = time.perf_counter_ns()
        self._speculator.commit(window, num_picked, experts_used)
        profiler.add_python("verify", started)
        profiler.end_round(len(window.ids), num_picked)


class Profiler:
    """Times of one run of one engine. Use as a context manager around it, and attach the generation before it starts.

    times: (stage, section, layer, tag, function) -> [ns, calls]; stage is "prefill" or "decode"; section is the part of
    the forward pass (embed, attention, mlp, head, or "" outside of it); tag a named matrix product, or "".
    parts: (stage, section, layer) -> ns of PARTS inside the section's native calls.
    python: (stage, phase) -> ns of Python that belongs to a phase of its own (draft, verify).
    rounds: one dict per decode round: start and end (ns), rows, tokens, position, native (ns by section), and the
    streamer's counters then.
    experts: layer -> counts per expert. events: (name, category, start ns, ns, layer) when trace is on.
    """

    def __init__(self, engine, *, trace: bool = False):
        self.engine, self.stage, self.section, self.layer, self.tag = engine, "prefill", "", -1, ""
        self.times: dict = defaultdict(lambda: [0, 0])
        self.parts: dict = defaultdict(lambda: [0] * len(PARTS))
        self.python: dict = defaultdict(int)
        self.experts_run: dict = defaultdict(int)  # (stage, layer) -> experts read by moe_experts
        self.rounds: list[dict] = []
        self.experts: dict[int, list[int]] = {}
        self.events: list | None = [] if trace else None
        self.bytes: dict = {}  # tag's (section, layer, tag) -> (bytes read by one call, format)
        self.busy_ns: list[int] = []
        self._restore: list = []
        self._ctx = engine.context.handle
        self._part_ns = ffi.new("int64_t[]", len(PARTS))
        self._last_parts = [0] * len(PARTS)
        self._round_started, self._round_native = 0, defaultdict(int)

    # ---- attaching ----

    def __enter__(self):
        model = self.engine.model
        for name in ("embed", "head"):
            self._section(model, name, name, -1)
        for name in ("attention", "mlp"):
            self._block_section(model, name)
        for n, block in enumerate(model.blocks):
            self._tag_products(block.attention, "attention", n)
            self._tag_mlp(block.mlp, n)
        self._tag_products(model, "head", -1)
        lib.observe(self._timed)
        lib.moe_timing(self._ctx, 1, ffi.NULL, ffi.NULL)
        self.times.clear()
        self._read_parts()
        self._busy_before = self._busy()
        return self

    def __exit__(self, *exc):
        self.busy_ns = [b - a for a, b in zip(self._busy_before, self._busy(), strict=True)]
        lib.stop_observing()
        lib.moe_timing(self._ctx, 0, ffi.NULL, ffi.NULL)
        for obj, name, value in reversed(self._restore):
            if value is None:
                delattr(obj, name)
            else:
                setattr(obj, name, value)
        self._restore.clear()

    def attach(self, generation) -> None:
        """Follow the rounds of a generation that has not started."""
        generation.speculator = _TimedSpeculator(self, generation.speculator)

    def _replace(self, obj, name: str, value) -> None:
        self._restore.append((obj, name, vars(obj).get(name)))
        setattr(obj, name, value)

    def _section(self, obj, name: str, section: str, layer: int) -> None:
        call = getattr(obj, name)

        def run(*args):
            self.section, self.layer = section, layer
            try:
                return call(*args)
            finally:
                self._end_section(section, layer)

        self._replace(obj, name, run)

    def _block_section(self, model, name: str) -> None:
        call, number = getattr(model, name), {id(block): n for n, block in enumerate(model.blocks)}

        def run(block, *args):
            self.section, self.layer = name, number[id(block)]
            try:
                return call(block, *args)
            finally:
                self._end_section(name, self.layer)

        self._replace(model, name, run)

    def _tag_products(self, obj, section: str, layer: int) -> None:
        for name, value in list(vars(obj).items()):
            if isinstance(value, Linear):
                self._tag(obj, name, name, section, layer)

    def _tag(self, obj, name: str, tag: str, section: str, layer: int) -> None:
        linear = getattr(obj, name)
        formats = ", ".join(dict.fromkeys(m.format or m.layout for m in linear.matrices))
        self.bytes[section, layer, tag] = (sum(m.num_bytes for m in linear.matrices), formats)
        self._replace(obj, name, _Tagged(self, linear, tag))

    def _tag_mlp(self, mlp, n: int) -> None:
        routed, shared = getattr(mlp, "routed", None), getattr(mlp, "shared", None)
        if routed is not None:
            self._tag(routed, "router_linear", "router", "mlp", n)
            counts = self.experts[n] = [0] * routed.num_experts
            routed.observers.append(lambda ids, weights: self._count(counts, ids))
            self._restore_observer(routed)
        dense = mlp if routed is None else getattr(shared, "mlp", None)
        if shared is not None and getattr(shared, "gate_linear", None) is not None:
            self._tag(shared, "gate_linear", "shared gate", "mlp", n)
        if dense is not None:
            kind = "dense" if routed is None else "shared"
            self._tag(dense, "gate_up", f"{kind} gate_up", "mlp", n)
            self._tag(dense, "down", f"{kind} down", "mlp", n)

    def _restore_observer(self, routed) -> None:
        self._restore.append((routed, "observers", routed.observers[:-1]))

    @staticmethod
    def _count(counts: list[int], ids) -> None:
        for expert in ids.reshape(-1).tolist():
            counts[expert] += 1

    # ---- recording ----

    def _timed(self, name: str, function):
        clock, times = time.perf_counter_ns, self.times

        def call(*args):
            started = clock()
            result = function(*args)
            spent = clock() - started
            entry = times[self.stage, self.section, self.layer, self.tag, name]
            entry[0] += spent
            entry[1] += 1
            self._round_native[self.section] += spent
            if name == "moe_experts":
                self.experts_run[self.stage, self.layer] += args[NUM_EXPERTS_ARGUMENT]
            if self.events is not None:
                self.events.append((self.tag or name.removeprefix("moe_"), self.section, started, spent, self.layer))
            return result

        return call if name.startswith("moe_") and name not in UNTIMED else function

    def _read_parts(self) -> list[int]:
        lib.moe_timing(self._ctx, 1, self._part_ns, ffi.NULL)
        now = list(self._part_ns)
        delta = [b - a for a, b in zip(self._last_parts, now, strict=True)]
        self._last_parts = now
        return delta

    def _end_section(self, section: str, layer: int) -> None:
        total = self.parts[self.stage, section, layer]
        for i, ns in enumerate(self._read_parts()):
            total[i] += ns
        self.section, self.layer = "", -1

    def _busy(self) -> list[int]:
        found = ffi.new("int64_t[]", self.engine.context.num_threads)
        lib.moe_timing(self._ctx, 1, ffi.NULL, found)
        return list(found)

    def add_python(self, phase: str, started: int) -> None:
        """Time since `started` (ns) that is neither native nor the loop's own."""
        self.python[self.stage, phase] += time.perf_counter_ns() - started

    def begin_round(self, position: int) -> int:
        """A decode round begins; the first one ends the prefill."""
        self.stage, self._position = "decode", position
        self._round_native = defaultdict(int)
        self._round_started = time.perf_counter_ns()
        return self._round_started

    def end_round(self, rows: int, tokens: int) -> None:
        stream = getattr(self.engine, "stream", None)
        self.rounds.append({
            "start": self._round_started, "end": time.perf_counter_ns(), "rows": rows, "tokens": tokens,
            "position": self._position, "native": dict(self._round_native),
            "stream": stream.cache.stats() if stream else None,
        })  # fmt: skip
