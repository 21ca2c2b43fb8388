"""Compare token ids of random texts with llama.cpp, for GGUF files (vocabularies alone are enough).

python scripts/fuzz_tokenizers.py --peer-python VENV/bin/python [--count N] [--seed N] [--pre NAME] FILE.gguf ...

--peer-python: an interpreter with llama-cpp-python. --pre: compare under this pre-tokenizer instead of the file's; the
file is copied with the name changed. Prints texts that differ and a count per file; exit code 1 when some did.
Where our pre-tokenizer composes characters (NFC) and llama.cpp does not, texts are composed before both see them.
"""

import argparse
import json
import random
import sys
import tempfile
import unicodedata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from gguf_vocabulary import copy_with_pre
from tokenizer_peer import Peer

from engine.pretokenizers import _TABLE
from engine.tokenizer import Tokenizer
from engine.weights.gguf_header import read_header

TEXTS = json.loads((Path(__file__).parent.parent / "tests" / "data" / "tokenizers" / "texts.json").read_text())
WORDS = [word for text in TEXTS for word in text.split(" ")]
BLANKS = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u3000", "\u2003", "\u200b", ""]
RANGES = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80), (0x1E00, 0x2C00),
          (0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0x1F300, 0x1F700)]  # fmt: skip


def random_text(rng: random.Random) -> str:
    """A text of words, blanks and single characters that Unicode has assigned."""
    parts = []
    for _ in range(rng.randint(1, 24)):
        kind = rng.random()
        if kind < 0.35:
            parts.append(rng.choice(WORDS))
        elif kind < 0.65:
            parts.append(rng.choice(BLANKS))
        elif kind < 0.75:
            parts.append(rng.choice("'\"!?.,:;/\\()[]{}<>|=+-*&^%$#@~`_") * rng.randint(1, 4))
        else:
            characters = map(chr, rng.choices(range(*rng.choice(RANGES)), k=rng.randint(1, 4)))
            parts.append("".join(c for c in characters if unicodedata.category(c) not in ("Cn", "Cs")))
    return "".join(parts)


def compare(file: Path, pre: str | None, options) -> int:
    """Print and count the texts whose ids differ."""
    metadata = read_header(file).metadata
    tokenizer = Tokenizer.from_gguf(metadata, str(file), pre)
    rules = (
        _TABLE.get(pre or metadata.get("tokenizer.ggml.pre")) if metadata["tokenizer.ggml.model"] == "gpt2" else None
    )
    rng, failed = random.Random(options.seed), 0
    peer = Peer(options.peer_python, file)
    for _ in range(options.count):
        text = random_text(rng)
        if rules is not None and rules.nfc:
            text = unicodedata.normalize("NFC", text)
        special = rng.random() < 0.5
        ours, theirs = (
            tokenizer.encode(text, add_special_tokens=False, parse_special=special),
            peer.encode(text, special),
        )
        if ours != theirs:
            failed += 1
            if failed <= options.show:
                print(f"  {text!r}\n    ours   {ours}\n    theirs {theirs}")
    peer.close()
    print(
        f"{file.name}{f' as {pre}' if pre else ''}: {options.count - failed} of {options.count} texts agree", flush=True
    )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=3)
    parser.add_argument("--pre", action="append", default=[])
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for file in options.files:
            for pre in options.pre or [None]:
                copy = file if pre is None else copy_with_pre(file, pre, Path(folder) / f"{file.stem}-{pre}.gguf")
                failed += compare(copy, pre, options)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
