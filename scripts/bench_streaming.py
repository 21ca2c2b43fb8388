"""Speed of a model that does not fit: millstream and llama.cpp on one file, under the same memory limit, cold.

    python scripts/bench_streaming.py DIR --router uniform --json out.json    # makes DIR/uniform.gguf (4 GB) first
    python scripts/bench_streaming.py DIR --router skewed --share 25,50 --arms llama,llama-128k --json out.json
    python scripts/bench_streaming.py MODEL.gguf --isa avx2 --arms resident,millstream --json out.json
    python scripts/bench_streaming.py --json out.json --report                        # tables and targets, as Markdown

Every call adds its results to the JSON file, so a run can be cut into calls of minutes; a file takes results of one
revision on one machine with one set of settings only. An arm is a process of its own in a memory cgroup of dense
weights + KV + 256 MiB + SHARE percent of the expert bytes; where no cgroup can be made it is reported as not run. The
file's pages are dropped before each. Arms:

    device       O_DIRECT reads of experts at random at depth 16
    resident     millstream without a limit: the speed when nothing is missing. Runs first and last of a call
    millstream   millstream under the limit, its defaults; with it the device at its request size and depth: before and
                 after as a steady stream, and after it in bursts of as many experts as a layer missed
    llama        llama.cpp (llama-cpp-python, mmap, weights not re-packed, which would need them all in anonymous
                 memory) on the file, read-ahead of this disk as found
    llama-128k   the same through a loop device with 128 KiB read-ahead (needs root)
    routing      what an LRU of half of the experts would hit on the ids that are used; nothing is stored

Both engines read the same warm-up tokens and then the same measured ones, one at a time. Where seconds run out before
that, the caps and the tokens done are printed with the result.

Uniform and skewed routing are properties of the file: with random weights the attention output makes tokens alike, so
few experts serve them all; attn_norm scaled by 0.05 leaves each its own embedding, and all serve.
"""

import argparse
import json
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import streaming_report
from memory_cgroup import CgroupError, MemoryCgroup
from page_cache import evict
from streaming_disk import ALIGN_BYTES, burst_read_rate, direct_read_rate, disk_read_ahead, loop_device

from engine.atomic_file import AtomicFile
from engine.experts.cache import CHUNK_BYTES, DEFAULT_READERS
from engine.hardware import cpu_model, usable_cpus
from engine.weights import open_model

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
MARGIN_BYTES = 256 * MIB
ARMS = ("device", "resident", "millstream", "llama", "llama-128k")
UNLIMITED = ("device", "resident", "routing")
# Where nearly all fit, each expert must have been met before the measured part; a smaller cache is full early.
WARM_UP_TOKENS = ((100, 64), (75, 32), (0, 16))


def parse_arguments() -> argparse.Namespace:
    def names(text):
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="GGUF file, or with --router the directory to put one into")
    parser.add_argument("--router", type=names, default=[], help="uniform, skewed, or both")
    parser.add_argument("--layers", type=int, default=16, help="of a file that --router makes")
    parser.add_argument("--json", type=Path, required=True, help="results are added to this file")
    parser.add_argument("--report", action="store_true", help="only print what the JSON file holds, and the targets")
    parser.add_argument("--arms", type=names, default=list(ARMS))
    parser.add_argument("--share", type=lambda t: [float(p) for p in t.split(",")], default=[25, 50, 75, 100],
                        metavar="PERCENT,...", help="of the expert bytes")  # fmt: skip
    parser.add_argument("--threads", type=int, help="for both engines; default: physical cores")
    parser.add_argument("--isa", help="tier of millstream (llama.cpp chooses its own)")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--warm-up-tokens", type=int, help="default: 16, from 75 %% on 32, from 100 %% on 64")
    parser.add_argument("--tokens", type=int, default=48, help="measured")
    parser.add_argument("--warm-up-s", type=float, default=120, help="cap of an arm's warm-up")
    parser.add_argument("--seconds", type=float, default=90, help="cap of an arm's measured part")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for millstream: io=buffered, ...")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama_cpp")
    args = parser.parse_args()
    if not args.report and args.model is None:
        parser.error("a GGUF file is needed, or a directory and --router")
    for name, known in (("arms", (*ARMS, "routing")), ("router", ("uniform", "skewed"))):
        unknown = sorted(set(getattr(args, name)) - set(known))
        if unknown:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return args


def warm_up_tokens(args, share: float | None) -> int:
    if args.warm_up_tokens is not None:
        return args.warm_up_tokens
    return next(tokens for least, tokens in WARM_UP_TOKENS if (share or 0) >= least)


class Subject:
    """The file that is measured: where its experts lie, what else it holds."""

    def __init__(self, path: Path, router: str, ctx: int):
        self.path, self.router = path, router
        files = open_model(path)
        config = files.config
        slabs = [record for record in files.tensors.values() if record.role in ("gate_up", "down")]
        self.experts = [[(r.offset, r.nbytes) for r in slabs[at : at + 3]] for at in range(0, len(slabs), 3)]
        self.expert_bytes = sum(record.nbytes for record in slabs)
        self.dense_bytes = sum(record.nbytes for record in files.tensors.values()) - self.expert_bytes
        width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
        self.kv_bytes = 2 * 2 * config["num_hidden_layers"] * ctx * width
        self.vocab_size = config["vocab_size"]
        files.close()

    def limit(self, share: float) -> int:
        return self.dense_bytes + self.kv_bytes + MARGIN_BYTES + int(self.expert_bytes * share / 100)

    def describe(self) -> dict:
        return {"path": self.path.name, "bytes": self.path.stat().st_size, "expert_bytes": self.expert_bytes,
                "experts": len(self.experts), "dense_bytes": self.dense_bytes, "kv_bytes": self.kv_bytes}  # fmt: skip

    def device_mb_s(self, request_bytes: int, depth: int, seconds: float, seed: int) -> float:
        return direct_read_rate(self.path, self.experts, request_bytes, depth, seconds, seed) / 1e6


def run_child(arm: str, share: float | None, model: str, args, ids: list[int], group: MemoryCgroup | None) -> dict:
    first = warm_up_tokens(args, share)
    job = {
        "model": model, "ids": ids, "threads": args.threads, "isa": args.isa, "ctx": args.ctx,
        "warm_up_tokens": first, "warm_up_s": args.warm_up_s, "tokens": min(args.tokens, len(ids) - first),
        "seconds": args.seconds, "options": dict(streaming_report.setting(text) for text in args.option),
    }  # fmt: skip
    if arm == "resident":  # as a reference for every share: all positions that any of them measures
        job["tokens"] = len(ids) - first
    python = args.llama_python if arm.startswith("llama") else sys.executable
    engine = "llama" if arm.startswith("llama") else "millstream"
    command = [python, str(HERE / "streaming_arms.py"), engine, json.dumps(job)]
    enter = group.enter if group is not None else None
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter, check=False)
    if done.returncode:
        return {"failed": f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_limited(arm: str, share: float | None, subject: Subject, args, ids: list[int]) -> dict:
    stayed = evict(subject.path)
    limit = nullcontext() if share is None else MemoryCgroup(subject.limit(share))
    behind = loop_device(subject.path, 128) if arm == "llama-128k" else nullcontext(str(subject.path))
    with limit as group, behind as model:
        result = run_child(arm, share, model, args, ids, group)
        if group is not None:
            result["cgroup"] = group.figures()
    read_ahead = 128 if arm == "llama-128k" else disk_read_ahead(subject.path)
    return {**result, "cached_before": stayed, "read_ahead_kib": read_ahead}


def run_arm(arm: str, share: float | None, subject: Subject, args, ids: list[int]) -> dict:
    """One result: what was measured, or {"not_run": reason}."""

    def device(request_bytes, depth, seconds=2.0):
        return subject.device_mb_s(request_bytes, depth, seconds, args.seed)

    if arm == "device":
        return {"mb_s": {f"{kib} KiB x 16": device(kib << 10, 16) for kib in (256, 1024)}}
    try:
        before = device(CHUNK_BYTES, DEFAULT_READERS) if arm == "millstream" else None
        result = run_limited(arm, share, subject, args, ids)
    except (CgroupError, OSError) as error:
        return {"not_run": str(error)}
    if before is not None:
        result["device_mb_s"] = [before, device(CHUNK_BYTES, DEFAULT_READERS)]
        result["burst_mb_s"] = burst_rate(subject, result.get("counted"), args.seed)
    return result


def burst_rate(subject: Subject, counted: dict | None, seed: int) -> float | None:
    """MB/s of the device when as many experts are asked for at once as a layer missed."""
    if not counted or not counted["miss_calls"]:
        return None
    burst = counted["misses"] / counted["miss_calls"]
    how = (CHUNK_BYTES, DEFAULT_READERS, 2.0, seed, burst)
    return burst_read_rate(subject.path, subject.experts, *how) / 1e6


def lru_hit_rate(subject: Subject, args, ids: list[int]) -> float:
    """Of an LRU of half the experts on the routing of these ids, recorded without a limit."""
    import numpy as np
    from cache_replay import Replay, merge

    import engine
    from engine.experts.policy import make_policy
    from engine.experts.route_trace import RecordedTrace, RouteTrace

    loaded = engine.load(subject.path, threads=args.threads, ctx=args.ctx)
    kv, array = loaded.new_kv(), np.array(ids, np.int32)
    with tempfile.TemporaryDirectory() as folder:
        with RouteTrace(Path(folder) / "routes", loaded.model, "olmoe"):
            for position in range(len(ids)):
                loaded.model.forward(array[position : position + 1], kv, position)
        trace = RecordedTrace(Path(folder) / "routes")
        header = trace.header
        found = [merge(r.layer, header.num_experts, r.ids, r.weights) for r in trace]
    num_keys = header.num_layers * header.num_experts
    return Replay(make_policy("lru", num_keys // 2, num_keys), num_keys // 2).run(found).hit_rate


def make_model(folder: Path, router: str, layers: int) -> Path:
    """folder/ROUTER.gguf with that routing: 4 GB for 16 layers."""
    path = folder / (f"{router}.gguf" if layers == 16 else f"{router}-{layers}.gguf")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--layers", str(layers), *(["--uniform-router"] if router == "uniform" else [])]
        subprocess.run([sys.executable, HERE / "make_big_gguf.py", path, *options], check=True, stdout=sys.stderr)
        os.truncate(path, -(-path.stat().st_size // ALIGN_BYTES) * ALIGN_BYTES)  # whole sectors, for a loop device
    return path


def git(*command: str) -> str:
    done = subprocess.run(["git", "-C", str(HERE), *command], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def command_line(args) -> str:
    """The call, with the paths of this machine left out: what others would type."""
    places = {str(args.model): "DIR" if args.router else args.model.name, str(args.json): args.json.name,
              args.llama_python: "PYTHON_WITH_LLAMA_CPP"}  # fmt: skip
    return shlex.join(["python", "scripts/bench_streaming.py", *(places.get(text, text) for text in sys.argv[1:])])


def describe_run(args) -> dict:
    """What must be the same for all results of a file."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    settings = {name: getattr(args, name) for name in ("threads", "ctx", "seed", "tokens", "warm_up_tokens")}
    return {
        "revision": (git("rev-parse", "--short=12", "HEAD") or "unknown") + changed,
        "machine": {"cpu": cpu_model(), "cpus": os.cpu_count(), "memory_mib": memory, "kernel": platform.release()},
        "settings": settings,
    }


def read_records(path: Path, run: dict | None = None) -> list[dict]:
    """The file's results; run: what new ones must agree with."""
    records = json.loads(path.read_text()) if path.exists() else []
    if run is not None and records and records[0]["run"] != run:
        theirs = records[0]["run"]
        name = next(name for name in run if run[name] != theirs.get(name))
        sys.exit(f"error: {path}: holds results of {name} {theirs.get(name)}, this is {run[name]}; give another --json")
    return records


def measure_file(subject: Subject, args, run: dict) -> None:
    draw = random.Random(args.seed)
    longest = max(warm_up_tokens(args, share) for share in args.share)
    count = min(longest + args.tokens, args.ctx)
    ids = [draw.randrange(min(4096, subject.vocab_size)) for _ in range(count)]
    jobs = [(arm, share) for arm in args.arms for share in ([None] if arm in UNLIMITED else args.share)]
    if "resident" in args.arms and len(jobs) > 1:
        jobs.append(("resident", None))  # how much the machine drifts
    call = f"{time.strftime('%F %T')} {subject.router}"
    for arm, share in jobs:
        name = streaming_report.name_of({"router": subject.router, "arm": arm, "share": share, "isa": args.isa})
        print(f"running: {name}", file=sys.stderr, flush=True)
        if arm == "routing":
            print(f"routing: an LRU of half the experts hits {100 * lru_hit_rate(subject, args, ids):.1f} %")
            continue
        started, load = time.strftime("%F %T"), os.getloadavg()[0]
        result = run_arm(arm, share, subject, args, ids)
        record = {"run": run, "time": started, "command": command_line(args), "router": subject.router,
                  "arm": arm, "share": share, "isa": args.isa, "option": args.option, "model": subject.describe(),
                  "load": load, "result": {**result, "call": call}}  # fmt: skip
        with AtomicFile(args.json) as file:
            file.handle.write((json.dumps([*read_records(args.json, run), record], indent=1) + "\n").encode())
        print(streaming_report.line(record), flush=True)


def main() -> None:
    args = parse_arguments()
    if args.report:
        print(streaming_report.markdown(read_records(args.json)))
        return
    args.threads = args.threads or usable_cpus().count
    if "llama-128k" in args.arms and not shutil.which("losetup"):
        print("note: losetup is missing, llama-128k will not run", file=sys.stderr)
    run = describe_run(args)
    read_records(args.json, run)
    if args.router:
        paths = [(make_model(args.model, router, args.layers), router) for router in args.router]
    else:
        paths = [(args.model, args.model.stem)]
    for path, router in paths:
        measure_file(Subject(path, router, args.ctx), args, run)


if __name__ == "__main__":
    main()
