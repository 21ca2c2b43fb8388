"""Dense Qwen3: q/k RMSNorm per head before RoPE, an explicit head_dim. The case of zero experts.

Source: transformers `Qwen3ForCausalLM`.
"""

from dataclasses import dataclass

from ..config import ConfigReader
from . import _decoder as decoder
from . import _gguf as gguf
from . import _qwen as qwen

HARMLESS = qwen.HARMLESS


@dataclass(frozen=True, kw_only=True)
class Config(decoder.DecoderConfig):
    """config.json of a Qwen3 model, checked."""

    intermediate_size: int
    attention_bias: bool  # of q, k, v and o

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        qwen.refuse_sliding_window(read)
        result = cls(
            **decoder.decoder_fields(read, theta=10000.0, eps=1e-6),
            intermediate_size=read.integer("intermediate_size"),
            attention_bias=read.boolean("attention_bias", False),
        )
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
MLP = "layers.{n}.mlp"
TENSORS = decoder.TENSORS | decoder.mlp_tensors(MLP)


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    attention = decoder.decoder_shapes(c, bias=c.attention_bias, output_bias=c.attention_bias, head_norms=True)
    return attention | decoder.mlp_shapes(MLP, c.intermediate_size, c.hidden_size)


GGUF_ARCHITECTURE = "qwen3"
GGUF_TENSORS = gguf.GGUF_TENSORS


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys."""
    return gguf.decoder_from_gguf(keys, 10000.0) | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


class Model(decoder.Decoder):
    """A loaded Qwen3."""

    config_class = Config

    def make_attention(self, n: int, weights):
        bias = self.config.attention_bias
        return decoder.Attention(self.config, n, weights, self.buffers, qk_norm="head", bias=bias, output_bias=bias)

    def make_mlp(self, n: int, weights):
        c = self.config
        return decoder.DenseMLP(f"layers.{n}.mlp", c.intermediate_size, c.hidden_size, weights, self.buffers)
