"""What DeepSeek-V2 and -V3 share: leading dense layers, shared experts, latent attention, and how they lie in GGUF."""

from dataclasses import dataclass

from ..config import ConfigReader
from ..errors import ConfigError
from ..kernels import lib
from ..moe import Groups, Router
from . import _decoder as decoder
from . import _gguf as gguf
from . import _latent as latent

# Notes on training and on parallel layouts; the rotary embedding's and the routing's keys are read.
HARMLESS = decoder.HARMLESS | {"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux", "num_local_experts"}
EXPERT, SHARED = "layers.{n}.mlp.experts.{e}", "layers.{n}.mlp.shared_experts"
PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class RoutedConfig:
    """Fields of routed experts beside shared ones, behind leading dense layers (DeepSeek, GLM)."""

    intermediate_size: int  # of the dense layers
    moe_intermediate_size: int
    num_shared_experts: int
    first_k_dense_replace: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    n_group: int  # 1: no groups
    topk_group: int
    num_extra_layers: int  # for multi-token prediction, stored behind the others (_mtp.py)

    @property
    def dense_layers(self) -> frozenset[int]:
        return frozenset(range(min(self.first_k_dense_replace, self.num_hidden_layers)))

    def unused_in_checkpoint(self, name: str) -> bool:
        """Tensors of layers for multi-token prediction that are not used."""
        parts = name.split(".")
        layer = int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 3 and parts[2].isdigit() else -1
        return self.num_hidden_layers <= layer < self.num_hidden_layers + self.num_extra_layers

    def unused_in_gguf(self, name: str) -> bool:
        parts = name.split(".")
        layer = int(parts[1]) if parts[0] == "blk" and len(parts) > 2 and parts[1].isdigit() else -1
        return self.num_hidden_layers <= layer < self.num_hidden_layers + self.num_extra_layers


def routed_fields(read: ConfigReader, *, norm: bool, dense: int) -> dict:
    """The fields of RoutedConfig and the number of experts. norm, dense: the family's defaults of norm_topk_prob and
    first_k_dense_replace."""
    experts = decoder.expert_fields(read, "n_routed_experts")
    groups = read.integer("n_group", 1)
    top_groups = read.integer("topk_group", groups)
    if experts["num_experts"] % groups or top_groups > groups:
        raise ConfigError(
            f"config.json: n_routed_experts {experts['num_experts']}, n_group {groups} and topk_group {top_groups} do "
            "not fit"
        )
    if experts["num_experts_per_tok"] > experts["num_experts"] // groups * top_groups:
        raise ConfigError(
            f"config.json: num_experts_per_tok {experts['num_experts_per_tok']} exceeds the experts of topk_group "
            f"{top_groups} of n_group {groups} groups"
        )
    read.only("moe_layer_freq", 1)
    return experts | {
        "intermediate_size": read.integer("intermediate_size"),
        "moe_intermediate_size": read.integer("moe_intermediate_size"),
        "num_shared_experts": read.integer("n_shared_experts", 0, minimum=0),
        "first_k_dense_replace": read.integer("first_k_dense_replace", dense, minimum=0),
        "norm_topk_prob": read.boolean("norm_topk_prob", norm),
        "routed_scaling_factor": read.number("routed_scaling_factor", 1.0),
        "n_group": groups,
        "topk_group": top_groups,
        "num_extra_layers": read.integer("num_nextn_predict_layers", 0, minimum=0),
    }


MLP_TENSORS = {
    "layers.{n}.mlp.router": "model.layers.{n}.mlp.gate.weight",
    "layers.{n}.mlp.router.correction_bias": "model.layers.{n}.mlp.gate.e_score_correction_bias",
    **{f"{p}.{part}": f"model.{p}.{part}.weight" for p in (EXPERT, SHARED, "layers.{n}.mlp") for part in PARTS},
}
MLP_GGUF_TENSORS = {name: source for name, source in gguf.GGUF_TENSORS.items() if ".mlp." in name} | {
    "layers.{n}.mlp.router.correction_bias": ("blk.{n}.exp_probs_b.bias", "blk.{n}.exp_probs_b"),
    **{f"{SHARED}.{part}": f"blk.{{n}}.ffn_{part.removesuffix('_proj')}_shexp.weight" for part in PARTS},
}
layers_of = decoder.layers_of


def mlp_shapes(c, *, correction: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of dense layers, router, routed and shared experts."""
    shapes = {
        "layers.{n}.mlp.router": (c.num_experts, c.hidden_size),
        **decoder.mlp_shapes(EXPERT, c.moe_intermediate_size, c.hidden_size),
    }
    if correction:
        shapes["layers.{n}.mlp.router.correction_bias"] = (c.num_experts,)
    if c.num_shared_experts:
        shapes |= decoder.mlp_shapes(SHARED, c.moe_intermediate_size * c.num_shared_experts, c.hidden_size)
    if c.dense_layers:
        shapes |= decoder.mlp_shapes("layers.{n}.mlp", c.intermediate_size, c.hidden_size)
    return shapes


def make_mlp(c, n: int, weights, buffers: decoder.Buffers, make_router):
    """The MLP of layer n. make_router: called for layers with experts only."""
    if n in c.dense_layers:
        return decoder.DenseMLP(f"layers.{n}.mlp", c.intermediate_size, c.hidden_size, weights, buffers)
    shared = None
    if c.num_shared_experts:
        width = c.moe_intermediate_size * c.num_shared_experts
        shared = decoder.SharedExpert(SHARED.format(n=n), width, c.hidden_size, weights, buffers, gated=False)
    return decoder.MoeMLP(c, n, c.moe_intermediate_size, weights, buffers, make_router(), shared=shared)


def sigmoid_router(c, n: int, weights) -> Router:
    """Routing of DeepSeek-V3 and GLM-4.5."""
    return Router(
        lib.MOE_SIGMOID_THEN_TOPK, c.norm_topk_prob, c.routed_scaling_factor,
        correction=weights.vector(f"layers.{n}.mlp.router.correction_bias", c.num_experts),
        groups=Groups(c.n_group, c.topk_group, lib.MOE_GROUP_TOP2_SUM) if c.n_group > 1 else None,
        norm_epsilon=1e-20,
    )  # fmt: skip


def routed_from_gguf(keys) -> dict:
    """Keys of RoutedConfig in the spelling of config.json."""
    return {
        "intermediate_size": keys.integer("feed_forward_length"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", None) or 1.0,
        "n_group": keys.integer("expert_group_count", None) or 1,
        "topk_group": keys.integer("expert_group_used_count", None) or keys.integer("expert_group_count", None) or 1,
    }


SOFTMAX, SIGMOID = 1, 2  # expert_gating_func


def gating_function(keys) -> int:
    """Files of the first converters have no such key; they hold DeepSeek-V2."""
    return keys.integer("expert_gating_func", None) or SOFTMAX


def latent_from_gguf(keys) -> dict:
    """config.json of a file of architecture deepseek2, in the spelling of Hugging Face.

    Newer files describe the attention as it is cached (one key head of kv_lora_rank + rotated part) and give the heads'
    own sizes as key_length_mla and value_length_mla; older ones have attn_kv_b in place of attn_k_b and attn_v_b.
    """
    rank, rotated = keys.integer("attention.kv_lora_rank"), keys.integer("rope.dimension_count")
    key, value = keys.integer("attention.key_length"), keys.integer("attention.value_length")
    keys.integer("attention.head_count_kv", None)
    mla = keys.integer("attention.key_length_mla", None), keys.integer("attention.value_length_mla", None)
    if mla[0] is not None and (key, value) != (rank + rotated, rank):
        raise ConfigError(
            f"{keys.where}: key_length {key}, value_length {value} do not fit kv_lora_rank {rank} and "
            f"rope.dimension_count {rotated}"
        )
    key, value = (mla[0] or key), (mla[1] or value)
    extra = keys.integer("nextn_predict_layers", 0)  # counted in block_count
    scaling = gguf.rope_scaling_from_gguf(keys)
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", None)  # 0.1 * mscale_all_dim
    for scale in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):  # mscale decides here
        gguf.only_value(keys, scale, 1.0)
    if scaling and multiplier:
        mscale = round(multiplier * 10, 6)
        scaling["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": keys.integer("block_count") - extra,
        "num_nextn_predict_layers": extra,
        "num_attention_heads": keys.integer("attention.head_count"),
        "q_lora_rank": keys.integer("attention.q_lora_rank", None) or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        **scaling,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": keys.rows("token_embd.weight"),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        **({} if "blk.0.attn_k_b.weight" in keys.tensors else {"fused_kv_b": True}),
        **routed_from_gguf(keys),
    }


TENSORS = {name: source for name, source in decoder.TENSORS.items() if ".self_attn." not in name} | latent.TENSORS
TENSORS |= MLP_TENSORS
GGUF_ARCHITECTURE = "deepseek2"
GGUF_TENSORS = {name: source for name, source in gguf.GGUF_TENSORS.items() if ".self_attn." not in name}
GGUF_TENSORS |= latent.GGUF_TENSORS | MLP_GGUF_TENSORS
