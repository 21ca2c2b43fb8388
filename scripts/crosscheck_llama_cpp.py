"""Compare millstream with llama.cpp on small random GGUF files of every family that both run.

A case is a checkpoint with random weights, turned into GGUF by llama.cpp's own converter and quantized by its own
quantizer, so names, permutations, fused experts and split tensors are exactly those of published files. Both engines
read that file. llama.cpp decodes greedily; millstream is fed the same tokens, once in blocks and once one by one.

What must hold, per file:

- float32: the same token at every greedy position, and logits within 2e-4 of the largest logit. Both compute the same
  sums in another order.
- quantized: both engines round activations to 8 bits, by different rules (scales in float16 or float32, over 32 or 256
  values), so neither is exact and their logits differ by more than rounding; a router may even send a token to other
  experts. Each is compared with the exact run of that file: its weights dequantized to float32 and run by millstream.
  millstream's distance must be at most 1.25 times llama.cpp's. A distance is the median over the positions of the
  largest logit difference. The factor was chosen after the first results were seen; it guards against getting worse.
  Formats whose scales span 256 values meet activations that both engines round alike: in models of up to 8 layers
  logits must be equal like float32's at some positions at least. They are until a value lies so close to the middle
  between two integers that the last bit decides; from there on the context differs.
- always: millstream's logits of the blocks are bit for bit those of single tokens.

Three interpreters may be needed, since the packages are large: this one (extras of the tests), one with torch and
transformers (extra `oracle`), one with llama-cpp-python (extra `peers`). The converter is in the source archive:

    pip download --no-binary :all: --no-deps --no-build-isolation llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    python scripts/crosscheck_llama_cpp.py --converter llama_cpp_python-*/vendor/llama.cpp \\
        [--oracle-python PYTHON] [--peer-python PYTHON] [--out FILE.json] [--markdown] [CASE ...]

Exit code 1 when something that must hold does not.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from crosscheck_cases import DEVIATIONS, SUPER_BLOCKS, UNSUPPORTED, VARIANTS, Case, cases  # noqa: E402
from crosscheck_peer import NUM_GREEDY, context_of, exact_of, path_of, source_of  # noqa: E402
from run_facts import facts_text, require_writable, run_facts, write_json  # noqa: E402

MAX_ERROR = 2e-4  # float32: another order of additions
MAX_LAYERS_ALIKE = 8  # with more, a rounding that the last bit decides is met at every position
MAX_RATIO = 1.25  # quantized: distance to the exact run, ours over llama.cpp's


def check(name: str, case: Case, kind: str, folder: Path, failure: str | None) -> dict:
    """Result of one file. failure: what llama.cpp's process said, when it made no logits."""
    from engine.errors import EngineError

    result = {"case": name, "family": case.family, "format": kind, "ok": False}
    logits_file = folder / f"{name}.{kind}.npz"
    if not logits_file.is_file():
        return result | {"error": f"llama.cpp: {failure}"}
    path = path_of(folder, name, kind)
    with np.load(logits_file) as file:
        tokens, peer_logits = file["tokens"], file["logits"]
    try:
        ours, stepwise, formats = run_ours(path, tokens, case.prompt)
        exact = run_ours(exact_of(path), tokens, case.prompt)[0] if exact_of(path).is_file() else ours
    except EngineError as error:
        return result | {"error": f"millstream: {error}"}
    picks = (ours.argmax(axis=1) == peer_logits.argmax(axis=1))[case.prompt - 1 : -1]
    result |= {
        "tensors": formats, "layers": case.config["num_hidden_layers"], "prompt": case.prompt, "tokens": NUM_GREEDY,
        "equal_tokens": int(picks.sum()), "blocks_equal_steps": np.array_equal(ours, stepwise),
    }  # fmt: skip
    return result | judge(ours, peer_logits, exact, result)


def judge(ours: np.ndarray, peer: np.ndarray, exact: np.ndarray, result: dict) -> dict:
    """Distances and the verdict. Written so that a logit that is no number fails."""
    apart, formats = distances(ours, peer), set(result["tensors"])
    equal = {"equal_positions": int((apart <= MAX_ERROR).sum())}
    if formats <= {"f32"}:
        error = float(apart.max())
        fits = error <= MAX_ERROR and result["equal_tokens"] == result["tokens"]
        return equal | {"difference": error, "bound": MAX_ERROR, "ok": fits and result["blocks_equal_steps"]}
    error, peer_error = (float(np.median(distances(x, exact))) for x in (ours, peer))
    alike = formats <= SUPER_BLOCKS and result["layers"] <= MAX_LAYERS_ALIKE
    fits = error <= MAX_RATIO * peer_error and (equal["equal_positions"] > 0 or not alike)
    return equal | {
        "difference": float(np.median(apart)), "error_to_exact": error, "peer_error_to_exact": peer_error,
        "bound": MAX_RATIO * peer_error, "ok": fits and result["blocks_equal_steps"],
    }  # fmt: skip


def run_ours(path: Path, tokens: np.ndarray, prompt: int) -> tuple[np.ndarray, np.ndarray, dict]:
    """Logits [T, V] of the tokens in blocks, and one by one; format -> number of matrices."""
    import engine

    loaded = engine.load(path, kv="f32", ctx=context_of(prompt), threads=1)

    def run(size: int) -> np.ndarray:
        kv, starts = loaded.new_kv(), range(0, len(tokens), size)
        return np.concatenate([loaded.model.forward(tokens[i : i + size], kv, i, logits="all").copy() for i in starts])

    formats = Counter(r.format for r in loaded.files.tensors.values() if len(r.shape) > 1 and r.role != "router")
    return run(loaded.model.max_tokens), run(1), dict(formats)


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Per position, the largest difference over the largest logit of all."""
    return np.abs(a.astype(np.float64) - b).max(axis=1) / np.abs(b).max()


def run_case(name: str, case: Case, folder: Path, args) -> list[dict]:
    """Results of all formats of a converted case; its files are removed unless --folder keeps them."""
    failure = None if source_of(folder, name).is_file() else "not converted"
    if (folder / f"{name}.error").is_file():
        failure = (folder / f"{name}.error").read_text().splitlines()[0]
    peer = (args.peer_python, SCRIPTS / "crosscheck_peer.py", folder, name, case.prompt)
    failures = dict.fromkeys(case.formats, failure)
    if failure is None:
        write_widths(folder, name)
        stage(*peer, *case.formats)
        for kind in case.formats:  # after a crash: one by one
            if not (folder / f"{name}.{kind}.npz").is_file():
                failures[kind] = stage(*peer, kind)
    results = [check(name, case, kind, folder, failures[kind]) for kind in case.formats]
    for path in folder.glob(f"{name}[.-]*") if args.folder is None else ():
        path.unlink()
    return results


def write_widths(folder: Path, name: str) -> None:
    """NAME.widths.json for crosscheck_peer.py: tensor -> its inputs, those of all experts together."""
    import gguf

    parts = [folder / f"{name}.gguf", *folder.glob(f"{name}-0*.gguf")]
    tensors = [t for path in parts if path.is_file() for t in gguf.GGUFReader(path).tensors]
    widths = {t.name: int(t.shape[0]) * (int(t.shape[2]) if len(t.shape) > 2 else 1) for t in tensors}
    (folder / f"{name}.widths.json").write_text(json.dumps(widths))


def stage(python: str, *arguments) -> str | None:
    """Run a part in another interpreter; returns the last line of what it said when it failed."""
    done = subprocess.run([python, *map(str, arguments)], capture_output=True, text=True)
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines()
    return f"exit code {done.returncode}" + (f", {lines[-1]}" if lines else "")


def peer_version(python: str) -> str:
    done = subprocess.run(
        [python, "-c", "import llama_cpp; print(llama_cpp.__version__)"], capture_output=True, text=True
    )
    return done.stdout.strip() or "not installed"


# ---- report ----


def row(r: dict) -> list[str]:
    """The cells of HEAD."""
    if "error" in r:
        return [r["case"], r["format"], *[""] * 6, f"FAILED: {r['error'][:200]}"]
    positions = f"{r['equal_positions']}/{r['prompt'] + r['tokens']}"
    cells = [r["case"], r["format"], f"{r['equal_tokens']}/{r['tokens']}", positions, f"{r['difference']:.1e}"]
    if "error_to_exact" in r:
        ratio = r["error_to_exact"] / (r["peer_error_to_exact"] or float("nan"))
        cells += [f"{r['error_to_exact']:.1e}", f"{r['peer_error_to_exact']:.1e}", f"{ratio:.2f} (<= {MAX_RATIO})"]
    else:
        cells += ["", "", f"<= {r['bound']:.0e}"]
    return [*cells, "ok" if r["ok"] else "FAILED" if r["blocks_equal_steps"] else "FAILED: blocks differ from steps"]


HEAD = ["case", "format", "tokens", "positions", "difference", "ours to exact", "llama.cpp's", "bound", "result"]


def report(results: list[dict]) -> None:
    rows = [HEAD, *map(row, results)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(HEAD) - 1)]
    for cells in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(cells, [*widths, 0], strict=True)))
    print(f"\n{sum(r['ok'] for r in results)} of {len(results)} files ok")
    for name, reason in UNSUPPORTED.items():
        print(f"{name}: not in llama.cpp: {reason}")
    for name, d in DEVIATIONS.items():
        print(f"{name}: {d['rule']} Truth: {d['truth']}. Compared: {d['compared']}.")


def markdown(results: list[dict]) -> str:
    """A row per case that runs in several formats: float32's difference, then ratios of distances to the exact run."""
    found = {(r["case"], r["format"]): r for r in results}
    names = [name for name in dict.fromkeys(r["case"] for r in results) if (name, "q8_0") in found]
    kinds = [kind for kind in dict.fromkeys(r["format"] for r in results if r["case"] in names)
             if sum((name, kind) in found for name in names) > 1]  # fmt: skip
    lines = ["| case | " + " | ".join(kinds) + " |", "| --- " * (len(kinds) + 1) + "|"]
    for name in names:
        cells = [_cell(found[name, kind]) if (name, kind) in found else "" for kind in kinds]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(r: dict) -> str:
    if "error" in r:
        return "FAILED"
    text = f"{r['equal_tokens']}, "
    if "error_to_exact" in r:
        text += f"{r['error_to_exact'] / r['peer_error_to_exact']:.2f}"
    else:
        text += f"{r['difference']:.0e}"
    return text if r["ok"] else f"{text} FAILED"


def families_without_check(results: list[dict]) -> list[str]:
    """Families of the engine that no case here proves: unproven for GGUF."""
    from engine.models import family, known

    def file_of(name: str) -> str:
        return family(name).__name__.rsplit(".", 1)[-1]

    proven = {file_of(r["family"]) for r in results if r["ok"] and r["format"] == "f32"}
    return sorted({file_of(name) for name in known()} - proven)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--converter", required=True, help="vendor/llama.cpp of llama-cpp-python's source archive")
    parser.add_argument("--oracle-python", default=sys.executable, help="interpreter with torch and transformers")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with llama-cpp-python")
    parser.add_argument("--out", metavar="FILE.json", help="write the results here")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation too")
    parser.add_argument("--folder", help="keep the files here")
    args = parser.parse_args()
    if args.out:
        require_writable(args.out)
    known, facts = cases(), run_facts() | {"llama-cpp-python": peer_version(args.peer_python)}
    names = args.names or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    results = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(args.folder or made)
        folder.mkdir(parents=True, exist_ok=True)
        convert = (args.oracle_python, SCRIPTS / "crosscheck_convert.py", args.converter, folder)
        if failure := stage(*convert, *names):
            print(f"conversion: {failure}", file=sys.stderr)
        for i, name in enumerate(names):
            results += run_case(name, known[name], folder, args)
            bad = sum(not r["ok"] for r in results)
            print(f"{i + 1}/{len(names)} {name}: done, {bad} files failed so far", file=sys.stderr, flush=True)
    print(facts_text(facts))
    report(results)
    if args.markdown:
        print(markdown(results))
    missing = families_without_check(results)
    print(f"families without a passing float32 case (unproven for GGUF): {', '.join(missing) or 'none'}")
    if args.out:
        content = {"facts": facts, "results": results, "unproven_families": missing, "unsupported": UNSUPPORTED,
                   "deviations": DEVIATIONS, "variants": list(VARIANTS)}  # fmt: skip
        write_json(args.out, content)
    return 0 if all(r["ok"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
