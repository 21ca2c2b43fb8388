"""The whole matrix: speculation against plain decode, bit for bit.

    python scripts/prove_spec.py --state FILE [--parts shipped,model,streamed ...] [--minutes M] [--json FILE]

Token ids, finish reason, text and the checksum of the logits of every emitted position must be those of plain decode,
256 tokens long, greedy and drawn with penalties, for windows of 1 to 8 rows and auto:

shipped   20 prompts x both samplers x all lengths x all sources: lookup, oracle (always right), spoiled (the oracle
          with every third draft wrong), random.
model     a draft model (the same model in another format, and itself) x 20 prompts x both samplers x all lengths.
streamed  caches from the smallest to the whole, windows cut short: 20 prompts; sampler, look-ahead (off, on) and
          lengths go round, so that each source meets each length in each cache twice.
families  all supported families, 20 prompts; sampler and lengths go round, so that each source meets each length twice.
cached    all families with experts, caches of the smallest size, one more, half and all of the experts: 20 prompts;
          caches, look-ahead, sampler and lengths go round.
combined  lookup before and behind a draft model (the same weights in bfloat16) on all families, and the layer for
          multi-token prediction (always right): 20 prompts; sampler and lengths go round.
mtp       the layer for multi-token prediction of each family that has one, with random weights and with such that are
          always right, all experts in memory and 13 of them, 20 prompts; lengths go round.

Every finished row is a line of FILE; a run with the same FILE goes on behind them. Stops at the first difference, exit
code 1; with --minutes it stops there, exit code 3.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import mtp_models  # noqa: E402
import spec_tools  # noqa: E402
import tiny_models  # noqa: E402
from spec_tools import FAMILIES  # noqa: E402
from test_spec import DRAWN, GREEDY, PROMPTS  # noqa: E402

import engine  # noqa: E402
from converters.hf import RoleFormats, convert  # noqa: E402
from engine.runtime import SHIPPED_MODEL  # noqa: E402
from engine.spec import LookupSource  # noqa: E402
from engine.spec.cut import DraftCut  # noqa: E402
from engine.spec.draft_model import ModelSource  # noqa: E402
from engine.spec.mtp import MtpSource  # noqa: E402

LENGTHS = (*range(1, 9), "auto")
SAMPLERS = (("greedy", GREEDY), ("drawn", DRAWN))
TOKENS = 256
CACHES = (2, 3, 5, 9, 16, 24)  # of 24 experts, 2 a token
COUNTED = ("rounds", "tokens", "drafted", "accepted")


class Proof:
    """Runs and counts; remembers in a file which rows are done."""

    def __init__(self, state: Path, minutes: float | None):
        self.state = state
        self.rows = [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []
        self._done = {row["row"] for row in self.rows}
        self._deadline = time.monotonic() + minutes * 60 if minutes else None

    def row(self, name: str, load, prompt, sampling, cases) -> None:
        """name: what the row is, its part first. cases: (source name, rows of a window, its source or None)."""
        if name in self._done:
            return
        if self._deadline and time.monotonic() > self._deadline:
            print(f"stopped for time before {name}; run again with the same --state", file=sys.stderr)
            sys.exit(3)
        started, loaded = time.monotonic(), load()
        options = {"max_tokens": TOKENS, "ignore_eos": True, "sampling": sampling}
        plain = spec_tools.run(loaded, prompt, **options)
        counts: dict = defaultdict(lambda: defaultdict(int))
        for source, rows, make in cases:
            cut = DraftCut.of_stream(loaded.stream) if loaded.stream else None
            made = make(loaded, sampling) if make else None
            stats = spec_tools.assert_same(loaded, prompt, rows, source, plain, made=made, cut=cut, **options)
            count = counts[source]
            count["runs"] += 1
            for key in COUNTED:
                count[key] += getattr(stats, key)
            count["cut_drafts"] += cut.drafts if cut else 0
        row = {"row": name, "emitted": len(plain[0]), "counts": counts}
        self.rows.append(row)
        with self.state.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: {sum(c['runs'] for c in counts.values())} runs equal, {time.monotonic() - started:.0f} s",
              file=sys.stderr, flush=True)  # fmt: skip

    def summary(self) -> dict:
        """Part -> source -> counts; prints them."""
        found: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
        for row in self.rows:
            for source, counts in row["counts"].items():
                for key, value in counts.items():
                    found[row["row"].split()[0]][source][key] += value
        for part, sources in found.items():
            for source, c in sources.items():
                print(
                    f"{part:9} {source:10} {c['runs']} runs, {c['tokens']} tokens in {c['rounds']} rounds, "
                    f"{c['accepted']}/{c['drafted']} drafts accepted, {c['cut_drafts']} cut: equal to plain decode"
                )
        return found


def once(make):
    """make() when it is first needed, and only the latest of several is kept in memory."""
    made = []
    return lambda: made[0] if made else (made.append(make()) or made[0])


def prove_shipped(proof, folder):
    load = once(lambda: engine.load(threads=1))
    cases = [(source, rows, None) for source in spec_tools.SOURCES for rows in LENGTHS]
    for n, (sampler, sampling) in product(range(len(PROMPTS)), SAMPLERS):
        proof.row(f"shipped prompt {n} {sampler}", load, PROMPTS[n], sampling, cases)


def prove_model(proof, folder):
    """The draft model is the shipped one in coarser formats (right often, not always), and the shipped one."""

    def coarse():
        path = folder / "coarse"
        convert(SHIPPED_MODEL.parent / "hf", path, formats=RoleFormats(experts="int3-g64", dense="int4-g64"), threads=1)
        return engine.load(threads=1, draft_model=path)

    for name, load in (("coarse", once(coarse)), ("itself", once(lambda: engine.load(draft_model=SHIPPED_MODEL)))):
        cases = [(name, rows, model_source) for rows in (LENGTHS if name == "coarse" else (2, 5, 8))]
        for n, (sampler, sampling) in product(range(len(PROMPTS)), SAMPLERS):
            proof.row(f"model {name} prompt {n} {sampler}", load, PROMPTS[n], sampling, cases)


def prove_streamed(proof, folder):
    for slots, (turn, lookahead) in product(CACHES, enumerate(("off", "on"))):
        options = {"threads": 1, "expert_slots": slots, "lookahead": lookahead, "history": False}
        load = once(lambda options=options: engine.load(**options))
        for n in range(turn, len(PROMPTS), 2):
            sampler, sampling = SAMPLERS[n // 2 % 2]
            cases = [(s, LENGTHS[(n + 2 * i) % 9], None) for i, s in enumerate(spec_tools.SOURCES)]
            proof.row(f"streamed {slots} slots, look-ahead {lookahead}, prompt {n} {sampler}", load, PROMPTS[n],
                      sampling, cases)  # fmt: skip


def family_prompts() -> list[list[int]]:
    """Twenty: random, half of it repeated, one token over and over, two in turns."""
    random = np.random.default_rng(2)
    draw = [random.integers(0, tiny_models.TOKENIZER_SIZE, 12).tolist() for _ in range(20)]
    shapes = (lambda d: d, lambda d: d[:8] * 3, lambda d: d[:1] * 16, lambda d: d[:2] * 9)
    return [shapes[i % 4](d) for i, d in enumerate(draw)]


def family_load(folder, name, **options):
    """Loads a tiny model of a family when it is first called; golden checkpoints have a context of 256."""
    return once(
        lambda: engine.load(
            spec_tools.family(folder / name, name, max_position_embeddings=512), threads=1, history=False, **options
        )
    )


def prove_families(proof, folder):
    for name in FAMILIES:
        load = family_load(folder, name)
        for n, ids in enumerate(family_prompts()):
            sampler, sampling = SAMPLERS[n // 4 % 2]
            cases = [(s, LENGTHS[(n + 2 * i) % 9], None) for i, s in enumerate(spec_tools.SOURCES)]
            proof.row(f"families {name} prompt {n} {sampler}", load, ids, sampling, cases)


def prove_cached(proof, folder):
    for turn, name in enumerate(FAMILIES):
        c = family_load(folder, name)().model.config
        top, every = c.num_experts_per_tok, c.num_experts * (c.num_hidden_layers - len(c.dense_layers))
        for cache, slots in enumerate((top, top + 1, every // 2, every) if top else ()):
            load = family_load(folder, name, expert_slots=slots, lookahead=("on", "off")[(turn + cache) % 2])
            for n, ids in enumerate(family_prompts()):
                if (n + n // 4) % 4 != cache:
                    continue
                sampler, sampling = SAMPLERS[(n // 4 + turn) % 2]
                cases = [(s, LENGTHS[(n // 4 + turn + 2 * i) % 9], None) for i, s in enumerate(spec_tools.SOURCES)]
                proof.row(f"cached {name} {slots} slots prompt {n} {sampler}", load, ids, sampling, cases)


def model_source(loaded, sampling):
    return ModelSource(loaded.draft, sampling, loaded.model.config.vocab_size, loaded.max_context)


def mtp_source(loaded, sampling):
    return MtpSource(loaded.context, sampling)


def prove_combined(proof, folder):
    """Sources that take turns, so that each has to catch up with what the others drafted."""

    def both(first, second):
        return lambda loaded, sampling: [first(loaded, sampling), second(loaded, sampling)]

    def lookup(loaded, sampling):
        return LookupSource()

    def cases(second, names, n):
        orders = ((names, both(lookup, second)), (names[::-1], both(second, lookup)))
        return [(",".join(order), LENGTHS[(n + 4 * i) % 9], make) for i, (order, make) in enumerate(orders)]

    for name in FAMILIES:
        hf = folder / name
        draft = once(lambda name=name, hf=hf: spec_tools.family(hf, name, "bf16", max_position_embeddings=512))
        load = once(lambda name=name, draft=draft: family_load(folder, name, draft_model=draft())())
        for n, ids in enumerate(family_prompts()):
            sampler, sampling = SAMPLERS[n // 4 % 2]
            made = cases(model_source, ("lookup", "model"), n)
            proof.row(f"combined {name} prompt {n} {sampler}", load, ids, sampling, made)
    for name in mtp_models.NAMES:
        load = mtp_load(folder, name, "knowing", None)
        for n, ids in enumerate(family_prompts()):
            sampler, sampling = SAMPLERS[n // 4 % 2]
            made = cases(mtp_source, ("lookup", "mtp"), n)
            proof.row(f"combined {name} mtp prompt {n} {sampler}", load, ids, sampling, made)


def mtp_load(folder, name, kind, slots):
    def make():
        path = folder / f"{name} {kind}"
        if not path.exists():
            weights = mtp_models.weights(name)
            mtp_models.checkpoint(path / "hf", name, mtp_models.knowing(weights) if kind == "knowing" else weights)
            file = path / "hf" / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 512}))
            convert(path / "hf", path / "out", formats=RoleFormats(experts="f32", dense="f32"), threads=1)
        return engine.load(path / "out", threads=1, mtp=True, expert_slots=slots, history=False)

    return once(make)


def prove_mtp(proof, folder):
    for name, kind, slots in product(mtp_models.NAMES, ("random", "knowing"), (None, 13)):
        load, where = mtp_load(folder, name, kind, slots), f"{slots} slots" if slots else "resident"
        for n, ids in enumerate(family_prompts()):
            sampler, sampling = SAMPLERS[n // 4 % 2]
            cases = [(kind, LENGTHS[(n + 4 * i) % 9], mtp_source) for i in range(2)]
            proof.row(f"mtp {name} {kind} {where} prompt {n} {sampler}", load, ids, sampling, cases)


PARTS = {
    "shipped": prove_shipped, "model": prove_model, "streamed": prove_streamed, "families": prove_families,
    "cached": prove_cached, "combined": prove_combined, "mtp": prove_mtp,
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="file of finished rows, made when there is none")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--json")
    args = parser.parse_args()
    proof = Proof(args.state, args.minutes)
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts.split(","):
            PARTS[part](proof, Path(folder))
    found = proof.summary()
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"DIFFERENT: {error}")
