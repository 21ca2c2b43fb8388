"""A draft model's drafts are those of decoding it from the start, whatever it was asked before; who pays for them."""

import time
from types import SimpleNamespace

import gguf
import gguf_models
import numpy as np
import pytest
import spec_tools
from cli_program import assert_error, run

import engine
from engine import runtime
from engine.errors import ConfigError
from engine.runtime import SHIPPED_MODEL
from engine.sampler import SamplingParams
from engine.spec import AutoPolicy, FixedPolicy, LookupSource, Speculator, draft_model
from engine.spec.draft_model import ModelSource, check_same_tokens
from engine.spec.drafts import DraftSource

SAMPLERS = [SamplingParams(), SamplingParams(temperature=0.9, repeat_penalty=1.3, seed=4)]


@pytest.fixture(scope="module")
def loaded():
    return engine.load(threads=1, draft_model=SHIPPED_MODEL)


def model_source(loaded, sampling=SAMPLERS[0], capacity=None):
    return ModelSource(loaded.draft, sampling, loaded.model.config.vocab_size, capacity or loaded.max_context)


@pytest.mark.parametrize("sampling", SAMPLERS)
def test_drafts_do_not_depend_on_what_was_drafted_before(loaded, sampling):
    """Texts that go on, that take back drafts, and others: against plain decode of the draft model."""
    source, random = model_source(loaded, sampling), np.random.default_rng(1)
    text = random.integers(0, 4096, 30).tolist()
    for turn in range(12):
        ids = np.array(text, np.int32)
        assert source.offer(ids, 5).count == 5
        count = 1 + turn % 5
        expected = loaded.draft.generate(text, max_tokens=count, sampling=sampling, ignore_eos=True)
        drafts = source.draft(count)
        assert list(expected.tokens()) == drafts
        kept = turn % (count + 1)
        text = [*text, *drafts[:kept], int(random.integers(0, 4096))] if turn != 7 else [*text[:12], 5, 6, 7]


def test_a_text_that_goes_back_further_than_a_ring_remembers(tmp_path, monkeypatch):
    """The draft model's cache then holds nothing that is of use, and says so."""
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    path = spec_tools.family(tmp_path, "gpt_oss")
    loaded = engine.load(path, threads=1, draft_model=path)
    source, text = model_source(loaded), np.random.default_rng(1).integers(3, 250, 150).astype(np.int32)
    for length in (150, 60, 130):
        ids = np.append(text[:length], np.int32(7))
        source.offer(ids, 4)
        drafts = source.draft(4)
        assert drafts == list(loaded.draft.generate(ids, max_tokens=4, temperature=0, ignore_eos=True).tokens())


def test_no_drafts_beyond_the_context_of_either_model(loaded):
    source = model_source(loaded, capacity=64)
    sizes = [source.offer(np.zeros(n, np.int32), 7) for n in (10, 57, 60, 63, 64)]
    assert [offer and offer.count for offer in sizes] == [7, 7, 4, 1, None]
    assert len(source.draft(1)) == 1 and source.offer(np.zeros(63, np.int32), 1) and len(source.draft(1)) == 1


def test_a_draft_model_with_a_smaller_context(tmp_path):
    """It drafts up to its end; the text goes on."""
    target = spec_tools.family(tmp_path / "target", "olmoe")
    draft = spec_tools.family(tmp_path / "draft", "olmoe", max_position_embeddings=64)
    loaded = engine.load(target, threads=1, draft_model=draft)
    options = {"max_tokens": 120, "ignore_eos": True, "temperature": 0}
    plain, found = loaded.generate([5, 6, 7], **options), loaded.generate([5, 6, 7], spec=5, draft=["model"], **options)
    assert "".join(found) == "".join(plain) and found.token_ids == plain.token_ids
    # Of 64 positions 3 are the prompt and 1 the first pick: 12 windows of 5; 59 plain steps follow.
    assert found.stats.spec.report()["windows"] == {1: 59, 5: 12}
    assert found.stats.spec.accepted == found.stats.spec.drafted == 48


def test_the_prompt_is_not_put_down_to_the_first_drafts(loaded, monkeypatch):
    """Two drafts in 10 ms, then in 30 ms, of which a fifth weighs."""
    source, text = model_source(loaded), np.arange(2, 402, dtype=np.int32)
    clock = iter([0.0, 9.0, 10.0, 10.010, 20.0, 20.030])
    monkeypatch.setattr(draft_model, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for expected in (0.0, 5.0, 0.8 * 5.0 + 0.2 * 15.0):
        source.offer(text, 2)
        source.draft(2)
        assert source.ms_per_draft == pytest.approx(expected)


def test_the_time_of_drafting_is_no_cost_of_the_window():
    """Else it would count twice: once measured with the window, once as the source's ms_per_draft."""
    policy = AutoPolicy()
    for _ in range(40):
        policy.record_plain(1.0)
        policy.rows(("slow", 0), 3, 0.5, 0.5)
        policy.record(("slow", 0), 4, 3, 1.3 + 3 * 0.5, 3, 3 * 0.5)
    # 4 tokens for 1.3 + 1.5 ms; were drafting counted twice, it would be 4.3 ms, more than four plain steps.
    assert policy.rows(("slow", 0), 3, 0.5, 0.5) == 4
    assert policy.rows(("free", 0), 3, 0.0, 0.99) == 4


def test_rows_that_are_dropped_leave_no_trace_in_the_cache():
    loaded = engine.load(threads=1)
    model, ids, dropped = loaded.model, np.arange(20, 28, dtype=np.int32), []

    def keep(block, routing):
        dropped.append(len(routing))
        return 8 if len(dropped) == 1 else 3

    kv, plain = loaded.new_kv(), loaded.new_kv()
    logits = model.forward(ids, kv, 0, logits="all", keep_rows=keep).copy()
    assert dropped == [8, 8, 3] and logits.shape[0] == 3 and kv.length == 3
    np.testing.assert_array_equal(logits, model.forward(ids[:3], plain, 0, logits="all"))
    assert [bytes(a) for a in kv.regions(3)] == [bytes(a) for a in plain.regions(3)]
    assert len(model.forward(ids, loaded.new_kv(), 0, logits="all")) == 8  # and the next pass drops nothing


def test_figures_of_windows_that_were_cut_short():
    """Drafts that were dropped were not looked at: they count as drafted, not as refused."""

    class Half(DraftSource):
        windows = drafts = 0
        start = begin = lambda self, *args: None
        keep_rows = None

        def end(self, key, asked, rows, num_accepted, ms):
            self.windows, self.drafts = self.windows + 1, self.drafts + asked - rows

    class Right(DraftSource):
        name, ms_per_draft = "right", 0.0
        offer = staticmethod(lambda text, limit: engine.spec.Offer(limit, 0))
        draft = staticmethod(lambda count: [1] * count)

    speculator = Speculator([Right()], FixedPolicy(6), Half())
    speculator.start()
    for kept, picked in ((3, 3), (6, 2), (1, 1)):
        window = speculator.window(np.array([1, 1], np.int32), 9)
        window.ids = window.ids[:kept]
        speculator.commit(window, picked, 0)
    found = speculator.stats.report()
    assert found["acceptance_by_position"][:3] == [1.0, 0.5, None] and found["windows"] == {6: 3}
    assert (found["drafted"], found["accepted"], found["cut_windows"], found["cut_drafts"]) == (15, 3, 3, 8)


def test_the_time_of_drafting_is_told_to_the_policy():
    told = []

    class Listening(FixedPolicy):
        def record(self, key, rows, num_accepted, ms, num_verified, draft_ms=0.0):
            told.append((ms, draft_ms))

    class Slow(DraftSource):
        name, ms_per_draft = "slow", 0.0
        offer = staticmethod(lambda text, limit: engine.spec.Offer(limit, 0))

        @staticmethod
        def draft(count):
            time.sleep(0.002)
            return [1] * count

    speculator = Speculator([Slow()], Listening(3))
    speculator.commit(speculator.window(np.array([1, 1], np.int32), 9), 1)
    assert told[0][0] >= told[0][1] >= 2.0
    speculator.commit(speculator.window(np.array([1, 1], np.int32), 9), 1)
    assert speculator.stats.draft_s == pytest.approx((told[0][1] + told[1][1]) / 1e3)
    assert speculator.stats.window_ms[3] == pytest.approx(told[0][0] + told[1][0])


# ---- sources that take turns -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["lookup, model", "model, lookup", "model"])
def test_sources_catch_up_with_each_others_drafts(tmp_path, tiny_snapshot, order):
    """The same weights, rounded, in a GGUF; a lookup that drafts whenever one token was there before."""
    gguf_models.write_gguf(tmp_path / "draft.gguf", "gqa_norm", {"exps|attn": gguf.GGMLQuantizationType.Q8_0})
    loaded = engine.load(tiny_snapshot("gqa_norm"), threads=1, draft_model=tmp_path / "draft.gguf")
    ids, options, names = [5, 6, 7, 8] * 3, {"max_tokens": 150, "ignore_eos": True}, order.split(", ")
    for rows, sampling in ((2, SAMPLERS[0]), (8, SAMPLERS[0]), (5, SAMPLERS[1])):
        plain = spec_tools.run(loaded, ids, sampling=sampling, **options)
        made = {"lookup": LookupSource(1), "model": model_source(loaded, sampling)}
        stats = spec_tools.assert_same(
            loaded, ids, rows, order, plain, made=[made[name] for name in names], sampling=sampling, **options
        )
        found = stats.report()
        assert list(found["sources"]) == names
        assert sum(source["drafted"] for source in found["sources"].values()) == found["drafted"]
        assert sum(source["accepted"] for source in found["sources"].values()) == found["accepted"]
        assert sum(stats.accepted_at) == found["accepted"] and stats.tokens == 149
        assert sum(n * count for n, count in found["windows"].items()) == found["rounds"] + found["drafted"]
        assert found["sources"]["model"]["accepted"] > 10
        assert min(source["drafted"] for source in found["sources"].values()) > 10 or order != "lookup, model"


# ---- token tables ------------------------------------------------------------------------------------------


def test_token_tables_that_differ_are_refused_with_the_first_difference():
    def tokens(*names):
        return SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=len(names), token_bytes=names.__getitem__))

    check_same_tokens(tokens(b"a", b"b"), tokens(b"a", b"b"))
    for shorter, longer in ((b"ab", b"abc"), (b"abc", b"ab")):
        with pytest.raises(ConfigError, match=f"it has {len(longer)} tokens, the model {len(shorter)}"):
            check_same_tokens(tokens(*shorter), tokens(*longer))
    for theirs in ((b"a", b"x", b"c"), (b"a", b"x", b"y"), (b"a", b"x"), (b"a", b"x", b"c", b"d")):
        with pytest.raises(ConfigError, match="token 1 is b'x' there and b'b' in the model"):
            check_same_tokens(tokens(b"a", b"b", b"c"), tokens(*theirs))


def test_a_draft_model_with_other_tokens_is_refused(tiny_snapshot):
    """The shipped model's token 0 is the end of text, the tiny models' is another."""
    other = tiny_snapshot("mha_base")
    with pytest.raises(ConfigError, match=r"token 0 is .*IP_ADDRESS.* there and .* in the model"):
        engine.load(threads=1, draft_model=other)
    done = run("generate", "x", "-n", 4, "--spec", 4, "--draft-model", other)
    assert_error(done, "--draft-model: token 0 is", "both need the same tokens")


def test_extra_bytes_of_layers_in_different_formats(tmp_path):
    """An expert counts as one of the layers' mean; a dense model has none."""
    q8 = gguf.GGMLQuantizationType.Q8_0
    gguf_models.write_gguf(tmp_path / "mixed.gguf", "gqa_norm", {"blk.0.*exps": q8, "blk.1.ffn_down_exps": q8})
    loaded = engine.load(tmp_path / "mixed.gguf", threads=1, expert_layout="compact")
    matrix, small = 64 * 64 * 4, 64 * 64 * 34 // 32
    assert loaded.generate("x", spec=4).stats.spec.expert_bytes == (4 * small + 5 * matrix) // 3
    dense = engine.load(spec_tools.family(tmp_path, "llama"), threads=1)
    found = dense.generate([5, 6, 7] * 4, spec=4, max_tokens=20, ignore_eos=True)
    "".join(found)
    assert found.stats.spec.expert_bytes == 0 and found.stats.spec.report()["experts_per_round"] == 0
