"""Tokenizer rules, the bytes of tokens, and the two stream filters (whole characters, stop strings)."""

import itertools
import json

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError, WeightsError
from engine.tokenizer import StopMatcher, Tokenizer, byte_level_alphabet

EOS = tiny_models.EOS_TOKEN_ID
# One, two, three and four bytes per character; a joined emoji; a combining accent; right-to-left text.
TEXTS = [
    "plain",
    "\u00e9t\u00e9",
    "\u4f60\u597d",
    "\U0001f600\U0001f44d\U0001f3fd",
    "a\u0301x",
    "\u05e9\u05dc",
    " \n\t",
]


def byte_tokens(text):
    """Ids of the tokens that stand for single bytes; their order is that of the sorted alphabet, after two specials."""
    order = sorted(byte_level_alphabet(), key=ord)
    of_byte = {byte: 2 + order.index(symbol) for symbol, byte in byte_level_alphabet().items()}
    return [of_byte[byte] for byte in text.encode()]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    for name, content in (
        ("tokenizer.json", tiny_models._tokenizer_json()),
        ("tokenizer_config.json", tiny_models._tokenizer_config_json()),
        ("generation_config.json", tiny_models._generation_config_json()),
    ):
        (path / name).write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return Tokenizer.from_dir(model_dir)


def byte_level(**config):
    """The tiny tokenizer with another tokenizer_config.json."""
    return Tokenizer(json.dumps(tiny_models._tokenizer_json()), config)


def sentencepiece_json():
    """A small vocabulary with byte fallback, as Llama-style tokenizers have."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581Hi", "a", "b"]
    added = [
        {"id": n, "content": pieces[n], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for n in range(3)
    ]  # fmt: skip
    template = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}  # fmt: skip
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
             "vocab": {piece: n for n, piece in enumerate(pieces)}, "merges": []}  # fmt: skip
    return json.dumps(
        {"version": "1.0", "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": None,
         "post_processor": template, "decoder": {"type": "Sequence", "decoders": decoders}, "model": model}
    )  # fmt: skip


# ---- encoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*TEXTS, tiny_models.PROMPT, ""])
def test_text_survives_a_round_trip(tokenizer, text):
    text = text.replace("a\u0301", "\u00e1")  # this tokenizer composes accents (NFC)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_ids_equal_the_library(tokenizer):
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(json.dumps(tiny_models._tokenizer_json()))
    assert tokenizer.encode(tiny_models.PROMPT) == backend.encode(tiny_models.PROMPT).ids


def test_special_tokens_in_text_are_read_only_when_asked(tokenizer):
    text = "a<|endoftext|>b"
    assert EOS in tokenizer.encode(text)
    plain = tokenizer.encode(text, parse_special=False)
    assert EOS not in plain
    assert tokenizer.decode_bytes(plain) == text.encode()
    assert EOS in tokenizer.encode(text), "the setting must not stick"


@pytest.mark.parametrize(
    ("rules", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True, "bos_token": "<|padding|>"}, [1], []),
        ({"add_bos_token": False, "bos_token": "<|padding|>"}, [], []),
        ({"add_eos_token": True, "eos_token": "<|endoftext|>"}, [], [EOS]),
        ({"add_bos_token": True, "bos_token": {"content": "<|padding|>"}, "add_eos_token": True,
          "eos_token": "<|endoftext|>"}, [1], [EOS]),
    ],
)  # fmt: skip
def test_bos_and_eos_follow_tokenizer_config(rules, before, after):
    subject = byte_level(**rules)
    assert subject.encode("xyz") == before + byte_tokens("xyz") + after
    assert subject.encode("xyz", add_special_tokens=False) == byte_tokens("xyz")


def test_template_of_the_tokenizer_counts_when_the_config_is_silent():
    assert Tokenizer(sentencepiece_json()).encode("ab")[0] == 1
    config = {"add_bos_token": False, "bos_token": "<s>"}
    assert Tokenizer(sentencepiece_json(), config).encode("ab")[0] != 1


def test_bos_is_not_doubled():
    subject = byte_level(add_bos_token=True, bos_token="<|endoftext|>")
    assert subject.encode("<|endoftext|>x").count(EOS) == 1


# ---- special ids -----------------------------------------------------------------------------------------------------


def test_eos_may_be_several():
    text = json.dumps(tiny_models._tokenizer_json())
    assert Tokenizer(text, {}, {"eos_token_id": [5, EOS]}).eos_ids == {5, EOS}
    assert Tokenizer(text, {}, {"eos_token_id": EOS}, {"eos_token_id": 7}).eos_ids == {EOS}
    assert Tokenizer(text, {}, {}, {"eos_token_id": 7}).eos_ids == {7}
    assert Tokenizer(text, {"eos_token": "<|endoftext|>"}).eos_ids == {EOS}
    assert Tokenizer(text).eos_ids == frozenset()


def test_bos_null_in_tokenizer_config_beats_a_default_in_config_json(model_dir):
    assert Tokenizer.from_dir(model_dir, None, {"bos_token_id": 1}).bos_id is None
    assert Tokenizer(json.dumps(tiny_models._tokenizer_json()), {}, {}, {"bos_token_id": 1}).bos_id == 1


def test_vocabulary_sizes(tokenizer, model_dir):
    assert tokenizer.vocab_size == tiny_models.TOKENIZER_SIZE
    padded = Tokenizer.from_dir(model_dir)
    padded.check_vocabulary(tiny_models.TOKENIZER_SIZE + 10)
    assert padded.token_bytes(tiny_models.TOKENIZER_SIZE + 9) == b""
    assert padded.decode([*byte_tokens("a"), tiny_models.TOKENIZER_SIZE]) == "a"
    with pytest.raises(ConfigError, match=f"token id {tiny_models.TOKENIZER_SIZE + 10} is out of range"):
        padded.token_bytes(tiny_models.TOKENIZER_SIZE + 10)
    with pytest.raises(WeightsError, match=f"{tiny_models.TOKENIZER_SIZE} ids.*only 12 rows"):
        padded.check_vocabulary(12)


@pytest.mark.parametrize("token_id", [-1, tiny_models.TOKENIZER_SIZE, 10**9])
def test_id_out_of_range_is_refused_with_the_range(tokenizer, token_id):
    with pytest.raises(ConfigError, match=f"{token_id} is out of range, expected 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.decode([token_id])


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(WeightsError, match="not a directory"):
        Tokenizer.from_dir(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"tokenizer\.json: file is missing"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(WeightsError, match=r"tokenizer\.json: cannot be read as JSON"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(WeightsError, match=r"tokenizer\.json: not a valid tokenizer"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_models._tokenizer_json()))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"tokenizer_config\.json: got list"):
        Tokenizer.from_dir(tmp_path)


def test_unknown_decoder_is_refused():
    content = tiny_models._tokenizer_json() | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    with pytest.raises(WeightsError, match="decoder WordPiece is not supported"):
        Tokenizer(json.dumps(content))


def test_bad_rules_are_refused():
    with pytest.raises(WeightsError, match="add_bos_token = 'yes'"):
        byte_level(add_bos_token="yes")
    with pytest.raises(WeightsError, match="no bos_token"):
        byte_level(add_bos_token=True, bos_token=None)


# ---- streaming -------------------------------------------------------------------------------------------------------


def stream(tokenizer, ids):
    decoder = tokenizer.stream_decoder()
    return [decoder.push(n) for n in ids] + [decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_single_byte_tokens_give_whole_characters(tokenizer, text):
    pieces = stream(tokenizer, byte_tokens(text))
    assert "".join(pieces) == text
    # Each character appears with the token of its last byte, none earlier and none later.
    expected = [char if last else "" for char in text for last in [0] * (len(char.encode()) - 1) + [1]]
    assert pieces[:-1] == expected


@pytest.mark.parametrize("text", [text for text in TEXTS if not text.isascii()])
def test_text_cut_at_any_byte_ends_with_the_last_whole_character(tokenizer, text):
    ids = byte_tokens(text)
    for cut in range(len(ids) + 1):
        assert "".join(stream(tokenizer, ids[:cut])) == text.encode()[:cut].decode(errors="ignore")


def test_invalid_bytes_become_replacement_marks_and_do_not_stick(tokenizer):
    euro = byte_tokens("\u20ac")
    assert "".join(stream(tokenizer, [*euro[:2], *byte_tokens("x"), *euro])) == "\ufffdx\u20ac"
    assert "".join(stream(tokenizer, [euro[1], *byte_tokens("x")])) == "\ufffdx"


def test_special_tokens_are_no_text(tokenizer):
    ids = [*byte_tokens("a"), 1, EOS, *byte_tokens("b")]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|padding|><|endoftext|>b"


def test_special_token_inside_a_character_does_not_break_it(tokenizer):
    first, *rest = byte_tokens("\u4f60")
    assert "".join(stream(tokenizer, [first, 1, *rest])) == "\u4f60"


@pytest.mark.parametrize("text", [" Hi", "\u4f60 a", "\U0001f600b"])
def test_byte_fallback_tokens(text):
    subject = Tokenizer(sentencepiece_json())
    ids = subject.encode(text)
    assert "".join(stream(subject, ids)) == subject.decode(ids) == text
    assert subject.decode_bytes(ids) == text.encode()


@given(st.text())
def test_stream_equals_decode_for_any_text(text):
    subject = _cached()
    assert "".join(stream(subject, byte_tokens(text))) == text == subject.decode(byte_tokens(text))


@given(st.lists(st.integers(0, tiny_models.TOKENIZER_SIZE - 1), max_size=40))
def test_stream_equals_decode_for_any_ids(ids):
    subject = _cached()
    whole = subject.decode(ids)
    streamed = "".join(stream(subject, ids))
    assert whole == streamed or whole == streamed + "\ufffd"


def _cached(found=[]):  # noqa: B006  (hypothesis tests cannot take a module fixture cheaply)
    if not found:
        found.append(byte_level())
    return found[0]


# ---- stop strings ----------------------------------------------------------------------------------------------------


def run_matcher(stops, pieces):
    matcher, out = StopMatcher(stops), []
    for piece in pieces:
        out.append(matcher.push(piece))
        if matcher.matched:
            break
    return "".join(out) + matcher.flush(), matcher.matched


def first_stop(stops, text):
    """The definition: read on until a stop string is complete, then drop it (the longest, if several end here)."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@pytest.mark.parametrize(
    "stops", [["END"], ["ab", "abc"], ["b", "cab"], ["\n\n"], ["aab"], ["xyz", "yz"], ["abca", "bc"]]
)
def test_every_split_of_a_text_stops_at_the_same_place(stops):
    for text in ("aENDb", "abcab", "xaab", "aaab\n\nz", "xyz", "ENEND", "none"):
        for size in range(len(text)):
            for cuts in itertools.combinations(range(1, len(text)), size):
                pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
                got, matched = run_matcher(stops, pieces)
                assert (got, bool(matched)) == first_stop(stops, text)


def test_text_is_held_back_only_while_it_may_be_a_stop():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("a", "E", "N", "x", "EN")] == ["a", "", "", "ENx", ""]
    assert (matcher.flush(), matcher.matched) == ("EN", None)


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["b"])
    assert (matcher.push("abc"), matcher.matched, matcher.push("more"), matcher.flush()) == ("a", "b", "", "")


def test_without_stops_text_passes():
    assert StopMatcher().push("text") == "text"


def test_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        StopMatcher(["x", ""])


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.text("abc", max_size=3)))
def test_matcher_emits_every_character_once(stops, pieces):
    got, matched = run_matcher(stops, pieces)
    text = "".join(pieces)
    assert text.startswith(got + (matched or ""))
    assert (got, bool(matched)) == first_stop(stops, text)
