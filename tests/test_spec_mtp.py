"""Drafts of the model's own layer for multi-token prediction: the text stays, right ones are kept, the layer's cache
follows the text.

A layer of random weights is never right; mtp_models.knowing makes one that always is.
"""

from functools import cache
from types import SimpleNamespace

import mtp_models
import numpy as np
import pytest
import spec_tools
from latent_and_sink_models import golden

import engine
from converters.hf import RoleFormats, convert
from engine import runtime
from engine.errors import NumericsError
from engine.experts.route_trace import moe_blocks
from engine.prompt_cache import PromptCache
from engine.sampler import SamplingParams
from engine.session import Session
from engine.spec import LookupSource, mtp
from engine.spec.cut import DraftCut
from engine.spec.mtp import MtpSource
from engine.spec.probes import SpoiledSource

NAMES = mtp_models.NAMES
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, repeat_penalty=1.1, seed=5)
IDS = np.random.default_rng(2).integers(3, 250, 20).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @cache
    def make(name, kind="random"):
        weights, path = mtp_models.weights(name), tmp_path_factory.mktemp(name)
        mtp_models.checkpoint(path / "hf", name, mtp_models.knowing(weights) if kind == "knowing" else weights)
        convert(path / "hf", path / "out", formats=RoleFormats(experts="f32", dense="f32"), threads=1)
        return path / "out"

    return make


@pytest.fixture(scope="module")
def load(folder):
    return lambda name, kind="random", **options: engine.load(folder(name, kind), mtp=True, threads=1, **options)


def source_of(loaded, sampling=spec_tools.GREEDY):
    return MtpSource(loaded.context, sampling)


def assert_same(loaded, ids, rows, plain, sampling, made=None, **options):
    made = made or source_of(loaded, sampling)
    cut = DraftCut.of_stream(loaded.stream) if loaded.stream else None
    return spec_tools.assert_same(loaded, ids, rows, "mtp", plain, made=made, cut=cut, sampling=sampling, **options)


@pytest.mark.parametrize("kind", ["random", "knowing"])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_that_of_plain_decode(load, folder, name, kind):
    """Also of an engine that was loaded without the layer, and whatever of the experts is in memory."""
    bare, loaded = engine.load(folder(name, kind), threads=1), load(name, kind)
    options = {"max_tokens": 64, "ignore_eos": True}
    for turn, sampling in enumerate((spec_tools.GREEDY, DRAWN)):
        plain = spec_tools.run(bare, IDS, sampling=sampling, **options)
        for rows in ((2, 5), (8, "auto"))[turn]:
            stats = assert_same(loaded, IDS, rows, plain, sampling, **options)
            assert stats.drafted or rows == "auto"
    for slots in (4, 13, 48):
        streamed = load(name, kind, expert_slots=slots)
        assert assert_same(streamed, IDS, 4, plain, DRAWN, **options).drafted


@pytest.mark.parametrize("sampling", [spec_tools.GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", NAMES)
def test_right_drafts_are_kept_and_spoiled_ones_are_not(load, name, sampling):
    loaded, options = load(name, "knowing", kv="f32"), {"max_tokens": 101, "ignore_eos": True}
    plain = spec_tools.run(loaded, IDS, sampling=sampling, **options)
    for rows in (2, 4, 8):
        stats = assert_same(loaded, IDS, rows, plain, sampling, **options)
        assert stats.accepted == stats.drafted  # 100 tokens behind the first
        assert stats.rounds == -(-100 // rows)
    every = golden(name)["config"]["vocab_size"]
    spoiled = SpoiledSource(source_of(loaded, sampling), 3, every)
    spoiled.follow = spoiled._inner.follow
    stats = assert_same(loaded, IDS, 4, plain, sampling, spoiled, **options)
    assert stats.drafted * 2 // 3 - 3 <= stats.accepted <= stats.drafted * 2 // 3 + 3


def test_sources_are_asked_in_order_and_report_themselves(load):
    """Lookup first; what it abstains from falls to the layer."""
    loaded = load("glm4_moe", "knowing")
    ids = [5, 6, 7, 8] * 5
    plain = loaded.generate(ids, max_tokens=64, ignore_eos=True)
    "".join(plain)
    for draft in (None, ["mtp", "lookup"]):
        spoken = loaded.generate(ids, max_tokens=64, ignore_eos=True, spec=4, draft=draft)
        "".join(spoken)
        assert spoken.token_ids == plain.token_ids
        assert spoken.stats.spec.sources["mtp"].accepted
        assert (spoken.stats.spec.sources["lookup"].drafted > 0) == (draft is None)


@pytest.mark.parametrize("name", NAMES)
def test_the_layers_cache_follows_the_text(load, name, monkeypatch):
    """Logits of a draft do not depend on how the text came about: blocks, windows, refused drafts, a session that went
    back, plain steps without drafts that used up the room for hidden states."""
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    loaded = load(name)
    ids = np.array(IDS + IDS[::-1], np.int32)

    def drafted(kv, text):
        state = kv.follower
        state.align(len(text) - 1)
        return state.run(int(text[-1]))[1].copy()

    def plain(text):
        kv = loaded.new_kv()
        for start in range(0, len(text) - 1, 8):
            loaded.model.forward(text[start : min(start + 8, len(text) - 1)], kv, start)
        return kv, drafted(kv, text)

    kv, want = plain(ids)
    assert kv.follower.kv.length == len(ids) - 1
    stepped = loaded.new_kv()
    for n in range(len(ids) - 1):  # no draft for 39 steps, room for 8
        loaded.model.forward(ids[n : n + 1], stepped, n)
    np.testing.assert_array_equal(drafted(stepped, ids), want)
    # Back to 30 tokens, which waiting hidden states reach: other drafts were refused.
    refused = loaded.new_kv()
    for n in range(25):
        loaded.model.forward(ids[n : n + 1], refused, n)
    drafted(refused, ids[:26])
    refused.follower.chain(np.ones((1, 64), np.float32), 9, 0)
    loaded.model.forward(np.array([ids[25], ids[26], 9, 9], np.int32), refused, 25, logits="all")
    refused.truncate(27)
    drafted(refused, ids[:28])
    for n in range(27, len(ids) - 1):
        loaded.model.forward(ids[n : n + 1], refused, n)
    np.testing.assert_array_equal(drafted(refused, ids), want)


@pytest.mark.parametrize("name", NAMES)
def test_going_back_past_a_hidden_state_that_is_gone_skips_its_place(load, name):
    """Of a text that parts from the former at `back`: pairs before back - 1 stay, the next place is pair back's."""
    loaded, back = load(name), 12
    old, new = np.array(IDS, np.int32), np.array([*IDS[:back], *IDS[:8]], np.int32)
    layer, model = loaded.model.mtp, loaded.model
    kv = loaded.new_kv()
    model.forward(old[:-1], kv, 0)
    kv.follower.run(int(old[-1]))
    model.forward(new[back:-1], kv, back)
    got = kv.follower.run(int(new[-1]))[1].copy()
    whole = loaded.new_kv()
    model.forward(new[:-1], whole, 0)
    pairs = [*range(back - 1), *range(back, len(new) - 1)]
    state = whole.follower
    want = layer.forward(state._hidden[pairs], new[1:][pairs], state.kv, 0)[1]
    np.testing.assert_array_equal(got, want)


def test_a_session_that_goes_back_or_is_restored_still_gets_drafts(load, tmp_path):
    """A hidden state that is gone costs the layer one place of its context; a restored cache costs it what came before.
    The text is that of plain decode either way, and right drafts are right again."""
    loaded = load("glm4_moe", "knowing")
    session = Session(loaded)

    def speak(ids, session, spec):
        spoken = loaded.generate(ids, max_tokens=24, ignore_eos=True, spec=spec, draft=["mtp"], session=session)
        "".join(spoken)
        return spoken

    first = speak(IDS, session, 4)
    for prompt in (IDS + first.token_ids[:9] + [7, 8], [*IDS[:12], 9, 9, 9], [4, *IDS]):
        spoken, plain = speak(prompt, session, 4), speak(prompt, Session(loaded), 0)
        assert spoken.token_ids == plain.token_ids
        assert spoken.stats.spec.accepted == spoken.stats.spec.drafted > 0
    assert session.kv.follower.shift == 0  # the last prompt shared nothing
    cache = PromptCache(tmp_path / "c", session, loaded)
    cache.save()
    restored = Session(loaded)
    PromptCache(tmp_path / "c", restored, loaded).restore()
    prompt = [*session.ids.tolist(), 8]
    spoken = speak(prompt, restored, 4)
    assert spoken.stats.reused_tokens == len(prompt) - 1
    assert spoken.token_ids == speak(prompt, Session(loaded), 0).token_ids
    assert spoken.stats.spec.accepted == spoken.stats.spec.drafted > 0
    restored.kv.restore(3)  # of another text, perhaps
    assert restored.kv.follower.first == restored.kv.follower.count == 0


def test_refused_rows_leave_no_trace_in_later_drafts(load):
    """Drafts behind a window of which one row was kept are those of a text that never had the others."""
    loaded, ids = load("glm4_moe"), np.array(IDS + IDS[::-1], np.int32)

    def drafts(source, kv, length):
        source.follow(kv)
        assert source.offer(ids[:length], 3) == (3, 0, 0.8)
        return source.draft(3)

    kv, source = loaded.new_kv(), source_of(loaded)
    loaded.model.forward(ids[:20], kv, 0)
    drafts(source, kv, 21)
    loaded.model.forward(np.array([ids[20], 9, 9, 9], np.int32), kv, 20, "all")
    kv.truncate(21)
    fresh = loaded.new_kv()
    loaded.model.forward(ids[:21], fresh, 0)
    assert drafts(source, kv, 22) == drafts(source_of(loaded), fresh, 22)


def test_drafts_need_the_hidden_state_before_them(load, monkeypatch):
    """States of positions 3 and 4 wait: texts of 5 and 6 tokens can be gone on from. The first call's time is the
    prompt's."""
    source = source_of(load("glm4_moe"))
    state = SimpleNamespace(first=3, count=2, broken=False)
    source.follow(SimpleNamespace(follower=state))
    offers = [source.offer(np.zeros(n, np.int32), 2) for n in range(3, 9)]
    assert [offer is not None for offer in offers] == [False, False, True, True, False, False]
    assert source.offer(np.zeros(5, np.int32), 0) is None
    state.broken = True
    assert source.offer(np.zeros(5, np.int32), 2) is None
    clock = iter([0.0, 9.0, 10.0, 10.010, 20.0, 20.030])
    monkeypatch.setattr(mtp, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    state.align, logits = (lambda position: None), np.zeros((1, 9), np.float32)
    state.run = lambda token: (None, logits)
    state.chain = lambda hidden, token, step: (None, logits)
    for expected in (0.0, 5.0, 0.8 * 5.0 + 0.2 * 15.0):
        assert source.draft(2) == [0, 0] and source.ms_per_draft == pytest.approx(expected)


def test_a_layer_with_a_value_that_is_not_finite_stops_drafting(load, monkeypatch):
    """Also where the room for hidden states is used up without a draft."""
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    loaded = load("glm4_moe", kind="random")
    plain = spec_tools.run(loaded, IDS, max_tokens=40, ignore_eos=True)
    loaded.model.mtp.norm.array[:] = 1
    loaded.model.mtp.enorm.array[3] = np.nan
    stats = assert_same(loaded, IDS, 4, plain, spec_tools.GREEDY, max_tokens=40, ignore_eos=True)
    assert stats.drafted == 0 and stats.report()["ended"] == {"mtp": "a value is not finite"}
    assert spec_tools.run(loaded, IDS, max_tokens=40, ignore_eos=True)[:4] == plain[:4]
    with pytest.raises(NumericsError, match="layer 3"):
        loaded.model.mtp.forward(np.ones((1, 64), np.float32), np.array([5], np.int32), loaded.new_kv().follower.kv, 0)


@pytest.mark.parametrize("slots", [None, 13])
def test_a_window_that_is_cut_short_leaves_the_hidden_states_of_its_rows(load, slots):
    """And the layer's own experts are not asked about rows."""
    loaded = load("glm4_moe", expert_slots=slots)
    kv, model, asked = loaded.new_kv(), loaded.model, []

    def two_rows(block, ids):
        asked.append(block.name)
        return 2

    model.forward(np.array(IDS[:10], np.int32), kv, 0)
    kv.follower.run(IDS[10])
    logits = model.forward(np.array(IDS[10:14], np.int32), kv, 10, "all", two_rows)
    assert len(logits) == kv.follower.count == 2
    kv.follower.run(IDS[12])
    assert "layer 3" not in asked and "layer 2" in asked


def test_figures_are_of_the_models_own_layers(load):
    """Experts a round, route traces and usage histories do not count the layer's."""
    loaded = load("deepseek_v3")
    assert len(moe_blocks(loaded.model)) == 2
    spoken = loaded.generate(IDS, max_tokens=30, ignore_eos=True, spec=2, draft=["mtp"])
    used = []
    for block in moe_blocks(loaded.model):
        block.observers.append(lambda ids, weights: used.append(len(np.unique(ids))))
    "".join(spoken)
    report = spoken.stats.spec.report()
    prefill = sum(used[:2])
    assert round(report["experts_per_round"] * report["rounds"]) == sum(used) - prefill


def test_lookup_before_the_layer_is_the_default(load):
    loaded = load("glm4_moe")
    names = [source.name for source in loaded._draft_sources(None, spec_tools.GREEDY)]
    assert names == [LookupSource.name, MtpSource.name]
