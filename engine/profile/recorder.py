"""Takes the times of a run. Everything the decode thread does is either in a native call, which is timed and counted
under the part of the model that made it, or Python; nothing is sampled, so the parts add up.

Attaching replaces attributes of the loaded model's objects by ones that say which part is running. A run without a
profiler is untouched: no flag is looked at, nothing is counted.
"""

import time
from collections import defaultdict

import numpy as np

from ..kernels import ffi, lib
from ..layers import Linear
from .call_log import OUTSIDE, CallLog, Mark

NUM_EXPERTS_ARGUMENT = 6  # of moe_experts
UNTIMED = ("moe_timing", "moe_streamer_stats")  # of the profiler itself
PARTS = ("quantize", "gate_up", "down")  # enum moe_time
DRAFT, MTP = "draft", "mtp"
STREAM_COUNTERS = ("hits", "misses", "bytes", "reads", "service_s", "busy_s", "wait_s")
STEPS, MAX_SECTIONS = 64, 1 << 14  # written down before they are added up


class _Tagged:
    """A callable that names itself while it runs in any layer's section of its kind: look-ahead asks the router of the
    next layer. A draft's own use of it is drafting."""

    def __init__(self, profiler, call, mark: Mark):
        self._extend, self._call, self._profiler = profiler.extend, call, profiler
        self._section, self._before = mark.section, mark.entry

    def __call__(self, *args, **options):
        if self._profiler.inside[0].section != self._section:
            return self._call(*args, **options)
        self._extend(self._before)
        try:
            return self._call(*args, **options)
        finally:
            self._extend(self._profiler.inside)

    def __getattr__(self, name):
        return getattr(self._call, name)


class _TimedSpeculator:
    """Marks rounds: a window's making is drafting, its commit ends the round."""

    def __init__(self, profiler, speculator):
        self._profiler, self._speculator, self.stats = profiler, speculator, speculator.stats

    def start(self, *args):
        self._speculator.start(*args)
        self._profiler.end_prefill()

    def window(self, text, room):
        profiler = self._profiler
        started = profiler.begin_round(len(text))
        if self.stats is None:  # plain decode
            window = self._speculator.window(text, room)
        else:
            window = profiler.draft(self._speculator.window, text, room)
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
    the forward pass (embed, attention, mlp, head; DRAFT: in the making of a window; MTP: the layer that drafts, while
    it follows the text; or "" outside of all); tag a named matrix product, or "".
    parts: (stage, section, layer) -> ns of PARTS inside the section's native calls.
    python: (stage, phase) -> ns of a phase with a clock of its own (draft, with the native calls in it, and verify), or
    of the profiler.
    text_ns: what making text of new tokens took, outside of prefill and rounds.
    engine_ns: what the caller waited for pieces of text in all; 0 for one that takes tokens.
    io: stage -> what the streamer's counters (STREAM_COUNTERS) grew by; empty where nothing is streamed.
    unfinished_ns: stage -> ns of the prefill or round that was interrupted.
    rounds: one dict per decode round: start and end (ns), rows, tokens, position, native (ns by section), and the
    streamer's counters then.
    experts: layer -> counts per expert. events: (name, category, start ns, ns, layer) when trace is on.
    """

    def __init__(self, engine, *, trace: bool = False):
        self.engine, self.stage, self.layer = engine, "prefill", -1
        self.python: dict = defaultdict(int)
        self.rounds: list[dict] = []
        self.io: dict[str, dict] = {}
        self.unfinished_ns = {"prefill": 0, "decode": 0}
        self.text_ns = self.engine_ns = 0
        self.events: list | None = [] if trace else None
        self.bytes: dict = {}  # tag's (section, layer, tag) -> (bytes read by one call, format)
        self.busy_ns: list[int] = []
        self._calls = CallLog(len(PARTS))
        self.extend, self.inside = self._calls.log.extend, OUTSIDE.entry  # inside: the section that runs
        self._restore: list = []
        self._ctx = engine.context.handle
        self._marks: dict[tuple[str, int], Mark] = {}
        self.experts: dict[int, list[int]] = {}
        self._experts: dict[int, tuple[np.ndarray, list[bytes]]] = {}  # layer -> counts, ids not counted yet
        self.experts_run: dict = defaultdict(int)  # (stage, layer) -> experts read by moe_experts
        self._round_started = 0
        # What the parts have taken so far, at the beginning and at every section's end.
        self._part_times = ffi.buffer(lib.moe_part_times(self._ctx), 8 * len(PARTS))
        self._part_log: list[bytes] = []
        self._ends_before = 0  # of the steps that wait

    @property
    def times(self) -> dict:
        return self._calls.times()

    @property
    def parts(self) -> dict:
        return self._calls.parts()

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
        self._replace(self.engine.tokenizer, "token_bytes", self._timed_text(self.engine.tokenizer.token_bytes))
        if model.mtp is not None:
            self._section(model.mtp, "forward", MTP, -1)
        lib.observe(self._timed)
        lib.moe_timing(self._ctx, 1, ffi.NULL, ffi.NULL)
        self._part_log[:] = [self._part_times[:]]
        self._calls.clear()
        self._busy_before = self._busy()
        self._stream_before = self._stream_counters()
        self._round_started = time.perf_counter_ns()  # of the prefill, so far
        return self

    def __exit__(self, *exc):
        if self._round_started:
            self.unfinished_ns[self.stage] = time.perf_counter_ns() - self._round_started
        self._end_stage()
        self._fold()
        self.experts = {layer: counts.tolist() for layer, (counts, _) in self._experts.items()}
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
        generation._pieces = self._timed_pieces(generation._pieces)

    def _replace(self, obj, name: str, value) -> None:
        self._restore.append((obj, name, vars(obj).get(name)))
        setattr(obj, name, value)

    def _mark(self, section: str, layer: int) -> Mark:
        return self._marks.setdefault((section, layer), Mark(section, layer))

    def _section(self, obj, name: str, section: str, layer: int) -> None:
        call, mark, extend, end = getattr(obj, name), self._mark(section, layer).entry, self.extend, self._end_section

        def run(*args):
            if self.inside is not OUTSIDE.entry:  # the layer that drafts, in the making of a window
                return call(*args)
            self.inside = mark
            extend(mark)
            try:
                return call(*args)
            finally:
                end()

        self._replace(obj, name, run)

    def _block_section(self, model, name: str) -> None:
        call, extend, end = getattr(model, name), self.extend, self._end_section
        marks = {id(block): (n, self._mark(name, n).entry) for n, block in enumerate(model.blocks)}

        def run(block, *args):
            self.layer, mark = marks[id(block)]
            self.inside = mark
            extend(mark)
            try:
                return call(block, *args)
            finally:
                end()

        self._replace(model, name, run)

    def _tag_products(self, obj, section: str, layer: int) -> None:
        for name, value in list(vars(obj).items()):
            if isinstance(value, Linear):
                self._tag(obj, name, name, section, layer)

    def _tag(self, obj, name: str, tag: str, section: str, layer: int) -> None:
        linear = getattr(obj, name)
        formats = ", ".join(dict.fromkeys(m.format or m.layout for m in linear.matrices))
        self.bytes[section, layer, tag] = (sum(m.num_bytes for m in linear.matrices), formats)
        self._replace(obj, name, _Tagged(self, linear, Mark(section, layer, tag)))

    def _tag_mlp(self, mlp, n: int) -> None:
        routed, shared = getattr(mlp, "routed", None), getattr(mlp, "shared", None)
        if routed is not None:
            self._tag(routed, "router_linear", "router", "mlp", n)
            seen: list[bytes] = []
            self._experts[n] = np.zeros(routed.num_experts, np.int64), seen
            routed.observers.append(lambda ids, weights: seen.append(ids.tobytes()))
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

    def _count(self) -> None:
        for counts, seen in self._experts.values():
            counts += np.bincount(np.frombuffer(b"".join(seen), np.int32), minlength=len(counts))
            seen.clear()

    # ---- recording ----

    def _timed(self, name: str, function):
        """A function that keeps (name, start, end) of every call; what that means is worked out between steps."""
        clock, extend, run = time.perf_counter_ns, self.extend, self.experts_run

        def call(*args):
            started = clock()
            result = function(*args)
            extend((name, started, clock()))
            return result

        def experts(*args):
            if self.inside[0].section == "mlp":
                run[self.stage, self.layer] += args[NUM_EXPERTS_ARGUMENT]
            return call(*args)

        if not name.startswith("moe_") or name in UNTIMED:
            return function
        return experts if name == "moe_experts" else call

    def _timed_pieces(self, pieces):
        clock, more = time.perf_counter_ns, True
        try:
            while more:
                started = clock()
                try:
                    piece = next(pieces, None)
                finally:
                    self.engine_ns += clock() - started
                more = piece is not None
                if more:
                    yield piece
        finally:
            pieces.close()

    def _timed_text(self, function):
        clock = time.perf_counter_ns

        def call(token_id):
            started = clock()
            try:
                return function(token_id)
            finally:
                self.text_ns += clock() - started

        return call

    def _end_section(self) -> None:
        self.inside = OUTSIDE.entry
        self.extend(OUTSIDE.entry)
        self._part_log.append(self._part_times[:])
        if len(self._part_log) > MAX_SECTIONS:  # of a long prefill
            self._fold()

    def _cut(self, owner: dict | None = None) -> None:
        """A step ends; owner: the round that it was."""
        ends = len(self._part_log) - 1
        waiting = self._calls.cut(self.stage, ends - self._ends_before, owner)
        self._ends_before = ends
        if waiting >= STEPS:
            self._fold()

    def _fold(self) -> None:
        """Add up what was written down since the last time."""
        self._calls.cut(self.stage, len(self._part_log) - 1 - self._ends_before, None)
        parts = np.frombuffer(b"".join(self._part_log), np.int64).reshape(-1, len(PARTS))
        found = self._calls.fold(np.diff(parts, axis=0))
        self._part_log[:] = self._part_log[-1:]
        self._ends_before = 0
        for kind, owners, begun, spent in found:
            for owner, native in zip(owners, kind.by_section(spent), strict=True):
                if owner is not None:
                    owner["native"] = native
            if self.events is not None:
                self._add_events(kind, begun, spent)
        self._count()

    def _add_events(self, kind, begun: np.ndarray, spent: np.ndarray) -> None:
        for starts, times in zip(begun.tolist(), spent.tolist(), strict=True):
            for (section, layer, tag, name), start, ns in zip(kind.keys, starts, times, strict=True):
                self.events.append((tag or name.removeprefix("moe_"), section, start, ns, layer))

    def _busy(self) -> list[int]:
        found = ffi.new("int64_t[]", self.engine.context.num_threads)
        lib.moe_timing(self._ctx, 1, ffi.NULL, found)
        return list(found)

    def draft(self, window, *args):
        """Make a window: native calls in it, of whatever model, are the draft's."""
        self.inside = self._mark(DRAFT, -1).entry
        self.extend(self.inside)
        try:
            return window(*args)
        finally:
            self._end_section()

    def add_python(self, phase: str, started: int) -> None:
        """Time since `started` (ns) that is not the loop's own."""
        self.python[self.stage, phase] += time.perf_counter_ns() - started

    def _stream_counters(self) -> dict:
        stream = getattr(self.engine, "stream", None)
        found = stream.cache.stats() if stream else {}
        return {name: found[name] for name in STREAM_COUNTERS if name in found}

    def _end_stage(self) -> None:
        now = self._stream_counters()
        self.io[self.stage] = {name: count - self._stream_before[name] for name, count in now.items()}
        self._stream_before = now

    def end_prefill(self) -> None:
        """The prompt is in the cache, the first token chosen."""
        self._cut()
        self._end_stage()
        self.stage, self._round_started = "decode", 0

    def begin_round(self, position: int) -> int:
        """A decode round begins."""
        self._position = position
        self._round_started = time.perf_counter_ns()
        return self._round_started

    def end_round(self, rows: int, tokens: int) -> None:
        """It is over. What the profiler does here is in no round."""
        stream = getattr(self.engine, "stream", None)
        ended = time.perf_counter_ns()
        self.rounds.append({
            "start": self._round_started, "end": ended, "rows": rows, "tokens": tokens,
            "position": self._position, "native": {}, "stream": stream.cache.stats() if stream else None,
        })  # fmt: skip
        self._round_started = 0
        self._cut(self.rounds[-1])
        self.add_python("profiler", ended)
