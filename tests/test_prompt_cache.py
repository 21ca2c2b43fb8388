"""--prompt-cache: the text is that of a run without, less is computed, and no file that does not fit is used."""

import json
import struct

import latent_and_sink_models as families
import pytest
import tiny_models
from cli_program import assert_error, make_snapshot, run
from gguf_models import write_gguf

import engine
from converters.hf import RoleFormats, convert
from engine.errors import ConfigError
from engine.prompt_cache import MAGIC, PromptCache, model_digest
from engine.session import Session

PROMPT = list(range(5, 85))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_snapshot(tmp_path_factory.mktemp("cache"), "mha_base")


@pytest.fixture(scope="module")
def loaded(model):
    return engine.load(model)


def tokens(loaded, session=None, prompt=PROMPT):
    generation = loaded.generate(prompt, max_tokens=10, ignore_eos=True, session=session)
    list(generation)
    return generation


def stored(loaded, path, prompt=PROMPT):
    """Write a cache of 80 tokens and their answer; returns the generation."""
    session = Session(loaded)
    cache = PromptCache(path, session, loaded)
    assert cache.restore() == f"prompt cache: {path} is new"
    generation = tokens(loaded, session, prompt)
    assert cache.save() == f"prompt cache: {path}: 89 tokens stored"
    return generation


def reopened(loaded, path):
    session = Session(loaded)
    cache = PromptCache(path, session, loaded)
    return session, cache.restore()


@pytest.mark.parametrize("kv", ["f16", "f32"])
def test_restored_tokens_are_not_run_again(model, tmp_path, kv):
    loaded = engine.load(model, kv=kv)
    expected = stored(loaded, tmp_path / "c")
    session, line = reopened(loaded, tmp_path / "c")
    assert line == f"prompt cache: {tmp_path / 'c'}: 89 tokens"
    found = tokens(loaded, session)
    assert (found.stats.reused_tokens, found.token_ids) == (79, expected.token_ids)
    longer = [*PROMPT, *expected.token_ids[:9], 7, 8]
    again, _ = reopened(loaded, tmp_path / "c")
    found = tokens(loaded, again, longer)
    assert (found.stats.reused_tokens, found.token_ids) == (89, tokens(loaded, None, longer).token_ids)


def test_the_file_holds_the_bytes_of_the_cache_and_little_more(loaded, tmp_path):
    stored(loaded, tmp_path / "c")
    c = loaded.model.config
    kv_bytes = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 89 * 2
    assert 0 < (tmp_path / "c").stat().st_size - kv_bytes - 89 * 4 < 1000
    assert [file.name for file in tmp_path.iterdir()] == ["c"], "no temporary file is left"


def test_every_damaged_byte_is_noticed(loaded, tmp_path):
    path = tmp_path / "c"
    stored(loaded, path)
    good = path.read_bytes()
    for at in [*range(12, 400, 7), *range(400, len(good), len(good) // 60), len(good) - 1]:
        bad = bytearray(good)
        bad[at] ^= 1
        path.write_bytes(bad)
        session, line = reopened(loaded, path)
        assert session.length == session.kv.length == 0, at
        assert line.startswith(f"note: prompt cache {path} ") and "will be replaced" in line
    for size in (0, 3, 8, 15, 16, 100, len(good) - 1, len(good) - 5000):
        path.write_bytes(good[:size])
        if size < 8:
            with pytest.raises(ConfigError, match="no prompt cache"):
                reopened(loaded, path)
        else:
            session, line = reopened(loaded, path)
            assert session.length == 0 and "is damaged" in line
    path.write_bytes(good + b"x")
    assert "is damaged" in reopened(loaded, path)[1]


def test_a_header_of_another_kind_is_damage(loaded, tmp_path):
    for header in ({"num_tokens": 5, "identity": []}, {"num_tokens": 5, "identity": 3}, [], {"num_tokens": 5}):
        text = json.dumps(header).encode()
        (tmp_path / "c").write_bytes(MAGIC + struct.pack("<II", 1, len(text)) + text)
        session, line = reopened(loaded, tmp_path / "c")
        assert session.length == 0 and ("is damaged" in line or "is of another" in line)


def test_a_directory_that_is_not_there_is_refused_at_once(loaded, tmp_path):
    with pytest.raises(ConfigError, match=r"no directory .*nowhere; make it"):
        PromptCache(tmp_path / "nowhere" / "c", Session(loaded), loaded)


def test_other_models_and_settings_are_not_used(loaded, model, tmp_path):
    path = tmp_path / "c"
    stored(loaded, path)
    (tmp_path / "w").mkdir()
    other_weights = make_snapshot(tmp_path / "w", {"rope_theta": 500.0})
    cases = [
        (engine.load(model, kv="f32"), "is of other settings"),
        (engine.load(other_weights), "is of another model"),
        (engine.load(model, ctx=88), "holds 89 tokens, the context 88"),
    ]
    for other, text in cases:
        session, line = reopened(other, path)
        assert session.length == 0 and text in line
    # Threads, tier and a context that is still large enough change no bit, so they do not count.
    assert "89 tokens" in reopened(engine.load(model, threads=1, isa="scalar", ctx=89), path)[1]


def test_foreign_and_newer_files_are_refused_untouched(loaded, tmp_path):
    for content, text in ((b"my novel", "exists and is no prompt cache"),
                          (MAGIC + struct.pack("<II", 9, 0), "version 9 of the file")):  # fmt: skip
        (tmp_path / "c").write_bytes(content)
        with pytest.raises(ConfigError, match=text):
            reopened(loaded, tmp_path / "c")
        assert (tmp_path / "c").read_bytes() == content
    with pytest.raises(ConfigError, match="there is no directory"):
        session = Session(loaded)
        cache = PromptCache(tmp_path / "no" / "c", session, loaded)
        tokens(loaded, session)
        cache.save()


def test_digest_tells_files_of_the_same_shape_apart(tmp_path):
    """A GGUF keeps no checksums: bytes of every tensor are sampled."""
    digests = set()
    for seed in (1, 1, 2):
        path = tmp_path / f"{len(digests)}.gguf"
        write_gguf(path, "mha_base", seed=seed)
        digests.add(model_digest(engine.load(path).files))
    assert len(digests) == 2


def test_draws_and_penalties_see_the_whole_text(loaded, tmp_path):
    stored(loaded, tmp_path / "c")
    session, _ = reopened(loaded, tmp_path / "c")
    settings = {"temperature": 1.0, "seed": 5, "repeat_penalty": 1.5, "repeat_last_n": -1, "presence_penalty": 1.0}
    found = [loaded.generate(PROMPT, max_tokens=20, ignore_eos=True, session=s, **settings) for s in (session, None)]
    assert "".join(found[0]) == "".join(found[1])
    assert found[0].token_ids == found[1].token_ids
    assert [g.stats.reused_tokens for g in found] == [79, 0]


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v2"])
def test_windows_and_latent_caches(tmp_path, name):
    """A ring is stored as far as it looks back: what goes on from there is reused, what goes back further is not."""
    families.checkpoint(tmp_path / "hf", name)
    convert(tmp_path / "hf", tmp_path / "out", formats=RoleFormats(experts="f32", dense="f32"), threads=1)
    loaded = engine.load(tmp_path / "out", ctx=families.CONTEXT)
    prompt = [5 + n * 7 % 50 for n in range(80)]
    expected = stored(loaded, tmp_path / "c", prompt)
    longer, other = [*prompt, *expected.token_ids[:9], 7, 8], [*prompt[:20], 9, 8, 7]
    ring = any(shape.window for shape in loaded.new_kv().shapes)
    assert ring == (name == "gpt_oss")
    for text, reused in ((longer, 89), (other, 0 if ring else 20)):
        session, line = reopened(loaded, tmp_path / "c")
        assert "89 tokens" in line
        found = tokens(loaded, session, text)
        assert (found.stats.reused_tokens, found.token_ids) == (reused, tokens(loaded, None, text).token_ids)


# ---- the program -----------------------------------------------------------------------------------------------------


def test_generate_and_chat_share_a_file(model, tmp_path):
    path, options = tmp_path / "c", ["-m", model, "-n", 8, "--ignore-eos", "--json"]
    plain = json.loads(run("generate", tiny_models.PROMPT, *options).stdout)
    runs = []
    for _ in range(2):
        done = run("generate", tiny_models.PROMPT, *options, "--prompt-cache", path)
        runs.append(json.loads(done.stdout))
        assert runs[-1]["token_ids"] == plain["token_ids"]
    count = len(plain["prompt_token_ids"])
    assert [r["stats"]["reused_tokens"] for r in runs] == [0, count - 1]
    assert f"prompt cache: {path}: {count + 7} tokens\n" in done.stderr
    assert f"({count - 1} more were in the cache)" in done.stderr

    caches = ([], ["--prompt-cache", path], ["--prompt-cache", path])
    chats = [run("chat", "-m", model, "-n", 5, *cache, text_in="Hello\nMore\n") for cache in caches]
    assert len({chat.stdout for chat in chats}) == 1
    assert "more were in the cache" in chats[2].stderr.split("finish")[0]
    assert "prompt cache" not in chats[0].stderr


def test_program_says_why_a_file_is_not_used(model, tmp_path):
    path = tmp_path / "c"
    run("generate", "Hello", "-m", model, "-n", 4, "--prompt-cache", path)
    done = run("generate", "Hello", "-m", model, "-n", 4, "--prompt-cache", path, "--kv", "f32")
    assert done.returncode == 0
    assert f"note: prompt cache {path} is of other settings; the prompt is computed" in done.stderr
    assert "tokens stored" in done.stderr
    path.write_bytes(b"something else")
    assert_error(run("generate", "Hello", "-m", model, "--prompt-cache", path), str(path), "no prompt cache")
