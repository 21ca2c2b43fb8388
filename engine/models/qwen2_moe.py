"""Qwen2-MoE: q/k/v biases, softmax over all experts then top-k, and a shared expert with a sigmoid gate of its own.

Source: transformers `Qwen2MoeForCausalLM` (modeling_qwen2_moe.py). Some layers may have a dense MLP instead of experts.
"""

from dataclasses import dataclass

from ..config import ConfigReader
from . import _decoder as decoder
from . import _gguf as gguf
from . import _qwen as qwen

HARMLESS = qwen.HARMLESS


@dataclass(frozen=True, kw_only=True)
class Config(qwen.SparseConfig):
    """config.json of a Qwen2-MoE model, checked."""

    shared_expert_intermediate_size: int
    qkv_bias: bool

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        qwen.refuse_sliding_window(read)
        result = cls(
            **decoder.decoder_fields(read, theta=10000.0, eps=1e-6, head_dim=False),
            **qwen.sparse_fields(read),
            shared_expert_intermediate_size=read.integer("shared_expert_intermediate_size"),
            qkv_bias=read.boolean("qkv_bias", True),
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
    return gguf.decoder_from_gguf(keys, 10000.0) | {
        **qwen.sparse_from_gguf(keys, False),
        "shared_expert_intermediate_size": keys.integer(
            "expert_shared_feed_forward_length", keys.integer("feed_forward_length")
        ),
        "qkv_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


class Model(decoder.Decoder):
    """A loaded Qwen2-MoE."""

    config_class = Config

    def make_attention(self, n: int, weights):
        return decoder.Attention(self.config, n, weights, self.buffers, bias=self.config.qkv_bias)

    def make_mlp(self, n: int, weights):
        c = self.config

        def shared():
            prefix, width = f"layers.{n}.mlp.shared_expert", c.shared_expert_intermediate_size
            return decoder.SharedExpert(prefix, width, c.hidden_size, weights, self.buffers, gated=True)

        return qwen.make_mlp(c, n, weights, self.buffers, shared)
