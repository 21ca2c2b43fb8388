"""What could make a speculative run differ from plain decode although all drafts are verified: rings that wrap, drafts
that cannot be run, padded vocabularies, sessions that go on behind a window that ended early. And wrong arguments."""

import latent_and_sink_models as models
import numpy as np
import pytest
import spec_tools
import tiny_models

import engine
from converters.hf import RoleFormats, convert
from engine import runtime
from engine.commands.generate import describe_spec
from engine.config import parse_spec
from engine.errors import ConfigError, ExpertReadError, NumericsError
from engine.sampler import SamplingParams
from engine.session import Session
from engine.spec import FixedPolicy, LookupSource, Speculator
from engine.spec.draft_model import ModelSource
from engine.spec.drafts import DraftSource

FLOAT = RoleFormats(experts="f32", dense="f32")


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """The folder of a model with sliding windows of 24 positions."""
    path = tmp_path_factory.mktemp("ring")
    models.checkpoint(path / "hf", "gpt_oss")
    convert(path / "hf", path / "out", formats=FLOAT, threads=1)
    return path / "out"


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """padded(V): the folder of a model with V logits, more than its tokenizer has tokens."""

    def folder(vocab_size):
        path = tmp_path_factory.mktemp(f"padded{vocab_size}")
        tiny_models.make_hf_dir(path / "hf", {"vocab_size": vocab_size})
        convert(path / "hf", path / "out", formats=FLOAT, threads=1)
        return path / "out"

    return folder


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_rings_that_wrap_are_cut_back_right(ring, monkeypatch, rows):
    """Blocks of at most 8 tokens make rings of 64 slots, so that 180 tokens go round them nearly three times; every
    second draft is wrong, so that the window is taken back at every place of the ring."""
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    loaded = engine.load(ring, threads=1)
    assert min(kv.capacity for kv in loaded.new_kv().layers) == 64
    ids, options = list(range(40, 60)), {"max_tokens": 180, "ignore_eos": True}
    plain = spec_tools.run(loaded, ids, **options)
    whole = np.array([*ids, *plain[0]], np.int32)
    for name in ("oracle", "spoiled", "random"):
        spec_tools.assert_same(loaded, ids, rows, name, plain, **options)
    # Plain decode itself, against one pass over the whole text without a ring.
    monkeypatch.undo()
    reference = engine.load(ring, threads=1)
    logits = reference.model.forward(whole, reference.new_kv(), 0, logits="all")
    assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == plain[0]


@pytest.mark.parametrize("cut", [3, 26, 41])
def test_a_session_goes_on_behind_a_window_that_ended_early(ring, monkeypatch, cut):
    """A reader that leaves in the middle of a window, then another prompt on the same session: what is reused must be
    what the first text holds, in rings too."""
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    loaded, first, options = engine.load(ring, threads=1), list(range(40, 60)), {"ignore_eos": True}
    plain = spec_tools.run(loaded, first, max_tokens=60, **options)
    session = Session(loaded)
    sources = [spec_tools.source("spoiled", plain[4], loaded.model.config.vocab_size)]
    generation = engine.generate.Generation(
        loaded, first, max_tokens=60, session=session, speculator=Speculator(sources, FixedPolicy(8)), **options
    )
    tokens = generation.tokens()
    assert [next(tokens) for _ in range(cut)] == plain[0][:cut]
    tokens.close()
    assert session.ids.tolist() == [*first, *plain[0]][: session.length] and session.length == session.kv.length
    second = [*first, *plain[0][: cut - 1], 7, 8, 9]
    expected = spec_tools.run(loaded, second, max_tokens=40, **options)
    sources = [spec_tools.source("spoiled", expected[4], loaded.model.config.vocab_size)]
    found = spec_tools.run(
        loaded, second, Speculator(sources, FixedPolicy(8)), max_tokens=40, session=session, **options
    )
    assert found[:4] == expected[:4] and found[4].stats.reused_tokens == len(first) + cut - 1


def test_a_stop_text_over_a_draft_and_the_pick_behind_it():
    """The stop text begins in an accepted draft and ends in the token that no draft foresaw."""
    loaded = engine.load(threads=1)
    options = {"max_tokens": 24, "ignore_eos": True}
    plain = spec_tools.run(loaded, "In the beginning", **options)
    known = [*plain[4].prompt_token_ids, *plain[0]]
    pieces = [loaded.tokenizer.token_bytes(t).decode() for t in plain[0]]

    class OneWrong(DraftSource):
        """Right but for the token with index `wrong`."""

        name, ms_per_draft = "one wrong", 0.0

        def __init__(self, wrong):
            self.wrong = len(known) - len(plain[0]) + wrong

        def offer(self, text, limit):
            self.at = len(text)
            return spec_tools.OracleSource(known).offer(text, limit)

        def draft(self, count):
            places = range(self.at, self.at + count)
            return [known[i] if i != self.wrong else (known[i] + 1) % 4096 for i in places]

    for last in (3, 4, 9):
        stop = pieces[last - 1][-1:] + pieces[last]
        expected = spec_tools.run(loaded, "In the beginning", stop=stop, **options)
        assert expected[1] == "stop"
        speculator = Speculator([OneWrong(last)], FixedPolicy(8))
        assert spec_tools.run(loaded, "In the beginning", speculator, stop=stop, **options)[:4] == expected[:4]
        assert speculator.stats.accepted


@pytest.mark.parametrize("error", [NumericsError, ExpertReadError])
def test_a_draft_that_cannot_be_run_is_dropped(ring, monkeypatch, error):
    """A forward pass that meets NaN in a draft's row says so, or that an expert cannot be read; plain decode would
    never have seen that token."""
    loaded = engine.load(ring, threads=1)
    options = {"max_tokens": 40, "ignore_eos": True}
    plain = spec_tools.run(loaded, list(range(40, 60)), **options)
    bad = next(t for t in range(loaded.model.config.vocab_size) if t not in [*range(40, 60), *plain[0]])
    forward = loaded.model.forward

    def poisoned(ids, *args, **settings):
        if bad in ids.tolist():
            forward(ids, *args, **settings)  # the cache is written before a layer finds out
            raise error("layers.1: NaN")
        return forward(ids, *args, **settings)

    class Bad(DraftSource):
        name, ms_per_draft = "bad", 0.0
        offer = spec_tools.RandomSource(1).offer

        def draft(self, count):
            return [bad] * count

    monkeypatch.setattr(loaded.model, "forward", poisoned)
    speculator = Speculator([Bad()], FixedPolicy(4))
    found = spec_tools.run(loaded, list(range(40, 60)), speculator, **options)
    assert found[:4] == plain[:4]
    failed = sum(speculator.stats.windows[2:])
    assert failed > 9 and speculator.stats.report()["failed_windows"] == failed
    said = f"; {failed} windows run again without drafts, the last because of: layers.1: NaN"
    assert said in describe_spec(speculator.stats)
    with pytest.raises(error):  # and a token of the text itself still ends it
        spec_tools.run(loaded, [40, bad], Speculator([LookupSource()], FixedPolicy(4)), **options)


def test_a_draft_model_that_is_padded_otherwise(padded):
    """Equal tokens, but the models' matrices are rounded up to different numbers of rows: ids that only one of them has
    are neither drafted nor run."""
    narrow, wide = padded(292), padded(420)
    for target, draft in ((narrow, wide), (wide, narrow)):
        loaded = engine.load(target, threads=1, draft_model=draft)
        for sampling in (SamplingParams(), SamplingParams(temperature=1.5, seed=2)):
            options = {"max_tokens": 60, "ignore_eos": True, "sampling": sampling}
            expected, found = loaded.generate([5, 6, 7], **options), loaded.generate([5, 6, 7], spec=4, **options)
            assert "".join(found) == "".join(expected) and found.token_ids == expected.token_ids
    source = ModelSource(loaded.draft, SamplingParams(), 420, 64)
    assert source.offer(np.array([5, 291], np.int32), 4) and source.offer(np.array([5, 292], np.int32), 4) is None


def test_a_source_that_does_not_pay_leaves_room_for_the_next():
    """The policy may refuse one source's drafts and take another's in the same round; it notes one choice a round."""

    class Picky(FixedPolicy):
        used = ()

        def rows(self, key, count, ms_per_draft, chance):
            return 1 if key[0] == "random" else super().rows(key, count, ms_per_draft, chance)

        def use(self, rows):
            self.used = (*self.used, rows)

    known = list(range(20))
    sources = [spec_tools.RandomSource(100), spec_tools.OracleSource(known)]
    speculator = Speculator(sources, Picky(4))
    text = np.array(known, np.int32)
    assert speculator.window(text[:5], 9).ids.tolist() == [4, 5, 6, 7]
    assert speculator.window(text, 9).ids.tolist() == [19]  # the oracle abstains here
    assert speculator.policy.used == (4, 1)


@pytest.mark.parametrize("spec", [True, False, 2.0, 2.7, "4 ", "\u0664", b"4", "+4", None, [4], np.array([1, 2])])
def test_a_window_length_of_another_type_is_refused(spec):
    with pytest.raises(ConfigError, match="expected 0 to 8 rows"):
        parse_spec(spec)


def test_window_lengths_that_are_fine():
    assert [parse_spec(s) for s in (0, "8", np.int32(3), "auto")] == [0, 8, 3, "auto"]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("lookup", "expected a list"), (["model"], "without a draft model"), ([1], "got 1"), ([], "got nothing"),
        (["lookup", "lookup"], "twice"),
    ],
)  # fmt: skip
def test_draft_sources_that_would_do_nothing_are_refused(draft, message):
    with pytest.raises(ConfigError, match=message):
        engine.load(threads=1).generate("x", spec=4, draft=draft)
