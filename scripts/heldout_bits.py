"""Bits per byte of the bundled model's snapshot on the held-out texts, beside xz: figures the tests hold it to.

Owns tests/data/heldout/snapshot_bits_per_byte.json. "full" is measured like bits_per_byte.json (same windows), with the
default snapshot and with float32 weights; "part" is the beginning of each text, short enough for a test.

    python scripts/heldout_bits.py --json tests/data/heldout/snapshot_bits_per_byte.json
"""

import argparse
import json
import lzma
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

HELDOUT = ROOT / "tests" / "data" / "heldout"
DOMAINS = ("kjv", "rst", "man", "jargon")
FULL = {"context": 2048, "stride": 1024}
PART = {"context": 1024, "stride": 512, "bytes": 40_000}


def xz_bits_per_byte(data: bytes) -> float:
    """Of `xz -9e`, container included, on exactly these bytes."""
    return 8 * len(lzma.compress(data, lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def first_lines(data: bytes, num_bytes: int) -> bytes:
    """Whole lines from the beginning, at most num_bytes: a cut elsewhere could split a character."""
    return data[: data.rindex(b"\n", 0, num_bytes) + 1]


def model_bits_per_byte(engine, data: bytes, context: int, stride: int) -> float:
    """Every byte scored once. Raises ValueError when the scored bytes are not the text's."""
    from engine import perplexity

    ids, _ = perplexity.build_sequence(engine.tokenizer, data.decode(), "all")
    windows = perplexity.plan_windows(len(ids), context, stride, "all")
    result = perplexity.evaluate(engine, ids, windows)
    if result.num_scored_bytes != len(data):
        raise ValueError(f"{result.num_scored_bytes} bytes were scored, the text has {len(data)}")
    return result.bits_per_byte


def measure_part(engine, heldout: Path = HELDOUT) -> dict:
    """domain -> bytes and bits per byte of the beginning of each text."""
    found = {}
    for domain in DOMAINS:
        data = first_lines((heldout / f"{domain}.txt").read_bytes(), PART["bytes"])
        bits = model_bits_per_byte(engine, data, PART["context"], PART["stride"])
        found[domain] = {"bytes": len(data), "xz": xz_bits_per_byte(data), "snapshot": bits}
    return found


def measure_full(snapshot, f32, heldout: Path = HELDOUT) -> dict:
    """domain -> bytes and bits per byte of each whole text; prints one line per domain."""
    print(f"{'text':8} {'bytes':>8} {'xz -9e':>8} {'snapshot':>9} {'f32':>8} {'saving':>7}")
    found = {}
    for domain in DOMAINS:
        data = (heldout / f"{domain}.txt").read_bytes()
        xz = xz_bits_per_byte(data)
        bits, bits_f32 = (model_bits_per_byte(engine, data, **FULL) for engine in (snapshot, f32))
        saving = 1 - bits / xz
        print(f"{domain:8} {len(data):8,} {xz:8.4f} {bits:9.4f} {bits_f32:8.4f} {saving:7.1%}", flush=True)
        found[domain] = {"bytes": len(data), "xz": xz, "snapshot": bits, "f32": bits_f32, "saving": saving}
    return found


def rounded(table: dict) -> dict:
    return {
        domain: {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}
        for domain, row in table.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf", type=Path, default=ROOT / "engine/data/tiny-moe/hf", help="source of the f32 weights")
    parser.add_argument("--model", type=Path, help="snapshot (default: the one that ships)")
    parser.add_argument("--heldout", type=Path, default=HELDOUT, help="directory of the texts")
    parser.add_argument("--threads", type=int, help="changes the time, not the figures")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    import engine
    from converters.hf import RoleFormats, convert

    with tempfile.TemporaryDirectory() as folder:
        convert(args.hf, Path(folder) / "f32", formats=RoleFormats(experts="f32", dense="f32"), threads=args.threads)
        f32 = engine.load(Path(folder) / "f32", threads=args.threads)
        snapshot = engine.load(args.model, threads=args.threads)
        full = measure_full(snapshot, f32, args.heldout)
    settings = {
        "full": FULL, "part": PART, "formats": snapshot.files.header.formats, "kv": snapshot.options.kv,
        "unit": "bits per byte", "xz": "container of preset 9 | extreme on the same bytes",
    }  # fmt: skip
    if args.json:
        content = {"settings": settings, "full": rounded(full), "part": rounded(measure_part(snapshot, args.heldout))}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
