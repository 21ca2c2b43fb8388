"""Time of one kernel call per layout, tier and number of tokens, in cache and streamed from memory.

The timing window holds matmul calls on ready strips and activations, on one thread; encoding, activation quantization
and Python's share (a few microseconds per window, amortised over its calls) are outside or negligible. Every arm is
run once per round, in rotated order; figures are medians over rounds with the fastest round and the quartiles beside
them. The clock is the thread's own CPU time, so that a busy machine's scheduler does not count; its memory traffic and
shared caches still do. Ratios between arms of one run are meaningful, absolute times of a shared machine are not.

    python scripts/bench_kernels.py                                   # every layout, best two tiers
    python scripts/bench_kernels.py --layouts nib8_iq4_xs --tiers avx2 --csv out.csv
    python scripts/bench_kernels.py --ggml-cpu path/to/libggml-cpu.so # adds ggml's vec_dot on the same storage bytes
"""

import argparse
import csv
import ctypes
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine import kernels
from engine.formats import FORMATS
from engine.kernels import ffi

FIELDS = ["arm", "tier", "where", "tokens", "us_median", "us_min", "us_q1", "us_q3", "ns_per_weight", "gb_per_s"]
# Storage format -> (vec_dot, bytes of ggml's own activation block, its length): the quantized partner of each type.
GGML_DOT = {
    "q8_0": ("ggml_vec_dot_q8_0_q8_0", 34, 32),
    "q4_0": ("ggml_vec_dot_q4_0_q8_0", 34, 32),
    "iq4_xs": ("ggml_vec_dot_iq4_xs_q8_K", 292, 256),
}

ROW_LOOP = """#include <stddef.h>
void rows(void (*dot)(int, float *, size_t, const void *, size_t, const void *, size_t, int), int num_rows, int cols,
          const char *w, size_t row_bytes, const void *x, float *y) {
    for (int r = 0; r < num_rows; r++) dot(cols, y + r, 0, w + (size_t)r * row_bytes, 0, x, 0, 1);
}
"""


def cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Arm:
    """One way to multiply: run(i) multiplies matrix i; bytes are what one call reads of the weights."""

    def __init__(self, name, tier, tokens, num_bytes, run):
        self.name, self.tier, self.tokens, self.num_bytes, self.run = name, tier, tokens, num_bytes, run
        self.seconds = []


def weights(fmt, rows, cols, count):
    """Quantized Gaussian rows, `count` copies of the storage: uint8 [count, rows, row_bytes]."""
    context = kernels.Context(tier="scalar")
    x = (0.02 * np.random.default_rng(0).standard_normal((rows, cols))).astype(np.float32)
    return np.broadcast_to(context.quantize(fmt.name, x), (count, rows, fmt.row_bytes(cols)))


def own_arms(fmt, tier, storage, cols, token_counts):
    context = kernels.Context(tier=tier, num_threads=1)
    layout, rows = context.layout(fmt.layout), storage.shape[1]
    # every matrix has memory of its own, or streaming would be a loop over one cached copy
    matrices = [context.encode(fmt.name, s, rows, cols) for s in storage]
    pointers = [kernels.address(m) for m in matrices]
    x = np.random.default_rng(1).standard_normal((max(token_counts), cols)).astype(np.float32)
    act_bytes = kernels.lib.moe_activation_bytes(layout.activation, cols)
    act = kernels.aligned_empty(act_bytes * len(x))
    status = kernels.lib.moe_quantize_activations(
        context.handle, kernels.address(act), layout.activation, kernels.address(x, "float *"), len(x), cols
    )
    kernels.check(status, "quantize activations")
    y = np.empty((len(x), rows), np.float32)
    strips = -(-rows // layout.strip_rows)

    def arm(tokens):
        out = ffi.new("float *[]", [kernels.address(y[t], "float *") for t in range(tokens)])
        xs = ffi.new("void *[]", [kernels.address(act[t * act_bytes :]) for t in range(tokens)])
        keep = (matrices, act, y, context)

        def run(i, keep=keep):
            layout.matmul(out, pointers[i], rows, cols, 0, strips, xs, tokens)

        return Arm(fmt.layout, tier, tokens, matrices[0].nbytes, run)

    return [arm(t) for t in token_counts]


def row_loop():
    """ggml computes one row for one token per call. The loop over rows is compiled: in Python it would be timed."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(ROW_LOOP)
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", target, source], check=True)
        return ctypes.CDLL(str(target)).rows


def ggml_arm(library, fmt, storage, cols):
    name, act_bytes, act_len = GGML_DOT[fmt.name]
    dot, loop = ctypes.cast(getattr(library, name), ctypes.c_void_p), row_loop()
    loop.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 2, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 2]
    _, rows, row_bytes = storage.shape
    own = np.array(storage)
    act = np.zeros((cols // act_len, act_bytes), np.uint8)
    q_at = act_bytes - act_len if act_len == 32 else 4
    act[:, q_at : q_at + act_len] = np.random.default_rng(2).integers(0, 256, (len(act), act_len), dtype=np.uint8)
    scale = np.float16(0.01) if act_len == 32 else np.float32(0.01)
    act[:, : scale.nbytes] = np.frombuffer(scale.tobytes(), np.uint8)
    y = np.empty(rows, np.float32)

    def run(i):
        loop(dot, rows, cols, own[i].ctypes.data, row_bytes, act.ctypes.data, y.ctypes.data)

    return Arm(f"ggml {fmt.name}", "(library)", 1, rows * row_bytes, run)


def measure(arms, num_matrices, rounds, calls):
    """Seconds per call; one warm-up round, arms in rotated order."""
    for number in range(rounds + 1):
        shift = number % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            arm.run(num_matrices - 1)  # in cache: brings the matrix back after the other arms
            start = time.thread_time()
            for call in range(calls):
                arm.run(call % num_matrices)
            seconds = (time.thread_time() - start) / calls
            if number:
                arm.seconds.append(seconds)


def report(arms, where, rows, cols, writer):
    for arm in arms:
        us = np.array(arm.seconds) * 1e6
        q1, median, q3 = np.percentile(us, [25, 50, 75])
        row = dict(arm=arm.name, tier=arm.tier, where=where, tokens=arm.tokens)
        row |= dict(us_median=round(median, 1), us_min=round(us.min(), 1), us_q1=round(q1, 1), us_q3=round(q3, 1))
        row |= dict(
            ns_per_weight=round(median * 1e3 / rows / cols / arm.tokens, 5),
            gb_per_s=round(arm.num_bytes / median / 1e3, 2),
        )
        print("  ".join(f"{row[f]!s:>13}" for f in FIELDS), flush=True)
        if writer:
            writer.writerow(row)


def parse():
    best = [name for name, supported, _ in kernels.tiers() if supported]
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layouts", nargs="*", default=sorted({f.layout for f in FORMATS.values()}))
    p.add_argument("--tiers", nargs="*", default=best[-2:])
    p.add_argument("--tokens", nargs="*", type=int, default=[1, 2, 3, 4, 8])
    p.add_argument("--rows", type=int, default=1024)
    p.add_argument("--cols", type=int, default=2048)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--calls", type=int, default=8, help="matmul calls per timing window in cache")
    p.add_argument("--stream-mib", type=int, default=256, help="total weights of the streaming case, 0: leave it out")
    p.add_argument("--ggml-cpu", help="path of libggml-cpu.so for the comparison arm")
    p.add_argument("--csv", type=Path)
    return p.parse_args()


def main():
    args = parse()
    print(f"# {cpu_name()}, {os.cpu_count()} CPUs, {platform.platform()}, load {os.getloadavg()[0]:.1f}")
    print(f"# {shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}; one thread, weights [{args.rows}, {args.cols}]")
    print("  ".join(f"{f:>13}" for f in FIELDS))
    library = ctypes.CDLL(args.ggml_cpu, mode=ctypes.RTLD_GLOBAL) if args.ggml_cpu else None
    if library is not None and hasattr(library, "ggml_cpu_init"):
        library.ggml_cpu_init()
    out = args.csv.open("w", newline="") if args.csv else None
    writer = csv.DictWriter(out, FIELDS) if out else None
    if writer:
        writer.writeheader()
    formats = [f for f in FORMATS.values() if f.layout in args.layouts]
    for fmt in {f.layout: f for f in formats}.values():
        matrix_bytes = args.rows * fmt.row_bytes(args.cols)
        copies = -(-args.stream_mib * 2**20 // matrix_bytes)
        storage = weights(fmt, args.rows, args.cols, max(copies, 1))
        arms = [arm for tier in args.tiers for arm in own_arms(fmt, tier, storage[:1], args.cols, args.tokens)]
        if library is not None and fmt.name in GGML_DOT:
            arms.append(ggml_arm(library, fmt, storage[:1], args.cols))
        measure(arms, 1, args.rounds, args.calls)
        report(arms, "cache", args.rows, args.cols, writer)
        for tier in (
            args.tiers if copies else ()
        ):  # one tier's matrices at a time: memory is the subject, not the victim
            arms = own_arms(fmt, tier, storage, args.cols, args.tokens)
            measure(arms, copies, max(3, args.rounds // 5), copies)
            report(arms, "memory", args.rows, args.cols, writer)
    if out:
        out.close()


if __name__ == "__main__":
    main()
