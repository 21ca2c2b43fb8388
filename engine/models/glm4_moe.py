"""GLM-4.5 (MoE): grouped-query attention with half of each head rotated, routing and experts as in DeepSeek-V3.

Source: transformers `Glm4MoeForCausalLM` (modeling_glm4_moe.py). Reads with _decoder.py, _deepseek.py and _mtp.py.
"""

from dataclasses import dataclass

from ..config import ConfigReader
from ..errors import ConfigError
from . import _decoder as decoder
from . import _deepseek as deepseek
from . import _gguf as gguf
from . import _mtp as mtp

HARMLESS = decoder.HARMLESS


@dataclass(frozen=True, kw_only=True)
class Config(deepseek.RoutedConfig, decoder.DecoderConfig):
    """config.json of a GLM-4.5-MoE model, checked."""

    attention_bias: bool
    use_qk_norm: bool

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        result = cls(
            **decoder.decoder_fields(read, theta=10000.0, eps=1e-5, rotary=0.5),
            **deepseek.routed_fields(read, norm=True, dense=1),
            attention_bias=read.boolean("attention_bias", False),
            use_qk_norm=read.boolean("use_qk_norm", False),
        )
        read.finish(HARMLESS)
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
TENSORS = decoder.TENSORS | deepseek.MLP_TENSORS | mtp.TENSORS
layers_of = deepseek.layers_of

GGUF_ARCHITECTURE = "glm4moe"
GGUF_TENSORS = gguf.GGUF_TENSORS | deepseek.MLP_GGUF_TENSORS | mtp.GGUF_TENSORS | {
    "layers.{n}.post_attention_layernorm": ("blk.{n}.post_attention_norm.weight", "blk.{n}.ffn_norm.weight"),
}  # fmt: skip


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys.

    Source: llama.cpp's converter and graph of "glm4moe"; block_count includes the layers for multi-token prediction.
    """
    extra = keys.integer("nextn_predict_layers", 0)
    if keys.integer("expert_gating_func", deepseek.SIGMOID) not in (0, deepseek.SIGMOID):
        raise ConfigError(f"{keys.where}: expert_gating_func is not supported for glm4moe (only 2, sigmoid)")
    config = gguf.decoder_from_gguf(keys, 10000.0) | deepseek.routed_from_gguf(keys)
    return config | {
        "num_hidden_layers": config["num_hidden_layers"] - extra,
        "num_nextn_predict_layers": extra,
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
    }


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    norms = {f"layers.{{n}}.self_attn.{name}": (c.head_dim,) for name in ("q_norm", "k_norm")}
    return (
        decoder.decoder_shapes(c, bias=c.attention_bias)
        | (norms if c.use_qk_norm else {})
        | deepseek.mlp_shapes(c, correction=True)
    )


def mtp_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """As `shapes`, of the layer for multi-token prediction."""
    return mtp.shapes(c, shapes(c))


class Model(decoder.Decoder):
    """A loaded GLM-4.5-MoE."""

    config_class = Config

    def make_attention(self, n: int, weights):
        c = self.config
        norm = "head" if c.use_qk_norm else None
        return decoder.Attention(c, n, weights, self.buffers, bias=c.attention_bias, qk_norm=norm)

    def make_mlp(self, n: int, weights):
        c = self.config
        return deepseek.make_mlp(c, n, weights, self.buffers, lambda: deepseek.sigmoid_router(c, n, weights))
