"""A plan against the run it predicts: `millstream plan` and `millstream bench` with the same settings, in turns.

    python scripts/check_plan.py [--model PATH] [--slots N | --slots half] [--prompt 128] [--decode 32] [--repeat 2]
                                 [--rounds 2]

Prints the median of the plans and that of all measurements, their ratio, and the ratio of the fastest of each, which a
busy machine changes less. Exit code 1 when the ratio of the medians is outside 15 % for a resident model, 25 % for a
streamed one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESIDENT, STREAMED = 0.15, 0.25


def millstream(*args) -> str:
    command = [sys.executable, "-m", "engine", *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def plan(args, options) -> dict:
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    model = [args.model] if args.model else []
    started = time.perf_counter()
    found = json.loads(millstream("plan", *model, "--prompt", args.prompt, *flags, "--json"))
    found["seconds"] = time.perf_counter() - started
    return found


def bench(args, options) -> dict[str, dict]:
    flags = ["--model", args.model] if args.model else []
    arm = ",".join(f"{name}={value}" for name, value in options.items())
    if arm:
        flags += ["--arm", arm]
    sizes = ("--prefill", args.prompt, "--decode", args.decode, "--depth", args.prompt, "--repeat", args.repeat)
    found = json.loads(millstream("bench", *flags, *sizes, "--json"))
    return {result["test"].split()[0]: result for result in found["results"]}


def span(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--slots", help="experts in memory, or half")
    parser.add_argument("--threads")
    parser.add_argument("--isa")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    options = {name: value for name in ("threads", "isa") if (value := getattr(args, name))}
    if args.slots:
        half = args.slots == "half"
        options["expert-slots"] = number_of_experts(args) // 2 if half else int(args.slots)
    plans, samples = [], {"prefill": [], "decode": []}
    for _ in range(args.rounds):
        plans.append(plan(args, options))
        for kind, result in bench(args, options).items():
            samples[kind] += result["samples"]
    first = plans[0]
    limit = STREAMED if first["streams"] else RESIDENT
    print(
        f"{first['path']}: {first['slots']} of {first['experts']} experts in memory, hit rate {first['hit_rate']:.2f} "
        f"({first['hit_rate_source']}); a plan took {min(p['seconds'] for p in plans):.1f} s"
    )
    good = True
    for kind, found in samples.items():
        predicted = [p["prediction"][f"{kind}_tok_s"] for p in plans]
        ratio = statistics.median(predicted) / statistics.median(found)
        inside = 1 - limit <= ratio <= 1 + limit
        good &= inside
        print(
            f"{kind:8} predicted {span(predicted)}, measured {span(found)} tok/s: {ratio:.2f} x, "
            f"{'within' if inside else 'OUTSIDE'} {100 * limit:.0f} %; fastest {max(predicted) / max(found):.2f} x"
        )
    return 0 if good else 1


def number_of_experts(args) -> int:
    found = json.loads(millstream("inspect", args.model, "--json") if args.model else millstream("plan", "--json"))
    if "experts" in found:
        return found["experts"]
    return found["config"]["num_experts"] * found["config"]["num_hidden_layers"]


if __name__ == "__main__":
    sys.exit(main())
