"""Make tests/data/tokenizers: two small vocabularies and the ids that llama.cpp gives for 46 texts.

python scripts/make_tokenizer_cases.py --peer-python VENV/bin/python (an interpreter with llama-cpp-python)

Needs gguf and regex itself.

The byte-level vocabulary is trained without cutting words, so that its merges cross every kind of border and each
pre-tokenizer gives other ids. Where llama.cpp replaces a model's expression by a simpler one that differs on some
text (marks, rare blanks), the ids come from the expression itself, run by the module `regex`; the script
prints which.
"""

import argparse
import itertools
import json
import re
import sys
import tempfile
import unicodedata
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))

from gguf_vocabulary import write_vocabulary  # noqa: E402
from tokenizer_peer import Peer  # noqa: E402

from engine.gguf_tokenizer import BYTE, CONTROL, UNKNOWN, USER_DEFINED  # noqa: E402
from engine.pretokenizers import pretokenizer  # noqa: E402
from engine.tokenizer import byte_level_alphabet  # noqa: E402

OUT = ROOT / "tests" / "data" / "tokenizers"
# One name for each set of rules that llama.cpp knows too.
PRE = ["gpt-2", "refact", "llama-bpe", "chatglm-bpe", "glm4", "qwen2", "qwen35", "stablelm2", "deepseek-llm",
       "deepseek-coder", "deepseek-v3", "falcon", "gpt-4o", "tekken", "bailingmoe", "default"]  # fmt: skip
CONTROLS, USER = ["<|end|>", "<|user|>"], ["    ", "<think>"]
TEXTS = json.loads((OUT / "texts.json").read_text())


def training_text() -> list[str]:
    """Lines of the documents, and the texts themselves, so that merges of every script come about."""
    lines = (ROOT / "docs" / "arithmetic.md").read_text(encoding="utf-8").splitlines()
    return [
        text
        for text in TEXTS * 30 + lines
        if not any(token in text for token in (*CONTROLS, "<think>", "jumps", "quoted"))
    ]


def byte_level_vocabulary() -> dict:
    """tokenizer.* keys of 256 bytes, 1200 merges, words that no merge makes, control and user-defined tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(byte_level_alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1456, initial_alphabet=alphabet, max_token_length=12, show_progress=False)
    backend.train_from_iterator(training_text(), trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    unmade = [word for word in ("\u0120jumps", "\u0120lazy", "quoted") if word not in tokens]
    tokens += unmade  # told from their parts by ignore_merges alone
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, *CONTROLS, *USER],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [CONTROL] * len(CONTROLS) + [USER_DEFINED] * len(USER),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens),
    }


def sentencepiece_vocabulary() -> dict:
    """tokenizer.* keys of pieces with scores, byte tokens, one control and one user-defined token."""
    counts: dict[str, int] = {}
    for text in training_text():
        for word in re.findall(r" ?[^ ]+| +", " " + text):
            word = word.replace(" ", "\u2581")
            for start in range(len(word)):
                for end in range(start + 1, min(start + 9, len(word)) + 1):
                    counts[word[start:end]] = counts.get(word[start:end], 0) + 1
    pieces = sorted(counts, key=lambda p: (-counts[p] * (len(p) if len(p) > 1 else 1), p))[:700]
    rare = sorted({c for c in "".join(pieces)} - set(pieces))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *pieces, *rare, "<think>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[1] * (len(pieces) + len(rare)), USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def ids_of(python: str, metadata: dict, special: bool = True, texts=TEXTS) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(python, write_vocabulary(Path(folder) / "vocab.gguf", metadata))
        found = [peer.encode(text, special) for text in texts]
        peer.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", default=sys.executable)
    python = parser.parse_args().peer_python
    assert len(TEXTS) == len(set(TEXTS)) == 46
    OUT.mkdir(parents=True, exist_ok=True)
    byte_level, pieces = byte_level_vocabulary(), sentencepiece_vocabulary()
    cases = {pre: ids_of(python, byte_level | {"tokenizer.ggml.pre": pre}) for pre in PRE}
    composed = [unicodedata.normalize("NFC", text) for text in TEXTS]
    # Qwen2's tokenizer composes characters first, llama.cpp does not.
    cases["qwen2"] = ids_of(python, byte_level | {"tokenizer.ggml.pre": "qwen2"}, texts=composed)
    cases["gpt-2 plain"] = ids_of(python, byte_level | {"tokenizer.ggml.pre": "gpt-2"}, special=False)
    cases["llama"] = ids_of(python, pieces)
    cases["llama plain"] = ids_of(python, pieces, special=False)
    cases["llama no prefix"] = ids_of(python, pieces | {"tokenizer.ggml.add_space_prefix": False})
    take_exact_expressions(cases, byte_level)
    for name, content in (("byte-level.json", byte_level), ("sentencepiece.json", pieces),
                          ("cases.json", cases)):  # fmt: skip
        text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
        (OUT / name).write_text(re.sub(r"\],", "],\n", text) + "\n")
    return 0


def merged(word: str, ranks: dict[tuple[str, str], int], vocab: dict[str, int]) -> list[int]:
    """Ids of one word: its bytes, joined by the lowest-ranked merge until there is none. The slow, plain definition."""
    symbol = {byte: character for character, byte in byte_level_alphabet().items()}
    parts = [symbol[byte] for byte in word.encode()]
    while True:
        pairs = [(ranks[pair], n) for n, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        if not pairs:
            return [vocab[part] for part in parts]
        _, n = min(pairs)
        parts[n : n + 2] = [parts[n] + parts[n + 1]]


def cut(pieces: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Every piece cut at the borders of the matches of one pattern after the other."""
    import regex

    for pattern in patterns:
        borders = [{0, len(p), *(at for m in regex.finditer(pattern, p) for at in m.span())} for p in pieces]
        pieces = [p[a:b] for p, at in zip(pieces, borders, strict=True) for a, b in itertools.pairwise(sorted(at))]
    return pieces


def ids_by_regex(metadata: dict, pre: str) -> list[list[int] | None]:
    """Ids by the module `regex` and the plain definition of merges; None for texts with added tokens."""
    rules = pretokenizer(pre, "here")
    vocab = {token: n for n, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = (tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"])
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    found = []
    for text in TEXTS:
        ids: list[int] | None = [] if not any(token in text for token in (*CONTROLS, *USER)) else None
        for word in cut([text], rules.patterns) if ids is not None else []:
            symbols = "".join(s for byte in word.encode() for s, b in byte_level_alphabet().items() if b == byte)
            whole = rules.ignore_merges and symbols in vocab
            ids += [vocab[symbols]] if whole else merged(word, ranks, vocab)
        found.append(ids)
    return found


def take_exact_expressions(cases: dict, byte_level: dict) -> None:
    """llama.cpp has no \\p{Lu} and no (?i:), and sees blanks outside of ASCII as one character: texts with marks or
    such blanks get the ids of the model's own expression."""
    for pre in ("gpt-4o", "tekken", "deepseek-llm", "deepseek-coder"):
        exact = ids_by_regex(byte_level, pre)
        for n, text in enumerate(TEXTS):
            if exact[n] is None or exact[n] == cases[pre][n]:
                continue
            print(f"{pre}: {text!r} differs from the simplified expression")
            assert any(unicodedata.category(c) in ("Lt", "Mn", "Mc", "Zs") and c > "~" for c in text)
            cases[pre][n] = exact[n]


if __name__ == "__main__":
    sys.exit(main())
