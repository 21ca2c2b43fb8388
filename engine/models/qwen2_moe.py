"""Qwen2-MoE: q/k/v biases, softmax over all experts then top-k, and a shared expert with a sigmoid gate of its own.

Source: transformers `Qwen2MoeForCausalLM` (modeling_qwen2_moe.py). Some layers may have a dense MLP instead of experts.
"""

from dataclasses import dataclass

from ..config import ConfigReader
from ..kernels import lib
from ..moe import Router
from . import _decoder as decoder
from . import _gguf as gguf

# Sizes of windows that use_sliding_window switches off.
HARMLESS = decoder.HARMLESS | {"sliding_window", "max_window_layers"}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.DecoderConfig):
    """config.json of a Qwen2-MoE model, checked."""

    intermediate_size: int  # of dense layers
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    qkv_bias: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]

    @property
    def dense_layers(self) -> frozenset[int]:
        return decoder.dense_layers(self.num_hidden_layers, self.decoder_sparse_step, self.mlp_only_layers)

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        decoder.refuse_sliding_window(read)
        result = cls(
            **decoder.decoder_fields(read, theta=10000.0, eps=1e-6, head_dim=False),
            **decoder.expert_fields(read),
            intermediate_size=read.integer("intermediate_size"),
            moe_intermediate_size=read.integer("moe_intermediate_size"),
            shared_expert_intermediate_size=read.integer("shared_expert_intermediate_size"),
            norm_topk_prob=read.boolean("norm_topk_prob", False),
            qkv_bias=read.boolean("qkv_bias", True),
            decoder_sparse_step=read.integer("decoder_sparse_step", 1),
            mlp_only_layers=tuple(read.integers("mlp_only_layers")),
        )
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
MLP, EXPERT, SHARED = "layers.{n}.mlp", "layers.{n}.mlp.experts.{e}", "layers.{n}.mlp.shared_expert"
# Our tensor name -> name in a Hugging Face checkpoint; {n} layer, {e} expert. Shapes are checked by `shapes`.
TENSORS = decoder.TENSORS | {
    f"{MLP}.router": "model.layers.{n}.mlp.gate.weight",
    f"{MLP}.shared_expert_gate": "model.layers.{n}.mlp.shared_expert_gate.weight",
    **decoder.mlp_tensors(MLP),
    **decoder.mlp_tensors(EXPERT),
    **decoder.mlp_tensors(SHARED),
}
layers_of = decoder.layers_of


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    return decoder.decoder_shapes(c, bias=c.qkv_bias) | {
        **decoder.mlp_shapes(MLP, c.intermediate_size, c.hidden_size),
        f"{MLP}.router": (c.num_experts, c.hidden_size),
        f"{MLP}.shared_expert_gate": (1, c.hidden_size),
        **decoder.mlp_shapes(SHARED, c.shared_expert_intermediate_size, c.hidden_size),
        **decoder.mlp_shapes(EXPERT, c.moe_intermediate_size, c.hidden_size),
    }


GGUF_ARCHITECTURE = "qwen2moe"
GGUF_TENSORS = gguf.GGUF_TENSORS


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys.

    Source: llama.cpp's converter and graph of "qwen2moe": every layer has experts, nothing is renormalised.
    """
    width = keys.integer("feed_forward_length")
    return gguf.decoder_from_gguf(keys, 10000.0) | {
        "intermediate_size": width,
        "moe_intermediate_size": gguf.expert_width(keys),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", width),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "qkv_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


class Model(decoder.Decoder):
    """A loaded Qwen2-MoE."""

    config_class = Config

    def make_attention(self, n: int, weights):
        return decoder.Attention(self.config, n, weights, self.buffers, bias=self.config.qkv_bias)

    def make_mlp(self, n: int, weights):
        c, prefix = self.config, f"layers.{n}.mlp"
        if n in c.dense_layers:
            return decoder.DenseMLP(prefix, c.intermediate_size, c.hidden_size, weights, self.buffers)
        shared = decoder.SharedExpert(
            f"{prefix}.shared_expert",
            c.shared_expert_intermediate_size,
            c.hidden_size,
            weights,
            self.buffers,
            gated=True,
        )
        router = Router(lib.MOE_SOFTMAX_THEN_TOPK, c.norm_topk_prob)
        return decoder.MoeMLP(c, n, c.moe_intermediate_size, weights, self.buffers, router, shared=shared)
