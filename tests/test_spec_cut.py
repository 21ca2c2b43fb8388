"""Windows that are cut short in the middle of a forward pass: the text stays what it is, and what is dropped is what
costs more reading than it promises."""

from types import SimpleNamespace

import latent_and_sink_models as models
import numpy as np
import pytest
import spec_tools

import engine
from converters.hf import RoleFormats, convert
from engine import runtime
from engine.runtime import SHIPPED_MODEL
from engine.spec.cut import DraftCut

NAMES = ["deepseek_v2", "gpt_oss", "granitemoe", "llama", "qwen2_moe"]
LENGTH = {"max_tokens": 90, "ignore_eos": True}


class AnyCut:
    """Drops rows as chance has it, at any layer."""

    windows = drafts = started = ended = 0

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)

    def start(self):
        self.started += 1

    def begin(self, key, chance):
        assert self.started == 1

    def keep_rows(self, block, ids):
        return len(ids) if self._random.random() < 0.6 else int(self._random.integers(1, len(ids) + 1))

    def end(self, key, asked, rows, num_accepted, ms):
        assert num_accepted < rows <= asked and self.started == 1
        self.ended += 1
        self.windows += rows < asked
        self.drafts += asked - rows


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_be_dropped_at_any_layer(tmp_path, monkeypatch, name):
    """Resident, with small rings where a family has them; dense families have no layer that drops anything."""
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    models.checkpoint(tmp_path / "hf", name)
    convert(tmp_path / "hf", tmp_path / "out", formats=RoleFormats(experts="f32", dense="f32"), threads=1)
    loaded = engine.load(tmp_path / "out", threads=1)
    prompt = np.random.default_rng(2).integers(0, loaded.model.config.vocab_size, 12).tolist() * 2
    options = LENGTH | {"max_tokens": min(90, loaded.max_context - len(prompt))}
    plain = spec_tools.run(loaded, prompt, **options)
    for rows, source in ((8, "oracle"), (5, "spoiled"), ("auto", "oracle")):
        cut = AnyCut(rows == 5)
        stats = spec_tools.assert_same(loaded, prompt, rows, source, plain, cut=cut, **options)
        assert stats.report()["cut_windows"] == cut.windows and cut.ended == stats.rounds
        if rows != "auto":
            assert (cut.windows > 3) == bool(loaded.model.config.num_experts)


@pytest.mark.parametrize("lookahead", ["off", "on"])
@pytest.mark.parametrize("slots", [2, 5, 12])
def test_streamed_text_is_that_of_resident_plain_decode(slots, lookahead):
    prompt = "In the beginning"
    plain = spec_tools.run(engine.load(threads=1), prompt, **LENGTH)
    loaded = engine.load(threads=1, expert_slots=slots, lookahead=lookahead)
    for rows, source in ((8, "random"), (8, "oracle"), (4, "spoiled"), ("auto", "spoiled")):
        cut = DraftCut.of_stream(loaded.stream)
        stats = spec_tools.assert_same(loaded, prompt, rows, source, plain, cut=cut, **LENGTH)
        if source == "random":  # wrong drafts, experts that are not there
            assert cut.windows > 20 and cut.drafts > 4 * cut.windows
            asked = stats.report()
            assert (asked["cut_windows"], asked["cut_drafts"]) == (cut.windows, cut.drafts)


def test_dropping_spares_reads():
    """Random drafts: the experts of what is dropped are not read."""
    read = {}
    for cut_drafts in (False, True):
        loaded = engine.load(threads=1, expert_slots=6, lookahead="off", cut_drafts=cut_drafts)
        generation = loaded.generate("In the beginning", spec=8, temperature=0, **LENGTH)
        generation.speculator.sources = [spec_tools.RandomSource(4096)]
        "".join(generation)
        report = generation.stats.spec.report()
        assert (report["cut_windows"] is not None) == cut_drafts
        read[cut_drafts] = loaded.stream.cache.counters.misses
    assert read[True] < 0.7 * read[False]


# ---- what is dropped ---------------------------------------------------------------------------------------


def cutter(layers=4, step_ms=10.0, read_ms=1.0, here=(), coming=(), chance=0.5, before=0.0):
    """A DraftCut of a cache of 100 experts a layer, that has seen plain steps of 10 misses each, and a window begun.
    before: ms waited, for one expert, in the prefill."""
    cache = SimpleNamespace(
        slot_of=[0 if key in here else -1 for key in range(100 * layers)], counters=SimpleNamespace(misses=1),
        lookahead=SimpleNamespace(coming=coming), waited=before,
    )  # fmt: skip
    cache.wait_ms = lambda: cache.waited
    cut = DraftCut(cache, layers)
    cut.start()
    for _ in range(5):
        cache.waited += 10 * read_ms
        cache.counters.misses += 10
        cut.end(None, 1, 1, 0, step_ms + 10 * read_ms)
    cut.begin(("test", 0), chance)
    return cut


def block(layer=0):
    return SimpleNamespace(experts=SimpleNamespace(first_key=100 * layer))


def routing(*rows):
    return np.array(rows, np.int32)


def test_a_likely_draft_stays_and_an_unlikely_one_goes():
    ids = routing([1, 2], [3, 4])
    assert cutter(chance=0.99).keep_rows(block(), ids) == 2
    assert cutter(chance=0.02).keep_rows(block(), ids) == 1
    assert cutter(chance=0.5, read_ms=0.1).keep_rows(block(), ids) == 2  # reads that cost little
    assert cutter(chance=0.5, read_ms=10.0).keep_rows(block(), ids) == 1


def test_what_a_prefill_waited_says_nothing():
    ids = routing([1, 2], [3, 4])
    assert cutter(chance=0.5, read_ms=0.1, before=1e6).keep_rows(block(), ids) == 2


def test_only_experts_that_have_to_be_read_for_a_draft_count():
    unlikely = {"chance": 0.3, "read_ms": 3.0}
    assert cutter(**unlikely).keep_rows(block(), routing([1, 2], [3, 4])) == 1
    assert cutter(**unlikely).keep_rows(block(), routing([3, 4], [3, 4])) == 2  # row 0 needs them anyway
    assert cutter(**unlikely, here={203, 204}).keep_rows(block(2), routing([1, 2], [3, 4])) == 2
    assert cutter(**unlikely, here={3, 4}).keep_rows(block(2), routing([1, 2], [3, 4])) == 1  # of another layer
    assert cutter(**unlikely, coming={3, 4}).keep_rows(block(), routing([1, 2], [3, 4])) == 2


def test_rows_behind_a_costly_one_may_pay_for_it():
    """All drafts nearly certain: the middle one's reads are no reason to lose those behind it."""
    ids = routing([1, 2], [3, 4], [1, 2], [1, 2])
    assert cutter(chance=0.9, read_ms=8.0).keep_rows(block(), ids) == 4
    assert cutter(chance=0.3, read_ms=8.0).keep_rows(block(), ids) == 1


def test_nothing_is_dropped_before_anything_was_measured():
    cut = DraftCut(cutter()._cache, 4)
    cut.start()
    cut.begin(("test", 0), 0.01)
    assert cut.keep_rows(block(), routing([1, 2], [3, 4])) == 2


def test_a_source_that_begins_to_hit_is_believed_again():
    cut = cutter(chance=0.5, read_ms=4.0)
    ids, kept = routing([1, 2], [3, 4]), []
    for turn in range(400):
        cut.begin(("test", 0), 0.5)
        kept.append(cut.keep_rows(block(), ids))
        cut._cache.waited += 16.0
        cut._cache.counters.misses += 4
        cut.end(("test", 0), 2, kept[-1], kept[-1] - 1 if turn > 100 else 0, 26.0)
    assert 0 < kept[20:100].count(2) < 5 and kept[-20:].count(2) == 20


def test_a_cache_of_everything_needs_no_cut():
    loaded = engine.load(threads=1, expert_slots=24)
    assert DraftCut.of_stream(loaded.stream) is None
    assert loaded.generate("x", spec=4).speculator.cut is None
    assert engine.load(threads=1).generate("x", spec=4).speculator.cut is None
    assert engine.load(SHIPPED_MODEL, threads=1, expert_slots=6).generate("x", spec=4).speculator.cut is not None


def test_layers_to_come_count_as_those_before():
    """A draft that misses two experts a layer: its share of one layer's reads is worth it, that of twelve is not; where
    the first layers had all it needs, so will the others."""
    ids = routing([1, 2], [3, 4])
    assert cutter(layers=1).keep_rows(block(), ids) == 2
    assert cutter(layers=12).keep_rows(block(), ids) == 1
    cut = cutter(layers=12, here={100 * n + e for n in range(8) for e in (3, 4)})
    assert [cut.keep_rows(block(n), ids) for n in range(9)] == [2] * 9


def test_what_was_dropped_was_not_wrong():
    """Windows of which only the first draft went on, and was right, say nothing about the others."""
    cut = cutter(chance=0.9, read_ms=0.1)
    for _ in range(60):
        cut.begin(("test", 0), 0.9)
        cut._cache.counters.misses += 2
        cut._cache.waited += 0.2
        cut.end(("test", 0), 4, 2, 1, 11.0)
    cut.begin(("test", 0), 0.9)
    assert cut.keep_rows(block(), routing([1, 2], [3, 4], [5, 6], [7, 8])) == 4
    for _ in range(60):
        cut.begin(("test", 0), 0.9)
        cut.end(("test", 0), 4, 4, 1, 11.0)  # and these that the second is wrong
    cut.begin(("test", 0), 0.9)
    assert cut.keep_rows(block(), routing([1, 2], [3, 4], [5, 6], [7, 8])) == 2


def test_times_and_misses_of_the_past_fade():
    """Reads took 10 ms each at first, and 0.1 ms in the 40 steps since."""
    cut, ids = cutter(chance=0.3, read_ms=10.0), routing([1, 2], [3, 4])
    assert cut.keep_rows(block(), ids) == 1
    for _ in range(40):
        cut._cache.waited += 1.0
        cut._cache.counters.misses += 10
        cut.end(None, 1, 1, 0, 11.0)
    cut.begin(("test", 0), 0.3)
    assert cut.keep_rows(block(), ids) == 2


def test_the_first_layer_knows_what_a_draft_usually_misses():
    cut, ids = cutter(layers=12, chance=0.3), routing([1, 2, 5, 6], [3, 4, 7, 8])
    for expert in (3, 4, 7, 8):
        cut._cache.slot_of[expert] = 0
    assert cut.keep_rows(block(), ids) == 2  # nothing missing here, nothing known of the others
    for _ in range(3):
        cut.begin(("test", 0), 0.3)
        for layer in range(12):
            cut.keep_rows(block(layer), ids)
        cut.end(("test", 0), 2, 1, 0, 10.0)
    cut.begin(("test", 0), 0.3)
    assert cut.keep_rows(block(), ids) == 1


def test_figures_of_what_was_cut():
    cut = cutter()
    for asked, kept in ((4, 4), (4, 2), (8, 1), (1, 1)):
        cut.begin(("test", 0), 0.5)
        cut.end(("test", 0), asked, kept, 0, 10.0)
    assert (cut.windows, cut.drafts) == (2, 9)
