"""Dense Llama, and Mistral, which adds sliding-window attention: the case of zero experts.

Source: transformers `LlamaForCausalLM`, `MistralForCausalLM`.
"""

from dataclasses import dataclass

from ..config import ConfigReader
from . import _decoder as decoder
from . import _gguf as gguf

HARMLESS = decoder.HARMLESS


@dataclass(frozen=True, kw_only=True)
class Config(decoder.DecoderConfig):
    """config.json of a Llama or Mistral model, checked."""

    intermediate_size: int
    attention_bias: bool  # of q, k, v and o
    sliding_window: int  # positions seen, 0 for all

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        if config.get("model_type") != "mistral":
            read.only("sliding_window")
        read.only("mlp_bias", False)
        read.only("pretraining_tp", 1)
        result = cls(
            **decoder.decoder_fields(read, theta=10000.0, eps=1e-6),
            intermediate_size=read.integer("intermediate_size"),
            attention_bias=read.boolean("attention_bias", False),
            sliding_window=read.integer("sliding_window", 0, minimum=0),
        )
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
MLP = "layers.{n}.mlp"
TENSORS = decoder.TENSORS | decoder.mlp_tensors(MLP)


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    attention = decoder.decoder_shapes(c, bias=c.attention_bias, output_bias=c.attention_bias)
    return attention | decoder.mlp_shapes(MLP, c.intermediate_size, c.hidden_size)


GGUF_ARCHITECTURE = "llama"  # shared with Mixtral
GGUF_TENSORS = gguf.GGUF_TENSORS
GGUF_UNUSED = gguf.ROPE_FACTORS


def gguf_matches(keys) -> bool:
    """Is a file of architecture "llama" ours? It is when it has no experts."""
    return not keys.integer("expert_count", 0)


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys.

    Source: llama.cpp's converter and graph of "llama": q and k rows are permuted, the window is not recorded.
    """
    return gguf.decoder_from_gguf(keys, 10000.0) | {
        "rope_interleave": True,
        "intermediate_size": keys.integer("feed_forward_length"),
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


class Model(decoder.Decoder):
    """A loaded Llama or Mistral."""

    config_class = Config

    def make_attention(self, n: int, weights):
        c, bias = self.config, self.config.attention_bias
        return decoder.Attention(c, n, weights, self.buffers, bias=bias, output_bias=bias, window=c.sliding_window)

    def make_mlp(self, n: int, weights):
        c = self.config
        return decoder.DenseMLP(f"layers.{n}.mlp", c.intermediate_size, c.hidden_size, weights, self.buffers)
