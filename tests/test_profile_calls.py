"""Recorded calls: none is lost, doubled or put elsewhere, whoever else computes, and the loop is left alone.

The oracle counts the same calls from outside: it stands in for the library in every module of the engine and for the
methods of the model that run a section, and so knows what Python asked for and within what.
"""

import itertools
import sys
import threading
from collections import Counter

import family_models
import latent_and_sink_models
import mtp_models
import numpy as np
import pytest
from native_calls import Experts, Matrix, context, pointer, route_plan, run_experts

import engine
from engine import runtime
from engine.errors import KernelError, NumericsError
from engine.kernels import ffi, lib
from engine.layers import Linear
from engine.profile import Profiler, recorder
from engine.profile.call_sums import CallSums, Spans, Timeline
from engine.profile.places import Places, address
from engine.profile.recording import CALL, EXPERT_USE, context_calls
from engine.runtime import SHIPPED_MODEL

# Of the profiler itself, or no part of a forward pass.
UNSEEN = ("moe_record", "moe_take_calls", "moe_busy_times", "moe_streamer_record", "moe_streamer_take_calls",
          "moe_streamer_stats", "moe_streamer_reset", "moe_matrix_bytes")  # fmt: skip


class Observer:
    """counts: (stage, section, layer, tag, function) -> calls. experts_run: (stage, layer) -> experts asked for;
    experts: (layer, expert) -> tokens that the router sent."""

    def __init__(self, monkeypatch, model):
        self.counts, self.experts_run, self.experts = Counter(), Counter(), Counter()
        self.stage, self.place, self._linear, self._model = "prefill", ("", -1), None, model
        self._products = self._known_products()
        for name, module in list(sys.modules.items()):
            if name.startswith("engine.") and getattr(module, "lib", None) is lib:
                monkeypatch.setattr(module, "lib", self)
        for name in ("embed", "head"):
            monkeypatch.setattr(model, name, self._within(getattr(model, name), lambda *_, at=(name, -1): at))
        number = {id(block): n for n, block in enumerate(model.blocks)}
        for name in ("attention", "mlp"):
            at = lambda block, *_, name=name: (name, number[id(block)])  # noqa: E731
            monkeypatch.setattr(model, name, self._within(getattr(model, name), at))
        if model.mtp is not None:
            monkeypatch.setattr(model.mtp, "forward", self._within(model.mtp.forward, lambda *_: ("mtp", -1)))
        product = Linear.__call__
        monkeypatch.setattr(Linear, "__call__", lambda linear, *args, **kw: self._product(product, linear, args, kw))
        for n, routed in self._routed():
            monkeypatch.setattr(routed, "observers", [lambda ids, weights, n=n: self._choice(n, ids)])

    def __getattr__(self, name):
        function = getattr(lib, name)
        if not name.startswith("moe_") or name in UNSEEN:
            return function
        return lambda *args: self._call(name, function, args)

    def follow(self, generation) -> None:
        """Before a profiler does."""
        speculator = generation.speculator
        start = speculator.start

        def started(*args):
            start(*args)
            self.stage = "decode"

        speculator.window = self._within(speculator.window, lambda *_: ("draft", -1))
        speculator.start = started

    def _routed(self):
        return [(n, b.mlp.routed) for n, b in enumerate(self._model.blocks) if hasattr(b.mlp, "routed")]

    def _known_products(self) -> dict:
        known = {id(self._model.lm_head): ("head", -1, "lm_head")}
        for n, block in enumerate(self._model.blocks):
            known |= {
                id(v): ("attention", n, k) for k, v in vars(block.attention).items() if isinstance(v, Linear)
            }  # fmt: skip
            shared = getattr(block.mlp, "shared", None)
            for kind, dense in (("dense", block.mlp), ("shared", getattr(shared, "mlp", None))):
                if hasattr(dense, "gate_up"):
                    known[id(dense.gate_up)] = ("mlp", n, f"{kind} gate_up")
                    known[id(dense.down)] = ("mlp", n, f"{kind} down")
            if getattr(shared, "gate_linear", None) is not None:
                known[id(shared.gate_linear)] = ("mlp", n, "shared gate")
        return known | {id(routed.router_linear): ("mlp", n, "router") for n, routed in self._routed()}

    def _within(self, function, at):
        def call(*args):
            before = self.place
            self.place = before if before[0] in ("draft", "mtp") else at(*args)
            try:
                return function(*args)
            finally:
                self.place = before

        return call

    def _product(self, product, linear, args, options):
        self._linear = linear
        return product(linear, *args, **options)

    def _choice(self, n, ids):
        self.experts.update((n, e) for e in ids.reshape(-1).tolist())

    def _call(self, name, function, args):
        section, layer, tag = *self.place, ""
        if name == "moe_linear" and section not in ("draft", "mtp"):
            section, layer, tag = self._products.get(id(self._linear), (section, layer, ""))
        self.counts[self.stage, section, layer, tag, name] += 1
        if name == "moe_experts" and section == "mlp":
            self.experts_run[self.stage, layer] += args[6]
        return function(*args)


def observed(monkeypatch, loaded, prompt, tokens=6, trace=False, **options):
    """(oracle, profiler) of one generation."""
    generation = loaded.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True, **options)
    with monkeypatch.context() as patch:
        oracle = Observer(patch, loaded.model)
        oracle.follow(generation)
        with Profiler(loaded, trace=trace) as profiler:
            profiler.attach(generation)
            list(generation)
    assert_same(oracle, profiler)
    return oracle, profiler


def assert_same(oracle, profiler):
    assert {key: calls for key, (_, calls) in profiler.times.items()} == oracle.counts
    assert dict(profiler.experts_run) == dict(oracle.experts_run)
    uses = {(n, e): count for n, row in profiler.experts.items() for e, count in enumerate(row) if count}
    assert uses == oracle.experts
    sections = {section for _, section, *_ in oracle.counts}
    assert {"embed", "attention", "mlp", "head", ""} <= sections
    decode = sum(ns for (stage, *_), (ns, _) in profiler.times.items() if stage == "decode")
    assert sum(sum(r["native"].values()) for r in profiler.rounds) == decode


@pytest.mark.parametrize("name", [*family_models.CONFIGS, *latent_and_sink_models.CONFIGS])
def test_calls_of_every_family_are_in_their_layer_and_section(monkeypatch, tmp_path, name):
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    latent_and_sink_models.checkpoint(tmp_path / "hf", name)
    oracle, _ = observed(monkeypatch, engine.load(tmp_path / "hf", threads=1), list(range(3, 23)), tokens=4)
    assert oracle.counts["prefill", "attention", 1, "o_proj", "moe_linear"] == 3  # parts of the prompt


@pytest.mark.parametrize("options", [{"spec": 0}, {"spec": 4}])
def test_calls_of_streamed_experts(monkeypatch, options):
    half = engine.load(threads=2, expert_slots=12, history=False, lookahead="on")
    oracle, profiler = observed(monkeypatch, half, "He said, He said,", 24, **options)
    for name in ("request", "use", "next"):
        assert any(function == f"moe_streamer_{name}" for *_, function in oracle.counts), name
    counted = half.stream.cache.stats()
    assert profiler.rounds[-1]["stream"]["misses"] == counted["misses"] > profiler.rounds[0]["stream"]["misses"]
    assert profiler.rounds[-1]["stream"]["wait_ns"] / 1e9 == pytest.approx(counted["wait_s"])


def test_calls_of_a_draft_model(monkeypatch):
    drafting = engine.load(threads=1, draft_model=SHIPPED_MODEL)
    oracle, _ = observed(monkeypatch, drafting, "He said, He said,", 24, spec=4, draft=["model"])
    assert oracle.counts["decode", "draft", -1, "", "moe_experts"] > 0
    assert oracle.counts["decode", "draft", -1, "", "moe_sample"] > 0


def test_calls_of_the_layer_that_drafts(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    mtp_models.checkpoint(tmp_path / "mtp", "glm4_moe")
    own = engine.load(tmp_path / "mtp", threads=1, mtp=True)
    generation = own.generate(list(range(3, 23)), max_tokens=12, temperature=0, ignore_eos=True, spec=3, draft=["mtp"])
    with monkeypatch.context() as patch:
        oracle = Observer(patch, own.model)
        oracle.follow(generation)
        with Profiler(own) as profiler:
            profiler.attach(generation)
            list(generation)
    # Hidden states that the layer keeps are made with the norm of the head, outside of everything for the oracle.
    norms = {(stage, *at): n for (stage, *at), n in oracle.counts.items() if at == ["", -1, "", "moe_rmsnorm"]}
    for (stage, *_), count in norms.items():
        del oracle.counts[stage, "", -1, "", "moe_rmsnorm"]
        oracle.counts[stage, "head", -1, "", "moe_rmsnorm"] += count
    assert norms and oracle.counts["prefill", "mtp", -1, "", "moe_linear"] > 0
    assert oracle.counts["decode", "draft", -1, "", "moe_linear"] > 0
    assert {key: calls for key, (_, calls) in profiler.times.items()} == oracle.counts


@pytest.fixture(scope="module")
def loaded():
    return engine.load(threads=2)


def counts(profiler):
    return {key: calls for key, (_, calls) in profiler.times.items()}


def run(loaded, between=lambda: None, trace=False):
    """Profiler of 40 tokens with drafts; between: called after every token."""
    generation = loaded.generate("He said, He said,", max_tokens=40, temperature=0, ignore_eos=True, spec=4)
    with Profiler(loaded, trace=trace) as profiler:
        profiler.attach(generation)
        for _ in generation.tokens():
            between()
    return profiler


def test_adding_up_now_and_then_changes_nothing(loaded, monkeypatch):
    whole = run(loaded, trace=True)
    monkeypatch.setattr(recorder, "MAX_KEPT", 1)  # after every round
    parts = run(loaded, trace=True)
    assert parts.python["decode", "profiler"] > 0 == whole.python["decode", "profiler"]
    assert counts(parts) == counts(whole) and parts.experts == whole.experts
    assert dict(parts.experts_run) == dict(whole.experts_run)
    for profiler in (whole, parts):
        events, rounds = profiler.events, profiler.rounds
        assert len(rounds) == len(whole.rounds)
        assert len(events) == sum(calls for _, calls in profiler.times.values())
        assert sum(ns for *_, ns, _ in events) == sum(ns for ns, _ in profiler.times.values())
        for r in rounds:
            inside = sum(ns for _, _, start, ns, _ in events if r["start"] <= start < r["end"])
            assert 0 < inside == sum(r["native"].values()) < r["end"] - r["start"]
    assert [e[:2] for e in parts.events] == [e[:2] for e in whole.events]


def test_other_engines_and_other_generations_do_not_count(loaded):
    """Neither on this thread, between two tokens, nor on another at the same time."""
    alone = run(loaded)
    other = engine.load(threads=1)
    names = iter(other.generate("In the", max_tokens=200, ignore_eos=True).tokens())
    same = iter(loaded.generate("In the", max_tokens=200, ignore_eos=True).tokens())
    stop = threading.Event()

    def compute():
        third = engine.load(threads=1)
        while not stop.is_set():
            "".join(third.generate("And", max_tokens=4, ignore_eos=True))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        mixed = run(loaded, lambda: (next(names), next(same)))
    finally:
        stop.set()
        thread.join()
    assert counts(mixed) == counts(alone) and mixed.experts == alone.experts


def test_one_profiler_at_a_time(loaded):
    with Profiler(loaded):
        with pytest.raises(KernelError, match="in use"), Profiler(loaded):
            pass
        assert context_calls(loaded.context).take()[0].size == 0  # the first goes on
    half = engine.load(threads=1, expert_slots=12, history=False)
    cache = half.stream.cache.handle
    assert lib.moe_streamer_record(cache, 1) == 0
    with pytest.raises(KernelError, match="in use"), Profiler(half):  # its context records, then not
        pass
    assert lib.moe_streamer_record(cache, 0) == 0
    assert counts(run(half)) and counts(run(loaded))


@pytest.mark.parametrize("error", [NumericsError("made up"), KeyboardInterrupt()])
def test_a_step_that_breaks_off_leaves_the_next_ones_right(loaded, monkeypatch, error):
    """In the middle of a layer. A window of drafts that breaks off is run again without them."""
    layer, calls = loaded.model.blocks[1].attention, itertools.count()
    attention = type(layer).__call__

    def breaks(self, *args):
        if self is layer and args[-2] > 1 and next(calls) == 2:  # a prompt, a window, and then
            raise error
        return attention(self, *args)

    generation = loaded.generate("He said, He said, He said,", max_tokens=40, temperature=0, ignore_eos=True, spec=4)
    with monkeypatch.context() as patch:
        oracle = Observer(patch, loaded.model)
        oracle.follow(generation)
        patch.setattr(type(layer), "__call__", breaks)
        with Profiler(loaded) as profiler:
            profiler.attach(generation)
            try:
                list(generation)
            except KeyboardInterrupt as interrupt:
                assert interrupt is error
    assert next(calls) > 2
    assert counts(profiler) == dict(oracle.counts)
    # The layer that broke off had begun with its norm, those of q and k are missing.
    norms = [oracle.counts["decode", "attention", n, "", "moe_rmsnorm"] for n in range(3)]
    assert norms[0] - 2 == norms[1] > norms[2] > 0
    if isinstance(error, KeyboardInterrupt):
        assert profiler.unfinished_ns["decode"] > 0
    else:
        assert profiler.unfinished_ns == {"prefill": 0, "decode": 0} and len(generation.token_ids) == 40


def test_calls_of_a_draft_model_are_not_told_by_addresses(loaded):
    """Both models may have mapped the same file."""
    places, calls = Places(loaded.model), np.zeros(4, CALL)
    norm, embed = loaded.model.blocks[1].input_layernorm.ptr, loaded.model.embed_tokens.cdata
    calls["subject"] = [address(embed), address(norm), 0, address(norm)]
    name = ffi.new("char[]", b"moe_made_up")
    calls["function"], calls["start"], calls["end"] = address(name), [1, 3, 5, 7], [2, 4, 6, 8]
    never, own = Spans([], []), np.array([True, False, True, True])
    found = CallSums(places).add(calls, own, np.empty(0, EXPERT_USE), Timeline(None, never, never, never))
    assert [places.all[n] for n in found.place] == [("embed", -1, ""), ("", -1, ""), ("embed", -1, ""),
                                                    ("attention", 1, "")]  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_busy_in_calls_and_not_waiting(threads):
    several, seen = engine.load(threads=threads), []
    for _ in range(20):  # on a machine with other work nobody may have waited
        generation = several.generate(list(range(3, 403)), max_tokens=1)
        with Profiler(several) as profiler:
            profiler.attach(generation)
            list(generation)
        called = sum(ns for ns, _ in profiler.times.values())
        seen.append((called, *profiler.busy_ns))
        assert all(0 <= busy <= called for busy in profiler.busy_ns)
        assert threads > 1 or profiler.busy_ns == [called]
    assert threads == 1 or any(0 < a < called and 0 < b < called for called, a, b in seen), seen


def test_the_loop_makes_no_calls_for_the_profiler(loaded):
    """Python calls of a token with a profiler and without: the same, but for a few around it, however many layers."""

    def python_calls(profiled):
        generation = loaded.generate("In the", max_tokens=33, temperature=0, ignore_eos=True)
        profiler = Profiler(loaded) if profiled else None
        seen = Counter()
        if profiled:
            profiler.__enter__()
            profiler.attach(generation)
        stream = generation.tokens()
        next(stream)
        sys.setprofile(lambda frame, event, arg: seen.update([event]))
        for _ in stream:
            pass
        sys.setprofile(None)
        if profiled:
            profiler.__exit__(None, None, None)
        return seen

    without, within = python_calls(False), python_calls(True)
    assert 0 < within["call"] - without["call"] <= 32 * 4  # window, commit, what the streamer counted, end of round
    assert 0 < within["c_call"] - without["c_call"] <= 32 * 10  # clocks and notes


# ---- the native side ----


def norms(ctx, weights, count):
    """Make `count` calls that take turns with the weights."""
    x = np.ones(8, np.float32)
    for i in range(count):
        assert lib.moe_rmsnorm(ctx, pointer(x), pointer(x), weights[i % len(weights)], 1, 8, 1e-6) == 0


def recording(ctx):
    """(what switches and takes, three weights)"""
    made = context_calls(type("Context", (), {"handle": ctx}))
    arrays = [np.ones(8, np.float32) for _ in range(3)]
    return made, [pointer(a) for a in arrays], arrays


def test_records_are_as_python_reads_them():
    for name, dtype in (("struct moe_call", CALL), ("struct moe_expert_use", EXPERT_USE)):
        assert ffi.sizeof(name) == dtype.itemsize
        offsets = [field.offset for _, field in ffi.typeof(name).fields]
        assert offsets == [dtype.fields[key][1] for key in dtype.names]


@pytest.mark.parametrize("steps", [[5000], [1, 1023, 1, 1024, 1025, 3000], [1024, 2048, 1, 4096, 0, 7]])
def test_no_call_is_lost_where_memory_grows(steps):
    """1024 calls fill the first piece of memory; each half is written while the other is looked at."""
    ctx = context()
    calls, weights, _arrays = recording(ctx)
    norms(ctx, weights, 10)
    calls.switch(True)
    want, before = [int(ffi.cast("uintptr_t", w)) for w in weights], 0
    for count in steps:
        norms(ctx, weights, count)
        found, uses = calls.take()
        assert len(found) == count and len(uses) == 0
        assert found["subject"].tolist() == [want[i % 3] for i in range(count)]
        assert {ffi.string(ffi.cast("char *", f)) for f in set(found["function"].tolist())} <= {b"moe_rmsnorm"}
        times = np.stack([found["start"], found["end"]], 1).reshape(-1)
        assert (np.diff(times) >= 0).all() and (times >= before).all()
        before = times[-1] if count else before
    norms(ctx, weights, 3)
    calls.switch(False)
    norms(ctx, weights, 3)
    assert len(calls.take()[0]) == 0
    calls.switch(True)
    assert len(calls.take()[0]) == 0
    calls.switch(False)


def test_no_expert_is_lost_where_memory_grows():
    """8192 entries fill the first piece of memory."""
    ctx = context()
    calls, _, _arrays = recording(ctx)
    experts = Experts([tuple(Matrix(ctx, "f32", np.ones((8, 8), np.float32)) for _ in range(3)) for _ in range(5)])
    x, rng = np.ones((4, 8), np.float32), np.random.default_rng(1)
    want, out = [], None
    calls.switch(True)
    for count in (1, 1700, 1800, 10):
        want.clear()
        for _ in range(count):
            ids = np.sort(rng.choice(5, (4, 2)).astype(np.int32), 1)
            ids[:, 1] += ids[:, 1] == ids[:, 0]
            ids %= 5
            plan = route_plan(ids, 5)
            out = run_experts(ctx, experts, x, ids, plan, out)
            want.append(list(zip(plan[0].tolist(), np.diff(plan[1]).tolist(), strict=True)))
        found, uses = calls.take()
        assert len(found) == count and {int(ffi.cast("uintptr_t", experts.table))} == set(found["subject"].tolist())
        assert found["num_experts"].tolist() == [len(call) for call in want]
        assert uses.tolist() == [use for call in want for use in call]
        assert (found["parts"][:, 1:] > 0).all() and (found["parts"][:, 0] == 0).all()  # floats: nothing to quantize
        assert (found["parts"].sum(1) <= found["end"] - found["start"]).all()


def test_contexts_record_each_for_itself():
    a, b = context(), context()
    (of_a, weights, _x), (of_b, _, _y) = recording(a), recording(b)
    of_a.switch(True)
    of_b.switch(True)
    norms(a, weights, 5)
    norms(b, weights, 7)
    of_b.switch(False)
    norms(b, weights, 9)
    assert len(of_a.take()[0]) == 5 and len(of_b.take()[0]) == 0


def test_calls_of_several_threads_are_all_there(loaded):
    """Callers of one context wait for each other; who takes waits like them."""
    ctx = context(None, 2)
    calls, weights, _arrays = recording(ctx)
    calls.switch(True)
    threads = [threading.Thread(target=norms, args=(ctx, [w], 3000)) for w in weights]
    for thread in threads:
        thread.start()
    total, found = Counter(), np.empty(0, CALL)
    while any(thread.is_alive() for thread in threads) or len(found):
        found = calls.take()[0]
        total.update(found["subject"].tolist())
    total.update(calls.take()[0]["subject"].tolist())
    assert total == {int(ffi.cast("uintptr_t", w)): 3000 for w in weights}
