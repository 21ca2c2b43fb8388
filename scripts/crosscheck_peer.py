"""llama.cpp's side of crosscheck_llama_cpp.py: quantized files, greedy tokens, logits.

Runs in an interpreter with llama-cpp-python, one process per call, since it may crash:

    python scripts/crosscheck_peer.py FOLDER CASE PROMPT_TOKENS FORMAT ...
"""

import json
import sys
from pathlib import Path

import numpy as np
from crosscheck_cases import FORMATS, NEED_IMPORTANCE

NUM_GREEDY, SEED = 64, 7


def context_of(prompt: int) -> int:
    """Positions, in both engines; llama.cpp rounds to multiples of 256 itself."""
    return -(-(prompt + NUM_GREEDY) // 256) * 256


def source_of(folder: Path, case: str) -> Path:
    """The converted file, or the first of a split set."""
    parts = sorted(folder.glob(f"{case}-00001-of-*.gguf"))
    return parts[0] if parts else folder / f"{case}.gguf"


def path_of(folder: Path, case: str, kind: str) -> Path:
    return source_of(folder, case) if FORMATS[kind] is None else folder / f"{case}.{kind}.gguf"


def exact_of(path: Path) -> Path:
    """The file with its weights dequantized to float32."""
    return path.with_name(f"{path.stem}.exact.gguf")


def requantize(source: Path, target: Path, kind: str, widths: dict[str, int]) -> None:
    """pure: every matrix in the format asked for, where its rows allow it. MXFP4's own rule is experts only. widths:
    tensor -> inputs (of all experts together), for an importance matrix of ones."""
    import ctypes

    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = FORMATS[kind] or 0, 1, True
    params.pure = kind != "mxfp4"
    if kind in NEED_IMPORTANCE:
        ones = (ctypes.c_float * max(widths.values()))(*[1.0] * max(widths.values()))
        entries = [llama_cpp.llama_model_imatrix_data(name.encode(), ones, width) for name, width in widths.items()]
        params.imatrix = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries)
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise SystemExit("llama.cpp's quantizer refused the file")


def run(path: Path, prompt_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [P + G] and logits [P + G, V]. Repacked weights are switched off: they are for speed, and builds use CPU
    features for them that not every machine has."""
    import llama_cpp

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain():
        params = defaults()
        params.use_extra_bufts = False
        return params

    context = context_of(prompt_tokens)
    llama_cpp.llama_cpp.llama_model_default_params = plain
    try:
        model = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=context, n_ubatch=context, n_threads=1, n_threads_batch=1,
            logits_all=True, flash_attn=False, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
            swa_full=True, verbose=False,
        )  # fmt: skip
    finally:
        llama_cpp.llama_cpp.llama_model_default_params = defaults
    tokens = [int(i) for i in np.random.default_rng(SEED).integers(3, model.n_vocab() - 1, prompt_tokens)]
    model.eval(tokens)
    for _ in range(NUM_GREEDY):
        tokens.append(int(np.argmax(model.scores[len(tokens) - 1])))
        model.eval(tokens[-1:])
    return np.array(tokens, np.int32), np.array(model.scores[: len(tokens)], np.float32)


def main(folder: Path, case: str, prompt_tokens: int, kinds: list[str]) -> None:
    """Write CASE.FORMAT.npz (tokens, logits of all positions), the quantized file it is of, and its exact form."""
    widths = json.loads((folder / f"{case}.widths.json").read_text())
    for kind in kinds:
        source, path = source_of(folder, case), path_of(folder, case, kind)
        if path != source:
            requantize(source, path, kind, widths)
        if kind != "f32":
            requantize(path, exact_of(path), "f32", widths)
        tokens, logits = run(path, prompt_tokens)
        np.savez(folder / f"{case}.{kind}.npz", tokens=tokens, logits=logits)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
