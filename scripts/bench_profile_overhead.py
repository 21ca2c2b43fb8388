"""What profiling costs while it is on: the same tokens decoded with a profiler, without one, and without one again.

The three take turns in one process, each round in another order; every figure is a median over rounds of a ratio within
the round. "off again / off" is 1 but for the noise, which is what the other ratios have to be compared with. cpu: of
the decode thread; process: of all threads (idle workers spin a little). A profiler adds up behind the run what it wrote
down: that is in none of the ratios, and printed as the last line.

    python scripts/bench_profile_overhead.py [MODEL] [--threads 1,2] [--tokens 64] [--rounds 9]
        [--isa avx2] [--expert-slots N] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import engine
from engine.bench import fixed_ids
from engine.profile import Profiler
from engine.session import Session

ARMS = ("off", "on", "off again")
CLOCKS = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns, "process": time.process_time_ns}


class Decode:
    """Runs of one engine that decode the same tokens; the prompt is computed once."""

    def __init__(self, loaded, prompt: int, tokens: int):
        self.loaded, self.tokens = loaded, tokens
        self._ids = fixed_ids(prompt, loaded.model.config.vocab_size)
        self._session = Session(loaded, prompt + tokens + 1)

    def run(self, profiled: bool) -> dict:
        """Milliseconds a token by each of CLOCKS, and what the profiler took behind it."""
        generation = self.loaded.generate(
            self._ids, max_tokens=self.tokens + 1, temperature=0, ignore_eos=True, session=self._session
        )
        with Profiler(self.loaded) if profiled else nullcontext() as profiler:
            if profiled:
                profiler.attach(generation)
            stream = generation.tokens()
            next(stream)
            before = [clock() for clock in CLOCKS.values()]
            for _ in stream:
                pass
            spent = [clock() - start for clock, start in zip(CLOCKS.values(), before, strict=True)]
            ended = time.perf_counter_ns()
        behind = time.perf_counter_ns() - ended
        found = {name: ns / 1e6 / self.tokens for name, ns in zip(CLOCKS, spent, strict=True)}
        return found | {"behind": behind / 1e6 / self.tokens}


def measure(decode: Decode, rounds: int) -> list[dict]:
    for _ in range(3):  # experts are re-coded at their second use
        decode.run(False)
    decode.run(True)
    found = []
    for n in range(rounds):
        order = [ARMS[(n + i) % len(ARMS)] for i in range(len(ARMS))]
        made = {arm: decode.run(arm == "on") for arm in order[:: -1 if n % 2 else 1]}
        found.append(made)
    return found


def summary(found: list[dict]) -> dict:
    def ratios(arm, clock):
        return sorted(made[arm][clock] / made["off"][clock] for made in found)

    result = {"ms_per_token": {clock: statistics.median(made["off"][clock] for made in found) for clock in CLOCKS}}
    for arm in ARMS[1:]:
        for clock in CLOCKS:
            values = ratios(arm, clock)
            quarter = len(values) // 4
            result[f"{arm} / off, {clock}"] = {
                "median": statistics.median(values), "quartiles": [values[quarter], values[-1 - quarter]],
            }  # fmt: skip
    result["behind_ms_per_token"] = statistics.median(made["on"]["behind"] for made in found)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory or file (default: the model that ships)")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa")
    parser.add_argument("--expert-slots", type=int)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    options = {"isa": args.isa, "ctx": args.prompt + args.tokens + 1, "expert_slots": args.expert_slots}
    report = {}
    for threads in map(int, args.threads.split(",")):
        loaded = engine.load(args.model, threads=threads, **{k: v for k, v in options.items() if v is not None})
        found = measure(Decode(loaded, args.prompt, args.tokens), args.rounds)
        made = report[f"{threads} threads"] = summary(found)
        times = ", ".join(f"{clock} {ms:.3f}" for clock, ms in made["ms_per_token"].items())
        tier = f"{loaded.context.tier}, {threads} thread{'s' if threads > 1 else ''}"
        print(f"{loaded.files.path.name}, {tier}, {args.tokens} tokens, {args.rounds} rounds; off, ms a token: {times}")
        for name, value in made.items():
            if "/" in name:
                low, high = (f"{q - 1:+.2%}" for q in value["quartiles"])
                print(f"  {name:22}{value['median'] - 1:+8.2%}   quartiles {low} .. {high}")
        behind = made["behind_ms_per_token"]
        print(f"  behind the run: {behind * 1e3:.1f} us a token, {behind / made['ms_per_token']['wall']:.2%}")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
