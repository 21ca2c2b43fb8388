"""gpt-oss: attention sinks, a sliding window on alternate layers, biases everywhere, clamped SwiGLU in the experts.

Source: transformers `GptOssForCausalLM` (modeling_gpt_oss.py). Reads with _decoder.py, which holds the forward pass.
The released checkpoints store the experts in MXFP4, gate and up rows in turn; both are only re-arranged.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from ..config import ConfigReader
from ..errors import ConfigError
from ..kernels import lib
from ..kv_cache import KVShape
from ..moe import Router
from ..weights.views import View
from . import _decoder as decoder
from ._gguf import GGUF_TENSORS as GGUF_DECODER
from ._gguf import decoder_from_gguf

# initial_context_length repeats rope_scaling's, experts_per_token is checked below.
HARMLESS = decoder.HARMLESS | {"initial_context_length"}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(decoder.DecoderConfig):
    """config.json of a gpt-oss model, checked. windows: positions that each layer sees, 0 for all."""

    intermediate_size: int  # expert width
    swiglu_limit: float
    attention_bias: bool
    windows: tuple[int, ...]

    @property
    def kv_shapes(self) -> list[KVShape]:
        """Rings in the layers with a window."""
        return [KVShape(self.num_key_value_heads, self.head_dim, window=window) for window in self.windows]

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        quantization = config.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
            config = {key: value for key, value in config.items() if key != "quantization_config"}
        read = ConfigReader(config)
        fields = decoder.decoder_fields(read, theta=150000.0, eps=1e-5)
        read.only("swiglu_alpha", 1.702)
        experts = decoder.expert_fields(read, "num_local_experts")
        read.only("experts_per_token", experts["num_experts_per_tok"])
        result = cls(
            **fields,
            **experts,
            intermediate_size=read.integer("intermediate_size"),
            swiglu_limit=read.number("swiglu_limit", 7.0),
            attention_bias=read.boolean("attention_bias", True),
            windows=_windows(read, fields["num_hidden_layers"]),
        )
        if not result.swiglu_limit > 0:
            raise ConfigError(f"config.json: swiglu_limit = {result.swiglu_limit}, expected a positive number")
        read.finish(HARMLESS)
        return result


def _windows(read: ConfigReader, num_layers: int) -> tuple[int, ...]:
    window = read.integer("sliding_window", 128)
    types = read.strings("layer_types", [(SLIDING, FULL)[n % 2] for n in range(num_layers)])
    if len(types) != num_layers or not set(types) <= {SLIDING, FULL}:
        raise ConfigError(
            f"config.json: layer_types has {len(types)} entries {sorted(set(types))}, expected {num_layers} of "
            f"{SLIDING} or {FULL}"
        )
    return tuple(window if kind == SLIDING else 0 for kind in types)


READABLE_QUANTIZATION = ("mxfp4",)
OUTPUT_AXIS = 0  # of our [out, in]; the fused tensors of 16-bit checkpoints are [in, out] and are turned by their views


def _rows_of_mxfp4(rows: slice, _config, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks [R, B, 16], scales [R, B] of a released checkpoint -> rows of format mxfp4, [len(rows), B * 17].

    There, byte i of a block holds elements 2i (low nibble) and 2i + 1; in mxfp4 i and i + 16. Scales mean the same.
    """
    blocks, scales = blocks[rows], scales[rows]
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:2], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], packed], -1).reshape(len(blocks), -1)


def _rows_transposed(rows: slice, _config, fused: np.ndarray) -> np.ndarray:
    """[in, out] -> rows of [out, in]."""
    return fused.T[rows]


def _slice(rows: slice, _config, vector: np.ndarray) -> np.ndarray:
    return vector[rows]


GATE, UP, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)
EXPERT, EXPERTS = "layers.{n}.mlp.experts.{e}", "model.layers.{n}.mlp.experts"


def _expert_sources(ours: str, fused: str, rows: slice) -> dict:
    """Matrix and bias of one of an expert's projections."""
    name = f"{EXPERTS}.{fused}"
    return {
        f"{EXPERT}.{ours}": (
            View((f"{name}_blocks", f"{name}_scales"), partial(_rows_of_mxfp4, rows), "mxfp4"),
            View((name,), partial(_rows_transposed, rows)),
        ),
        f"{EXPERT}.{ours}.bias": View((f"{name}_bias",), partial(_slice, rows)),
    }


TENSORS = decoder.TENSORS | {
    "layers.{n}.self_attn.sinks": "model.layers.{n}.self_attn.sinks",
    "layers.{n}.mlp.router": "model.layers.{n}.mlp.router.weight",
    "layers.{n}.mlp.router.bias": "model.layers.{n}.mlp.router.bias",
    **_expert_sources("gate_proj", "gate_up_proj", GATE),
    **_expert_sources("up_proj", "gate_up_proj", UP),
    **_expert_sources("down_proj", "down_proj", ALL),
}

GGUF_ARCHITECTURE = "gpt-oss"
GGUF_TENSORS = GGUF_DECODER | {
    "layers.{n}.post_attention_layernorm": ("blk.{n}.post_attention_norm.weight", "blk.{n}.ffn_norm.weight"),
    "layers.{n}.self_attn.sinks": "blk.{n}.attn_sinks.weight",
    "layers.{n}.mlp.router.bias": "blk.{n}.ffn_gate_inp.bias",
    f"{EXPERT}.gate_proj.bias": ("blk.{n}.ffn_gate_exps.bias", "blk.{n}.ffn_gate_up_exps.bias[0/2]"),
    f"{EXPERT}.up_proj.bias": ("blk.{n}.ffn_up_exps.bias", "blk.{n}.ffn_gate_up_exps.bias[1/2]"),
    f"{EXPERT}.down_proj.bias": "blk.{n}.ffn_down_exps.bias",
}


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys.

    Source: llama.cpp's converter and graph of "gpt-oss": windows on the even layers, limit 7. That the borders of the
    YaRN ramp are not rounded stands in the checkpoints and not in the file; it is the rule here (llama.cpp rounds).
    """
    config = decoder_from_gguf(keys, 150000.0)
    if "rope_scaling" in config:
        config["rope_scaling"] |= {"truncate": False}
    return config | {
        "intermediate_size": keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length")),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template that this model has."""
    experts = decoder.mlp_shapes(EXPERT, c.intermediate_size, c.hidden_size)
    return decoder.decoder_shapes(c, bias=c.attention_bias, output_bias=c.attention_bias) | {
        "layers.{n}.self_attn.sinks": (c.num_attention_heads,),
        "layers.{n}.mlp.router": (c.num_experts, c.hidden_size),
        "layers.{n}.mlp.router.bias": (c.num_experts,),
        **experts,
        **{f"{name}.bias": shape[:1] for name, shape in experts.items()},
    }


class Model(decoder.Decoder):
    """A loaded gpt-oss."""

    config_class = Config

    def make_attention(self, n: int, weights):
        c = self.config
        return decoder.Attention(
            c, n, weights, self.buffers, bias=c.attention_bias, output_bias=c.attention_bias, window=c.windows[n],
            sinks=True,
        )  # fmt: skip

    def make_mlp(self, n: int, weights):
        c = self.config
        router = Router(lib.MOE_TOPK_THEN_SOFTMAX, norm_topk_prob=False)
        return decoder.MoeMLP(
            c, n, c.intermediate_size, weights, self.buffers, router, bias=True, clamp=c.swiglu_limit
        )  # fmt: skip
