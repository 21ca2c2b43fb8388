"""Perplexity of a model whose experts are hqq5-ax0-g32, beside int8-row and the same bits grouped along the inputs.

Weight error cannot tell the two groupings apart, so they are judged by the model's own predictions of held-out text:

    bf16                  experts as they come
    int8-row              reference
    hqq5-ax0-g32          the format: 32 output rows of one input column share a scale and a zero
    axis 0, weights only  the same weights as float32 experts with float activations
    axis 1, weights only  32 input columns of one row share them instead: same solver, same bits, simulated as float32

The last two differ in nothing but the grouping. Also printed: how long greedy continuations under hqq5-ax0-g32 stay
those of the reference.

    python scripts/compare_hqq.py
    python scripts/compare_hqq.py --hf DIR --texts FILE... --limit-bytes 16384 --json out.json
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from converters.hf import RoleFormats, convert  # noqa: E402
from engine import load  # noqa: E402
from engine import perplexity as ppl  # noqa: E402
from engine.formats import FORMATS  # noqa: E402
from engine.kernels import Context  # noqa: E402
from engine.sampler import SamplingParams  # noqa: E402

NAME = "hqq5-ax0-g32"
REFERENCE = "int8-row"
AXES = {0: "axis 0, weights only", 1: "axis 1, weights only"}
EXPERT = ".mlp.experts."


def regroup(context: Context, w: np.ndarray, axis: int) -> np.ndarray:
    """float32 [rows, cols] quantized and back, groups of 32 along `axis`.

    The solver sees columns of 32 values; for axis 1 these are runs of 32 neighbours of one row.
    """
    x = w if axis == 0 else np.ascontiguousarray(w.reshape(-1, 32).T)
    back = FORMATS[NAME].dequantize(context.quantize(NAME, x), x.shape[1])
    return back if axis == 0 else np.ascontiguousarray(back.T).reshape(w.shape)


def read_tensors(path: Path) -> dict:
    """name -> (dtype, shape, uint8 bytes) of a safetensors file."""
    raw = np.fromfile(path, np.uint8)
    length = int(raw[:8].view("<u8")[0])
    header, data = json.loads(raw[8 : 8 + length].tobytes()), raw[8 + length :]
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}


def write_tensors(path: Path, tensors: dict) -> None:
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            file.write(data.tobytes())


def simulate(context: Context, hf: Path, out: Path, axis: int) -> dict:
    """Copy of a checkpoint with regrouped experts as F32. Returns the weight errors that went in."""
    out.mkdir()
    for path in hf.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, out)
    tensors, squares, total = read_tensors(hf / "model.safetensors"), 0.0, 0.0
    for name, (dtype, shape, data) in tensors.items():
        if EXPERT not in name:
            continue
        if dtype not in ("BF16", "F16", "F32"):
            raise SystemExit(f"{hf}: tensor {name} is {dtype}")
        w = data.view("<f4") if dtype == "F32" else context.to_f32(data.view("<u2"), dtype.lower())
        w = w.reshape(shape)
        got = regroup(context, w, axis)
        squares, total = squares + float(((got - w) ** 2).sum()), total + float((w**2).sum())
        tensors[name] = ("F32", shape, got.reshape(-1).view(np.uint8))
    write_tensors(out / "model.safetensors", tensors)
    return {"relative_rms": math.sqrt(squares / total)}


def measure(model, texts: list[str], ctx: int) -> dict:
    """Perplexity over all texts together, every token scored."""
    nll, tokens, num_bytes = 0.0, 0, 0
    for text in texts:
        ids, _ = ppl.build_sequence(model.tokenizer, text, "all")
        result = ppl.evaluate(model, ids, ppl.plan_windows(len(ids), ctx, None, "all"))
        nll, tokens, num_bytes = (
            nll + result.nll,
            tokens + result.num_scored_tokens,
            num_bytes + result.num_scored_bytes,
        )
    return {"perplexity": math.exp(nll / tokens), "bits_per_byte": nll / math.log(2) / num_bytes, "tokens": tokens}


def continuations(model, texts: list[str], runs: int, length: int) -> list[list[int]]:
    """Greedy token ids after prompts of 32 tokens, spread over the texts."""
    found = []
    for run in range(runs):
        ids = model.tokenizer.encode(texts[run % len(texts)], add_special_tokens=False, parse_special=False)
        start = run // len(texts) * 97 % max(1, len(ids) - 32)
        generation = model.generate(
            ids[start : start + 32], max_tokens=length, sampling=SamplingParams(temperature=0), ignore_eos=True
        )
        for _ in generation:
            pass
        found.append(list(map(int, generation.token_ids)))
    return found


def agreement(got: list[list[int]], want: list[list[int]], length: int) -> dict:
    first = [
        next((i for i, (a, b) in enumerate(zip(g, w, strict=True)) if a != b), None)
        for g, w in zip(got, want, strict=True)
    ]
    return {"runs": len(first), "tokens": length, "diverged_at": [i for i in first if i is not None]}


def describe(greedy: dict) -> str:
    runs, length, at = greedy["runs"], greedy["tokens"], greedy["diverged_at"]
    if not at:
        return f"no divergence in {runs} runs of {length} tokens"
    return f"{len(at)} of {runs} runs of {length} tokens diverge, at token {', '.join(map(str, sorted(at)))}"


def compare(
    hf: Path, texts: list[str], *, ctx: int, runs: int, length: int, threads: int | None = None, only=None
) -> dict:
    """{arm: measurements} plus "greedy". only: names of arms, None for all."""
    context, arms, greedy = Context(num_threads=threads), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in ("bf16", REFERENCE, NAME, *AXES.values()):
            if only is not None and arm not in only:
                continue
            source, experts, extra = hf, arm, {}
            if arm in AXES.values():
                axis = next(axis for axis, name in AXES.items() if name == arm)
                source, experts = Path(folder, f"hf-{axis}"), "f32"
                extra = simulate(context, hf, source, axis)
            out = Path(folder, f"snapshot-{len(arms)}")
            convert(source, out, formats=RoleFormats(experts=experts, dense="bf16"), threads=threads)
            model = load(out, threads=threads)
            arms[arm] = measure(model, texts, ctx) | extra
            if arm in (REFERENCE, NAME) and runs:
                greedy[arm] = continuations(model, texts, runs, length)
    result = {"reference": REFERENCE, "ctx": ctx, "arms": arms}
    if len(greedy) == 2:
        result["greedy"] = agreement(greedy[NAME], greedy[REFERENCE], length)
    return result


def read_texts(paths: list[Path], limit_bytes: int) -> list[str]:
    """The texts, each cut to a limit (0: whole) at a character."""
    return [path.read_bytes()[: limit_bytes or None].decode("utf-8", errors="ignore") for path in paths]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hf", type=Path, default=ROOT / "engine" / "data" / "tiny-moe" / "hf")
    p.add_argument("--texts", type=Path, nargs="*", default=sorted((ROOT / "tests" / "data" / "heldout").glob("*.txt")))
    p.add_argument("--limit-bytes", type=int, default=0, help="of each text; 0: all")
    p.add_argument("--ctx", type=int, default=512)
    p.add_argument("--runs", type=int, default=24, help="greedy continuations")
    p.add_argument("--length", type=int, default=48, help="tokens of each")
    p.add_argument("--threads", type=int)
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    texts = read_texts([t for t in args.texts if not t.name.endswith(".copyright.txt")], args.limit_bytes)
    found = compare(args.hf, texts, ctx=args.ctx, runs=args.runs, length=args.length, threads=args.threads)
    base = found["arms"][found["reference"]]["perplexity"]
    print(f"{'experts':24}{'perplexity':>12}{'ratio':>10}{'bits/byte':>11}{'weight rms':>12}")
    for arm, m in found["arms"].items():
        rms = f"{100 * m['relative_rms']:.3f} %" if "relative_rms" in m else ""
        print(f"{arm:24}{m['perplexity']:12.4f}{m['perplexity'] / base:10.5f}{m['bits_per_byte']:11.4f}{rms:>12}")
    print(f"{found['arms'][NAME]['tokens']} tokens scored, context {args.ctx}; ratio to {found['reference']}")
    if "greedy" in found:
        print(f"greedy, {NAME} against {found['reference']}: {describe(found['greedy'])}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
