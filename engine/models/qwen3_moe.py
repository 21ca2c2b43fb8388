"""Qwen3-MoE: q/k RMSNorm per head before RoPE, an explicit head_dim, softmax over all experts then top-k.

Source: transformers `Qwen3MoeForCausalLM` (modeling_qwen3_moe.py). The class renormalises nothing by default; released
models set norm_topk_prob. Some layers may have a dense MLP instead of experts.
"""

from dataclasses import dataclass

from ..config import ConfigReader
from . import _decoder as decoder
from . import _gguf as gguf
from . import _qwen as qwen

HARMLESS = qwen.HARMLESS


@dataclass(frozen=True, kw_only=True)
class Config(qwen.SparseConfig):
    """config.json of a Qwen3-MoE model, checked."""

    attention_bias: bool  # of q, k, v and o

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        qwen.refuse_sliding_window(read)
        experts = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
        result = cls(
            **decoder.decoder_fields(read, theta=10000.0, eps=1e-6),
            **qwen.sparse_fields(read, experts),
            attention_bias=read.boolean("attention_bias", False),
        )
        read.only("num_local_experts", result.num_experts)
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
MLP, EXPERT = "layers.{n}.mlp", "layers.{n}.mlp.experts.{e}"
# Our tensor name -> name in a Hugging Face checkpoint; {n} layer, {e} expert. Shapes are checked by `shapes`.
TENSORS = decoder.TENSORS | {
    f"{MLP}.router": "model.layers.{n}.mlp.gate.weight",
    **decoder.mlp_tensors(MLP),
    **decoder.mlp_tensors(EXPERT),
}
layers_of = decoder.layers_of


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    return decoder.decoder_shapes(c, bias=c.attention_bias, output_bias=c.attention_bias, head_norms=True) | {
        **decoder.mlp_shapes(MLP, c.intermediate_size, c.hidden_size),
        f"{MLP}.router": (c.num_experts, c.hidden_size),
        **decoder.mlp_shapes(EXPERT, c.moe_intermediate_size, c.hidden_size),
    }


GGUF_ARCHITECTURE = "qwen3moe"
GGUF_TENSORS = gguf.GGUF_TENSORS


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys.

    Source: llama.cpp's converter and graph of "qwen3moe": every layer has experts, top-k is always renormalised.
    """
    return gguf.decoder_from_gguf(keys, 10000.0) | {
        **qwen.sparse_from_gguf(keys, True),
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


class Model(decoder.Decoder):
    """A loaded Qwen3-MoE."""

    config_class = Config

    def make_attention(self, n: int, weights):
        bias = self.config.attention_bias
        return decoder.Attention(self.config, n, weights, self.buffers, qk_norm="head", bias=bias, output_bias=bias)

    def make_mlp(self, n: int, weights):
        return qwen.make_mlp(self.config, n, weights, self.buffers)
