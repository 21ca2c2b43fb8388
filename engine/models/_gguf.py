"""Parts of `config_from_gguf` that families share: keys that mean the same in every architecture."""

import math

from ..errors import ConfigError
from ..rope import yarn_mscale

# Our tensor name -> where it lies (weights/slices.py), alike in all architectures; of several the file has one.
GGUF_TENSORS = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "layers.{n}.input_layernorm": "blk.{n}.attn_norm.weight",
    "layers.{n}.post_attention_layernorm": "blk.{n}.ffn_norm.weight",
    "layers.{n}.self_attn.q_proj": "blk.{n}.attn_q.weight",
    "layers.{n}.self_attn.k_proj": "blk.{n}.attn_k.weight",
    "layers.{n}.self_attn.v_proj": "blk.{n}.attn_v.weight",
    "layers.{n}.self_attn.o_proj": "blk.{n}.attn_output.weight",
    "layers.{n}.self_attn.q_proj.bias": "blk.{n}.attn_q.bias",
    "layers.{n}.self_attn.k_proj.bias": "blk.{n}.attn_k.bias",
    "layers.{n}.self_attn.v_proj.bias": "blk.{n}.attn_v.bias",
    "layers.{n}.self_attn.o_proj.bias": "blk.{n}.attn_output.bias",
    "layers.{n}.self_attn.q_norm": "blk.{n}.attn_q_norm.weight",
    "layers.{n}.self_attn.k_norm": "blk.{n}.attn_k_norm.weight",
    "layers.{n}.mlp.gate_proj": "blk.{n}.ffn_gate.weight",
    "layers.{n}.mlp.up_proj": "blk.{n}.ffn_up.weight",
    "layers.{n}.mlp.down_proj": "blk.{n}.ffn_down.weight",
    "layers.{n}.mlp.router": "blk.{n}.ffn_gate_inp.weight",
    "layers.{n}.mlp.experts.{e}.gate_proj": ("blk.{n}.ffn_gate_exps.weight", "blk.{n}.ffn_gate_up_exps.weight[0/2]"),
    "layers.{n}.mlp.experts.{e}.up_proj": ("blk.{n}.ffn_up_exps.weight", "blk.{n}.ffn_gate_up_exps.weight[1/2]"),
    "layers.{n}.mlp.experts.{e}.down_proj": "blk.{n}.ffn_down_exps.weight",
    "layers.{n}.mlp.shared_expert.gate_proj": "blk.{n}.ffn_gate_shexp.weight",
    "layers.{n}.mlp.shared_expert.up_proj": "blk.{n}.ffn_up_shexp.weight",
    "layers.{n}.mlp.shared_expert.down_proj": "blk.{n}.ffn_down_shexp.weight",
    "layers.{n}.mlp.shared_expert_gate": "blk.{n}.ffn_gate_inp_shexp.weight",
}


# For GGUF_UNUSED: a tensor that `rope_from_gguf` reads.
ROPE_FACTORS = {"rope_freqs.weight"}


def expert_width(keys) -> int:
    """Width of an expert, from the key or, in files without it, from the first expert tensor."""
    width = keys.integer("expert_feed_forward_length", None)
    if width is not None:
        return width
    found = [t.shape for name, t in keys.tensors.items() if name.endswith(".ffn_down_exps.weight")]
    if not found or len(found[0]) != 3:
        raise ConfigError(f"{keys.where}: no key and no tensor says how wide an expert is")
    return found[0][2]


def decoder_from_gguf(keys, default_theta: float) -> dict:
    """What every architecture's keys say alike, in the spelling of config.json."""
    return {
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": keys.integer("attention.head_count"),
        "num_key_value_heads": keys.integer("attention.head_count_kv", keys.integer("attention.head_count")),
        **head_dim_from_gguf(keys),
        **rope_from_gguf(keys, default_theta),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": keys.rows("token_embd.weight"),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
    }


def head_dim_from_gguf(keys) -> dict:
    """{"head_dim": n} from attention.key_length, which must equal value_length; {} where the file has neither."""
    key, value = keys.integer("attention.key_length", None), keys.integer("attention.value_length", None)
    if key != value:
        raise ConfigError(f"{keys.where}: attention.key_length {key} and value_length {value} differ")
    return {} if key is None else {"head_dim": key}


def rope_from_gguf(keys, default_theta: float) -> dict:
    """rope_theta, partial_rotary_factor, and rope_scaling where the file scales, in the spelling of Hugging Face."""
    heads = keys.integer("attention.head_count")
    if heads < 1:
        raise ConfigError(
            f"{keys.where}: metadata key {keys.architecture}.attention.head_count = {heads}, expected >= 1"
        )
    head_dim = keys.integer("attention.key_length", None) or keys.integer("embedding_length") // heads
    rotary = keys.integer("rope.dimension_count", head_dim)
    turned = {} if rotary == head_dim else {"partial_rotary_factor": rotary / head_dim}
    scaling = rope_scaling_from_gguf(keys)
    if "rope_freqs.weight" in keys.tensors:  # the llama3 rule, one factor per pair
        if scaling:
            raise ConfigError(f"{keys.where}: rope_freqs.weight and rope.scaling.type are both given")
        factors = keys.vector("rope_freqs.weight")
        scaling = {"rope_scaling": {"rope_type": "frequency_factors", "factors": factors}}
    return {"rope_theta": keys.number("rope.freq_base", default_theta), **turned, **scaling}


def rope_scaling_from_gguf(keys) -> dict:
    """{"rope_scaling": {...}} for linear and YaRN scaling, {} for none.

    The converter writes llama3 scaling as a tensor, rope_freqs.weight, that the family has to read.
    """
    kind = keys.text("rope.scaling.type", None)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", None))
    original = keys.integer("rope.scaling.original_context_length", None)
    if kind is None and factor not in (None, 0, 1):
        kind = "linear"
    if kind in (None, "none") or (kind == "linear" and factor in (None, 0, 1)):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": float(factor)}}
    if kind != "yarn" or factor is None:
        raise ConfigError(f"{keys.where}: rope.scaling.type {kind!r} (factor {factor}) is not supported")
    scaling = {"rope_type": "yarn", "factor": float(factor)}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    optional = {
        "attention_factor": _attention_factor(keys, factor),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", None),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", None),
    }
    return {"rope_scaling": {**scaling, **{name: value for name, value in optional.items() if value is not None}}}


def _attention_factor(keys, factor: float) -> float | None:
    """Factor of cos and sin where the file changes YaRN's usual one; None where it does not.

    attn_factor multiplies the usual one (llama.cpp). yarn_attn_factor is written by its converter and read by nobody
    for these architectures, so only a value that changes nothing is sure to mean what the model was trained with.
    """
    usual = yarn_mscale(factor)
    only_value(keys, "rope.scaling.yarn_ext_factor", 1.0)
    only_value(keys, "rope.scaling.yarn_attn_factor", usual)
    times = keys.number("rope.scaling.attn_factor", None)
    return None if times in (None, 1) else usual * times


def only_value(keys, key: str, value: float) -> None:
    """Refuse the key by name where it is there and has another value."""
    found = keys.number(key, None)
    if found is not None and not math.isclose(found, value, rel_tol=1e-6):
        raise ConfigError(
            f"{keys.where}: metadata key {keys.architecture}.{key} = {found} is not supported (only {value:g})"
        )
