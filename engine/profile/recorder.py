"""Takes the times of a run. Everything the decode thread does is either in a native call, which the native side records
with what it worked with (engine.profile.places says where that belongs), or Python; nothing is sampled, so the parts
add up.

In the loop itself there is no Python of the profiler's: it notes times where a round begins and ends, and what was
recorded is added up after the run, or after many rounds.
"""

import resource
import time
from collections import defaultdict

import numpy as np

from ..kernels import ffi, lib
from .call_sums import CallSums, Sorted, Spans, Timeline
from .places import Places
from .recording import Recording

STREAM_COUNTERS = ("hits", "misses", "bytes", "reads", "service_s", "busy_s", "wait_s")
MAX_KEPT = 8192  # layer passes of rounds that are not added up yet; some 15 records of 64 bytes each
# What is noted of a round, and behind it what its streamer had counted until then.
_ROUND = ("start", "drafted", "position", "committing", "end", "rows", "tokens")
_STREAM = ("hits", "misses", "bytes", "wait_ns")


class _TimedSpeculator:
    """Notes rounds: a window's making is drafting, its commit ends the round."""

    def __init__(self, profiler, speculator):
        self._profiler, self._speculator, self.stats = profiler, speculator, speculator.stats
        self._window, self._commit, self._note = speculator.window, speculator.commit, profiler.notes.extend

    def start(self, *args):
        self._speculator.start(*args)
        self._profiler.end_prefill()

    def window(self, text, room, clock=time.perf_counter_ns):
        self._note((clock(),))
        window = self._window(text, room)
        self._note((clock(), len(text)))
        return window

    def commit(self, window, num_picked, experts_used, clock=time.perf_counter_ns):
        started = clock()
        self._commit(window, num_picked, experts_used)
        self._note((started, clock(), len(window.ids), num_picked))
        profiler = self._profiler
        if profiler.cache is not None:
            self._note(profiler.stream_counts())
        if len(profiler.notes) >= profiler.max_notes:
            profiler.between_rounds()


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class Profiler:
    """Times of one run of one engine. Use as a context manager around it, and attach the generation before it starts.
    All figures are there when it is left.

    times: (stage, section, layer, tag, function) -> [ns, calls]; stage is "prefill" or "decode"; the next three are a
    Place: the part of the forward pass (embed, attention, mlp, head; draft: in the making of a window; mtp: the layer
    that drafts, while it follows the text; or "" outside of all), its layer or -1, and a named matrix product, or "".
    parts: the same -> ns of PARTS inside those calls.
    bytes: Place of a product -> (bytes of weights read by one call, their formats).
    python: (stage, phase) -> ns of a phase with a clock of its own (draft, with the native calls in it, and verify), or
    of the profiler.
    text_ns: what making text of new tokens took, outside of prefill and rounds.
    engine_ns: what the caller waited for pieces of text in all; 0 for one that takes tokens.
    io: stage -> what the streamer's counters (STREAM_COUNTERS) grew by; empty where nothing is streamed.
    page_faults: of the process, those for which the disk was read.
    stream_at_decode: the counters that rounds have under `stream`, when decoding began.
    unfinished_ns: stage -> ns of the prefill or round that was interrupted.
    rounds: one dict per decode round: start and end (ns), rows, tokens, position, native (ns by section), and the
    streamer's counters then.
    experts: layer -> counts per expert. experts_run: (stage, layer) -> experts read by moe_experts.
    events: (name, category, start ns, ns, layer) of every call, when trace is on.
    """

    def __init__(self, engine, *, trace: bool = False):
        self.engine, self._trace = engine, trace
        self.notes: list[int] = []  # of rounds that are not added up yet
        self.rounds: list[dict] = []
        self.page_faults = 0
        self.io: dict[str, dict] = {}
        self.stream_at_decode: dict = {}
        self.python: dict = defaultdict(int, {("decode", "profiler"): 0})
        self.unfinished_ns = {"prefill": 0, "decode": 0}
        self.text_ns = self.engine_ns = 0
        self.busy_ns: list[int] = []
        places = Places(engine.model)
        self.bytes, self._sums, self._recording = places.bytes, CallSums(places), Recording(engine)
        self._sorted: list[Sorted] = []
        self._restore: list = []
        self._following = Spans([], [])
        self._prefill_end: int | None = None
        self.cache = engine.stream.cache if engine.stream else None
        self._raw = ffi.new("struct moe_stream_stats *")
        self._width = len(_ROUND) + (0 if self.cache is None else len(_STREAM))
        self.max_notes = self._width * max(1, MAX_KEPT // len(engine.model.blocks))

    @property
    def times(self) -> dict:
        return self._sums.times

    @property
    def parts(self) -> dict:
        return self._sums.parts

    @property
    def experts_run(self) -> dict:
        return self._sums.experts_run

    @property
    def events(self) -> list[tuple]:
        return [event for found in self._sorted for event in self._sums.events(found)]

    # ---- attaching ----

    def __enter__(self):
        tokenizer, model = self.engine.tokenizer, self.engine.model
        self._recording.start()
        self._replace(tokenizer, "token_bytes", self._timed_text(tokenizer.token_bytes))
        if model.mtp is not None:
            self._replace(model.mtp, "forward", self._noted(model.mtp.forward))
        self._busy_before = self._busy()
        self._stream_before = self._stream_counters()
        self.page_faults = -_major_faults()
        self._started = time.perf_counter_ns()
        return self

    def __exit__(self, *exc):
        ended = time.perf_counter_ns()
        try:
            self.page_faults += _major_faults()
            self._end_stage()
            self._add_up(ended)
            self.busy_ns = [b - a for a, b in zip(self._busy_before, self._busy(), strict=True)]
        finally:
            self._recording.stop()
            for obj, name, value in reversed(self._restore):
                if value is None:
                    delattr(obj, name)
                else:
                    setattr(obj, name, value)
            self._restore.clear()
        self.experts = {layer: counts.tolist() for layer, counts in self._sums.experts.items()}

    def attach(self, generation) -> None:
        """Follow the rounds of a generation that has not started."""
        generation.speculator = _TimedSpeculator(self, generation.speculator)
        generation._pieces = self._timed_pieces(generation._pieces)

    def _replace(self, obj, name: str, value) -> None:
        self._restore.append((obj, name, vars(obj).get(name)))
        setattr(obj, name, value)

    # ---- recording ----

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

    def _noted(self, function):
        """The layer that drafts, as it follows the text."""

        def call(*args):
            self._following.starts.append(time.perf_counter_ns())
            try:
                return function(*args)
            finally:
                self._following.ends.append(time.perf_counter_ns())

        return call

    def end_prefill(self) -> None:
        """The prompt is in the cache, the first token chosen."""
        self._prefill_end = time.perf_counter_ns()
        self._end_stage()

    def between_rounds(self) -> None:
        """Much has been noted. What the profiler does here is in no round."""
        started = time.perf_counter_ns()
        self._add_up(started)
        self.python["decode", "profiler"] += time.perf_counter_ns() - started

    def _busy(self) -> list[int]:
        found = ffi.new("int64_t[]", self.engine.context.num_threads)
        lib.moe_busy_times(self.engine.context.handle, found)
        return list(found)

    def stream_counts(self) -> tuple:
        """_STREAM of now."""
        raw, counters = self._raw, self.cache.counters
        lib.moe_streamer_stats(self.cache.handle, raw)
        return counters.hits, counters.misses, raw.bytes, raw.wait_ns

    def _stream_counters(self) -> dict:
        found = self.cache.stats() if self.cache else {}
        return {name: found[name] for name in STREAM_COUNTERS if name in found}

    def _end_stage(self) -> None:
        now = self._stream_counters()
        stage = "prefill" if "prefill" not in self.io else "decode"
        self.io[stage] = {name: count - self._stream_before[name] for name, count in now.items()}
        self._stream_before = now
        if stage == "prefill" and self.cache:
            self.stream_at_decode = dict(zip(_STREAM, self.stream_counts(), strict=True))

    # ---- adding up ----

    def _add_up(self, now: int) -> None:
        """What was noted and recorded since the last time; `now` (ns) ends what is still open."""
        whole = len(self.notes) - len(self.notes) % self._width
        rows = np.array(self.notes[:whole], np.int64).reshape(-1, self._width)
        unfinished = self.notes[whole:]
        self.notes.clear()
        column = dict(zip((*_ROUND, *_STREAM), rows.T, strict=False))
        starts, drafted, ends = (column[name].tolist() for name in ("start", "drafted", "end"))
        self.python["decode", "draft"] += int((column["drafted"] - column["start"]).sum())
        self.python["decode", "verify"] += int((column["end"] - column["committing"]).sum())
        if unfinished:
            self.unfinished_ns["decode"] = now - unfinished[0]
            if len(unfinished) > 1:  # its window was made
                self.python["decode", "draft"] += unfinished[1] - unfinished[0]
            starts, ends = [*starts, unfinished[0]], [*ends, now]
            drafted = [*drafted, unfinished[1] if len(unfinished) > 1 else now]
        elif self._prefill_end is None:
            self.unfinished_ns["prefill"] = now - self._started
        calls, own, experts = self._recording.take()
        timeline = Timeline(self._prefill_end, Spans(starts, ends), Spans(starts, drafted), self._following)
        found = self._sums.add(calls, own, experts, timeline)
        self._following = Spans([], [])
        self._add_rounds(rows, self._sums.by_section(found, len(starts)))
        if self._trace:
            self._sorted.append(found)

    def _add_rounds(self, rows: np.ndarray, native: list[dict]) -> None:
        for row, sections in zip(rows.tolist(), native, strict=False):
            noted = dict(zip(_ROUND, row, strict=False))
            stream = dict(zip(_STREAM, row[len(_ROUND) :], strict=True)) if self.cache else None
            self.rounds.append({
                **{name: noted[name] for name in ("start", "end", "rows", "tokens", "position")},
                "native": sections, "stream": stream,
            })  # fmt: skip
