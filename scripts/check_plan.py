"""Plans against the runs they predict: `millstream plan` and real runs with the same settings, in turns.

    python scripts/check_plan.py [CASE ...] [--prompt 128] [--decode 32] [--rounds 5] [--json FILE]

A CASE is `shipped` or a model's path, then options after commas: `shipped,slots=half`, `big.gguf,isa=avx2,threads=1`.
The real model waits, loaded, in a process of its own; a round is one plan, as a user would run it, and right after it
a prompt and a decode of the real model, so that a machine whose speed wanders from minute to minute changes both alike.
Printed are medians of the plans, of the runs, and of the rounds' ratios, which are what counts: exit code 1 when one
is outside 15 % for a resident model, 25 % for a streamed one. A streamed plan has the usage history of the first decode
(what `generate` leaves beside a model; here beside a link to it, in a temporary directory); its expected hit rate and
those of the runs are printed side by side.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "engine" / "data" / "tiny-moe" / "snapshot"
RESIDENT, STREAMED = 0.15, 0.25
CASES = ("shipped", "shipped,slots=half")


class Case:
    """One model with options; `run` is a process that holds it loaded."""

    def __init__(self, text: str, prompt: int, decode: int):
        self.text, (model, *options) = text, text.split(",")
        self.options = dict(option.partition("=")[::2] for option in options)
        self.directory = tempfile.TemporaryDirectory(prefix="millstream-check-")
        self.model, self.prompt = str(Path(self.directory.name, Path(model).name)), prompt
        Path(self.model).symlink_to(SHIPPED if model == "shipped" else Path(model).absolute())
        if self.options.get("slots") == "half":
            self.options["slots"] = str(self.plan()["experts"] // 2)
        worker = {"model": self.model, "options": self.options, "prompt": prompt, "decode": decode}
        command = [sys.executable, __file__, "--worker", json.dumps(worker)]
        self.run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.measure()  # first use of experts, of buffers, of code

    def flags(self) -> list[str]:
        names = {"slots": "expert-slots"}
        return [part for key, value in self.options.items() for part in (f"--{names.get(key, key)}", value)]

    def plan(self) -> dict:
        command = [sys.executable, "-m", "engine", "plan", self.model, "--json"]
        options = [] if self.options.get("slots") == "half" else self.flags()
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--prompt", str(self.prompt), *options], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.returncode)
        return json.loads(done.stdout) | {"seconds": time.perf_counter() - started}

    def measure(self) -> dict:
        print(file=self.run.stdin, flush=True)
        line = self.run.stdout.readline()
        if not line:
            sys.exit(f"{self.text}: the run ended with status {self.run.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.run.stdin.close()
        self.run.wait()
        self.directory.cleanup()


def work(options: dict) -> None:
    """A line in: measure once; a JSON object out."""
    sys.path.insert(0, str(ROOT))
    from engine.bench import EngineArm, fixed_ids
    from engine.experts.history import UsageRecorder, history_path, model_fingerprint

    names, numbers = {"slots": "expert_slots"}, ("threads", "slots", "readers")
    chosen = {names.get(k, k): int(v) if k in numbers else v for k, v in options["options"].items()}
    prompt, decode = options["prompt"], options["decode"]
    arm = EngineArm("run", options["model"], chosen, prompt + decode + 1)
    ids, recorder = fixed_ids(prompt, arm.vocab_size), None
    if arm.engine.stream:
        recorder = UsageRecorder(arm.engine.model, model_fingerprint(arm.engine.files))
    for _ in sys.stdin:
        # It has waited for seconds: threads, caches and clock are cold, which no user's second turn is.
        arm.prefill(ids)
        arm.decode(ids, min(decode, 8))
        arm.prefill(ids)
        start = counts(arm)
        found = {"prefill": prompt / arm.prefill(ids)}
        before = counts(arm)
        found["prefill_hit_rate"] = (before[0] - start[0]) / max(sum(before) - sum(start), 1)
        if recorder:
            recorder.start()
        found["decode"] = decode / arm.decode(ids, decode)[0]
        if recorder:
            recorder.stop()
            recorder.usage.save(history_path(arm.engine.files))
            recorder = None
        hits, misses = (now - was for now, was in zip(counts(arm), before, strict=True))
        print(json.dumps(found | {"hit_rate": hits / max(hits + misses, 1)}), flush=True)


def counts(arm) -> tuple[int, int]:
    stats = arm.engine.stream.stats() if arm.engine.stream else {"hits": 0, "misses": 0}
    return stats["hits"], stats["misses"]


def span(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def check(case: Case, rounds: int) -> dict:
    plans, runs = [], []
    for number in range(rounds):
        if number % 2:
            runs.append(case.measure())
            plans.append(case.plan())
        else:
            plans.append(case.plan())
            runs.append(case.measure())
    first = plans[0]
    limit = STREAMED if first["streams"] else RESIDENT
    print(
        f"{case.text}: {first['slots']} of {first['experts']} experts in memory, tier {first['tier']}, "
        f"{first['threads']} threads; a plan took {statistics.median(p['seconds'] for p in plans):.1f} s"
    )
    if first["streams"]:
        real, prompt = (statistics.median(run[key] for run in runs) for key in ("hit_rate", "prefill_hit_rate"))
        print(
            f"  hit rate expected {first['hit_rate']:.2f} ({first['hit_rate_source']}), when decoding {real:.2f}, "
            f"of the prompts {prompt:.2f}"
        )
    result = {"case": case.text, "limit": limit, "plans": plans, "runs": runs}
    for kind in ("prefill", "decode"):
        predicted = [p["prediction"][f"{kind}_tok_s"] for p in plans]
        found = [run[kind] for run in runs]
        ratios = [p / f for p, f in zip(predicted, found, strict=True)]
        ratio = statistics.median(ratios)
        result[kind] = {"ratio": ratio, "within": 1 - limit <= ratio <= 1 + limit}
        print(
            f"  {kind:8} predicted {span(predicted)}, measured {span(found)} tok/s: "
            f"{ratio:.2f} x ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{'within' if result[kind]['within'] else 'OUTSIDE'} {100 * limit:.0f} %",
            flush=True,
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="every figure of every plan and run")
    args = parser.parse_args()
    results = []
    for text in args.cases:
        case = Case(text, args.prompt, args.decode)
        results.append(check(case, args.rounds))
        case.close()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(r[kind]["within"] for r in results for kind in ("prefill", "decode")) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
