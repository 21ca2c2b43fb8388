"""Parts of `config_from_gguf` that families share: keys that mean the same in every architecture."""

from ..errors import ConfigError


def head_dim_from_gguf(keys) -> dict:
    """{"head_dim": n} from attention.key_length, which must equal value_length; {} where the file has neither."""
    key, value = keys.integer("attention.key_length", None), keys.integer("attention.value_length", None)
    if key != value:
        raise ConfigError(f"{keys.where}: attention.key_length {key} and value_length {value} differ")
    return {} if key is None else {"head_dim": key}


def rope_from_gguf(keys, default_theta: float) -> dict:
    """rope_theta, and rope_scaling where the file scales, in the spelling of Hugging Face.

    rope.dimension_count must be read by the caller where it is less than the head; here it must be the whole head.
    """
    head_dim = keys.integer("attention.key_length", None) or (
        keys.integer("embedding_length") // keys.integer("attention.head_count")
    )
    rotary = keys.integer("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ConfigError(f"{keys.where}: rope.dimension_count {rotary} of heads of {head_dim} is not supported")
    return {"rope_theta": keys.number("rope.freq_base", default_theta), **rope_scaling_from_gguf(keys)}


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
        "attention_factor": keys.number("rope.scaling.attn_factor", None),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", None),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", None),
    }
    return {"rope_scaling": {**scaling, **{name: value for name, value in optional.items() if value is not None}}}
