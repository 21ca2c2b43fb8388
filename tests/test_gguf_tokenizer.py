"""Tokenizers rebuilt from GGUF metadata: ids against llama.cpp (tests/data/tokenizers, see
scripts/make_tokenizer_cases.py), rules of special tokens, and every kind of metadata that is refused."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
from cli_program import assert_error, run
from gguf_models import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import pretokenizers
from engine.errors import WeightsError
from engine.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data" / "tokenizers"
TEXTS, IDS = json.loads((DATA / "texts.json").read_text()), json.loads((DATA / "cases.json").read_text())
BYTE_LEVEL = json.loads((DATA / "byte-level.json").read_text())
PIECES = json.loads((DATA / "sentencepiece.json").read_text())
PRE = "tokenizer.ggml.pre"
TOKENS = BYTE_LEVEL["tokenizer.ggml.tokens"]
END, USER = TOKENS.index("<|end|>"), TOKENS.index("<|user|>")


def made(base, **changes):
    """A tokenizer of one of the vocabularies, keys replaced (None removes)."""
    metadata = base | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None}, "made.gguf")


def byte_level(pre="gpt-2", **changes):
    return made(BYTE_LEVEL, pre=pre, **changes)


# ---- ids -------------------------------------------------------------------------------------------------------------


def wrong(tokenizer, name, **options):
    ids = [tokenizer.encode(text, add_special_tokens=False, **options) for text in TEXTS]
    return [text for text, a, b in zip(TEXTS, ids, IDS[name], strict=True) if a != b]


BYTE_LEVEL_NAMES = [name for name in IDS if name in pretokenizers.known()]


@pytest.mark.parametrize("pre", BYTE_LEVEL_NAMES)
def test_byte_level_ids(pre):
    assert len(TEXTS) == 46
    assert wrong(byte_level(pre), pre) == []


def test_every_set_of_rules_has_its_cases():
    shown = {pretokenizers._TABLE[name].patterns for name in BYTE_LEVEL_NAMES}
    assert shown == {rules.patterns for rules in pretokenizers._TABLE.values()}


def test_cases_tell_the_rules_apart():
    """Ids of two sets of rules differ somewhere, or a mistake in one could not be seen."""
    rules = {name: dataclasses.replace(pretokenizers._TABLE[name], adds_bos=False) for name in BYTE_LEVEL_NAMES}
    ids = {name: json.dumps(IDS[name]) for name in BYTE_LEVEL_NAMES}
    same = [(a, b) for a in ids for b in ids if a < b and ids[a] == ids[b] and rules[a] != rules[b]]
    assert same == [("bailingmoe", "stablelm2")], "written differently, equal in effect"


def test_sentencepiece_ids():
    assert wrong(made(PIECES), "llama") == []
    assert wrong(made(PIECES, add_space_prefix=False), "llama no prefix") == []


def test_control_tokens_as_plain_text():
    """Control tokens are read only when asked for, user-defined ones always."""
    assert wrong(byte_level(), "gpt-2 plain", parse_special=False) == []
    assert wrong(made(PIECES), "llama plain", parse_special=False) == []
    assert wrong(byte_level(), "gpt-2 plain") == ["<|user|>Hi<|end|>\nnot <|other|>"]


def test_composed_characters_follow_the_family():
    split, whole = "e\u0301", "\u00e9"
    for pre, composes in (("olmo", True), ("qwen2", True), ("gpt-2", False), ("llama-bpe", False), ("qwen35", False)):
        subject = byte_level(pre)
        assert (subject.encode(split) == subject.encode(whole)) == composes


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_bytes_survive(text):
    for subject, prefix, read in (
        (cached("deepseek-v3"), b"", text),
        (cached("refact"), b"", text),
        (cached(None), b" ", text.replace("\u2581", " ")),  # the character that stands for a space is one
    ):
        ids = subject.encode(text, add_special_tokens=False, parse_special=False)
        # A space is put in front of every stretch between added tokens.
        got = subject.decode_bytes(ids, skip_special=False)
        assert got.replace(b" ", b"") == read.encode().replace(b" ", b"")
        assert "<think>" in text or not text or got == prefix + read.encode()


@functools.cache
def cached(pre):
    return made(PIECES) if pre is None else byte_level(pre)


# ---- special tokens --------------------------------------------------------------------------------------------------


def test_special_tokens_and_their_bytes():
    subject = byte_level()
    end, think = subject.encode("<|end|>")[0], subject.encode("<think>")[0]
    assert (subject.is_special(end), subject.is_special(think)) == (True, False)
    assert subject.decode([end, think]) == "<think>"
    assert subject.bos_id == end


@pytest.mark.parametrize(
    ("base", "keys", "expected"),
    [
        (BYTE_LEVEL, {"pre": "gpt-2"}, False),
        (BYTE_LEVEL, {"pre": "llama-bpe"}, True),
        (BYTE_LEVEL, {"pre": "llama-bpe", "add_bos_token": False}, False),
        (BYTE_LEVEL, {"pre": "gpt-2", "add_bos_token": True}, True),
        (PIECES, {}, True),
        (PIECES, {"add_bos_token": False}, False),
    ],
)
def test_bos_rules(base, keys, expected):
    subject = made(base, **keys)
    assert subject.adds_bos == (subject.encode("x")[0] == subject.bos_id) == expected


def test_eos_is_added_where_the_file_says_so():
    assert made(PIECES, add_eos_token=True).encode("x")[-1] == 2
    assert made(PIECES).encode("x")[-1] != 2


def test_all_ends_of_an_answer_are_found():
    tokens = [*BYTE_LEVEL["tokenizer.ggml.tokens"], "<|eot_id|>", "<|eom_id|>", "<|im_end|>"]
    types = [*BYTE_LEVEL["tokenizer.ggml.token_type"], 3, 1, 3]
    n = len(tokens)
    subject = byte_level(tokens=tokens, token_type=types)
    assert subject.eos_ids == {END, USER, n - 3, n - 1}, "an ordinary token of that name is text"
    assert byte_level(tokens=tokens, token_type=types, eot_token_id=7, eom_token_id=8).eos_ids == {
        END,
        USER,
        7,
        8,
        n - 3,
        n - 1,
    }


def test_channel_markers_are_seen():
    """gpt-oss: without them thoughts and answer would run into each other."""
    extra = ["<|start|>", "<|channel|>", "<|message|>", "<|end_of_text|>"]
    subject = byte_level(tokens=[*TOKENS, *extra], token_type=[*BYTE_LEVEL["tokenizer.ggml.token_type"], 3, 3, 3, 3])
    ids = subject.encode("<|start|>a<|channel|>b<|message|>c<|end_of_text|>")
    assert subject.decode(ids) == "<|start|>a<|channel|>b<|message|>c"
    other = byte_level(tokens=[*TOKENS, "<|start|>"], token_type=[*BYTE_LEVEL["tokenizer.ggml.token_type"], 3])
    assert other.decode(other.encode("<|start|>a")) == "a"


def test_unused_tokens_are_padding():
    tokens = [*BYTE_LEVEL["tokenizer.ggml.tokens"], "[PAD0]"]
    subject = byte_level(tokens=tokens, token_type=[*BYTE_LEVEL["tokenizer.ggml.token_type"], 5])
    subject.check_vocabulary(len(tokens))
    assert subject.token_bytes(len(tokens) - 1) == b""


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_unknown_pre_is_refused_by_name_unless_forced():
    with pytest.raises(
        WeightsError, match=r"made\.gguf: pre-tokenizer 'new-one' is not known.*known:.*qwen2.*--force-tok"
    ):
        byte_level("new-one")
    with pytest.raises(WeightsError, match=r"tokenizer\.ggml\.pre is missing.*known: bailingmoe, "):
        byte_level(None)
    forced = Tokenizer.from_gguf(BYTE_LEVEL | {PRE: "new-one"}, force="qwen2")
    assert wrong(forced, "qwen2") == []
    with pytest.raises(WeightsError, match="pre-tokenizer 'nonsense' is not known"):
        Tokenizer.from_gguf(BYTE_LEVEL | {PRE: "gpt-2"}, force="nonsense")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer model 'bert' is not supported; known: gpt2, llama"),
        ({"model": None}, r"no tokenizer \(tokenizer\.ggml\.model is missing\)"),
        ({"model": 3}, "tokenizer.ggml.model = 3, expected str"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"token_type": [1, 2]}, f"token_type has 2 items, the vocabulary {len(TOKENS)} tokens"),
        ({"token_type": 1}, "token_type = 1, expected a list of int"),
        ({"tokens": [1] * len(TOKENS)}, r"tokens = \[1, .*expected a list of str"),
        ({"merges": None}, "merges is missing"),
        ({"merges": 1.5}, "merges = 1.5, expected a list of str"),
        ({"merges": [1, 2]}, r"merges = \[1, 2\], expected a list of str"),
        ({"merges": ["a b", "zz qq"]}, "has 'zz qq', of which no token"),
        ({"merges": ["ab"]}, "has 'ab', of which no token"),
        ({"eos_token_id": len(TOKENS)}, f"eos_token_id = {len(TOKENS)}, the vocabulary has {len(TOKENS)} tokens"),
        ({"add_bos_token": 1}, "add_bos_token = 1, expected bool"),
        ({"bos_token_id": True}, "bos_token_id = True, expected int"),
        (
            {"bos_token_id": None, "add_bos_token": True},
            r"made\.gguf: tokenizer\.ggml\.add_bos_token is true, but there is no bos_token_id",
        ),
        ({"tokens": ["a"] * len(TOKENS)}, "holds 'a' more than once"),
    ],
)
def test_metadata_that_is_refused(changes, message):
    with pytest.raises(WeightsError, match=message):
        byte_level(**changes)


def test_pieces_without_scores_or_bytes_are_refused():
    with pytest.raises(WeightsError, match=r"scores is missing"):
        made(PIECES, scores=None)
    with pytest.raises(WeightsError, match=r"scores = \['a'\], expected a list of float"):
        made(PIECES, scores=["a"])
    with pytest.raises(WeightsError, match="scores has 3 items"):
        made(PIECES, scores=[1.0, 2.0, 3.0])
    tokens = [token.replace("<0x41>", "<0x?>") for token in PIECES["tokenizer.ggml.tokens"]]
    types = [1 if kind == 2 else kind for kind in PIECES["tokenizer.ggml.token_type"]]
    with pytest.raises(WeightsError, match="neither a token <0x41> nor an unknown token"):
        made(PIECES, tokens=tokens, token_type=types)


# ---- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, "mha_base")
    return path


def test_generate_from_a_file_reads_text_as_the_checkpoint_does(gguf_file, tiny_snapshot):
    text = "The router picks experts; don't say 1234!"
    options = ["-n", 8, "--ignore-eos", "--json"]
    found = [
        json.loads(run("generate", text, "-m", m, *options).stdout) for m in (gguf_file, tiny_snapshot("mha_base"))
    ]
    for key in ("prompt_token_ids", "token_ids", "text"):
        assert found[0][key] == found[1][key]


def test_unknown_pre_needs_force(tmp_path):
    file = tmp_path / "other.gguf"
    write_gguf(file, "mha_base", edit=lambda writer: replace_pre(writer, "new-one"))
    assert_error(run("generate", "x", "-m", file), "pre-tokenizer 'new-one'", "--force-tokenizer")
    done = run("generate", "don't", "-m", file, "-n", 1, "--json", "--force-tokenizer", "olmo")
    assert len(json.loads(done.stdout)["prompt_token_ids"]) == 4
    assert_error(run("generate", "x", "-m", file, "--force-tokenizer", "none"), "'none' is not known")
    assert_error(run("generate", "x", "--force-tokenizer", "olmo"), "only for GGUF files")
    facts = json.loads(run("inspect", file, "--json").stdout)["tokenizer"]
    assert "'new-one' is not known" in facts["error"]


def replace_pre(writer, name):
    for keys in writer.kv_data:
        keys["tokenizer.ggml.pre"].value = name


def test_sampler_settings_come_from_the_file(tmp_path):
    def edit(writer):
        for name, value in (("temp", 0.7), ("top_p", 0.9), ("penalty_repeat", 1.25)):
            writer.add_float32(f"general.sampling.{name}", value)
        for name, value in (("top_k", 5), ("penalty_last_n", 33)):
            writer.add_int32(f"general.sampling.{name}", value)

    file = tmp_path / "sampling.gguf"
    write_gguf(file, "mha_base", edit=edit)
    found = json.loads(run("generate", "x", "-m", file, "-n", 2, "--json", "--top-k", 3).stdout)
    expected = {"temperature": 0.7, "top_p": 0.9, "repeat_penalty": 1.25, "repeat_last_n": 33, "top_k": 3, "min_p": 0}
    assert {name: found["sampling"][name] for name in expected} == expected
    sources = {name: found["sampling_sources"][name] for name in expected}
    assert sources == dict.fromkeys(expected, "gguf") | {"top_k": "flag", "min_p": "default"}


def test_sampling_that_is_not_computed_here_is_refused(tmp_path):
    file = tmp_path / "mirostat.gguf"
    write_gguf(file, "mha_base", edit=lambda writer: writer.add_int32("general.sampling.mirostat", 2))
    assert_error(run("generate", "x", "-m", file), "mirostat = 2 is not supported")
