"""Tiny GGUF files of gpt-oss, DeepSeek and GLM as llama.cpp's converter writes them: the models of the golden files.

Names, writer and key spellings are the gguf package's; the rules (stacked experts, kv_b split and turned, MXFP4 blocks
re-packed, MTP layers behind the others) are the converter's. scripts/crosscheck_llama_cpp.py runs the converter itself.
"""

import re

import gguf
import latent_and_sink_models as models
import numpy as np
from gguf import GGMLQuantizationType as Type

ARCHITECTURES = {"gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe": "glm4moe"}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight")


def write_gguf(path, name: str, *, fused_kv_b: bool = False, fused_experts: bool = False, edit=None, more=None) -> None:
    """Write the model of a golden file. fused_kv_b: as older converters; fused_experts: gate and up in one tensor, as
    newer ones may; edit(writer): adds or replaces keys. more: tensors of the checkpoint besides, and
    tensors by their names in the file."""
    file = models.golden(name)
    config = file["config"]
    kind = config["model_type"]
    mxfp4 = name.endswith("mxfp4")
    weights = (models.make_mxfp4 if mxfp4 else models.make_weights)(file["shapes"], file["seed"])
    writer = gguf.GGUFWriter(path, ARCHITECTURES[kind])
    _common_keys(writer, config)
    {"gpt_oss": _gpt_oss_keys, "glm4_moe": _glm_keys}.get(kind, _deepseek_keys)(writer, config, fused_kv_b)
    if edit:
        edit(writer)
    more = more or {}
    weights |= {name: array for name, array in more.items() if name.startswith("model.")}
    tensors = _renamed(kind, config, weights, fused_kv_b)
    tensors |= {name: array for name, array in more.items() if name.startswith("blk.")}
    if fused_experts:
        for n in range(config["num_hidden_layers"]):
            for end in ("weight", "bias"):
                parts = [tensors.pop(f"blk.{n}.ffn_{part}_exps.{end}", None) for part in ("gate", "up")]
                if parts[0] is not None:
                    tensors[f"blk.{n}.ffn_gate_up_exps.{end}"] = np.concatenate(parts, axis=1)
    for tensor, array in tensors.items():
        if array.dtype == np.uint8:
            writer.add_tensor(tensor, array, raw_dtype=Type.MXFP4)
        else:
            writer.add_tensor(tensor, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _common_keys(writer, config: dict) -> None:
    import gguf_models

    rope = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(float(rope["beta_fast"]))
        writer.add_rope_scaling_yarn_beta_slow(float(rope["beta_slow"]))
    gguf_models.add_tokenizer(writer)


def _gpt_oss_keys(writer, config: dict, _fused) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])


def _routed_keys(writer, config: dict) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)


def _deepseek_keys(writer, config: dict, fused_kv_b: bool) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count_kv(config["num_attention_heads"] if fused_kv_b else 1)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(key if fused_kv_b else rank + rotated)
    writer.add_value_length(value if fused_kv_b else rank)
    if not fused_kv_b:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rotated)
    if (mscale := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    _routed_keys(writer, config)


def _glm_keys(writer, config: dict, _fused) -> None:
    writer.add_block_count(config["num_hidden_layers"] + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"] // 2)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    _routed_keys(writer, config)


def _renamed(kind: str, config: dict, weights: dict, fused_kv_b: bool) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, _ARCH_ENUM[kind]), config["num_hidden_layers"] + 1)
    found, stacks = {}, {}
    for name, array in sorted(weights.items()):
        expert = _EXPERT.fullmatch(name)
        if expert:
            stacks.setdefault(f"blk.{expert[1]}.ffn_{expert[3]}_exps.weight", {})[int(expert[2])] = array
        elif ".mlp.experts." in name:
            found |= _fused_experts(name, weights)
        elif name.endswith("kv_b_proj.weight") and not fused_kv_b:
            layer, heads = name.split(".")[2], config["num_attention_heads"]
            k, v = np.split(array.reshape(heads, -1, config["kv_lora_rank"]), [config["qk_nope_head_dim"]], axis=1)
            found[f"blk.{layer}.attn_k_b.weight"], found[f"blk.{layer}.attn_v_b.weight"] = k.swapaxes(1, 2), v
        elif name.endswith("e_score_correction_bias"):
            found[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = array
        else:
            known = f"{name}.weight" if name.endswith("sinks") else name
            found[names.get_name(known, (".weight", ".bias"))] = array
    if kind == "glm4_moe":
        found.setdefault(f"blk.{config['num_hidden_layers']}.nextn.eh_proj.weight", np.ones((64, 128), np.float32))
        found.setdefault(f"blk.{config['num_hidden_layers']}.attn_norm.weight", np.ones(64, np.float32))
    return found | {name: np.stack([by_id[e] for e in sorted(by_id)]) for name, by_id in stacks.items()}


_ARCH_ENUM = {"gpt_oss": "GPT_OSS", "deepseek_v2": "DEEPSEEK2", "deepseek_v3": "DEEPSEEK2", "glm4_moe": "GLM4_MOE"}


def _fused_experts(name: str, weights: dict) -> dict[str, np.ndarray]:
    """Gate and up rows taken apart; 16-bit tensors turned, MXFP4 blocks packed as GGUF wants them."""
    blk, part = f"blk.{name.split('.')[2]}.ffn", "gate_up" if "gate_up" in name else "down"
    if name.endswith("_scales"):
        return {}
    if name.endswith("_blocks"):
        rows, end = _packed(weights[name], weights[name.replace("_blocks", "_scales")]), "weight"
    elif name.endswith("_bias"):
        rows, end = weights[name], "bias"
    else:
        rows, end = weights[name].swapaxes(1, 2), "weight"
    if part == "down":
        return {f"{blk}_down_exps.{end}": rows}
    return {f"{blk}_gate_exps.{end}": rows[:, 0::2], f"{blk}_up_exps.{end}": rows[:, 1::2]}


def _packed(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    out = np.empty((*blocks.shape[:3], 17), np.uint8)
    out[..., 0] = scales
    for i in range(16):  # element i low, i + 16 high; the checkpoint has 2i low, 2i + 1 high
        low = blocks[..., i // 2] >> 4 * (i % 2) & 15
        high = blocks[..., 8 + i // 2] >> 4 * (i % 2) & 15
        out[..., 1 + i] = low | high << 4
    return out.reshape(*blocks.shape[:2], -1)
