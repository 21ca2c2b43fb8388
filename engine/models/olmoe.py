"""OLMoE: q/k RMSNorm over the full projection, softmax router over all experts then top-k, no renormalisation.

Source: transformers `OlmoeForCausalLM` (modeling_olmoe.py). Reads with _decoder.py, which holds the forward pass.
"""

from dataclasses import dataclass

from ..config import ConfigReader
from ..kernels import lib
from ..moe import Router
from . import _decoder as decoder
from . import _gguf as gguf

HARMLESS = decoder.HARMLESS


@dataclass(frozen=True, kw_only=True)
class Config(decoder.DecoderConfig):
    """config.json of an OLMoE model, checked."""

    intermediate_size: int  # expert width
    norm_topk_prob: bool
    clip_qkv: float | None

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        read.only("attention_bias", False)
        result = cls(
            **decoder.decoder_fields(read, theta=10000.0, eps=1e-5, head_dim=False),
            **decoder.expert_fields(read),
            intermediate_size=read.integer("intermediate_size"),
            norm_topk_prob=read.boolean("norm_topk_prob", False),
            clip_qkv=read.number("clip_qkv", optional=True),
        )
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
# Our tensor name -> name in a Hugging Face checkpoint; {n} layer, {e} expert. Shapes are checked by `shapes`.
EXPERT = "layers.{n}.mlp.experts.{e}"
TENSORS = decoder.TENSORS | {
    "layers.{n}.mlp.router": "model.layers.{n}.mlp.gate.weight",
    **decoder.mlp_tensors(EXPERT),
}


# Our tensor name -> where it lies in a GGUF file (weights/slices.py); files of older converters and newer ones differ.
GGUF_ARCHITECTURE = "olmoe"
GGUF_TENSORS = gguf.GGUF_TENSORS


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys.

    Source: llama.cpp's converter and graph of "olmoe": top-k probabilities are not renormalised.
    """
    return gguf.decoder_from_gguf(keys, 10000.0) | {
        "intermediate_size": keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length")),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "clip_qkv": keys.number("attention.clamp_kqv", None) or None,
    }


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    return decoder.decoder_shapes(c) | {
        "layers.{n}.self_attn.q_norm": (c.hidden_size,),
        "layers.{n}.self_attn.k_norm": (c.num_key_value_heads * c.head_dim,),
        "layers.{n}.mlp.router": (c.num_experts, c.hidden_size),
        **decoder.mlp_shapes(EXPERT, c.intermediate_size, c.hidden_size),
    }


class Model(decoder.Decoder):
    """A loaded OLMoE."""

    config_class = Config

    def make_attention(self, n: int, weights):
        return decoder.Attention(self.config, n, weights, self.buffers, qk_norm="width", clip=self.config.clip_qkv)

    def make_mlp(self, n: int, weights):
        c = self.config
        router = Router(lib.MOE_SOFTMAX_THEN_TOPK, c.norm_topk_prob)
        return decoder.MoeMLP(c, n, c.intermediate_size, weights, self.buffers, router)
