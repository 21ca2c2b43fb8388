"""Speculation against plain decode, side by side in one run.

    python scripts/bench_spec.py [--model FILE] [--tokens 256] [--only NAME] [--parts lookup,never,oracle] [--json FILE]

Arms: plain, --spec 2, 4, 8 and auto, interleaved, their order rotated from round to round, one round of warm-up, equal
token counts, medians with the range. Texts that copy (greedy continuations of a table and of a listing) and texts that
do not (drawn prose), and drafts that never hit (random tokens under auto). Part "oracle": the drafts are the text
itself: the upper bound, compared with what the times per window length allow.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import engine  # noqa: E402
from engine.generate import Generation  # noqa: E402
from engine.sampler import SamplingParams  # noqa: E402
from engine.spec import LookupSource, make_speculator  # noqa: E402
from engine.spec.probes import OracleSource, RandomSource  # noqa: E402

HELDOUT = ROOT / "tests" / "data" / "heldout"
PROSE = SamplingParams(temperature=0.9, top_p=0.95, seed=3)
# name -> (file, first character, characters, sampler)
TEXTS = {
    "copy: rst": ("rst.txt", 0, 3000, SamplingParams()),
    "copy: man": ("man.txt", 24000, 3000, SamplingParams()),
    "prose: kjv": ("kjv.txt", 0, 1500, PROSE),
    "prose: jargon": ("jargon.txt", 9000, 1500, PROSE),
}
ARMS = (0, 2, 4, 8, "auto")


def run(loaded, ids, sampling, tokens, spec, sources):
    generation = Generation(
        loaded, ids, max_tokens=tokens, sampling=sampling, ignore_eos=True, speculator=make_speculator(spec, sources())
    )
    for _ in generation:
        pass
    return generation


def measure(loaded, ids, sampling, args, arms, sources):
    """{arm: {ms_per_token: [..], report}}; every arm must give the same tokens."""
    found = {arm: {"ms_per_token": [], "report": None} for arm in arms}
    expected = None
    for turn in range(args.repeat + 1):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            generation = run(loaded, ids, sampling, args.tokens, arm, sources)
            expected = expected or generation.token_ids
            if generation.token_ids != expected:
                sys.exit(f"DIFFERENT tokens with --spec {arm}")
            if turn:
                stats = generation.stats
                found[arm]["ms_per_token"].append(stats.decode_s * 1e3 / (stats.generated_tokens - 1))
                found[arm]["report"] = stats.spec and stats.spec.report()
    return found, expected


def summary(found):
    plain = statistics.median(found[0]["ms_per_token"])
    for arm, row in found.items():
        times = sorted(row["ms_per_token"])
        row["speedup"] = plain / statistics.median(times)
        row["spread"] = [plain / times[-1], plain / times[0]]
        if arm and row["report"]:
            # Tokens per round over (ms per round / ms per token): above 1 the windows pay.
            r = row["report"]
            row["break_even"] = r["tokens_per_round"] / (r["ms_per_round"] / plain)
    return found


def show(name, found):
    print(f"\n{name}: plain {statistics.median(found[0]['ms_per_token']):.3f} ms/token")
    for arm, row in found.items():
        r = row["report"]
        tail = ""
        if r:
            tail = (
                f"  {r['tokens_per_round']:.2f} tokens/round, {r['ms_per_round']:.3f} ms/round, tokens/round : "
                f"(ms/round : ms/token) = {row['break_even']:.2f}, accepted {r['accepted']}/{r['drafted']}"
            )
        if "bound" in row:
            share = row["speedup"] / row["bound"]
            tail += f", bound {row['bound']:.2f} ({share:.0%}), {row['experts_per_round']:.1f} experts/round"
        low, high = row["spread"]
        print(f"  spec {arm!s:>4}: {row['speedup']:.2f} x  [{low:.2f}, {high:.2f}]{tail}")


def oracle(loaded, ids, sampling, args, tokens):
    """Right drafts only, per window length, against the bound rows / (ms of such a window / ms of a plain step)."""
    known = [*ids, *tokens]
    found, _ = measure(loaded, ids, sampling, args, ARMS[:-1], lambda: [OracleSource(known)])
    for arm, row in summary(found).items():
        if arm:
            plain = statistics.median(found[0]["ms_per_token"])
            row["bound"] = arm * plain / row["report"]["ms_by_window"][arm]
            row["experts_per_round"] = row["report"]["experts_by_window"][arm]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", help="part of the names of the texts to run")
    parser.add_argument("--parts", default="lookup,never", help="lookup, never (drafts that never hit), oracle")
    parser.add_argument("--expert-slots", type=int, help="stream, with so many experts in memory")
    parser.add_argument("--json")
    args = parser.parse_args()
    loaded = engine.load(args.model, threads=args.threads, isa=args.isa, expert_slots=args.expert_slots)
    parts = args.parts.split(",")
    print(" ".join(["python", *sys.argv]), f"; tier {loaded.context.tier}, {loaded.context.num_threads} threads")
    results = {}
    for name, (file, start, length, sampling) in TEXTS.items():
        if args.only and args.only not in name:
            continue
        text = (HELDOUT / file).read_text()[start : start + length]
        ids = loaded.tokenizer.encode(text)[: args.prompt_tokens]
        plain = run(loaded, ids, sampling, args.tokens, 0, list)
        if "lookup" in parts:
            found, _ = measure(loaded, ids, sampling, args, ARMS, lambda: [LookupSource()])
            results[name] = summary(found)
            show(name, found)
        if "never" in parts:
            vocab_size = loaded.model.config.vocab_size
            never, _ = measure(loaded, ids, sampling, args, (0, "auto"), partial(list, [RandomSource(vocab_size)]))
            results[name + ", drafts never hit"] = summary(never)
            show(name + ", drafts never hit", never)
        if "oracle" in parts:
            results[name + ", oracle"] = best = oracle(loaded, ids, sampling, args, plain.token_ids)
            show(name + ", oracle", best)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
