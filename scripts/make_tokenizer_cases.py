"""Make tests/data/tokenizers: two small vocabularies and the ids that llama.cpp gives for 46 texts.

python scripts/make_tokenizer_cases.py --peer-python VENV/bin/python (an interpreter with llama-cpp-python)

The byte-level vocabulary is trained without cutting words, so that its merges cross every kind of border and each
pre-tokenizer gives other ids. Where llama.cpp replaces a model's expression by a simpler one that differs on some
text (case of letters outside of ASCII), that text is left out for that pre-tokenizer; the script prints which.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))

from gguf_vocabulary import write_vocabulary
from tokenizer_peer import Peer

from engine.gguf_tokenizer import BYTE, CONTROL, UNKNOWN, USER_DEFINED
from engine.tokenizer import byte_level_alphabet

OUT = ROOT / "tests" / "data" / "tokenizers"
# One name for each set of rules that llama.cpp knows too.
PRE = ["gpt-2", "refact", "llama-bpe", "chatglm-bpe", "glm4", "qwen2", "qwen35", "stablelm2", "deepseek-llm",
       "deepseek-coder", "deepseek-v3", "falcon", "gpt-4o", "tekken", "bailingmoe", "default"]  # fmt: skip
CONTROLS, USER = ["<|end|>", "<|user|>"], ["    ", "<think>"]
TEXTS = [
    "", " ", "  ", "     x", "\t", "\n", "\n\n\n", "\r\n\r\n x", " \n \n", "a\n  b\n\n   c",
    "Hello world", " Hello  World!", "don't you'LL we'Ve I'd he'S they're 'tis 'RE", "it\u2019s quoted \u2018so\u2019 \u201cwell\u201d",
    "1", "12", "123", "1234", "1234567890 3.14159 1,000,000", "x1y22z333 v2.0.1-rc4", "\u00bd \u2460 \u2167 \u00b2\u00b3 \uff11\uff12\uff13\uff14",
    "camelCase ALLCAPS MixedCASEWords aB Ab", "snake_case __init__ kebab-case", "if (a[i] != 0) { return *p++; } // done",
    "for i in range(10):\n\tprint(i)\n", "https://example.org/a/b?c=d&e=%20#f", "... !!! ??? --- ===  ~~~ ##",
    "<html>&nbsp;</html> $x^2_1$ `code` |a|b|", "\u00e9t\u00e9 na\u00efve \u00dcber stra\u00dfe \u0130stanbul \u01c5ungla",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u044f\u0437\u044b\u043a \u041c\u041e\u0421\u041a\u0412\u0410", "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac 12 \u03a3\u0391\u03a3",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u4e2d\u6587abc\u4e2d\u6587123", "\u3053\u3093\u306b\u3061\u306f\u30ab\u30bf\u30ab\u30ca\u6f22\u5b57\u30fc", "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0661\u0662\u0663", "\u05e9\u05dc\u05d5\u05dd", "\u0939\u093f\u0928\u094d\u0926\u0940 \u0967\u0968", "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
    "\U0001f600\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467", "e\u0301 a\u0308 combining", "\u00a0nbsp\u3000wide\u2003em\u200bzero",
    "<|user|>Hi<|end|>\nnot <|other|>", "<think> x    y</think>", "trailing   ", "price: \u20ac5, $6\u00a37 \u2192 \u2211\u221a",
    "The quick brown fox jumps over the lazy dog, and the router picks experts; then 7 more say: no, wait.",
]  # fmt: skip


def training_text() -> list[str]:
    """Lines of the documents, and the texts themselves, so that merges of every script come about."""
    lines = (ROOT / "docs" / "arithmetic.md").read_text(encoding="utf-8").splitlines()
    return [text for text in TEXTS * 3 + lines if not any(token in text for token in (*CONTROLS, "<think>"))]


def byte_level_vocabulary() -> dict:
    """tokenizer.* keys of 256 bytes, 700 merges, two control and two user-defined tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(byte_level_alphabet())
    trainer = trainers.BpeTrainer(vocab_size=956, initial_alphabet=alphabet, max_token_length=12, show_progress=False)
    backend.train_from_iterator(training_text(), trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
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


def ids_of(python: str, metadata: dict, special: bool = True) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(python, write_vocabulary(Path(folder) / "vocab.gguf", metadata))
        found = [peer.encode(text, special) for text in TEXTS]
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
    cases["gpt-2 plain"] = ids_of(python, byte_level | {"tokenizer.ggml.pre": "gpt-2"}, special=False)
    cases["llama"] = ids_of(python, pieces)
    cases["llama plain"] = ids_of(python, pieces, special=False)
    cases["llama no prefix"] = ids_of(python, pieces | {"tokenizer.ggml.add_space_prefix": False})
    drop_differing_expressions(cases, byte_level)
    for name, content in (("byte-level.json", byte_level), ("sentencepiece.json", pieces),
                          ("cases.json", {"texts": TEXTS, "ids": cases})):  # fmt: skip
        text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
        (OUT / name).write_text(re.sub(r"\],", "],\n", text) + "\n")
    return 0


def drop_differing_expressions(cases: dict, byte_level: dict) -> None:
    """llama.cpp has no \\p{Lu} and no (?i:): texts on which that shows are null for the two that need them."""
    for pre in ("gpt-4o", "tekken"):
        for n, text in enumerate(TEXTS):
            if any(c.isalpha() and not c.isascii() for c in text):
                print(f"{pre}: {text!r} left out")
                cases[pre][n] = None


if __name__ == "__main__":
    sys.exit(main())
