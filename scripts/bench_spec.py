"""Speculation against plain decode, side by side in one run.

    python scripts/bench_spec.py [--model FILE] [--tokens 256] [--only NAME] [--parts lookup,never,oracle,spoiled]
        [--arms plain,2,4,8,auto] [--share PERCENT | --expert-slots N | --ram GIB] [--cut on|off|both] [--minutes 9]
        [--json FILE]

Arms (plain, --spec 2, 4, 8 and auto) are interleaved, their order rotated from round to round, one round of warm-up,
equal token counts, medians with the range. Texts that copy (greedy continuations of a table and of a listing) and texts
that do not (drawn prose). Parts: what drafts come from. lookup: the text. never: random tokens, which never hit.
oracle: the text that follows, always right, compared with what the times per window length allow. spoiled: the oracle
with every third draft wrong. --cut both: windows that drop drafts whose experts are not in memory against windows that
do not (--share 50: half of the experts are). No round begins after --minutes of a part's share of the time.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import engine  # noqa: E402
from engine.generate import Generation  # noqa: E402
from engine.hardware import cpu_model  # noqa: E402
from engine.sampler import SamplingParams  # noqa: E402
from engine.spec import LookupSource, make_speculator  # noqa: E402
from engine.spec.cut import DraftCut  # noqa: E402
from engine.spec.probes import OracleSource, RandomSource, SpoiledSource  # noqa: E402

HELDOUT = ROOT / "tests" / "data" / "heldout"
PROSE = SamplingParams(temperature=0.9, top_p=0.95, seed=3)
# name -> (file, first character, characters, sampler)
TEXTS = {
    "copy: rst": ("rst.txt", 0, 3000, SamplingParams()),
    "copy: man": ("man.txt", 24000, 3000, SamplingParams()),
    "prose: kjv": ("kjv.txt", 0, 1500, PROSE),
    "prose: jargon": ("jargon.txt", 9000, 1500, PROSE),
}
PARTS = ("lookup", "never", "oracle", "spoiled")
SPOILED_EVERY = 3


def sources_of(part, known, vocab_size):
    """A new list of the part's draft sources; known: prompt and text of a plain run."""
    return {
        "lookup": lambda: [LookupSource()],
        "never": lambda: [RandomSource(vocab_size)],
        "oracle": lambda: [OracleSource(known)],
        "spoiled": lambda: [SpoiledSource(OracleSource(known), SPOILED_EVERY, vocab_size)],
    }[part]()


def run(loaded, ids, sampling, tokens, arm, sources):
    """One generation; arm: (spec, whether windows are cut short). Returns (it, bytes of experts read)."""
    spec, cut = arm
    cutter = DraftCut.of_stream(loaded.stream) if cut and loaded.stream else None
    before = bytes_read(loaded)
    generation = Generation(
        loaded, ids, max_tokens=tokens, sampling=sampling, ignore_eos=True,
        speculator=make_speculator(spec, sources, cutter),
    )  # fmt: skip
    for _ in generation.tokens():
        pass
    return generation, bytes_read(loaded) - before


def bytes_read(loaded):
    return loaded.stream.cache.stats()["bytes"] if loaded.stream else 0


def measure(loaded, ids, sampling, args, part, expected, deadline):
    """{arm: {ms_per_token: [..], report, bytes_read}}; every arm must give the tokens of `expected`."""
    arms = args.arms
    found = {arm: {"ms_per_token": [], "bytes_read": [], "window_ms": [], "report": None} for arm in arms}
    known = [*ids, *expected]
    for turn in range(args.repeat + 1):
        if turn > 1 and time.monotonic() > deadline:
            break
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            sources = sources_of(part, known, loaded.model.config.vocab_size)
            generation, nbytes = run(loaded, ids, sampling, args.tokens, arm, sources)
            if generation.token_ids != expected:
                sys.exit(f"DIFFERENT tokens with --spec {arm[0]}, {part} drafts")
            if turn:
                stats, row = generation.stats, found[arm]
                row["ms_per_token"].append(stats.decode_s * 1e3 / (stats.generated_tokens - 1))
                row["bytes_read"].append(nbytes)
                row["report"] = stats.spec and stats.spec.report()
                row["window_ms"].append(row["report"]["ms_by_window"].get(arm[0]) if row["report"] else None)
    return found


def summary(found, part):
    """Adds speedup, spread and, for the oracle, the bound: rows / (ms of such a window / ms of a plain step), and the
    share of it that was reached, both round by round."""
    base = found[next(iter(found))]["ms_per_token"]
    plain = statistics.median(base)
    for (spec, _), row in found.items():
        times = sorted(row["ms_per_token"])
        row["speedup"] = plain / statistics.median(times)
        row["spread"] = [plain / times[-1], plain / times[0]]
        # The same round's plain run is as near in time as can be: a machine that changes its speed counts for less.
        row["speedup_by_round"] = statistics.median(a / b for a, b in zip(base, row["ms_per_token"], strict=True))
        if r := row["report"]:
            # Tokens per round over (ms per round / ms per token): above 1 the windows pay.
            row["break_even"] = r["tokens_per_round"] / (r["ms_per_round"] / plain)
            if part == "oracle" and spec != "auto":
                bounds = [spec * a / w for a, w in zip(base, row["window_ms"], strict=True)]
                row["bound"] = statistics.median(bounds)
                row["of_bound"] = statistics.median(
                    a / ms / bound for a, ms, bound in zip(base, row["ms_per_token"], bounds, strict=True)
                )
                row["experts_per_round"] = r["experts_by_window"][spec]
    fixed = [row["speedup_by_round"] for (spec, _), row in found.items() if spec != "auto"]
    for (spec, _), row in found.items():
        if spec == "auto":
            row["of_best_fixed"] = row["speedup_by_round"] / max(fixed)
    return found


def show(name, found):
    first = found[next(iter(found))]
    print(
        f"\n{name}: plain {statistics.median(first['ms_per_token']):.3f} ms/token, {len(first['ms_per_token'])} rounds"
    )
    for (spec, cut), row in found.items():
        tail = ""
        if r := row["report"]:
            tail = (
                f"  {r['tokens_per_round']:.2f} tokens/round, {r['ms_per_round']:.3f} ms/round, tokens/round : "
                f"(ms/round : ms/token) = {row['break_even']:.2f}, accepted {r['accepted']}/{r['drafted']}, "
                f"drafting {r['draft_s'] * 1e6 / r['rounds']:.0f} us/round"
            )
            if r["cut_windows"] is not None:
                tail += f", cut {r['cut_windows']} windows by {r['cut_drafts']} drafts"
        if "bound" in row:
            experts = f"{row['experts_per_round']:.1f} experts/round"
            tail += f", bound {row['bound']:.2f} ({row['of_bound']:.0%} reached), {experts}"
        if "of_best_fixed" in row:
            tail += f", {row['of_best_fixed']:.1%} of the best fixed arm"
        if row["bytes_read"][0]:
            tail += f", {statistics.median(row['bytes_read']) / 1e6:.0f} MB read"
        low, high = row["spread"]
        label = f"{spec}{' cut' if cut else ''}"
        speed = f"{row['speedup']:.3f} x (by round {row['speedup_by_round']:.3f})"
        print(f"  spec {label:>8}: {speed}  [{low:.2f}, {high:.2f}]{tail}", flush=True)


def machine():
    return {"cpu": cpu_model(), "cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()[0]}


def parse_arms(names, cut):
    """(spec, cut) of every arm; plain first, whatever the order given."""
    specs = [name if name == "auto" else 0 if name == "plain" else int(name) for name in names.split(",")]
    arms = [(0, False)]
    for spec in specs:
        if spec:
            arms += (
                [(spec, False)] if cut == "off" else [(spec, True)] if cut == "on" else [(spec, False), (spec, True)]
            )
    return arms


def load(args):
    options = {"threads": args.threads, "isa": args.isa, "ctx": args.ctx, "history": False}
    slots = args.expert_slots
    if args.share:
        from engine.weights import open_model
        from engine.weights.architectures import expert_ids

        slots = round(len(set(expert_ids(open_model(args.model).tensors))) * args.share / 100)
    return engine.load(args.model, expert_slots=slots, ram=args.ram, lookahead=args.lookahead, **options)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa")
    parser.add_argument("--ctx", type=int, help="context in tokens: room for the KV cache")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5, help="rounds at most")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; at least one round of each is made")
    parser.add_argument("--only", help="part of the names of the texts to run")
    parser.add_argument("--parts", default="lookup,never", help=", ".join(PARTS))
    parser.add_argument("--arms", default="plain,2,4,8,auto")
    parser.add_argument("--cut", choices=("on", "off", "both"), default="on")
    parser.add_argument("--share", type=float, metavar="PERCENT", help="stream, with so many of the experts in memory")
    parser.add_argument("--expert-slots", type=int, help="stream, with so many experts in memory")
    parser.add_argument("--ram", type=float, help="stream as --ram says")
    parser.add_argument("--lookahead", default="auto")
    parser.add_argument("--json")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    args.arms = parse_arms(args.arms, args.cut)
    return args


def main():
    args, started = arguments(), time.monotonic()
    loaded = load(args)
    if not loaded.stream:
        args.arms = list(dict.fromkeys((spec, False) for spec, _ in args.arms))
    command = " ".join(["python", *sys.argv])
    about = machine() | {"tier": loaded.context.tier, "threads": loaded.context.num_threads}
    print(command, about, *(loaded.stream.notes() if loaded.stream else ["resident"]), sep="\n", flush=True)
    results = {"command": command, "machine": about, "texts": {}}
    texts = {name: text for name, text in TEXTS.items() if not args.only or args.only in name}
    jobs = len(texts) * len(args.parts)
    for done, (name, part) in enumerate((name, part) for name in texts for part in args.parts):
        file, start, length, sampling = texts[name]
        ids = loaded.tokenizer.encode((HELDOUT / file).read_text()[start : start + length])[: args.prompt_tokens]
        expected = run(loaded, ids, sampling, args.tokens, args.arms[0], [])[0].token_ids
        spent = time.monotonic() - started
        deadline = time.monotonic() + (args.minutes * 60 - spent) / (jobs - done)
        found = summary(measure(loaded, ids, sampling, args, part, expected, deadline), part)
        show(f"{name}, {part} drafts", found)
        rows = {f"{spec}{' cut' if cut else ''}": row for (spec, cut), row in found.items()}
        results["texts"].setdefault(name, {})[part] = rows
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
