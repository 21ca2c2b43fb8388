"""Speed of the kernels, one thread, against ggml's dot products on the same storage bytes, with targets.

Per format: kernel calls on strips in cache (1, 2, 3, 4, 8 tokens and the tile of many), one token streamed from memory,
the codec, and sums of codec and kernel (compact strips). All arms of a table take turns in rotated order; figures are
medians with the quartiles' half distance beside them, on the thread's own CPU time. Ratios hold within a run; a shared
machine's absolute times do not. Reference formats run in every table, so that a piece of the list stands alone:

    python scripts/bench_kernels.py --formats iq4_xs iq3_s --ggml-sdist llama_cpp_python-0.3.36.tar.gz
    python scripts/bench_kernels.py --formats hqq5-ax0-g32 --stream-mib 0

All formats take minutes. In ten pieces, each 10 to 20 seconds of CPU time, well below 90 on a machine that does
nothing else, at any time and in any order; then as one table:

    for k in $(seq 10); do python scripts/bench_kernels.py --piece $k/10 --json piece$k.json; done
    python scripts/bench_kernels.py --merge piece*.json --json all.json

The merged table has a row per format and a mark at every figure that misses its target.

ggml comes from an installed llama-cpp-python (extra `peers`) or --ggml-lib. pip builds that for the CPU at hand; to be
compared on AVX2 its dot products are compiled again from the source distribution (--ggml-sdist FILE, or `download`).
"""

import argparse
import ctypes
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ggml_peer

from engine import kernels
from engine.formats import FORMATS
from engine.hardware import cpu_model
from engine.kernels import ffi

TOKENS = (1, 2, 3, 4, 8)
TILE = 48  # tokens of the tile arm: a window of 32 and one of 16
ROWS, COLS = 1024, 2048
NIBBLES = ("iq4_xs", "iq4_nl", "mxfp4", "q4_0", "q4_k")
GRIDS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
BYTES = ("q8_0", "q6_k", "q5_k")
NIBBLE_TARGET, BYTE_TARGET, IQ3_S_TARGET = {1: 2.1, 3: 2.9, 8: 3.5}, {1: 1.3, 3: 2.0, 8: 2.5}, {1: 7.0, 3: 8.0, 8: 9.5}
COMPACT_TARGET, OTHER_TARGET = {1: 1.2, 3: 2.5, 8: 4.0}, {1: 1.3, 3: 1.3, 8: 1.3}
REFERENCES = {"nib8": ("q4_0", "q4_k"), "byte8": ("q5_k", "q6_k")}  # where the best of a kind is


class Arm:
    """run(i) is one timed call on matrix i of `matrices`; `calls` of them make a window."""

    def __init__(self, run, calls=4, matrices=1):
        self.run, self.calls, self.matrices, self.seconds = run, calls, matrices, []

    @property
    def median(self):
        return statistics.median(self.seconds)

    @property
    def spread(self):
        q1, q3 = np.percentile(self.seconds, [25, 75])
        return (q3 - q1) / 2 / self.median


def measure(arms, rounds):
    """Seconds per call of every arm; one warm-up round, order rotated."""
    names = list(arms)
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            arm = arms[name]
            if arm.matrices == 1:
                arm.run(0)  # back into the cache after the other arms
            start = time.thread_time()
            for call in range(arm.calls):
                arm.run(call % arm.matrices)
            if number:
                arm.seconds.append((time.thread_time() - start) / arm.calls)


def storage_rows(fmt):
    """Storage [ROWS, row_bytes]: quantized Gaussian rows, or random blocks of moderate weights where we only read."""
    rng = np.random.default_rng(0)
    if fmt.max_relative_error is not None:
        x = (0.02 * rng.standard_normal((ROWS, COLS))).astype(np.float32)
        return kernels.Context(tier="scalar").quantize(fmt.name, x)
    blocks = rng.integers(0, 256, (40000, fmt.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        size = np.abs(fmt.dequantize(blocks, fmt.block_len)).max(axis=1)
    blocks = blocks[(size > 1e-4) & (size < 1e3)]
    return blocks[rng.integers(0, len(blocks), (ROWS, COLS // fmt.block_len))].reshape(ROWS, -1)


class Bench:
    """One format on one tier: strips, activations and the arms on them."""

    def __init__(self, name, tier, ggml):
        self.fmt, self.ggml = FORMATS[name], ggml
        self.context = kernels.Context(tier=tier, num_threads=1)
        self.layout = self.context.layout(self.fmt.layout)
        self.storage = np.ascontiguousarray(storage_rows(self.fmt))
        self.strips = self.context.encode(name, self.storage, ROWS, COLS)
        x = np.random.default_rng(1).standard_normal((TILE, COLS)).astype(np.float32)
        self.act_bytes = kernels.lib.moe_activation_bytes(self.layout.activation, COLS)
        self.act = kernels.aligned_empty(self.act_bytes * TILE)
        args = (kernels.address(self.act), self.layout.activation, kernels.address(x, "float *"), TILE, COLS)
        kernels.check(kernels.lib.moe_quantize_activations(self.context.handle, *args), "quantize activations")
        self.y = np.empty((TILE, ROWS), np.float32)
        self.out = ffi.new("float *[]", [kernels.address(row, "float *") for row in self.y])
        self.xs = ffi.new("void *[]", [kernels.address(self.act[t * self.act_bytes :]) for t in range(TILE)])
        self.num_strips = ROWS // self.layout.strip_rows

    def kernel(self, tokens, strips=None):
        """One call on matrix i of `strips` (uint8 [n, bytes])."""
        strips = self.strips[None] if strips is None else strips
        at = [kernels.address(s) for s in strips]
        windows = [(t, min(32, tokens - t)) for t in range(0, tokens, 32)]

        def run(i):
            for t, n in windows:
                call = self.layout.tile if n > 8 and self.layout.tile else self.layout.matmul
                for first in range(t, t + n, n if n > 8 and self.layout.tile else 8):
                    count = n if n > 8 and self.layout.tile else min(8, t + n - first)
                    call(self.out + first, at[i], ROWS, COLS, 0, self.num_strips, self.xs + first, count)

        return Arm(run, calls=2 if tokens > 8 else 8, matrices=len(at))

    def dot(self, library, loop, storage=None):
        storage = self.storage[None] if storage is None else storage
        dot = ctypes.cast(getattr(library, ggml_peer.symbol(self.fmt.name)), ctypes.c_void_p)
        x, y, row_bytes = ggml_peer.activations(self.fmt.name, COLS), np.empty(ROWS, np.float32), self.storage.shape[1]

        def run(i):
            loop(dot, ROWS, COLS, storage[i].ctypes.data, row_bytes, x.ctypes.data, y.ctypes.data)

        return Arm(run, calls=2, matrices=len(storage))

    def codec(self):
        table, out = self.context.format(self.fmt.name), kernels.aligned_empty(self.strips.nbytes)
        args = (kernels.address(out), table, self.layout, kernels.address(self.storage), ROWS, COLS)
        keep = out
        return Arm(lambda i, keep=keep: kernels.lib.moe_encode(self.context.handle, *args), calls=2)


def copies(one, mib):
    """The bytes of one matrix again and again, in memory of their own."""
    count = -(-mib * 2**20 // one.nbytes)
    raw = kernels.aligned_empty(count * one.nbytes).reshape(count, one.nbytes)
    raw[:] = one.reshape(1, -1)
    return raw


def targets_of(name, layout):
    """(ratio to ggml, formats against the best of which it counts in ns per weight) that a format is to reach."""
    kind = layout.split("_")[0]
    if name in NIBBLES:
        return NIBBLE_TARGET, ()
    if name == "iq3_s":
        return IQ3_S_TARGET, ("iq4_xs",)
    if name in GRIDS or name == "e8-iq3":
        return {}, ("iq4_xs",)
    if name in BYTES:
        return BYTE_TARGET, ()
    return OTHER_TARGET, REFERENCES.get(kind, ())


def cache_lines(bench, arms, refs):
    name, lines = bench.fmt.name, []
    ratios, against = targets_of(name, bench.fmt.layout)

    def line(what, value, target, ok, note=""):
        lines.append(dict(format=name, what=what, value=round(value, 3), target=target, reached=ok, note=note))

    for tokens in TOKENS:
        arm = arms[tokens]
        line(f"us, {tokens} tokens", arm.median * 1e6, None, None, f"+-{arm.spread:.1%}")
        line(f"ns/weight, {tokens} tokens", arm.median * 1e9 / ROWS / COLS / tokens, None, None)
        if "ggml" in arms:
            ratio = tokens * arms["ggml"].median / arm.median
            target = ratios.get(tokens)
            line(f"x ggml, {tokens} tokens", ratio, target, target and ratio >= target)
        if against:
            best = min(against, key=lambda other: refs[other][tokens].median)
            ratio = arm.median / refs[best][tokens].median
            line(f"ns/weight / {best}, {tokens} tokens", ratio, 1.15, ratio <= 1.15)
        if name == "hqq5-ax0-g32" and tokens in (1, 3):
            ratio = refs["int8-row"][tokens].median / arm.median
            target = {1: 1.0, 3: 1.2}[tokens]
            line(f"x int8-row, {tokens} tokens", ratio, target, ratio >= target)
        if name in GRIDS and "ggml" in arms and tokens in COMPACT_TARGET:
            ratio = tokens * arms["ggml"].median / (arm.median + arms["codec"].median)
            line(f"x ggml, compact, {tokens} tokens", ratio, COMPACT_TARGET[tokens], ratio >= COMPACT_TARGET[tokens])
    if bench.layout.tile:
        saved = 1 - arms["tile"].median / TILE / (arms[8].median / 8)
        line(f"tile of {TILE}: time saved per token", saved, 0.15, saved >= 0.15, f"+-{arms['tile'].spread:.1%}")
    speed = bench.storage.nbytes / arms["codec"].median / 1e9
    target = 2.0 if name in GRIDS else 4.0 if name in NIBBLES else None
    line("codec, GB/s of storage", speed, target, target and speed >= target)
    if name == "e8-iq3":
        scalar = arms["scalar"].median + arms["scalar codec"].median
        ratio = scalar / (arms[1].median + arms["codec"].median)
        line("x scalar, compact, 1 token", ratio, 15.0, ratio >= 15)
    return lines


def stream_lines(bench, library, loop, args):
    name = bench.fmt.name
    strips = copies(bench.strips, args.stream_mib)
    arms = {tokens: bench.kernel(tokens, strips) for tokens in TOKENS}
    for arm in arms.values():
        arm.calls = len(strips)
    arms |= {"read": Arm(lambda i: loop.read_all(strips.ctypes.data, strips.nbytes), calls=1)}
    if library is not None and name in ggml_peer.PARTNER:
        storage = copies(bench.storage, args.stream_mib // 4)
        arms["ggml"] = bench.dot(library, loop.rows, storage)
        arms["ggml"].calls = len(storage)
    arms["read"].matrices = 2  # nothing to bring back into the cache
    measure(arms, max(3, args.rounds // 4))
    own, read = bench.strips.nbytes / arms[1].median / 1e9, strips.nbytes / arms["read"].median / 1e9
    lines = [
        dict(what=f"memory, us, {t} tokens", value=arms[t].median * 1e6, note=f"+-{arms[t].spread:.1%}") for t in TOKENS
    ]
    lines.append(dict(what="memory, GB/s", value=own, note=f"plain reads {read:.1f}"))
    fast = name in NIBBLES or name in GRIDS
    lines.append(dict(what="memory, share of plain reads", value=own / read, target=0.9 if fast else None))
    if "ggml" in arms:
        target = 2.0 if name in NIBBLES else 4.5 if name in GRIDS else None
        for t in TOKENS:
            value = t * arms["ggml"].median / arms[t].median
            lines.append(dict(what=f"memory, x ggml, {t} tokens", value=value, target=target if t == 1 else None))
    full = []
    for item in lines:
        target = item.setdefault("target", None)
        reached = target and item["value"] >= target
        full.append(dict(format=name, reached=reached, note="") | item | dict(value=round(item["value"], 3)))
    return full


def bench_format(name, library, loop, args):
    bench = Bench(name, args.tier, library)
    arms = {t: bench.kernel(t) for t in TOKENS} | {"tile": bench.kernel(TILE), "codec": bench.codec()}
    if library is not None and name in ggml_peer.PARTNER:
        arms["ggml"] = bench.dot(library, loop.rows)
    if name == "e8-iq3":
        scalar = Bench(name, "scalar", None)
        arms |= {"scalar": scalar.kernel(1), "scalar codec": scalar.codec()}
        arms["scalar"].calls = arms["scalar codec"].calls = 1
    _, against = targets_of(name, bench.fmt.layout)
    wanted = (*against, "int8-row") if name == "hqq5-ax0-g32" else against
    refs = {}
    for other in wanted:
        reference = Bench(other, args.tier, None)
        refs[other] = {t: reference.kernel(t) for t in TOKENS}
    measure(arms | {(o, t): a for o, by in refs.items() for t, a in by.items()}, args.rounds)
    lines = cache_lines(bench, arms, refs)
    return lines + (stream_lines(bench, library, loop, args) if args.stream_mib else [])


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = [name for name in FORMATS if not FORMATS[name].layout.startswith("rows_")]
    p.add_argument("--formats", nargs="*", default=named, choices=named, metavar="NAME")
    p.add_argument("--tier", default="avx2")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--stream-mib", type=int, default=512, help="weights of the streaming arms; 0: leave them out")
    p.add_argument("--ggml-lib", type=Path, help="folder of libggml-cpu.so; default: the installed llama-cpp-python")
    p.add_argument("--ggml-sdist", help="source distribution of the same version, or `download`: dot products for AVX2")
    p.add_argument("--piece", type=piece, metavar="K/N", help="every N-th of the formats, beginning with the K-th")
    p.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="measure nothing: one table of earlier runs")
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    if args.piece:
        first, step = args.piece
        args.formats = args.formats[first - 1 :: step]
    return args


def piece(text):
    first, _, step = text.partition("/")
    if not (first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise argparse.ArgumentTypeError(f"expected K/N with 1 <= K <= N, got {text!r}")
    return int(first), int(step)


COLUMNS = {  # of the merged table: heading -> the lines of a format
    "us 1": "us, 1 tokens", "us 3": "us, 3 tokens", "us 8": "us, 8 tokens",
    "x ggml 1": "x ggml, 1 tokens", "3": "x ggml, 3 tokens", "8": "x ggml, 8 tokens",
    "compact 1": "x ggml, compact, 1 tokens", "3 ": "x ggml, compact, 3 tokens", "8 ": "x ggml, compact, 8 tokens",
    "memory x ggml": "memory, x ggml, 1 tokens", "of plain reads": "memory, share of plain reads",
    "tile saves": f"tile of {TILE}: time saved per token", "codec GB/s": "codec, GB/s of storage",
}  # fmt: skip


def cell(line):
    if line is None:
        return ""
    target = "" if line["target"] is None else f" ({line['target']:g})"
    return f"{line['value']:.3g}{target}{'' if line['reached'] or line['target'] is None else ' !'}"


def merged(files):
    """One table of several runs; in brackets the target, `!` where it is missed. Other misses follow as lines."""
    runs = [json.loads(f.read_text()) for f in files]
    lines = [line for run in runs for line in run["lines"]]
    found = {(line["format"], line["what"]): line for line in lines}
    print(*dict.fromkeys(f"# {text}" for run in runs for text in run["machine"]), sep="\n")
    print("| format |", " | ".join(COLUMNS), "|\n|", " | ".join(["---"] * (len(COLUMNS) + 1)), "|")
    for name in dict.fromkeys(line["format"] for line in lines):
        print(f"| {name} |", " | ".join(cell(found.get((name, what))) for what in COLUMNS.values()), "|")
    for line in lines:
        if line["what"] not in COLUMNS.values() and line["target"] is not None:
            print(f"{line['format']}: {line['what']}: {cell(line)}")
    reached = [bool(line["reached"]) for line in lines if line["target"] is not None]
    print(f"{sum(reached)} of {len(reached)} targets reached")
    return {"machine": [run["machine"] for run in runs], "lines": lines}


def targets_text():
    """The targets of the formats, as lines."""
    kinds = {"iq3_s": IQ3_S_TARGET, ", ".join(NIBBLES): NIBBLE_TARGET, ", ".join(BYTES): BYTE_TARGET,
             "others that ggml has": OTHER_TARGET, "compact, " + ", ".join(GRIDS): COMPACT_TARGET}  # fmt: skip
    for names, by_tokens in kinds.items():
        yield f"target: {names}: " + ", ".join(f"{v:g} x ggml with {t}" for t, v in by_tokens.items()) + " tokens"
    yield "target: from memory 2 x ggml (nibbles), 4.5 x (grids), 0.9 of plain reads; tile 15 %; codecs 4 and 2 GB/s"


def peer(args, folder):
    libraries = args.ggml_lib or ggml_peer.installed_libraries()
    if libraries is None:
        return None, "no ggml: llama-cpp-python (extra `peers`) is not installed and --ggml-lib is not given"
    sdist = args.ggml_sdist
    if sdist == "download":
        sdist = ggml_peer.download_sdist(folder)
    return ggml_peer.load(libraries.resolve(), Path(sdist) if sdist else None, Path("build/peers"))


def main():
    args = parse()
    if args.merge:
        result = merged(args.merge)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        library, how = peer(args, Path(folder))
        loop = ggml_peer.loops(Path(folder))
        head = [
            f"{cpu_model()}, {os.cpu_count()} CPUs, {platform.platform()}, load {os.getloadavg()[0]:.1f}",
            f"{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
            f"one thread, tier {args.tier}, weights [{ROWS}, {COLS}], {args.rounds} rounds; {how}",
            *targets_text(),
        ]
        print(*(f"# {line}" for line in head), sep="\n")
        lines = []
        for name in args.formats:
            for line in bench_format(name, library, loop, args):
                lines.append(line)
                mark = "" if line["target"] is None else "reached" if line["reached"] else "MISSED"
                target = "" if line["target"] is None else f"target {line['target']:g}"
                print(
                    f"{name:14} {line['what']:34} {line['value']:10.3f}  {target:12} {mark:8} {line['note']}",
                    flush=True,
                )
        if args.json:
            args.json.write_text(json.dumps({"machine": head, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
