"""Sessions: a prompt costs what it does not share with the last one, and the text is that of a fresh cache."""

import numpy as np
import pytest

import engine
from engine.errors import ConfigError
from engine.session import Session, common_prefix

PROMPT = list(range(5, 85))  # more than one chunk of positions


@pytest.fixture(scope="module")
def loaded(tiny_snapshot):
    return engine.load(tiny_snapshot("mha_base"), ctx=160)


def run(loaded, ids, session=None, max_tokens=12):
    generation = loaded.generate(ids, max_tokens=max_tokens, ignore_eos=True, session=session)
    list(generation)
    return generation


def counted(loaded, monkeypatch):
    """Numbers of tokens of every forward call."""
    calls, forward = [], loaded.model.forward
    monkeypatch.setattr(loaded.model, "forward", lambda ids, *a, **k: calls.append(len(ids)) or forward(ids, *a, **k))
    return calls


def test_common_prefix():
    def of(a, b):
        return common_prefix(np.array(a, np.int32), np.array(b, np.int32))

    assert [of([], [1]), of([1, 2], [1, 2]), of([1, 2], [1, 2, 3]), of([1, 5, 3], [1, 2, 3]), of([4], [1])] == [
        0, 2, 2, 1, 0]  # fmt: skip


def test_follow_up_runs_only_what_is_new(loaded, monkeypatch):
    session = Session(loaded)
    first = run(loaded, PROMPT, session)
    follow_up = [*PROMPT, *first.token_ids, 7, 8, 9]
    calls = counted(loaded, monkeypatch)
    second = run(loaded, follow_up, session)
    # The last token of an answer is picked but never run.
    assert second.stats.reused_tokens == len(PROMPT) + len(first.token_ids) - 1
    assert sum(calls) == 4 + len(second.token_ids) - 1
    assert second.token_ids == run(loaded, follow_up).token_ids


@pytest.mark.parametrize("shared", [0, 1, 63, 64, 65, 79, 80])
def test_any_shared_prefix_gives_the_text_of_a_fresh_cache(loaded, shared):
    session = Session(loaded)
    run(loaded, PROMPT, session)
    other = [*PROMPT[:shared], 3, 4, *range(90, 95)]
    found = run(loaded, other, session)
    assert found.stats.reused_tokens == shared
    assert found.token_ids == run(loaded, other).token_ids


def test_the_same_prompt_again_runs_its_last_token(loaded):
    session = Session(loaded)
    first, second = run(loaded, PROMPT, session), run(loaded, PROMPT, session)
    assert (first.stats.reused_tokens, second.stats.reused_tokens) == (0, len(PROMPT) - 1)
    assert first.token_ids == second.token_ids


def test_interrupted_forward_pass_is_not_reused(loaded, monkeypatch):
    """What was written half is not counted as being there."""
    session = Session(loaded)
    generation = loaded.generate(PROMPT, max_tokens=20, ignore_eos=True, session=session)
    mlp, left = loaded.model.mlp, [2 * loaded.model.config.num_hidden_layers + 1]  # in the first layer

    def interrupted(block, num_tokens):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return mlp(block, num_tokens)

    next(generation.tokens())
    monkeypatch.setattr(loaded.model, "mlp", interrupted)
    generation = loaded.generate([*PROMPT, 1], max_tokens=20, ignore_eos=True, session=session)
    with pytest.raises(KeyboardInterrupt):
        list(generation.tokens())
    monkeypatch.undo()
    assert session.kv.length > session.length == len(PROMPT) + 1 + len(generation.token_ids) - 1
    again = [*PROMPT, 1, *generation.token_ids, 2, 3]
    length, found = session.length, run(loaded, again, session)
    assert (found.stats.reused_tokens, found.token_ids) == (length, run(loaded, again).token_ids)


def test_stopped_iteration_leaves_a_usable_session(loaded):
    session = Session(loaded)
    generation = loaded.generate(PROMPT, max_tokens=20, ignore_eos=True, session=session)
    tokens = generation.tokens()
    for _ in range(3):
        next(tokens)
    tokens.close()
    assert session.ids.tolist() == [*PROMPT, *generation.token_ids[:2]]


def test_session_smaller_than_a_prompt_refuses_it(loaded):
    with pytest.raises(ConfigError, match="92 positions are needed, this session holds 90"):
        run(loaded, PROMPT, Session(loaded, 90))


@pytest.mark.parametrize("kv", ["f16", "f32"])
def test_regions_carry_positions_to_a_cache_of_another_size(tiny_snapshot, kv):
    loaded = engine.load(tiny_snapshot("mha_base"), ctx=160, kv=kv)
    source, target = Session(loaded), Session(loaded, 100)
    run(loaded, PROMPT, source)
    count = 70
    pairs = list(zip(source.kv.regions(count), target.kv.regions(count), strict=True))
    c = loaded.model.config
    expected = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * count * (4 if kv == "f32" else 2)
    assert sum(a.nbytes for a, _ in pairs) == expected
    for a, b in pairs:
        b[:] = a
    target.restore(source.ids[:count])
    found = run(loaded, PROMPT, target)
    assert found.stats.reused_tokens == count
    assert found.token_ids == run(loaded, PROMPT).token_ids
    assert source.kv.describe() == target.kv.describe()
