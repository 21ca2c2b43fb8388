"""Speed and memory of millstream and llama.cpp on one GGUF file, in turns.

    python scripts/compare_llama_cpp.py MODEL.gguf [--threads 2] [--isa avx2] [--rounds 5] [--peer-python PATH] \\
        [--out FILE.json]

Both engines hold the model in a process of their own and work one at a time, the order rotating from round to round,
after two rounds that do not count (experts are re-coded at their second use): prefill of --prompt tokens, then greedy
decode of --tokens. Printed are medians with their spread, peak memory, seconds from start to the first token, where
millstream's decode step spends its time, and whether the tokens are equal; before that the command, the versions and
the machine, so that a result can be made again. llama-cpp-python comes from the optional extra "peers", or from
--peer-python.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run_facts import facts_text, require_writable, run_facts, write_json

ROOT = Path(__file__).resolve().parent.parent


def peak_rss() -> int:
    """Largest resident set so far in bytes, mapped file pages included."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Millstream:
    """The engine without tokenizer and sampler: token ids in, greedy ids out."""

    def __init__(self, path: str, threads: int, isa: str | None, positions: int, layout: str):
        sys.path.insert(0, str(ROOT))
        import numpy as np

        from engine.kernels import Context
        from engine.models import family
        from engine.weights import open_model
        from engine.weights.loader import WeightLoader

        self.np, files = np, open_model(path)
        self.context = Context(isa, threads)
        self.loader = WeightLoader(files, self.context, compact_experts=layout == "compact")
        module = family(files.architecture)
        self.model = module.Model(files.config, self.loader, self.context, positions, min(positions, 512))
        self.positions, self.kv = positions, None

    def prefill(self, ids: list[int]) -> int:
        from engine.generate import prefill

        self.kv = self.model.new_kv(self.positions)
        return int(prefill(self.model, self.kv, self.np.array(ids, self.np.int32))[0].argmax())

    def step(self, token: int, position: int) -> int:
        return int(self.model.forward(self.np.array([token], self.np.int32), self.kv, position)[0].argmax())

    def facts(self) -> dict:
        recoder = self.loader.recoder
        recoded = {"recoded_bytes": recoder.done_bytes, "recode_s": recoder.seconds} if recoder else {}
        size = self.model.config.vocab_size
        return {"tier": self.context.tier, "vocab_size": size, **recoded}

    def phases(self, token: int, position: int, steps: int) -> dict[str, float]:
        """Milliseconds of a decode step by product, or by native call where it is none; "python" is what is left."""
        from engine.profile.call_sums import CallSums, Spans, Timeline
        from engine.profile.places import Places
        from engine.profile.recording import context_calls

        recorded, sums, never = context_calls(self.context), CallSums(Places(self.model)), Spans([], [])
        recorded.switch(True)
        started = time.perf_counter()
        for i in range(steps):
            token = self.step(token, position + i)
        total = time.perf_counter() - started
        calls, experts = recorded.take()
        sums.add(calls, self.np.full(len(calls), True), experts, Timeline(None, never, never, never))
        recorded.switch(False)
        spent: dict[str, float] = {}
        for (*_, tag, function), (ns, _) in sorted(sums.times.items(), key=lambda item: -item[1][0]):
            name = tag or function.removeprefix("moe_")
            spent[name] = spent.get(name, 0.0) + ns / 1e6 / steps
        step = total * 1e3 / steps
        return {**spent, "python": step - sum(spent.values()), "step": step}


def llama_cpp(path: str, threads: int, positions: int, repack: bool):
    """The peer of `millstream bench --against`, in this process: it imports nothing of the package."""
    sys.path.insert(0, str(ROOT / "engine" / "peers"))
    from llama_cpp_worker import LlamaCpp

    return LlamaCpp(path, threads, positions, repack)


def facts_of(engine) -> dict:
    return {**engine.facts(), "peak_rss_bytes": peak_rss()}


def work(options: dict) -> None:
    """The loop of a worker process: a JSON object per line in, one out."""
    started = time.perf_counter()
    if options["engine"] == "millstream":
        names = ("path", "threads", "isa", "positions", "layout")
        engine = Millstream(*(options[name] for name in names))
    else:
        engine = llama_cpp(options["path"], options["threads"], options["positions"], options["repack"])
    loaded = time.perf_counter()
    engine.prefill([5])
    reply = {"load_s": loaded - started, "first_token_s": time.perf_counter() - started, **facts_of(engine)}
    engine.prefill(list(range(5, 69)))  # where a build of llama.cpp whose repacked kernels are broken here falls over
    print(json.dumps(reply), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "phases" in order:
            reply = {"phases": engine.phases(order["token"], order["position"], order["phases"])}
        else:
            ids, times, tokens = order["prompt"], [], []
            clock = time.perf_counter()
            token = engine.prefill(ids)
            prefill_s = time.perf_counter() - clock
            for i in range(order["tokens"]):
                tokens.append(token)
                clock = time.perf_counter()
                token = engine.step(token, len(ids) + i)
                times.append(time.perf_counter() - clock)
            reply = {"prefill_s": prefill_s, "decode_s": times, "ids": tokens, **facts_of(engine)}
        print(json.dumps(reply), flush=True)


class Worker:
    """A process that runs one engine. What it writes to stderr is shown when it fails: llama.cpp writes a lot."""

    def __init__(self, python: str, **options):
        command = [python, str(Path(__file__).resolve()), "--worker", json.dumps(options)]
        self.options = options
        self.name, self._log = options["engine"], tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.started = self._reply()

    def _reply(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self._log.seek(0)
            print(*self._log.read().splitlines()[-3:], sep="\n", file=sys.stderr)
            raise SystemExit(f"{self.name}: the process ended with status {status}")
        return json.loads(line)

    def ask(self, **order) -> dict:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def summary(rounds: list[dict], prompt: int) -> dict:
    """Medians over rounds; spread: (largest - smallest) / median."""
    prefill = [prompt / r["prefill_s"] for r in rounds]
    decode = [1 / statistics.median(r["decode_s"]) for r in rounds]

    def middle(values):
        value = statistics.median(values)
        return {"median": value, "spread": (max(values) - min(values)) / value}

    return {
        "prefill_tok_s": middle(prefill),
        "decode_tok_s": middle(decode),
        "peak_rss_bytes": rounds[-1]["peak_rss_bytes"],
        "recode_s": rounds[-1].get("recode_s"),
        "recoded_bytes": rounds[-1].get("recoded_bytes"),
    }


def equal_tokens(a: list[int], b: list[int]) -> int:
    """How many tokens are equal from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


WARM_UP_ROUNDS = 2


def compare(path: Path, threads: int, isa, rounds: int, prompt: int, tokens: int, layout: str, peer: str, repack: bool):
    import random

    facts = run_facts()  # before the machine is busy with this
    shared = {"path": str(path), "threads": threads, "positions": prompt + tokens + 32}
    workers = [Worker(sys.executable, engine="millstream", isa=isa, layout=layout, **shared)]
    source = random.Random(1)
    ids = [source.randrange(4, min(4000, workers[0].started["vocab_size"])) for _ in range(prompt)]
    try:
        workers.append(Worker(peer, engine="llama.cpp", repack=repack, **shared))
    except SystemExit as error:
        if not repack:
            raise
        print(f"{error}; once more without repacked weights", file=sys.stderr)
        workers.append(Worker(peer, engine="llama.cpp", repack=False, **shared))
    found: dict[str, list[dict]] = {w.name: [] for w in workers}
    for number in range(WARM_UP_ROUNDS + rounds):
        for worker in workers if number % 2 else workers[::-1]:
            reply = worker.ask(prompt=ids, tokens=tokens)
            if number >= WARM_UP_ROUNDS:
                found[worker.name].append(reply)
            speeds = f"prefill {prompt / reply['prefill_s']:.1f}, decode {1 / statistics.median(reply['decode_s']):.1f}"
            print(f"round {number} {worker.name}: {speeds} tok/s", file=sys.stderr)
    last = {name: replies[-1]["ids"] for name, replies in found.items()}
    phases = workers[0].ask(phases=16, token=last["millstream"][-1], position=prompt + tokens)["phases"]
    for worker in workers:
        worker.close()
    result = {"file": path.name, "file_bytes": path.stat().st_size, "threads": threads, "rounds": rounds,
              "prompt": prompt, "tokens": tokens, "expert_layout": layout, "phases_ms": phases,
              "equal_tokens": equal_tokens(last["millstream"], last["llama.cpp"])}  # fmt: skip
    for worker in workers:
        result[worker.name] = {**worker.started, **summary(found[worker.name], prompt)}
    result["llama.cpp"]["repacked"] = workers[1].options["repack"]
    result["facts"] = facts | {"llama-cpp-python": result["llama.cpp"]["version"]}
    for key in ("prefill_tok_s", "decode_tok_s"):
        result[f"{key}_ratio"] = result["millstream"][key]["median"] / result["llama.cpp"][key]["median"]
    return result


def as_text(r: dict) -> str:
    lines = [facts_text(r["facts"])]
    lines += [f"{r['file']}: {r['file_bytes'] / 1e9:.2f} GB, {r['threads']} threads, {r['rounds']} rounds"]
    repacked = "weights re-packed" if r["llama.cpp"]["repacked"] else "weights as in the file"
    remark = {"millstream": f", experts {r['expert_layout']}", "llama.cpp": f", {repacked}"}
    for name in ("millstream", "llama.cpp"):
        e = r[name]
        speeds = ", ".join(
            f"{what} {e[key]['median']:.1f} tok/s (+-{50 * e[key]['spread']:.0f} %)"
            for what, key in ((f"prefill {r['prompt']}", "prefill_tok_s"), (f"decode {r['tokens']}", "decode_tok_s"))
        )
        lines.append(
            f"{name} ({e['tier']}{remark[name]}): {speeds}; "
            f"peak RSS {e['peak_rss_bytes'] / r['file_bytes']:.2f} x file; "
            f"load {e['load_s']:.2f} s, first token after {e['first_token_s']:.2f} s"
        )
    lines.append(f"ratio: prefill {r['prefill_tok_s_ratio']:.2f}, decode {r['decode_tok_s_ratio']:.2f}")
    lines.append(f"greedy tokens equal: {r['equal_tokens']} of {r['tokens']}")
    step = r["phases_ms"]["step"]
    parts = [f"{name} {ms:.2f} ({100 * ms / step:.1f} %)" for name, ms in r["phases_ms"].items()]
    lines.append("ms per decode step, millstream: " + ", ".join(parts))
    return "\n".join(lines)


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--expert-layout", choices=["fast", "compact"], default="fast")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp uses the weights as the file has them")
    parser.add_argument("--json", action="store_true", help="JSON in place of text")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the JSON here too")
    o = parser.parse_args()
    if o.out:
        require_writable(o.out)
    r = compare(
        o.model, o.threads, o.isa, o.rounds, o.prompt, o.tokens, o.expert_layout, o.peer_python, not o.no_repack
    )
    print(json.dumps(r, indent=1) if o.json else as_text(r))
    if o.out:
        write_json(o.out, r)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
