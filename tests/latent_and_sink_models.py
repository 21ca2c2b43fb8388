"""Tiny random checkpoints of gpt-oss, DeepSeek and GLM, made from a seed in the published Hugging Face layout.

scripts/make_family_golden.py and the tests build the same bytes, so only small golden results are committed. Names and
shapes of the tensors come from transformers (they are kept in the golden file), not from the code under test.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import tiny_models

GOLDEN_DIR = Path(__file__).parent / "data" / "golden" / "families"
NUM_GREEDY = 80
CONTEXT = 160  # prompt and continuation; longer than every sliding window here

_COMMON = {
    "hidden_size": 64, "num_attention_heads": 4, "vocab_size": tiny_models.TOKENIZER_SIZE, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": tiny_models.EOS_TOKEN_ID,
    "pad_token_id": tiny_models.PAD_TOKEN_ID, "tie_word_embeddings": False,
}  # fmt: skip
_GPT_OSS = _COMMON | {
    "model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4, "num_local_experts": 8,
    "num_experts_per_tok": 3, "intermediate_size": 32, "sliding_window": 24, "swiglu_limit": 2.0,
}  # fmt: skip
_ROUTED = {
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "n_shared_experts": 2, "num_experts_per_tok": 4, "n_routed_experts": 16,
}  # fmt: skip
_LATENT = _COMMON | _ROUTED | {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 40,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
_GLM = _COMMON | _ROUTED | {
    "model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 32, "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
}  # fmt: skip

# "seed" is not a config key: the first seed for which every greedy step has a clear winner.
CONFIGS = {
    "gpt_oss": _GPT_OSS | {"rope_parameters": _YARN | {"rope_theta": 150000.0, "truncate": False}},
    # Rows in MXFP4 as released, layers in another order, no YaRN.
    "gpt_oss_mxfp4": _GPT_OSS | {
        "intermediate_size": 64, "num_hidden_layers": 3, "sliding_window": 17,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "swiglu_limit": 7.0,
    },
    "deepseek_v2_lite": _LATENT | {
        "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "rope_theta": 10000.0,
    },
    "deepseek_v2": _LATENT | {
        "model_type": "deepseek_v2", "q_lora_rank": 48, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 4.0,
        "rope_parameters": _YARN | {"rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": _LATENT | {
        "model_type": "deepseek_v3", "q_lora_rank": 48, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
        "rope_parameters": _YARN | {"rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm4_moe": _GLM | {
        "attention_bias": True, "use_qk_norm": True, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe_groups": _GLM | {
        "attention_bias": False, "use_qk_norm": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
    },
}  # fmt: skip


def make_tensor(name: str, shape, seed: int) -> np.ndarray:
    """float32 values of one tensor, from its name and the seed alone."""
    x = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(tuple(shape)).astype(np.float32)
    last = name.rsplit(".", 1)[-1] if not name.endswith(".weight") else name.rsplit(".", 2)[-2]
    if last.endswith("norm"):
        return np.float32(1) + np.float32(0.2) * x
    if last in ("bias", "sinks") or last.endswith("_bias"):
        return np.float32({"sinks": 1.5, "e_score_correction_bias": 0.3}.get(last, 0.4)) * x
    if last == "embed_tokens":
        return x
    fan_in = shape[-2] if "experts." in name and len(shape) == 3 else shape[-1]  # fused tensors are [E, in, out]
    gain = {"lm_head": 1.0, "router": 3.0, "gate": 3.0, "q_proj": 2.0, "k_proj": 2.0, "q_b_proj": 2.0}.get(last, 1.5)
    return x * np.float32(gain / np.sqrt(fan_in))


def make_weights(shapes: dict, seed: int) -> dict[str, np.ndarray]:
    return {name: make_tensor(name, shape, seed) for name, shape in shapes.items()}


def make_mxfp4(shapes: dict, seed: int) -> dict[str, np.ndarray]:
    """As make_weights, with the fused experts of gpt-oss replaced by random MXFP4 blocks and scales."""
    weights = make_weights({name: shape for name, shape in shapes.items() if not _is_fused(name)}, seed)
    for name, (experts, cols, rows) in ((name, shape) for name, shape in shapes.items() if _is_fused(name)):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        weights[f"{name}_blocks"] = rng.integers(0, 256, (experts, rows, cols // 32, 16), np.uint8)
        weights[f"{name}_scales"] = rng.integers(121, 124, (experts, rows, cols // 32)).astype(np.uint8)
    return weights


def _is_fused(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [E, rows, cols]: two codes per byte, low nibble first, times 2^(scale - 127)."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([table, -table])
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:3], 32)
    values = np.ldexp(table[codes], scales[..., None].astype(np.int32) - 127)
    return values.reshape(*blocks.shape[:2], -1)


def write_hf_dir(folder: Path, config: dict, weights: dict[str, np.ndarray]) -> Path:
    """A Hugging Face directory with tiny_models' tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tiny_models.EOS_TOKEN_ID}))
    (folder / "tokenizer.json").write_text(json.dumps(tiny_models._tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny_models._tokenizer_config_json()))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def golden(name: str) -> dict:
    """Arrays of the golden file; "config", "shapes" and "seed" decoded."""
    with np.load(GOLDEN_DIR / f"{name}.npz") as file:
        found = {key: file[key] for key in file.files}
    return found | json.loads(bytes(found.pop("model")).decode())


def checkpoint(folder: Path, name: str, *, decoded: bool = False) -> Path:
    """The checkpoint that a golden file was made from. decoded: MXFP4 blocks as the fused float32 tensors they mean."""
    file = golden(name)
    config = file["config"]
    if not name.endswith("mxfp4"):
        return write_hf_dir(folder, config, make_weights(file["shapes"], file["seed"]))
    weights = make_mxfp4(file["shapes"], file["seed"])
    if decoded:
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        for name in [name.removesuffix("_blocks") for name in weights if name.endswith("_blocks")]:
            values = mxfp4_values(weights.pop(f"{name}_blocks"), weights.pop(f"{name}_scales"))
            weights[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    return write_hf_dir(folder, config, weights)
