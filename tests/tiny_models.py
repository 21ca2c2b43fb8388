"""Tiny random OLMoE checkpoints in the published Hugging Face layout, made from a seed.

Tests and scripts/make_golden.py build the same bytes from the same (config, seed), so only small golden results are
committed, never weights. Knows file layouts and tensor names; knows nothing of the forward pass. No torch.
Shape letters: V vocab, H hidden, N heads, K kv heads, D head_dim, E experts, I expert width.
"""

import hashlib
import json
import math
import zlib
from pathlib import Path

import numpy as np

# The text every golden file starts from; the golden prompt ids are its encoding with the tiny tokenizer.
PROMPT = "The router picks experts; then 7 more say: no, wait."

_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Merges build on each other, as in a trained tokenizer ("\u0120" is the byte-level spelling of a space).
_MERGES = """
\u0120 t|h e|\u0120t he|i n|e r|\u0120 a|o n|r e|\u0120 s|\u0120 m|o u|\u0120m o|\u0120mo re|e x|p er|ex per|t s
\u0120 exper|\u0120exper ts|c k|i ck|a y|\u0120s ay|n o|\u0120 no|in g|a n|n d|\u0120a nd|T he|t er|s t
""".strip().replace("\n", "|")

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer: byte-level BPE with the pre-tokenizer, normaliser and special-token layout of the published models
# ---------------------------------------------------------------------------------------------------------------------


def _byte_symbols():
    """Return the 256 printable stand-ins of the byte-level alphabet, in byte order.

    Source: GPT-2 bytes_to_unicode: printable Latin-1 stays, every other byte b becomes chr(256 + running count).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def _tokens():
    """Return the tokenizer's tokens in id order: two specials, 256 bytes, the merges, end of text last."""
    merged = [pair.replace(" ", "") for pair in _MERGES.split("|")]
    return ["|||IP_ADDRESS|||", "<|padding|>", *sorted(_byte_symbols()), *merged, "<|endoftext|>"]


TOKENIZER_SIZE = len(_tokens())
PAD_TOKEN_ID = 1
EOS_TOKEN_ID = TOKENIZER_SIZE - 1


def _tokenizer_json():
    tokens = _tokens()
    special_ids = (0, PAD_TOKEN_ID, EOS_TOKEN_ID)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": _MERGES.split("|"),
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in special_ids],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model,
    }


def _tokenizer_config_json():
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": True,
        "eos_token": "<|endoftext|>",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<|padding|>",
        "tokenizer_class": "GPTNeoXTokenizer",
        "unk_token": None,
    }


def _generation_config_json():
    return {"_from_model_config": True, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": PAD_TOKEN_ID, "use_cache": True}


# ---------------------------------------------------------------------------------------------------------------------
# Configurations
# ---------------------------------------------------------------------------------------------------------------------

_BASE = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "clip_qkv": None,
    "eos_token_id": EOS_TOKEN_ID,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "pad_token_id": PAD_TOKEN_ID,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 320,
}

# Overrides of _BASE, one entry per rule that an engine can get wrong. "seed" is not a config key: it is the weight seed
# of the golden files, the first one for which scripts/make_golden.py found every margin comfortable.
CONFIGS = {
    "mha_base": {"seed": 2913},
    "gqa_norm": {
        "seed": 1078,
        "num_key_value_heads": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-06,
    },
    "clip": {"seed": 291, "clip_qkv": 1.0, "vocab_size": 304},
    "rope_params": {"seed": 245, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    "tied": {"seed": 1850, "tie_word_embeddings": True, "rms_norm_eps": 1e-06},
    # Widths, head_dim and counts that are no powers of two; eps so large that a hard-wired 1e-5 shows in the logits.
    "odd": {
        "seed": 1389,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_key_value_heads": 2,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "rms_norm_eps": 0.01,
        "vocab_size": 331,
    },
    # Rows of 256, the block length of the K and IQ formats.
    "wide": {
        "seed": 1821,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
}


def golden_seed(name):
    """Return the weight seed that the golden file of `name` was made from."""
    return CONFIGS[name]["seed"]


def hf_config(name_or_config, dtype="F32"):
    """Return the config.json dictionary of a CONFIGS name or of a dictionary of overrides."""
    overrides = dict(CONFIGS[name_or_config] if isinstance(name_or_config, str) else name_or_config)
    overrides.pop("seed", None)
    config = {**_BASE, **overrides, "torch_dtype": _DTYPE_NAMES[dtype]}
    if "rope_parameters" in overrides:
        # Spelling of newer exports: theta moved into rope_parameters, torch_dtype became dtype.
        del config["rope_theta"], config["rope_scaling"]
        config["dtype"] = config.pop("torch_dtype")
        config["transformers_version"] = "5.0.0"
    return dict(sorted(config.items()))


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


def tensor_shapes(config):
    """Return {checkpoint tensor name: shape} in the module order of the published checkpoints."""
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv_width = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for proj, rows in (("q", hidden), ("k", kv_width), ("v", kv_width), ("o", hidden)):
            shapes[f"{prefix}self_attn.{proj}_proj.weight"] = (rows, hidden)
        shapes[f"{prefix}self_attn.q_norm.weight"] = (hidden,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (kv_width,)
        shapes[f"{prefix}mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            shapes[f"{prefix}mlp.experts.{expert}.gate_proj.weight"] = (width, hidden)
            shapes[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = (width, hidden)
            shapes[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = (hidden, width)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


# Standard deviation of each matrix times sqrt(row length), i.e. the gain on a unit-RMS input. The sublayers outweigh
# the small embedding, so the next token depends on the context and not only on the last token (with tied embeddings a
# large row would elect itself again and again); the router gain keeps its softmax between one-hot and uniform.
_GAINS = {
    "q_proj": 1.0,
    "k_proj": 1.0,
    "v_proj": 1.0,
    "o_proj": 1.5,
    "gate_proj": 1.5,
    "up_proj": 1.5,
    "down_proj": 2.0,
    "gate": 1.5,
    "lm_head": 3.0,
}
_EMBEDDING_STD = 0.3
_NORM_SPREAD = 0.3


def _normal_like(rng, shape):
    """Return unit-variance, bell-shaped values: a sum of four uniforms.

    Only exact arithmetic on the raw random stream, so that every platform and libm gives the same bits.
    """
    u = rng.random((4, *shape))
    return ((u[0] + u[1]) + (u[2] + u[3]) - 2.0) * math.sqrt(3.0)


def _make_tensor(name, shape, seed):
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = _normal_like(rng, shape)
    if len(shape) == 1:
        return (1.0 + _NORM_SPREAD * values).astype(np.float32)
    if name == "model.embed_tokens.weight":
        return (_EMBEDDING_STD * values).astype(np.float32)
    return (_GAINS[name.split(".")[-2]] / math.sqrt(shape[-1]) * values).astype(np.float32)


def make_weights(config, seed, dtype="F32"):
    """Return {tensor name: float32 array} holding exactly the values that a directory of this dtype stores."""
    return {name: _round(_make_tensor(name, shape, seed), dtype) for name, shape in tensor_shapes(config).items()}


def weights_sha256(weights):
    """Return the digest that golden files record, so that a changed generator is told from a wrong forward pass."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(weights[name], "<f4").tobytes())
    return digest.hexdigest()


def _bf16_bits(values):
    """Return bfloat16 bit patterns (uint16), rounded to nearest even; finite input only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _round(values, dtype):
    if dtype == "BF16":
        return (_bf16_bits(values).astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float16).astype(np.float32) if dtype == "F16" else values


def _stored_bytes(values, dtype):
    if dtype == "BF16":
        return _bf16_bits(values).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def write_safetensors(path, tensors, dtype="F32"):
    """Write one safetensors file: u64 header length, JSON header padded to 8 bytes, tensor bytes back to back.

    Written by hand because numpy has no bfloat16. Source: safetensors format description.
    """
    header, blobs, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name in sorted(tensors):
        blob = _stored_bytes(tensors[name], dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    return offset


def _split(weights, shards):
    """Cut the tensors, in module order, into `shards` runs of about equal size."""
    total = sum(array.nbytes for array in weights.values())
    parts, done = [{} for _ in range(shards)], 0
    for name, array in weights.items():
        parts[done * shards // total][name] = array
        done += array.nbytes
    if not all(parts):
        raise ValueError(f"{len(weights)} tensors cannot fill {shards} shards")
    return parts


def _write_json(path, content):
    Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(path, weights, dtype, shards, index):
    if shards == 1:
        write_safetensors(path / "model.safetensors", weights, dtype)
        return
    weight_map, total_bytes = {}, 0
    for number, part in enumerate(_split(weights, shards), start=1):
        file_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        total_bytes += write_safetensors(path / file_name, part, dtype)
        weight_map.update(dict.fromkeys(part, file_name))
    if index:
        content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(path / "model.safetensors.index.json", content)


def make_hf_dir(path, name_or_config, seed=None, dtype="F32", shards=1, index=True, weights=None):
    """Write a complete tiny OLMoE directory and return its path.

    `name_or_config` is a CONFIGS name or a dictionary of config overrides. `seed` defaults to the golden seed. `dtype`
    (F32, BF16 or F16) applies to every tensor. More than one shard comes with model.safetensors.index.json, unless
    `index` is false (a broken download). weights: instead of those of make_weights.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if seed is None:
        overrides = CONFIGS[name_or_config] if isinstance(name_or_config, str) else name_or_config
        seed = overrides.get("seed", 0)
    config = hf_config(name_or_config, dtype)
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", _generation_config_json())
    _write_json(path / "tokenizer.json", _tokenizer_json())
    _write_json(path / "tokenizer_config.json", _tokenizer_config_json())
    weights = make_weights(config, seed, dtype) if weights is None else weights
    _write_weights(path, weights, dtype, shards, index)
    return path
