"""Speed of a model that does not fit: millstream and llama.cpp on one file, under the same memory limit, cold.

    python scripts/bench_streaming.py MODEL.gguf --json out.json                     # all arms, some minutes
    python scripts/bench_streaming.py MODEL.gguf --json out.json --arms device,millstream --percents 50
    python scripts/bench_streaming.py --make skewed DIR ...                          # makes DIR/skewed.gguf first
    python scripts/bench_streaming.py --json out.json --report                       # ratios and targets

An arm is a process of its own in a memory cgroup of dense weights + KV + 256 MiB + PERCENT of the expert bytes; where
no cgroup can be made it is reported as not run. The file's pages are dropped before each. Every call adds its results
to the JSON file, so arms can be run one by one on a machine that is quiet for a short time only. Arms:

    device       O_DIRECT reads of experts at random, at the streamer's request size and depth, and at depth 16
    resident     millstream without a limit: the speed when nothing is missing
    millstream   millstream under the limit, its defaults
    llama        llama.cpp (llama-cpp-python, mmap, weights not re-packed, which would need them all in anonymous
                 memory) on the file, read-ahead of this disk as found
    llama-128k   the same through a loop device with 128 KiB read-ahead (needs root)

Uniform and skewed routing are properties of the file (--make): with random weights the attention output makes tokens
alike, so few experts serve them all; attn_norm scaled by 0.05 leaves each its own embedding, and all serve. The arm
"routing" prints what an LRU of half of the experts would hit on the ids that are used, so that it is known which of the
two was measured.
"""

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from memory_cgroup import CgroupError, MemoryCgroup
from page_cache import evict

from engine.atomic_file import AtomicFile
from engine.hardware import usable_cpus
from engine.weights import open_model

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
MARGIN_BYTES = 256 * MIB
ALIGN_BYTES = 4096
ARMS = ("device", "resident", "millstream", "llama", "llama-128k")
UNLIMITED = ("device", "resident")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="GGUF file, or with --make the directory to put one into")
    parser.add_argument("--make", choices=("uniform", "skewed"))
    parser.add_argument("--json", type=Path, required=True, help="results are added to this file")
    parser.add_argument("--report", action="store_true", help="only print what the JSON file holds, and the targets")
    parser.add_argument("--arms", type=lambda t: t.split(","), default=list(ARMS))
    parser.add_argument("--percents", type=lambda t: [float(p) for p in t.split(",")], default=[25, 50, 75, 100])
    parser.add_argument("--threads", type=int, help="for both engines; default: physical cores")
    parser.add_argument("--isa", help="tier of millstream")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=500, help="at most")
    parser.add_argument("--seconds", type=float, default=15, help="measured part of an arm, at most")
    parser.add_argument("--warm-up-tokens", type=int, default=64)
    parser.add_argument("--warm-up-s", type=float, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for millstream: io=buffered, ...")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama_cpp")
    return parser.parse_args()


def value(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


class Subject:
    """The file that is measured: where its experts lie, what else it holds."""

    def __init__(self, path: Path, ctx: int):
        self.path = path
        files = open_model(path)
        config = files.config
        experts = [record for record in files.tensors.values() if record.role in ("gate_up", "down")]
        self.ranges = [(record.offset, record.nbytes) for record in experts]
        self.expert_bytes = sum(record.nbytes for record in experts)
        self.dense_bytes = sum(record.nbytes for record in files.tensors.values()) - self.expert_bytes
        width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
        self.kv_bytes = 2 * 2 * config["num_hidden_layers"] * ctx * width
        self.vocab_size = config["vocab_size"]
        files.close()

    def limit(self, percent: float) -> int:
        return self.dense_bytes + self.kv_bytes + MARGIN_BYTES + int(self.expert_bytes * percent / 100)

    def describe(self) -> dict:
        return {"path": self.path.name, "expert_bytes": self.expert_bytes, "dense_bytes": self.dense_bytes,
                "kv_bytes": self.kv_bytes, "slab_bytes": max(nbytes for _, nbytes in self.ranges)}  # fmt: skip


def direct_read_rate(subject: Subject, request_bytes: int, depth: int, seconds: float, seed: int) -> float:
    """Bytes per second of `depth` threads that read random slabs in requests of at most request_bytes, O_DIRECT."""
    import mmap

    handle = os.open(subject.path, os.O_RDONLY | os.O_DIRECT)
    done, deadline = [0] * depth, time.perf_counter() + seconds

    def reader(number: int) -> None:
        draw, buffer = random.Random(seed * 1000 + number), mmap.mmap(-1, request_bytes)
        while time.perf_counter() < deadline:
            offset, nbytes = draw.choice(subject.ranges)
            at, end = offset // ALIGN_BYTES * ALIGN_BYTES, offset + nbytes
            while at < end:
                length = min(request_bytes, -(-(end - at) // ALIGN_BYTES) * ALIGN_BYTES)
                found = os.preadv(handle, [memoryview(buffer)[:length]], at)
                if found <= 0:
                    break
                done[number] += found
                at += found

    threads = [threading.Thread(target=reader, args=(n,)) for n in range(depth)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(handle)
    return sum(done) / (time.perf_counter() - started)


def run_device(subject: Subject, args) -> dict:
    rates = {}
    for request, depth in ((1 * MIB, 4), (256 * 1024, 16), (1 * MIB, 16)):
        rates[f"{request >> 10} KiB x {depth}"] = direct_read_rate(subject, request, depth, 3, args.seed) / 1e6
    return {"mb_s": rates, "best_mb_s": max(rates.values())}


@contextmanager
def loop_device(path: Path, read_ahead_kib: int):
    """A read-only loop device on the file, direct, with this read-ahead. Raises OSError with the reason."""
    if path.stat().st_size % 512:
        raise OSError(
            f"{path.name} is not whole sectors of 512 bytes, so a loop device cuts it off; truncate -s %512 it"
        )
    command = ["losetup", "--find", "--show", "--read-only", "--direct-io=on", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise OSError(f"losetup: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        Path(f"/sys/block/{Path(device).name}/queue/read_ahead_kb").write_text(str(read_ahead_kib))
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)


def disk_read_ahead(path: Path) -> int | None:
    """KiB that the kernel reads ahead on the file's disk."""
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return int(setting.read_text()) if setting.exists() else None


def run_child(arm: str, model: str, args, ids: list[int], group: MemoryCgroup | None) -> dict:
    job = {
        "model": model, "ids": ids, "threads": args.threads, "isa": args.isa, "ctx": args.ctx,
        "seconds": args.seconds, "warm_up_tokens": args.warm_up_tokens, "warm_up_s": args.warm_up_s,
        "options": {k: value(v) for k, v in (text.split("=", 1) for text in args.option)},
    }  # fmt: skip
    python = args.llama_python if arm == "llama" else sys.executable
    command = [python, str(HERE / "streaming_arms.py"), arm, json.dumps(job)]
    enter = group.enter if group is not None else None
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter, check=False)
    if done.returncode:
        return {"failed": f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_arm(arm: str, percent: float | None, subject: Subject, args, ids: list[int]) -> dict:
    """One result: what was measured, or {"not_run": reason}."""
    if arm == "device":
        return run_device(subject, args)
    stayed = evict(subject.path)
    try:
        limit = nullcontext() if percent is None else MemoryCgroup(subject.limit(percent))
        behind = loop_device(subject.path, 128) if arm == "llama-128k" else nullcontext(str(subject.path))
        with limit as group, behind as model:
            result = run_child(arm.split("-")[0].replace("resident", "millstream"), model, args, ids, group)
            if group is not None:
                result["cgroup"] = group.figures()
    except (CgroupError, OSError) as error:
        return {"not_run": str(error)}
    return {**result, "cached_before": stayed, "read_ahead_kib": 128 if "128k" in arm else disk_read_ahead(args.model)}


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


def make_model(args) -> Path:
    """DIR/NAME.gguf of 4 GB with the wanted routing."""
    path = args.model / f"{args.make}.gguf"
    if not path.exists():
        args.model.mkdir(parents=True, exist_ok=True)
        options = ["--uniform-router"] if args.make == "uniform" else []
        subprocess.run([sys.executable, HERE / "make_big_gguf.py", path, *options], check=True, stdout=sys.stderr)
        os.truncate(path, -(-path.stat().st_size // ALIGN_BYTES) * ALIGN_BYTES)  # whole sectors, for a loop device
    return path


def describe_machine() -> dict:
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())  # fmt: skip
    return {"cpu": cpu, "kernel": platform.release(), "load": os.getloadavg()[0], "time": time.strftime("%F %T")}


def show(record: dict) -> None:
    result, percent = record["result"], record["percent"]
    name = record["arm"] + ("" if percent is None else f" {percent:g} %")
    if "not_run" in result or "failed" in result:
        print(
            f"{name:18} " + (f"not run: {result['not_run']}" if "not_run" in result else f"FAILED: {result['failed']}")
        )
        return
    if "mb_s" in result:
        print(f"{name:18} " + ", ".join(f"{k}: {v:.0f} MB/s" for k, v in result["mb_s"].items()))
        return
    line = f"{name:18} {result['tok_s']:7.2f} tok/s  {result['read_bytes_per_token'] / 1e6:8.1f} MB/token"
    c = result["counted"]
    if c:
        busy, uses = c["busy_s"], max(1, c["hits"] + c["misses"])
        line += (
            f"  {c['bytes'] / 1e6 / busy if busy else 0:6.0f} MB/s while reading  {100 * c['hits'] / uses:5.1f} % hits"
            f"  wait {100 * c['wait_s'] / result['seconds']:4.1f} %"
            f"  re-coding {1000 * c['recode_s'] / result['tokens']:.0f} ms/token on the readers"
        )
    print(line + f"  ({result['tokens']} tokens after {result['warm_up']['tokens']})")


def latest(records: list[dict]) -> dict[tuple, dict]:
    """(arm, percent) -> result of the last run that finished."""
    return {(r["arm"], r["percent"]): r["result"] for r in records if "tok_s" in r["result"] or "mb_s" in r["result"]}


def report_row(percent: float, found: dict, slab_bytes: int) -> dict:
    """The figures of one limit that have targets; None where an arm is missing."""
    ours, resident, device = (
        found.get(("millstream", percent)),
        found.get(("resident", None)),
        found.get(("device", None)),
    )
    peers = [found[key] for key in (("llama", percent), ("llama-128k", percent)) if key in found]
    row = dict.fromkeys(("tok_s", "of_device", "bytes_over_misses", "hidden", "over_llama", "over_llama_as_found"))
    if ours is None:
        return row
    c, row["tok_s"] = ours["counted"], ours["tok_s"]
    if c and c["misses"]:
        rate = c["bytes"] / c["busy_s"]
        row["of_device"] = rate / 1e6 / device["best_mb_s"] if device else None
        row["bytes_over_misses"] = c["bytes"] / (c["misses"] * 3 * slab_bytes)
        if resident:
            # 1: the time of a token without its wait is that of a token when nothing is missing.
            row["hidden"] = (ours["seconds"] - c["wait_s"]) / ours["tokens"] * resident["tok_s"]
    if peers:
        row["over_llama"] = ours["tok_s"] / max(peer["tok_s"] for peer in peers)
    if ("llama", percent) in found:
        row["over_llama_as_found"] = ours["tok_s"] / found["llama", percent]["tok_s"]
    return row


def report(path: Path) -> None:
    records = json.loads(path.read_text())
    found, slab_bytes = latest(records), records[-1]["model"]["slab_bytes"]
    for record in records:
        show(record)
    print("\nlimit    tok/s  of the device (>= 0.9)  bytes / misses' (<= 1.05)  token less wait / resident  "
          "/ better llama.cpp (>= 2)  / llama.cpp as found")  # fmt: skip
    for percent in sorted({percent for _, percent in found if percent is not None}):
        row = report_row(percent, found, slab_bytes)
        cells = ["-" if value is None else f"{value:.2f}" for value in row.values()]
        widths = (7, 24, 27, 29, 28, 23)
        line = "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        print(f"{percent:4g} % {line}")


def save(path: Path, record: dict) -> None:
    records = json.loads(path.read_text()) if path.exists() else []
    with AtomicFile(path) as file:
        file.handle.write((json.dumps([*records, record], indent=1) + "\n").encode())


def main() -> None:
    args = parse_arguments()
    if args.report:
        report(args.json)
        return
    args.threads = args.threads or usable_cpus().count
    args.model = make_model(args) if args.make else args.model
    unknown = sorted(set(args.arms) - set(ARMS) - {"routing"})
    if unknown:
        sys.exit(f"error: --arms: unknown {', '.join(unknown)}; known: {', '.join(ARMS)}, routing")
    if "llama-128k" in args.arms and not shutil.which("losetup"):
        print("note: losetup is missing, llama-128k will not run", file=sys.stderr)
    subject = Subject(args.model, args.ctx)
    draw = random.Random(args.seed)
    ids = [draw.randrange(min(4096, subject.vocab_size)) for _ in range(min(args.tokens, args.ctx))]
    for arm in args.arms:
        for percent in [None] if arm in (*UNLIMITED, "routing") else args.percents:
            print(f"running: {arm}" + ("" if percent is None else f" {percent:g} %"), file=sys.stderr, flush=True)
            if arm == "routing":
                print(f"routing: an LRU of half the experts hits {100 * lru_hit_rate(subject, args, ids):.1f} %")
                continue
            settings = {name: getattr(args, name) for name in ("threads", "isa", "ctx", "seed", "option", "warm_up_s")}
            record = {"arm": arm, "percent": percent, "model": subject.describe(), "settings": settings,
                      "machine": describe_machine(), "result": run_arm(arm, percent, subject, args, ids)}  # fmt: skip
            save(args.json, record)
            show(record)


if __name__ == "__main__":
    main()
