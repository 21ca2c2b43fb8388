"""Make tests/data/golden/families/*.npz: tiny random models of every family but OLMoE under transformers.

Needs the extra `oracle` (torch, transformers). float32, CPU, one thread, eager attention and experts. A file holds the
config and the names and shapes of the tensors as transformers stores them, the seed, the prompt, the greedy
continuation by cached decoding, and logits of some positions. Refused: a checkpoint of which a key is missing or
left over; cached decoding that differs from a full forward; a greedy step without a clear winner (the next seed).

    python scripts/make_family_golden.py [NAME ...]
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import family_models  # noqa: E402
import latent_and_sink_models as models  # noqa: E402
import tiny_models  # noqa: E402

CONFIGS = models.CONFIGS | family_models.CONFIGS
MIN_MARGIN = 4e-3  # top-1 minus top-2 over the largest logit
MIN_DISTINCT = 25
MAX_CACHE_ERROR = 5e-5
EVERY = 8  # of the decode steps' logits


def prompt_ids() -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(tiny_models._tokenizer_json())).encode(tiny_models.PROMPT).ids


def stored_form(config: dict) -> tuple[dict, dict]:
    """config.json and {name: shape} as transformers writes them."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config["model_type"]
    made = AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(made).save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    return written, shapes


def load(folder: Path, mxfp4: bool):
    import torch
    from transformers import AutoModelForCausalLM

    extra = {}
    if mxfp4:
        from transformers import Mxfp4Config

        extra["quantization_config"] = Mxfp4Config(dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True, **extra,
    )  # fmt: skip
    problems = {key: value for key, value in info.items() if value}
    assert not problems, f"loading reported {problems}"
    return model.float().eval()


def run(model, prompt: list[int]) -> dict:
    """Prefill and cached greedy decoding; logits [P + G - 1, V] checked against one full forward."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        rows = list(model(torch.tensor([prompt]), cache=cache).logits[0])
        greedy = [int(rows[-1].argmax())]
        while len(greedy) < models.NUM_GREEDY:
            rows.append(model(torch.tensor([[greedy[-1]]]), cache=cache).logits[0, -1])
            greedy.append(int(rows[-1].argmax()))
        full = model(torch.tensor([[*prompt, *greedy[:-1]]]), use_cache=False).logits[0].numpy()
    cached = torch.stack(rows).numpy()
    assert np.abs(cached - full).max() <= MAX_CACHE_ERROR * np.abs(full).max(), np.abs(cached - full).max()
    return {"greedy": greedy, "logits": cached}


def margin(logits: np.ndarray) -> float:
    top = np.sort(logits, axis=-1)[:, -2:]
    return float((top[:, 1] - top[:, 0]).min() / np.abs(logits).max())


def make(name: str) -> None:
    config, mxfp4 = CONFIGS[name], name.endswith("mxfp4")
    written, shapes = stored_form(config)
    if mxfp4:
        written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    prompt = prompt_ids()
    for seed in range(1000):
        weights = (models.make_mxfp4 if mxfp4 else models.make_weights)(shapes, seed)
        with tempfile.TemporaryDirectory() as folder:
            model = load(models.write_hf_dir(Path(folder), written, weights), mxfp4)
        try:
            found = run(model, prompt)
        except AssertionError as error:
            print(f"{name}: seed {seed}: cache {error}", flush=True)
            raise
        steps = found["logits"][len(prompt) - 1 :]
        good = margin(steps) >= MIN_MARGIN and len(set(found["greedy"])) >= MIN_DISTINCT
        if good and tiny_models.EOS_TOKEN_ID not in found["greedy"]:
            break
    else:
        raise SystemExit(f"{name}: no seed with clear winners; change the configuration")
    if mxfp4:  # transformers' own decoding of the blocks, against ours for the tests
        for key, value in weights.items():
            if key.endswith("_blocks"):
                ours = models.mxfp4_values(value, weights[key.replace("_blocks", "_scales")]).swapaxes(1, 2)
                loaded = model.get_parameter(key.removesuffix("_blocks")).detach().numpy()
                assert np.array_equal(ours, loaded), f"{key}: decoded differently"
    keep = sorted({0, 1, len(prompt) - 1, *range(len(prompt), len(found["logits"]), EVERY), len(found["logits"]) - 1})
    model_json = json.dumps({"config": written, "shapes": shapes, "seed": seed}, sort_keys=True)
    models.GOLDEN_DIR.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        models.GOLDEN_DIR / f"{name}.npz", model=np.frombuffer(model_json.encode(), np.uint8),
        prompt_ids=np.array(prompt, np.int32), greedy_ids=np.array(found["greedy"], np.int32),
        positions=np.array(keep, np.int32), logits=found["logits"][keep],
    )  # fmt: skip
    size = (models.GOLDEN_DIR / f"{name}.npz").stat().st_size
    print(
        f"{name}: seed {seed}, margin {margin(steps):.4f}, {len(set(found['greedy']))} tokens, {size} bytes", flush=True
    )


if __name__ == "__main__":
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for chosen in sys.argv[1:] or CONFIGS:
        make(chosen)
