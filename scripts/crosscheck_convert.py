"""Checkpoints with random weights, made into GGUF by llama.cpp's converter: a stage of crosscheck_llama_cpp.py.

Runs in an interpreter with torch and transformers:

    python scripts/crosscheck_convert.py CONVERTER FOLDER CASE ...
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]
SEED = 7


def convert(case, path: Path) -> None:
    """Write path (float32 weights, or MXFP4 blocks where the case says so)."""
    import gguf
    import latent_and_sink_models as models
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from conversion.base import TextModel
    from make_family_golden import stored_form

    # Its list of known tokenizers has no made-up one; ids are compared here, not texts.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    config, shapes = stored_form(case.config)
    if case.blocks:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    weights = (models.make_mxfp4 if case.blocks else models.make_weights)(shapes, SEED)
    calm(weights, config["num_hidden_layers"])
    checkpoint = models.write_hf_dir(path.with_suffix(".hf"), config, weights)
    try:
        with torch.inference_mode():
            hparams = ModelBase.load_hparams(checkpoint, False)
            kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
            kind.set_vocab = TextModel._set_vocab_gpt2
            kind(checkpoint, gguf.LlamaFileType.ALL_F32, path, **dict(case.options)).write()
    finally:
        shutil.rmtree(checkpoint)


def calm(weights: dict, num_layers: int) -> None:
    """In deep models, what a layer adds to the residual stream is scaled by (2 layers)^-1/2, as in initialised ones:
    with the gains of the shallow cases rounding grows from layer to layer until nothing can be compared."""
    if num_layers > 8:
        for name, values in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                values *= values.dtype.type((2 * num_layers) ** -0.5)


def main(converter: str, folder: str, names: list[str]) -> None:
    sys.path[:0] = [converter, f"{converter}/gguf-py"]
    from crosscheck_cases import cases

    known = cases()
    for name in names:
        try:
            convert(known[name], Path(folder, f"{name}.gguf"))
        except Exception as error:  # whatever it is: the result of this case
            Path(folder, f"{name}.error").write_text(f"converter: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
