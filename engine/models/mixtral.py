"""Mixtral: softmax over all experts, then top-k, always renormalised; sliding-window attention where the config asks.

Source: transformers `MixtralForCausalLM` (modeling_mixtral.py).
"""

from dataclasses import dataclass

from ..config import ConfigReader
from ..kernels import lib
from ..moe import Router
from . import _decoder as decoder
from . import _gguf as gguf

HARMLESS = decoder.HARMLESS | {"router_jitter_noise"}  # noise of training


@dataclass(frozen=True, kw_only=True)
class Config(decoder.DecoderConfig):
    """config.json of a Mixtral model, checked."""

    intermediate_size: int  # expert width
    sliding_window: int  # positions seen, 0 for all

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        result = cls(
            **decoder.decoder_fields(read, theta=1e6, eps=1e-5),
            **decoder.expert_fields(read, "num_local_experts"),
            intermediate_size=read.integer("intermediate_size"),
            sliding_window=read.integer("sliding_window", 0, minimum=0),
        )
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
EXPERT = "layers.{n}.mlp.experts.{e}"
# Our tensor name -> name in a Hugging Face checkpoint; {n} layer, {e} expert. Shapes are checked by `shapes`.
TENSORS = decoder.TENSORS | {
    "layers.{n}.mlp.router": "model.layers.{n}.block_sparse_moe.gate.weight",
    f"{EXPERT}.gate_proj": "model.layers.{n}.block_sparse_moe.experts.{e}.w1.weight",
    f"{EXPERT}.up_proj": "model.layers.{n}.block_sparse_moe.experts.{e}.w3.weight",
    f"{EXPERT}.down_proj": "model.layers.{n}.block_sparse_moe.experts.{e}.w2.weight",
}


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    return decoder.decoder_shapes(c) | {
        "layers.{n}.mlp.router": (c.num_experts, c.hidden_size),
        **decoder.mlp_shapes(EXPERT, c.intermediate_size, c.hidden_size),
    }


GGUF_ARCHITECTURE = "llama"  # shared with dense models
# Files of the first converters have a tensor per expert.
GGUF_TENSORS = gguf.GGUF_TENSORS | {
    f"{EXPERT}.{part}_proj": (f"blk.{{n}}.ffn_{part}_exps.weight", f"blk.{{n}}.ffn_{part}.{{e}}.weight")
    for part in ("gate", "up", "down")
}
GGUF_UNUSED = gguf.ROPE_FACTORS


def gguf_matches(keys) -> bool:
    """Is a file of architecture "llama" ours? It is when it has experts."""
    return bool(keys.integer("expert_count", 0))


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys.

    Source: llama.cpp's converter and graph of "llama": q and k rows are permuted, the window is not recorded.
    """
    return gguf.decoder_from_gguf(keys, 10000.0) | {
        "rope_interleave": True,
        "intermediate_size": keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length")),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


class Model(decoder.Decoder):
    """A loaded Mixtral."""

    config_class = Config

    def make_attention(self, n: int, weights):
        return decoder.Attention(self.config, n, weights, self.buffers, window=self.config.sliding_window)

    def make_mlp(self, n: int, weights):
        c = self.config
        router = Router(lib.MOE_SOFTMAX_THEN_TOPK, norm_topk_prob=True)
        return decoder.MoeMLP(c, n, c.intermediate_size, weights, self.buffers, router)
