"""Speed of the codecs, one thread: storage bytes re-coded to strips per second, every format, with targets.

Codecs run the same instructions whatever the bytes are, so rows are random. Storage and strips of [256, 2048] stay in
L2. All formats take turns; a figure is the median over the rounds of the best of a few calls, on the thread's own CPU
time: anything else that the machine does can only make a call slower.

    python scripts/bench_codecs.py
    python scripts/bench_codecs.py --tier avx512 --formats q4_0 iq3_s --json out.json
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine import kernels
from engine.formats import FORMATS

ROWS, COLS = 256, 2048
NIBBLES = (
    "q4_0",
    "q4_1",
    "q4_k",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
    "nvfp4",
    "int4-g32",
    "int4-g64",
    "int4-g128",
    "int3-g64",
)
GRIDS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "e8-iq3")
NIBBLE_TARGET, GRID_TARGET = 4.0, 2.0  # GB/s of storage
CALLS = 5


def target_of(name):
    return NIBBLE_TARGET if name in NIBBLES else GRID_TARGET if name in GRIDS else None


class Codec:
    """call() re-codes one matrix of a format."""

    def __init__(self, name, tier):
        self.context = kernels.Context(tier=tier, num_threads=1)
        self.table = self.context.format(name)
        self.layout = self.context.layout(self.context.layout_of(name))
        row_bytes = self.context.row_bytes(name, COLS)
        self.storage = np.random.default_rng(0).integers(0, 256, (ROWS, row_bytes), np.uint8)
        self.out = kernels.aligned_empty(kernels.lib.moe_matrix_bytes(self.layout, ROWS, COLS))
        self.args = (kernels.address(self.out), self.table, self.layout, kernels.address(self.storage), ROWS, COLS)
        self.seconds = []

    def call(self):
        kernels.check(kernels.lib.moe_encode(self.context.handle, *self.args), "encode")

    def measure(self):
        self.call()  # back into the cache
        took = []
        for _ in range(CALLS):
            start = time.thread_time()
            self.call()
            took.append(time.thread_time() - start)
        self.seconds.append(min(took))

    def gb_per_s(self, num_bytes):
        return num_bytes / statistics.median(self.seconds) / 1e9


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = [name for name in FORMATS if not FORMATS[name].layout.startswith("rows_")]
    p.add_argument("--formats", nargs="*", default=named, choices=named, metavar="NAME")
    p.add_argument("--tier", default="avx2")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--json", type=Path)
    return p.parse_args()


def main():
    args = parse()
    codecs = {name: Codec(name, args.tier) for name in args.formats}
    for _ in range(args.rounds):
        for codec in codecs.values():
            codec.measure()
    print(f"# one thread, tier {args.tier}, [{ROWS}, {COLS}], {args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print(f"{'format':14} {'storage GB/s':>12} {'strips GB/s':>12}  {'target':>6}")
    lines = []
    for name, codec in codecs.items():
        speed, target = codec.gb_per_s(codec.storage.nbytes), target_of(name)
        line = dict(
            format=name, storage_gb_per_s=round(speed, 2), strips_gb_per_s=round(codec.gb_per_s(codec.out.nbytes), 2)
        )
        lines.append(line | dict(target=target, reached=target and speed >= target))
        mark = "" if target is None else f"{target:6g}  {'reached' if speed >= target else 'MISSED'}"
        print(f"{name:14} {line['storage_gb_per_s']:12.2f} {line['strips_gb_per_s']:12.2f}  {mark}".rstrip())
    if args.json:
        args.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
