"""Dense Qwen2: biases on q, k and v. The case of zero experts.

Source: transformers `Qwen2ForCausalLM`.
"""

from dataclasses import dataclass

from ..config import ConfigReader
from . import _decoder as decoder
from . import _gguf as gguf
from . import _qwen as qwen

HARMLESS = qwen.HARMLESS


@dataclass(frozen=True, kw_only=True)
class Config(decoder.DecoderConfig):
    """config.json of a Qwen2 model, checked."""

    intermediate_size: int

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        qwen.refuse_sliding_window(read)
        result = cls(
            **decoder.decoder_fields(read, theta=10000.0, eps=1e-6, head_dim=False),
            intermediate_size=read.integer("intermediate_size"),
        )
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
MLP = "layers.{n}.mlp"
TENSORS = decoder.TENSORS | decoder.mlp_tensors(MLP)


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    attention = decoder.decoder_shapes(c, bias=True)
    return attention | decoder.mlp_shapes(MLP, c.intermediate_size, c.hidden_size)


GGUF_ARCHITECTURE = "qwen2"
GGUF_TENSORS = gguf.GGUF_TENSORS


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys."""
    return gguf.decoder_from_gguf(keys, 10000.0) | {
        "intermediate_size": keys.integer("feed_forward_length"),
    }


class Model(decoder.Decoder):
    """A loaded Qwen2."""

    config_class = Config

    def make_attention(self, n: int, weights):
        return decoder.Attention(self.config, n, weights, self.buffers, bias=True)

    def make_mlp(self, n: int, weights):
        c = self.config
        return decoder.DenseMLP(f"layers.{n}.mlp", c.intermediate_size, c.hidden_size, weights, self.buffers)
