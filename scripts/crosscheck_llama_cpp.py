"""Compare millstream with llama.cpp on small random GGUF files of every family that both run.

A case is a checkpoint with random weights, turned into GGUF by llama.cpp's own converter and requantized by its own
quantizer, so names, permutations, fused experts and split tensors are exactly those of published files. Both engines
then read that file. llama.cpp decodes greedily; millstream is fed the same tokens, once as a block and once token by
token. Reported per file: the difference of the logits over the largest logit, and at how many positions both pick the
same token. float32 weights: the difference is the largest one, and must be rounding. Quantized weights: both engines
round activations to 8 bits, by different rules, which now and then sends a token to another expert; so the figure is
the median over the positions, both engines are compared with the float32 run of the dequantized file, and millstream
must not be further from it than llama.cpp is.

Three interpreters may be needed, since the packages are large: this one (extras of the tests), one with torch and
transformers (extra `oracle`), one with llama-cpp-python (extra `peers`). The converter is in the source archive:

    pip download --no-binary :all: --no-deps --no-build-isolation llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    python scripts/crosscheck_llama_cpp.py --converter llama_cpp_python-*/vendor/llama.cpp \\
        [--oracle-python PYTHON] [--peer-python PYTHON] [--json OUT] [CASE ...]
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

NUM_GREEDY, CONTEXT, SEED = 64, 256, 7
FORMATS = {"f32": None, "q8_0": 7, "q4_0": 2}  # llama.cpp's numbers of whole-file formats
MAX_ERROR = 2e-4  # float32: another order of additions
# Quantized: distance to the float32 run, ours over llama.cpp's (its scales of activations are float16).
MAX_RATIO = 1.25
# Rows of 128, so that every format and every kernel of llama.cpp fits.
SIZES = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
SIZES["shared_expert_intermediate_size"] = 128
LATENT_SIZES = {
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip


def cases() -> dict[str, dict]:
    """Case -> config: the golden configurations, wide enough for every format."""
    import family_models
    import latent_and_sink_models
    import tiny_models

    olmoe = {key: value for key, value in tiny_models.hf_config("mha_base").items() if key != "torch_dtype"}
    found = {"olmoe": olmoe}
    found |= {name: dict(config) for name, config in family_models.CONFIGS.items()}
    found |= {name: dict(config) for name, config in latent_and_sink_models.CONFIGS.items() if "mxfp4" not in name}
    for name, reason in UNSUPPORTED.items():
        assert name in found, (name, reason)
        del found[name]
    for name, (changes, _) in DEVIATIONS.items():
        found[name].update(changes)
    for config in found.values():
        config.update({key: size for key, size in SIZES.items() if key in config})
        config.update({key: size for key, size in LATENT_SIZES.items() if config.get(key)})
        if config["model_type"] == "deepseek_v2" and not config["q_lora_rank"]:
            config["num_hidden_layers"] = 27  # llama.cpp knows the variant without q_a by that number
        if config["model_type"] == "deepseek_v3":
            config["scoring_func"] = "sigmoid"  # the converter reads a key that transformers leaves out
        config["vocab_size"] = tiny_models.TOKENIZER_SIZE
    return found


# Configurations that llama.cpp's graph of the architecture does not compute.
UNSUPPORTED = {
    "qwen2_moe_mixed": "layers without experts, renormalised top-k",
    "qwen3_moe_plain": "layers without experts, top-k that is not renormalised",
    "mixtral_window": "the converter records no sliding window",
    "mistral": "the converter records no sliding window",
}
# What a case leaves out because the two differ there on purpose, and why.
DEVIATIONS = {
    "gpt_oss": (
        # A theta for which the borders of the ramp are 0 and (just below) 5, rounded or not.
        {"swiglu_limit": 7.0, "rope_parameters": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 200, "beta_fast": 32.0,
            "beta_slow": 1.0, "rope_theta": math.exp(8 * math.log(200 / (2 * math.pi)) / 5 * (1 + 1e-6)),
            "truncate": False,
        }},
        "files record neither swiglu_limit (llama.cpp: 7) nor that the YaRN ramp has unrounded borders (it rounds)",
    ),
    "deepseek_v2": (
        {"n_group": 1, "topk_group": 1}, "llama.cpp judges groups by their two best experts; DeepSeek-V2 by the best",
    ),
}  # fmt: skip


# ---- in the interpreter with torch: checkpoint and conversion ----


def convert(names: list[str], folder: Path, converter: str) -> None:
    """Write folder/NAME.gguf with float32 weights."""
    sys.path[:0] = [converter, f"{converter}/gguf-py"]
    import gguf
    import latent_and_sink_models as models
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from conversion.base import TextModel
    from make_family_golden import stored_form

    # Its list of known tokenizers has no made-up one; ids are compared here, not texts.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    for name in names:
        config, shapes = stored_form(cases()[name])
        checkpoint = models.write_hf_dir(folder / f"{name}-hf", config, models.make_weights(shapes, SEED))
        with torch.inference_mode():
            hparams = ModelBase.load_hparams(checkpoint, False)
            kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
            kind.set_vocab = TextModel._set_vocab_gpt2
            try:
                kind(checkpoint, gguf.LlamaFileType.ALL_F32, folder / f"{name}.gguf").write()
            except Exception as error:  # whatever it is: the result of this case
                (folder / f"{name}.error").write_text(f"converter: {type(error).__name__}: {error}")


# ---- in the interpreter with llama-cpp-python: quantized files, greedy tokens, logits ----


def peer(case: str, kind: str, folder: Path) -> None:
    """Write NAME-FORMAT.gguf and NAME-FORMAT.npz (tokens, logits of all positions)."""
    import llama_cpp

    source, path = folder / f"{case}.gguf", path_of(case, kind, folder)
    if path != source:
        requantize(llama_cpp, source, path, FORMATS[kind])
        requantize(llama_cpp, path, exact_of(path), 0)
    tokens, logits = run_peer(llama_cpp, path)
    np.savez(folder / f"{case}-{kind}.npz", tokens=tokens, logits=logits)


def requantize(llama_cpp, source: Path, target: Path, number: int) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure, params.allow_requantize = number, 1, True, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise SystemExit("llama.cpp's quantizer refused the file")


def exact_of(path: Path) -> Path:
    """The file with its weights dequantized to float32."""
    return path.with_name(f"{path.stem}-exact.gguf")


def path_of(case: str, kind: str, folder: Path) -> Path:
    return folder / (f"{case}.gguf" if FORMATS[kind] is None else f"{case}-{kind}.gguf")


def run_peer(llama_cpp, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [P + G] and logits [P + G, V]. Repacked weights are switched off: they are for speed, and builds use CPU
    features for them that not every machine has."""
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain():
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = plain
    model = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_batch=CONTEXT, n_threads=1, n_threads_batch=1, logits_all=True, flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, swa_full=True, verbose=False,
    )  # fmt: skip
    tokens = prompt(model.n_vocab())
    model.eval(tokens)
    for _ in range(NUM_GREEDY):
        tokens.append(int(np.argmax(model.scores[len(tokens) - 1])))
        model.eval(tokens[-1:])
    return np.array(tokens, np.int32), np.array(model.scores[: len(tokens)], np.float32)


def prompt(vocab_size: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(SEED).integers(3, vocab_size - 1, 40)]


# ---- here ----


def check(name: str, kind: str, folder: Path, peer_python: str) -> dict:
    """Result of one file."""
    from engine.errors import EngineError

    result = {"case": name, "format": kind, "ok": False}
    if (folder / f"{name}.error").is_file():
        return result | {"error": (folder / f"{name}.error").read_text().splitlines()[0]}
    failure = stage(peer_python, folder, "--stage", "peer", "--converter", "-", name, kind)
    if failure:
        return result | {"error": f"llama.cpp: {failure}"}
    path = path_of(name, kind, folder)
    with np.load(folder / f"{name}-{kind}.npz") as file:
        tokens, peer_logits = file["tokens"], file["logits"]
    try:
        ours, stepwise = run_ours(path, tokens)
        exact = ours if kind == "f32" else run_ours(exact_of(path), tokens)[0]
    except EngineError as error:
        return result | {"error": f"millstream: {error}"}
    start = len(tokens) - NUM_GREEDY - 1
    picks = (ours.argmax(axis=1) == peer_logits.argmax(axis=1))[start:-1]
    result |= {
        "tokens": NUM_GREEDY,
        "equal_tokens": int(picks.sum()),
        "block_equals_steps": np.array_equal(ours, stepwise),
    }
    if kind == "f32":
        error = float(distances(ours, peer_logits).max())
        fits = error <= MAX_ERROR and bool(picks.all())
        return result | {"difference": error, "bound": MAX_ERROR, "ok": fits and result["block_equals_steps"]}
    error, peer_error = (float(np.median(distances(x, exact))) for x in (ours, peer_logits))
    bound = MAX_RATIO * peer_error
    return result | {
        "difference": float(np.median(distances(ours, peer_logits))), "error": None, "error_to_exact": error,
        "peer_error_to_exact": peer_error, "bound": bound, "ok": error <= bound and result["block_equals_steps"],
    }  # fmt: skip


def run_ours(path: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] of the tokens as one block, and one by one."""
    import engine

    loaded = engine.load(path, kv="f32", ctx=CONTEXT, threads=1)
    block = loaded.model.forward(tokens, loaded.new_kv(), 0, logits="all").copy()
    kv = loaded.new_kv()
    steps = [loaded.model.forward(tokens[i : i + 1], kv, i).copy() for i in range(len(tokens))]
    return block, np.concatenate(steps)


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Per position, the largest difference over the largest logit of all."""
    return np.abs(a.astype(np.float64) - b).max(axis=1) / np.abs(b).max()


def report(results: list[dict]) -> None:
    print(f"{'case':18} {'format':6} {'difference':>10} {'equal tokens':>12} {'to exact':>9} {'llama.cpp':>9}  result")
    for r in results:
        if r.get("error"):
            print(f"{r['case']:18} {r['format']:6} {'':43}  FAILED: {r['error'][:200]}")
            continue
        tokens, exact = f"{r['equal_tokens']}/{r['tokens']}", ""
        if "error_to_exact" in r:
            exact = f"{r['error_to_exact']:9.1e} {r['peer_error_to_exact']:9.1e}"
        verdict = "ok" if r["ok"] else "FAILED"
        print(f"{r['case']:18} {r['format']:6} {r['difference']:10.1e} {tokens:>12} {exact:19}  {verdict}")
    for name, reason in UNSUPPORTED.items():
        print(f"{name:18} not in llama.cpp: {reason}")
    for name, (_, reason) in DEVIATIONS.items():
        print(f"{name:18} differs: {reason}")


def stage(python: str, folder: Path, *arguments: str) -> str | None:
    """Run a part of this script in another interpreter, and in a process of its own, since it may crash. Returns the
    last line of what it said when it failed."""
    done = subprocess.run([python, __file__, *arguments, "--folder", str(folder)], capture_output=True, text=True)
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines()
    return f"exit code {done.returncode}" + (f", {lines[-1]}" if lines else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--converter", required=True, help="vendor/llama.cpp of llama-cpp-python's source archive")
    parser.add_argument("--oracle-python", default=sys.executable, help="interpreter with torch and transformers")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with llama-cpp-python")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--folder", help="keep the files here")
    parser.add_argument("--stage", choices=("convert", "peer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage == "convert":
        sys.path.insert(0, str(Path(__file__).parent))
        convert(args.names, Path(args.folder), args.converter)
        return 0
    if args.stage == "peer":
        peer(*args.names, Path(args.folder))
        return 0
    names = args.names or list(cases())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(args.folder or made)
        folder.mkdir(parents=True, exist_ok=True)
        failure = stage(args.oracle_python, folder, "--stage", "convert", "--converter", args.converter, *names)
        if failure:
            raise SystemExit(f"conversion: {failure}")
        results = []
        for name in names:
            results += [check(name, kind, folder, args.peer_python) for kind in FORMATS]
            print(f"{name}: done", file=sys.stderr, flush=True)
    report(results)
    if args.json:
        Path(args.json).write_text(
            json.dumps(
                {
                    "results": results,
                    "unsupported": UNSUPPORTED,
                    "deviations": {n: why for n, (_, why) in DEVIATIONS.items()},
                },
                indent=1,
            )
            + "\n"
        )
    return 0 if all(r["ok"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
