"""Granite-MoE: top-k of the router's logits, then softmax over those; multipliers on embedding, scores, sums, logits.

Source: transformers `GraniteMoeForCausalLM` (modeling_granitemoe.py).
"""

from dataclasses import dataclass

from ..config import ConfigReader
from ..errors import ConfigError
from ..kernels import lib
from ..moe import Router
from ..weights.views import View
from . import _decoder as decoder
from . import _gguf as gguf

HARMLESS = decoder.HARMLESS


@dataclass(frozen=True, kw_only=True)
class Config(decoder.DecoderConfig):
    """config.json of a Granite-MoE model, checked."""

    intermediate_size: int  # expert width
    attention_bias: bool  # of q, k, v and o
    embedding_multiplier: float
    attention_multiplier: float  # scale of the scores
    residual_multiplier: float  # of what every part adds to the residual stream
    logits_scaling: float  # logits are divided by it

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        result = cls(
            **decoder.decoder_fields(read, theta=10000.0, eps=1e-6, head_dim=False),
            **decoder.expert_fields(read, "num_local_experts"),
            intermediate_size=read.integer("intermediate_size"),
            attention_bias=read.boolean("attention_bias", False),
            embedding_multiplier=read.number("embedding_multiplier", 1.0),
            attention_multiplier=read.number("attention_multiplier", 1.0),
            residual_multiplier=read.number("residual_multiplier", 1.0),
            logits_scaling=read.positive("logits_scaling", 1.0),
        )
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
EXPERT, MOE = "layers.{n}.mlp.experts.{e}", "model.layers.{n}.block_sparse_moe"
# Our tensor name -> name in a Hugging Face checkpoint, where all experts are one tensor, gate above up.
TENSORS = decoder.TENSORS | {
    "layers.{n}.mlp.router": f"{MOE}.router.layer.weight",
    f"{EXPERT}.gate_proj": View((f"{MOE}.input_linear.weight",), lambda c, fused: fused[: c.intermediate_size]),
    f"{EXPERT}.up_proj": View((f"{MOE}.input_linear.weight",), lambda c, fused: fused[c.intermediate_size :]),
    f"{EXPERT}.down_proj": View((f"{MOE}.output_linear.weight",), lambda c, down: down),
}


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    return decoder.decoder_shapes(c, bias=c.attention_bias, output_bias=c.attention_bias) | {
        "layers.{n}.mlp.router": (c.num_experts, c.hidden_size),
        **decoder.mlp_shapes(EXPERT, c.intermediate_size, c.hidden_size),
    }


GGUF_ARCHITECTURE = "granitemoe"
GGUF_TENSORS = gguf.GGUF_TENSORS
GGUF_UNUSED = gguf.ROPE_FACTORS


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys.

    Source: llama.cpp's converter and graph of "granitemoe": q and k rows are permuted.
    """
    multipliers = {
        "embedding_multiplier": keys.number("embedding_scale", 1.0) or 1.0,
        "attention_multiplier": keys.number("attention.scale", 0.0) or None,
        "residual_multiplier": keys.number("residual_scale", 1.0) or 1.0,
        "logits_scaling": keys.number("logit_scale") or 1.0,
    }
    if not keys.boolean("rope.scaling.finetuned", True):  # how the converter of Granite says "no rotation"
        raise ConfigError(f"{keys.where}: granitemoe.rope.scaling.finetuned = false: a model without rotary positions")
    config = gguf.decoder_from_gguf(keys, 10000.0)
    if multipliers["attention_multiplier"] is None:  # the graph's default
        multipliers["attention_multiplier"] = (config["hidden_size"] // config["num_attention_heads"]) ** -0.5
    return (
        config
        | multipliers
        | {
            "rope_interleave": True,
            "intermediate_size": keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length")),
            "num_local_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
        }
    )


class Model(decoder.Decoder):
    """A loaded Granite-MoE."""

    config_class = Config

    @property
    def embedding_scale(self) -> float:
        return self.config.embedding_multiplier

    @property
    def logits_scale(self) -> float:
        return 1.0 / self.config.logits_scaling

    def make_attention(self, n: int, weights):
        c, bias = self.config, self.config.attention_bias
        return decoder.Attention(
            c, n, weights, self.buffers, bias=bias, output_bias=bias, scale=c.attention_multiplier,
            output_scale=c.residual_multiplier,
        )  # fmt: skip

    def make_mlp(self, n: int, weights):
        c = self.config
        router = Router(lib.MOE_TOPK_THEN_SOFTMAX, False, c.residual_multiplier)  # the experts' sum, times it
        return decoder.MoeMLP(c, n, c.intermediate_size, weights, self.buffers, router)
