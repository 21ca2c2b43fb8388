"""What goes wrong in a run with drafts goes wrong as in plain decode: values that are not finite, interruptions, texts
that end within a window. And generations that take turns on one engine."""

import numpy as np
import pytest
import spec_tools

import engine
from engine import runtime
from engine.commands.generate import describe_spec
from engine.errors import NumericsError
from engine.generate import Generation
from engine.runtime import SHIPPED_MODEL
from engine.session import Session
from engine.spec import FixedPolicy, Speculator

OPTIONS = {"max_tokens": 60, "ignore_eos": True}
IDS = list(range(40, 60))


@pytest.fixture(scope="module")
def loaded():
    return engine.load(threads=1, draft_model=SHIPPED_MODEL)


@pytest.fixture(scope="module")
def plain(loaded):
    return spec_tools.run(loaded, IDS, **OPTIONS)


def generation(loaded, plain, rows, source="oracle", **options):
    made = spec_tools.source(source, plain[4], loaded.model.config.vocab_size)
    speculator = Speculator([made], FixedPolicy(rows)) if rows else spec_tools.PLAIN
    return Generation(loaded, IDS, speculator=speculator, sampling=spec_tools.GREEDY, **OPTIONS | options)


# ---- values that are not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 2, 8])
@pytest.mark.parametrize("wrong", [9, 16, 17])
def test_what_comes_before_logits_that_are_not_finite_is_emitted(loaded, plain, monkeypatch, rows, wrong):
    """The head finds out last: rows before the one with NaN are as good as ever."""
    forward, at = loaded.model.forward, len(IDS) + wrong - 1

    def poisoned(ids, kv, position, *args, **settings):
        logits = forward(ids, kv, position, *args, **settings)
        if position <= at < position + len(ids):
            logits = logits.copy()
            logits[at - position, 5] = np.nan
        return logits

    monkeypatch.setattr(loaded.model, "forward", poisoned)
    running, found = generation(loaded, plain, rows), []
    with pytest.raises(NumericsError, match="logits"):
        for token in running.tokens():
            found.append(token)
    assert found == plain[0][:wrong]
    if rows:
        assert running.stats.spec.tokens == wrong - 1


@pytest.mark.parametrize("calls", [0, 1, 30])
def test_a_draft_model_whose_values_are_not_finite_stops_drafting(loaded, plain, monkeypatch, calls):
    forward, made = loaded.draft.model.forward, []

    def failing(*args, **settings):
        made.append(args)
        if len(made) > calls:
            raise NumericsError("layers.1: NaN")
        return forward(*args, **settings)

    monkeypatch.setattr(loaded.draft.model, "forward", failing)
    found = loaded.generate(IDS, spec=4, draft=["model"], temperature=0, **OPTIONS)
    assert "".join(found) == plain[2] and found.token_ids == plain[0]
    assert len(made) == calls + 1 and found.stats.spec.drafted == calls
    assert "; no more drafts of model: a value is not finite" in describe_spec(found.stats.spec)


# ---- runs that end early -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 4, 8])
@pytest.mark.parametrize("length", [1, 4])
def test_a_run_ends_with_the_token_that_completes_a_stop_text(loaded, plain, rows, length):
    for last in (8, 9, 10, 17):
        text = loaded.tokenizer.decode(plain[0][: last + 1])
        stop = text[-length:]
        needed = next(n for n in range(61) if stop in loaded.tokenizer.decode(plain[0][:n]))
        found = generation(loaded, plain, rows, stop=stop)
        assert "".join(found) == text[: text.index(stop)] and found.finish_reason == "stop"
        assert found.token_ids == plain[0][:needed] and found.stats.generated_tokens == needed


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("source", ["oracle", "spoiled"])
def test_an_interruption_within_a_window_leaves_a_session_that_goes_on(tmp_path, monkeypatch, source, place):
    """In the forward pass, or between it and the picks: the session says what its cache holds, in rings too."""
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    loaded = engine.load(spec_tools.family(tmp_path, "gpt_oss"), threads=1)
    plain = spec_tools.run(loaded, IDS, **OPTIONS)
    forward, calls = loaded.model.forward, []

    def interrupted(ids, *args, **settings):
        calls.append(len(ids))
        if place == "behind" or len(calls) < 9:
            logits = forward(ids, *args, **settings)
        if len(calls) == 9:
            if place == "before":
                monkeypatch.setattr(loaded.model, "head", lambda *args: raise_interrupt())
                forward(ids, *args, **settings)
            raise KeyboardInterrupt
        return logits

    def raise_interrupt():
        raise KeyboardInterrupt

    session, head = Session(loaded), loaded.model.head
    monkeypatch.setattr(loaded.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        "".join(generation(loaded, plain, 8, source, session=session))
    assert calls[-1] == 8  # rows; the prefill took three calls
    monkeypatch.setattr(loaded.model, "forward", forward)
    monkeypatch.setattr(loaded.model, "head", head)
    known = [*IDS, *plain[0]]
    assert len(IDS) < session.length and session.ids.tolist() == known[: session.length]
    again = [*known[: session.length + 1], 7, 8]
    expected = spec_tools.run(loaded, again, **OPTIONS)
    made = spec_tools.source(source, expected[4], loaded.model.config.vocab_size)
    found = spec_tools.run(loaded, again, Speculator([made], FixedPolicy(8)), session=session, **OPTIONS)
    assert found[:4] == expected[:4] and found[4].stats.reused_tokens == len(again) - 3


# ---- more than one generation ------------------------------------------------------------------------------


def test_figures_are_of_the_generation_alone(loaded, plain):
    """Two that take turns count what each does by itself."""
    alone = generation(loaded, plain, 4, "spoiled")
    "".join(alone)
    first, second = generation(loaded, plain, 4, "spoiled"), generation(loaded, plain, 0)
    for _ in zip(first, second, strict=False):
        pass
    assert first.token_ids == second.token_ids == plain[0]
    assert first.stats.spec.window_experts == alone.stats.spec.window_experts
