"""Tiny GGUF files of the families in family_models as llama.cpp's converter writes them: the models of golden files.

Names, writer and key spellings are the gguf package's; the rules (stacked experts, permuted q and k rows, a tensor for
llama3 scaling) are the converter's. scripts/crosscheck_llama_cpp.py runs the converter itself.
"""

import re

import gguf
import gguf_models
import latent_and_sink_models as models
import numpy as np

ARCHITECTURES = {
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "mixtral": "llama", "granitemoe": "granitemoe", "llama": "llama",
    "qwen2": "qwen2", "qwen3": "qwen3",
}  # fmt: skip
PERMUTED = ("llama", "granitemoe")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def write_gguf(path, name: str, *, expert_tensors: bool = False, edit=None) -> None:
    """Write the model of a golden file. expert_tensors: one per expert, as the first converters did; edit(writer): adds
    or replaces keys."""
    file = models.golden(name)
    config = file["config"]
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _add_keys(writer, config)
    gguf_models.add_tokenizer(writer)
    if edit:
        edit(writer)
    for tensor, array in _tensors(architecture, config, models.make_weights(file["shapes"], file["seed"])).items():
        found = re.fullmatch(r"(blk\.\d+\.ffn_\w+)_exps\.weight", tensor) if expert_tensors else None
        parts = {f"{found[1]}.{e}.weight": part for e, part in enumerate(array)} if found else {tensor: array}
        for part, values in parts.items():
            writer.add_tensor(part, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_keys(writer, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "logits_scaling" in config:
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _tensors(architecture: str, config: dict, weights: dict) -> dict[str, np.ndarray]:
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    stacks: dict[str, dict[int, np.ndarray]] = {}
    found = {}
    for name, array in weights.items():
        if architecture in PERMUTED and ".q_proj." in name:
            array = _permute(array, config["num_attention_heads"])
        if architecture in PERMUTED and ".k_proj." in name:
            array = _permute(array, config["num_key_value_heads"])
        if match := _EXPERT.fullmatch(name):
            stacks.setdefault(f"blk.{match[1]}.ffn_{_PARTS[match[3]]}_exps.weight", {})[int(match[2])] = array
        elif name.endswith("input_linear.weight"):
            n = name.split(".")[2]
            found[f"blk.{n}.ffn_gate_exps.weight"], found[f"blk.{n}.ffn_up_exps.weight"] = np.split(array, 2, axis=1)
        elif name.endswith("output_linear.weight"):
            found[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = array
        else:
            new = names.get_name(name, (".weight", ".bias"))
            found[new] = array.reshape(-1) if "ffn_gate_inp_shexp" in new else array
    found |= {name: np.stack([array for _, array in sorted(stack.items())]) for name, stack in stacks.items()}
    if config["rope_parameters"]["rope_type"] == "llama3":
        found["rope_freqs.weight"] = _llama3_factors(config)
    return found


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head to neighbours."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _llama3_factors(config: dict) -> np.ndarray:
    """What every frequency is divided by."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    frequencies = rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)
