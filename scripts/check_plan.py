"""A plan against the run it predicts: `millstream plan`, `millstream bench` with the same settings, and the plan again.

    python scripts/check_plan.py [--model PATH] [--slots N | --slots half] [--prompt 128] [--decode 32] [--repeat 2]

Prints predicted (both plans, before and after), measured (median and range) and their ratio. Exit code 1 when the ratio
is outside 15 % for a resident model, 25 % for a streamed one: predicted is the mean of the two plans, so that a machine
that changes its pace in between counts less.
"""

import argparse
import json
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--slots", help="experts in memory, or half")
    parser.add_argument("--threads")
    parser.add_argument("--isa")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    options = {name: value for name in ("threads", "isa") if (value := getattr(args, name))}
    if args.slots:
        half = args.slots == "half"
        options["expert-slots"] = number_of_experts(args) // 2 if half else int(args.slots)
    before = plan(args, options)
    measured = bench(args, options)
    after = plan(args, options)
    limit = STREAMED if before["streams"] else RESIDENT
    print(
        f"{before['path']}: {before['verdict']}; {before['slots']} of {before['experts']} experts in memory, "
        f"hit rate {before['hit_rate']:.2f} ({before['hit_rate_source']}); a plan took {before['seconds']:.1f} s"
    )
    good = True
    for kind in ("prefill", "decode"):
        figures = [found["prediction"][f"{kind}_tok_s"] for found in (before, after)]
        result = measured[kind]
        ratio = sum(figures) / 2 / result["median"]
        inside = 1 - limit <= ratio <= 1 + limit
        good &= inside
        print(f"{kind:8} predicted {figures[0]:.2f} and {figures[1]:.2f}, measured {result['median']:.2f} "
              f"({min(result['samples']):.2f} to {max(result['samples']):.2f}) tok/s: {ratio:.2f} x, "
              f"{'within' if inside else 'OUTSIDE'} {100 * limit:.0f} %")  # fmt: skip
    return 0 if good else 1


def number_of_experts(args) -> int:
    found = json.loads(millstream("inspect", args.model, "--json") if args.model else millstream("plan", "--json"))
    if "experts" in found:
        return found["experts"]
    return found["config"]["num_experts"] * found["config"]["num_hidden_layers"]


if __name__ == "__main__":
    sys.exit(main())
