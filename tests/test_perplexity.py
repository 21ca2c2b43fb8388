"""Windows, exact byte counts and log-probabilities of the perplexity measurement."""

import math

import numpy as np
import pytest
import tiny_models

from engine import perplexity as ppl
from engine.errors import ConfigError

TEXT = "The router picks experts; then 7 more say: no, wait. \U0001f600 \u4f60\u597d \u00e9t\u00e9. " * 4


@pytest.fixture(scope="module")
def engine(tiny_snapshot):
    from engine import load

    return load(tiny_snapshot("mha_base"), threads=2)


@pytest.fixture(scope="module")
def ids(engine):
    return ppl.build_sequence(engine.tokenizer, TEXT, "half")[0]


def numpy_logprobs(engine, ids):
    """float64 [T - 1]: log-probability of ids[1:], from one forward pass over everything."""
    kv = engine.new_kv(len(ids))
    logits = engine.model.forward(ids, kv, 0, logits="all").astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logprobs[np.arange(len(ids) - 1), ids[1:]]


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_half_windows_are_those_of_llama_perplexity():
    """n_ctx 512: chunks side by side, logits 256 .. 510 score tokens 257 .. 511, the last partial chunk is dropped."""
    windows = ppl.plan_windows(1300, 512, None, "half")
    assert [(w.start, w.end, w.score) for w in windows] == [(0, 512, 257), (512, 1024, 512 + 257)]
    assert {w.num_scored for w in windows} == {255}


def test_stride_scores_the_last_tokens_of_overlapping_windows():
    windows = ppl.plan_windows(25, 10, 4, "half")
    assert [(w.start, w.end, w.score) for w in windows] == [(0, 10, 6), (4, 14, 10), (8, 18, 14), (12, 22, 18)]


@pytest.mark.parametrize("num_tokens", [2, 3, 9, 10, 11, 50, 53])
@pytest.mark.parametrize(("ctx", "stride"), [(10, None), (10, 1), (10, 9), (2, 1), (64, None), (5, 2)])
def test_all_windows_score_every_token_once(num_tokens, ctx, stride):
    windows = ppl.plan_windows(num_tokens, ctx, stride, "all")
    scored = [n for w in windows for n in range(w.score, w.end)]
    assert scored == list(range(1, num_tokens))
    for window in windows:
        assert window.start < window.score < window.end <= window.start + ctx
    step = stride or ctx // 2
    # Past the first window every token sees at least ctx - stride tokens before it.
    assert all(w.score - w.start >= ctx - step for w in windows[1:])


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((511, 512, None, "half"), "511 tokens, one window needs 512"),
        ((1, 512, None, "all"), "1 tokens, one window needs 2"),
        ((100, 1, None, "half"), "ctx: got 1"),
        ((100, 10, 10, "all"), "stride: got 10, expected 1 to 9"),
        ((100, 10, 0, "half"), "stride: got 0"),
    ],
)
def test_impossible_windows_are_refused(args, text):
    with pytest.raises(ConfigError, match=text):
        ppl.plan_windows(*args)


@pytest.mark.parametrize("ctx", [3, 4, 5])
def test_smallest_windows_score_something(ctx):
    assert all(w.num_scored > 0 for w in ppl.plan_windows(20, ctx, None, "half"))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_one_window_equals_a_plain_softmax(engine, ids):
    part = ids[:100]
    (window,) = ppl.plan_windows(len(part), 100, None, "half")
    result = ppl.evaluate(engine, part, [window])
    expected = -numpy_logprobs(engine, part)[window.score - 1 :].sum()
    assert result.num_scored_tokens == 49
    assert result.nll == pytest.approx(expected, rel=1e-8)
    assert result.perplexity == pytest.approx(math.exp(expected / 49), rel=1e-7)


def test_all_scores_sum_to_the_window_sums(engine, ids):
    ids, ctx, stride = ids[:130], 48, 16
    windows = ppl.plan_windows(len(ids), ctx, stride, "all")
    expected = 0.0
    for window in windows:
        logprobs = numpy_logprobs(engine, ids[window.start : window.end])
        expected -= logprobs[window.score - window.start - 1 :].sum()
    assert ppl.evaluate(engine, ids, windows).nll == pytest.approx(expected, rel=1e-8)


def test_parts_of_a_forward_pass_do_not_change_the_result(engine, ids, monkeypatch):
    windows = ppl.plan_windows(len(ids), 90, None, "half")
    whole = ppl.evaluate(engine, ids, windows)
    for max_tokens in (1, 7, 64):
        monkeypatch.setattr(engine.model, "max_tokens", max_tokens)
        assert ppl.evaluate(engine, ids, windows) == whole


def test_result_does_not_depend_on_threads_and_tier(engine, tiny_snapshot, ids):
    from engine import load

    windows = ppl.plan_windows(len(ids), 64, None, "half")
    other = load(tiny_snapshot("mha_base"), threads=1, isa="scalar")
    assert ppl.evaluate(other, ids, windows) == ppl.evaluate(engine, ids, windows)


def test_bos_replaces_the_first_token_of_each_window(engine, ids):
    windows = ppl.plan_windows(len(ids), 64, None, "half")
    replaced = ids.copy()
    replaced[[w.start for w in windows]] = 5
    assert ppl.evaluate(engine, ids, windows, bos_each_window=5) == ppl.evaluate(engine, replaced, windows)
    assert ppl.evaluate(engine, ids, windows) != ppl.evaluate(engine, replaced, windows)


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ctx", "stride"), [(16, None), (16, 3), (64, 10)])
def test_all_counts_every_byte_once(engine, ctx, stride):
    ids, num_lead = ppl.build_sequence(engine.tokenizer, TEXT, "all")
    assert (num_lead, ids[0]) == (1, tiny_models.EOS_TOKEN_ID)
    windows = ppl.plan_windows(len(ids), ctx, stride, "all")
    result = ppl.evaluate(engine, ids, windows)
    assert result.num_scored_bytes == len(TEXT.encode())
    assert result.num_scored_tokens == len(ids) - 1
    assert result.bits_per_byte == pytest.approx(result.nll / math.log(2) / len(TEXT.encode()))


def test_half_counts_the_bytes_of_the_scored_tokens_only(engine, ids):
    """Also where a window begins or ends inside a character: these tokens are single bytes."""
    text = "\U0001f600\u4f60" * 20
    ids, _ = ppl.build_sequence(engine.tokenizer, text, "half")
    assert len(ids) == len(text.encode())
    windows = ppl.plan_windows(len(ids), 13, None, "half")
    result = ppl.evaluate(engine, ids, windows)
    assert result.num_scored_bytes == result.num_scored_tokens == len(windows) * (13 - 7)


def test_special_tokens_in_the_text_are_characters(engine):
    ids, _ = ppl.build_sequence(engine.tokenizer, "a<|endoftext|>b", "half")
    assert tiny_models.EOS_TOKEN_ID not in ids


def test_all_needs_a_token_to_start_from(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "eos_id", None)
    with pytest.raises(ConfigError, match="neither"):
        ppl.build_sequence(engine.tokenizer, TEXT, "all")


def test_progress_reaches_the_total(engine, ids):
    windows, seen = ppl.plan_windows(len(ids), 64, None, "half"), []
    result = ppl.evaluate(engine, ids, windows, progress=lambda done, total, _: seen.append((done, total)))
    assert len(seen) == len(windows)
    assert seen[-1] == (result.num_scored_tokens,) * 2


def test_standard_error_is_that_of_the_mean(engine, ids):
    (window,) = ppl.plan_windows(100, 100, None, "half")
    result = ppl.evaluate(engine, ids[:100], [window])
    logprobs = numpy_logprobs(engine, ids[:100])[window.score - 1 :]
    expected = result.perplexity * logprobs.std(ddof=1) / math.sqrt(len(logprobs))
    assert result.perplexity_error == pytest.approx(expected, rel=1e-6)
