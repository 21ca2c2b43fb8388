"""Tiny GGUF files in the layout that llama.cpp's converter writes, made with the gguf package (names, writer, codecs).

The weights are those of tiny_models, so the golden files of the Hugging Face checkpoints judge GGUF files too.
"""

import re

import gguf
import numpy as np
import tiny_models
from gguf import GGMLQuantizationType as Type

_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


def olmoe_tensors(weights: dict, config: dict, fused: bool = False) -> dict[str, np.ndarray]:
    """GGUF name -> float32 array; the experts of a layer are stacked. fused: gate and up in one tensor."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.OLMOE, config["num_hidden_layers"])
    stacks: dict[str, list] = {}
    found = {}
    for name, array in weights.items():
        match = _EXPERT.fullmatch(name)
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}", []).append((int(match[2]), array))
        else:
            found[names.get_name(name, (".weight",))] = array
    for name, experts in stacks.items():
        found[names.get_name(name) + ".weight"] = np.stack([array for _, array in sorted(experts, key=lambda x: x[0])])
    if fused:
        for n in range(config["num_hidden_layers"]):
            gate, up = (found.pop(f"blk.{n}.ffn_{part}_exps.weight") for part in ("gate", "up"))
            found[f"blk.{n}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    return found


def add_olmoe_keys(writer, config: dict) -> None:
    """What the converter writes for an OLMoE."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_file_type(0)
    # The converter has no OLMoE to write these for; the keys are those of other architectures.
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["clip_qkv"] is not None:
        writer.add_clamp_kqv(config["clip_qkv"])


def add_tokenizer(writer, pre: str = "olmo") -> None:
    """The tiny byte-level tokenizer, padded to the model's vocabulary as the converter does."""
    tokens = tiny_models._tokens()
    special = {0, tiny_models.PAD_TOKEN_ID, tiny_models.EOS_TOKEN_ID}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges(tiny_models._MERGES.split("|"))
    writer.add_eos_token_id(tiny_models.EOS_TOKEN_ID)
    writer.add_pad_token_id(tiny_models.PAD_TOKEN_ID)
    writer.add_add_bos_token(False)


def write_gguf(path, name_or_config, formats=None, *, seed=None, fused=False, shard_tensors=0, edit=None, pre="olmo"):
    """Write a tiny OLMoE. formats: GGUF name pattern -> ggml Type (default F32; norms and routers stay F32).

    shard_tensors: tensors per file of a split set, 0 = one file. edit(writer): adds or replaces keys.
    Returns {GGUF name: float32 weights as stored}.
    """
    config = tiny_models.hf_config(name_or_config)
    seed = tiny_models.golden_seed(name_or_config) if seed is None else seed
    tensors = olmoe_tensors(tiny_models.make_weights(config, seed), config, fused)
    writer = gguf.GGUFWriter(path, "olmoe", split_max_tensors=shard_tensors)
    add_olmoe_keys(writer, config)
    add_tokenizer(writer, pre)
    if edit:
        edit(writer)
    stored = {}
    for name, array in tensors.items():
        kind = next((kind for pattern, kind in (formats or {}).items() if re.search(pattern, name)), Type.F32)
        if array.ndim == 1 or "ffn_gate_inp" in name:
            kind = Type.F32
        data = np.ascontiguousarray(array, np.float32) if kind == Type.F32 else gguf.quants.quantize(array, kind)
        stored[name] = array if kind == Type.F32 else gguf.quants.dequantize(data, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
