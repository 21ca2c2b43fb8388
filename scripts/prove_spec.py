"""The whole matrix: speculation against plain decode, bit for bit.

    python scripts/prove_spec.py [--model DIR] [--prompts 20] [--tokens 256] [--json FILE]

For every prompt, sampler (greedy; drawn with penalties), window length (2..8, auto) and draft source (lookup, oracle,
oracle with every third draft spoiled, random): token ids, finish reason, text and the checksum of the logits of every
emitted position must be those of plain decode. Stops at the first difference, exit code 1.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import spec_tools  # noqa: E402
from test_spec import DRAWN, GREEDY, PROMPTS  # noqa: E402

import engine  # noqa: E402

LENGTHS = (*range(2, 9), "auto")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json")
    args = parser.parse_args()
    loaded = engine.load(args.model)
    options = {"max_tokens": args.tokens, "ignore_eos": True}
    counts = {name: {"runs": 0, "rounds": 0, "tokens": 0, "drafted": 0, "accepted": 0} for name in spec_tools.SOURCES}
    started = time.monotonic()
    for done, prompt in enumerate(PROMPTS[: args.prompts]):
        for sampling in (GREEDY, DRAWN):
            plain = spec_tools.run(loaded, prompt, sampling=sampling, **options)
            for name in spec_tools.SOURCES:
                for rows in LENGTHS:
                    stats = spec_tools.assert_same(loaded, prompt, rows, name, plain, sampling=sampling, **options)
                    counts[name]["runs"] += 1
                    for key in ("rounds", "tokens", "drafted", "accepted"):
                        counts[name][key] += getattr(stats, key)
        spent = time.monotonic() - started
        left = spent / (done + 1) * (args.prompts - done - 1)
        print(f"prompt {done + 1} of {args.prompts}: equal; {spent:.0f} s, about {left:.0f} s to go", file=sys.stderr)
    for name, c in counts.items():
        drafts = f"{c['accepted']}/{c['drafted']} drafts accepted"
        print(
            f"{name:8} {c['runs']} runs, {c['tokens']} tokens in {c['rounds']} rounds, {drafts}: equal to plain decode"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"DIFFERENT: {error}")
