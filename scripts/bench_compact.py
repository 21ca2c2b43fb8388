"""Time of whole products on compact matrices (storage rows re-coded in the call), on strips, and of ggml's vec_dot.

One thread; a call is `moe_linear`, activation quantization included for our arms and not for ggml's. Weights are random
blocks of every grid index and sign, in cache. Arms are interleaved in rotated order; figures are medians over rounds of
the thread's own CPU time, with the fastest beside them, and ratios to ggml (whose call is one row and one token) or,
where ggml has no such format, to the scalar tier.

    python scripts/bench_compact.py --ggml-cpu path/to/libggml-cpu.so
    python scripts/bench_compact.py --formats e8-iq3 --tier avx2
"""

import argparse
import ctypes
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent))

import ggml_peer
from bench_kernels import Arm, cpu_name, measure

from engine import kernels
from engine.doctor import finite_rows
from engine.formats import FORMATS
from engine.kernels import address, ffi, lib

GRIDS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")


def named(arm, name, tokens):
    arm.name, arm.tokens = name, tokens
    return arm


def product_arm(name, fmt, context, storage, x, compact):
    """One moe_linear call over all rows."""
    matrix = context.matrix(fmt, storage, len(storage), x.shape[1], compact=compact)
    y = np.empty((len(x), len(storage)), np.float32)
    w, out = ffi.new("struct moe_matrix *[]", [matrix.cdata]), ffi.new("float *[]", [address(y, "float *")])
    keep = (matrix, y, x, context)

    def run(_i, keep=keep):
        kernels.check(lib.moe_linear(context.handle, w, out, 1, address(x, "float *"), len(x), 0), "linear")

    return named(Arm(run), name, len(x))


def ggml_arm(library, fmt, storage, cols):
    """vec_dot of a format whose partner is Q8_K (float d, 256 int8, 16 int16 sums), row by row."""
    with tempfile.TemporaryDirectory() as folder:
        loop = ggml_peer.loops(Path(folder)).rows
    dot = ctypes.cast(getattr(library, f"ggml_vec_dot_{fmt}_q8_K"), ctypes.c_void_p)
    act = np.zeros((cols // 256, 292), np.uint8)
    act[:, 4:260] = np.random.default_rng(2).integers(0, 256, (len(act), 256), dtype=np.uint8)
    act[:, :4] = np.frombuffer(np.float32(0.01).tobytes(), np.uint8)
    y = np.empty(len(storage), np.float32)

    def run(_i):
        loop(dot, len(storage), cols, storage.ctypes.data, storage.shape[1], act.ctypes.data, y.ctypes.data)

    return named(Arm(run), "ggml", 1)


def compare(fmt, args, library):
    context, scalar = kernels.Context(args.tier, 1), kernels.Context("scalar", 1)
    storage = finite_rows(scalar, fmt, args.rows, args.cols, np.random.default_rng(1))
    x = np.random.default_rng(3).standard_normal((max(args.tokens), args.cols)).astype(np.float32)
    arms = [product_arm(form, fmt, context, storage, x[:n].copy(), form == "compact")
            for n in args.tokens for form in ("compact", "strips")]  # fmt: skip
    if library is not None and hasattr(library, f"ggml_vec_dot_{fmt}_q8_K"):
        base = ggml_arm(library, fmt, storage, args.cols)
    else:
        base = product_arm("compact, scalar", fmt, scalar, storage, x[:1].copy(), True)
    for arm in (*arms, base):
        arm.calls = args.calls
    measure(dict(enumerate([*arms, base])), args.rounds)
    reference = np.median(base.seconds)
    print(f"{fmt}: {base.name} {reference * 1e6:.0f} us ({min(base.seconds) * 1e6:.0f}) a token")
    for arm in arms:
        us = np.array(arm.seconds) * 1e6
        ratio = reference * arm.tokens / np.median(arm.seconds)
        print(
            f"  {arm.name:8} {arm.tokens} tokens: {np.median(us):6.0f} us ({us.min():.0f})  {ratio:5.2f} x", flush=True
        )


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--formats", nargs="*", default=[*GRIDS, "e8-iq3"], choices=sorted(FORMATS))
    p.add_argument("--tier", help="CPU tier (default: the best this CPU runs)")
    p.add_argument("--tokens", nargs="*", type=int, default=[1, 3, 8])
    p.add_argument("--rows", type=int, default=1024)
    p.add_argument("--cols", type=int, default=2048)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--calls", type=int, default=4, help="calls per timing window")
    p.add_argument("--ggml-cpu", help="path of libggml-cpu.so")
    args = p.parse_args()
    library = ctypes.CDLL(args.ggml_cpu, mode=ctypes.RTLD_GLOBAL) if args.ggml_cpu else None
    if library is not None and hasattr(library, "ggml_cpu_init"):
        library.ggml_cpu_init()
    print(f"# {cpu_name()}, one thread, weights [{args.rows}, {args.cols}] in cache; medians (fastest)")
    for fmt in args.formats:
        compare(fmt, args, library)


if __name__ == "__main__":
    main()
