"""Multi-head latent attention of DeepSeek: one compressed row per position serves all heads.

The cache holds kv_lora_rank numbers (normalised) and the rotated key part; heads are never expanded: each query is
taken into the latent space by its head's k_b_proj, and each result out of it by its v_b_proj.
Shape letters: T tokens, N heads, R kv_lora_rank, P qk_rope_head_dim, Q qk_nope_head_dim, V v_head_dim.
"""

from dataclasses import dataclass

import numpy as np

from ..config import ConfigReader
from ..errors import ConfigError
from ..kv_cache import KVShape
from ..layers import Buffer, Layers, Linear
from ..rope import Yarn, yarn_mscale
from ..weights.views import View
from . import _decoder as decoder


@dataclass(frozen=True, kw_only=True)
class LatentConfig(decoder.DecoderConfig):
    """What a config.json with latent attention says besides DecoderConfig. head_dim is the rotated part."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    attention_bias: bool
    attention_scale: float
    fused_kv_b: bool  # the file holds kv_b_proj and not its two parts: GGUF files of older converters

    @property
    def kv_shapes(self) -> list[KVShape]:
        """One compressed row per position for all heads."""
        return [KVShape(1, self.kv_lora_rank + self.head_dim, self.kv_lora_rank, latent=True)] * self.num_hidden_layers

    @property
    def q_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.head_dim


def latent_fields(read: ConfigReader, *, theta: float, eps: float) -> dict:
    """The fields of LatentConfig but the experts. Scores are scaled by (Q + P)^-1/2, times YaRN's mscale squared."""
    rotated, nope = read.integer("qk_rope_head_dim"), read.integer("qk_nope_head_dim")
    heads = read.integer("num_attention_heads")
    read.only("num_key_value_heads", heads)
    read.only("head_dim", rotated)
    read.only("qk_head_dim", rotated + nope)
    fields = decoder.decoder_fields(read, theta=theta, eps=eps, head_dim=rotated, interleaved=True)
    rank, value_dim = read.integer("kv_lora_rank"), read.integer("v_head_dim")
    if any(width % 8 for width in (rank, nope, value_dim)):
        raise ConfigError(
            f"config.json: kv_lora_rank {rank}, qk_nope_head_dim {nope}, v_head_dim {value_dim} are not supported "
            "(multiples of 8 only)"
        )
    return fields | {
        "q_lora_rank": read.integer("q_lora_rank", 0, minimum=0) or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
        "v_head_dim": value_dim,
        "attention_bias": read.boolean("attention_bias", False),
        "fused_kv_b": read.boolean("fused_kv_b", False),
        "attention_scale": (nope + rotated) ** -0.5 * _temperature(fields["rope"].scaling) ** 2,
    }


def _temperature(scaling) -> float:
    """What YaRN puts into the scores here, mscale of mscale_all_dim; its ratio to mscale's is in cos and sin."""
    if not isinstance(scaling, Yarn) or not scaling.mscale_all_dim:
        return 1.0
    return yarn_mscale(scaling.factor, scaling.mscale_all_dim)


def _heads_first(c: LatentConfig, kv_b: np.ndarray) -> np.ndarray:
    """kv_b_proj [N * (Q + V), R], or bytes of its rows, as [N, Q + V, ...]."""
    return kv_b.reshape(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, -1)


def _k_b(c: LatentConfig, kv_b: np.ndarray) -> np.ndarray:
    """Rows for queries on their way in, [N * R, Q]."""
    return _heads_first(c, kv_b)[:, : c.qk_nope_head_dim].swapaxes(1, 2).reshape(-1, c.qk_nope_head_dim)


def _v_b(c: LatentConfig, kv_b: np.ndarray) -> np.ndarray:
    """Rows for results on their way out, [N * V, R]."""
    return _heads_first(c, kv_b)[:, c.qk_nope_head_dim :].reshape(-1, c.kv_lora_rank)


P = "layers.{n}.self_attn"
KV_B = f"model.{P}.kv_b_proj.weight"
TENSORS = {
    **{
        f"{P}.{name}": f"model.{P}.{name}.weight"
        for name in ("q_proj", "q_a_proj", "q_b_proj", "o_proj", "q_a_layernorm", "kv_a_layernorm")
    },
    f"{P}.kv_a_proj": f"model.{P}.kv_a_proj_with_mqa.weight",
    f"{P}.k_b_proj": View((KV_B,), _k_b),
    f"{P}.v_b_proj": View((KV_B,), _v_b),
    f"{P}.q_a_proj.bias": f"model.{P}.q_a_proj.bias",
    f"{P}.kv_a_proj.bias": f"model.{P}.kv_a_proj_with_mqa.bias",
    f"{P}.o_proj.bias": f"model.{P}.o_proj.bias",
}
GGUF_TENSORS = {
    f"{P}.q_proj": "blk.{n}.attn_q.weight",
    f"{P}.q_a_proj": "blk.{n}.attn_q_a.weight",
    f"{P}.q_a_layernorm": "blk.{n}.attn_q_a_norm.weight",
    f"{P}.q_b_proj": "blk.{n}.attn_q_b.weight",
    f"{P}.kv_a_proj": "blk.{n}.attn_kv_a_mqa.weight",
    f"{P}.kv_a_layernorm": "blk.{n}.attn_kv_a_norm.weight",
    f"{P}.k_b_proj": "blk.{n}.attn_k_b.weight",
    f"{P}.v_b_proj": "blk.{n}.attn_v_b.weight",
    f"{P}.kv_b_proj": "blk.{n}.attn_kv_b.weight",
    f"{P}.o_proj": "blk.{n}.attn_output.weight",
}


def latent_shapes(c: LatentConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of embedding, norms, attention and head."""
    hidden, q_width, rank = c.hidden_size, c.num_attention_heads * c.q_head_dim, c.kv_lora_rank
    shapes = {k: v for k, v in decoder.decoder_shapes(c).items() if ".self_attn." not in k}
    if c.q_lora_rank is None:
        shapes[f"{P}.q_proj"] = (q_width, hidden)
    else:
        shapes |= {
            f"{P}.q_a_proj": (c.q_lora_rank, hidden),
            f"{P}.q_a_layernorm": (c.q_lora_rank,),
            f"{P}.q_b_proj": (q_width, c.q_lora_rank),
        }
    shapes |= {
        f"{P}.kv_a_proj": (rank + c.head_dim, hidden),
        f"{P}.kv_a_layernorm": (rank,),
        f"{P}.o_proj": (hidden, c.num_attention_heads * c.v_head_dim),
    }
    if c.fused_kv_b:
        shapes[f"{P}.kv_b_proj"] = (c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), rank)
    else:
        shapes[f"{P}.k_b_proj"] = (c.num_attention_heads * rank, c.qk_nope_head_dim)
        shapes[f"{P}.v_b_proj"] = (c.num_attention_heads * c.v_head_dim, rank)
    if c.attention_bias:
        biased = ("q_a_proj", "kv_a_proj", "o_proj")
        shapes |= {f"{P}.{name}.bias": shapes[f"{P}.{name}"][:1] for name in biased if f"{P}.{name}" in shapes}
    return shapes


def split_kv_b(c: LatentConfig, name: str, weights) -> tuple:
    """The two parts of a kv_b_proj that is stored as rows: k_b_proj in float32, since turned blocks are no blocks, with
    the values that the file's blocks mean, and v_b_proj in the blocks as they are."""
    context, record = weights.context, weights.files.record(name)
    fused, ids = weights.matrix(name, *record.shape), Buffer(1, record.rows, np.int32)
    ids.array[0], values = np.arange(record.rows), Buffer(record.rows, record.cols)
    Layers(context).embed(values, fused, ids, record.rows)
    k_b = np.ascontiguousarray(_k_b(c, values.array))
    rows = _heads_first(c, weights.files.read(name).reshape(record.rows, -1))[:, c.qk_nope_head_dim :]
    v_b = np.ascontiguousarray(rows).reshape(-1)
    return (
        context.matrix("f32", k_b.view(np.uint8).reshape(-1), *k_b.shape),
        context.matrix(record.format, v_b, c.num_attention_heads * c.v_head_dim, record.cols),
    )


class LatentAttention:
    """Latent attention of layer n; called as decoder.Attention is."""

    def __init__(self, c: LatentConfig, n: int, weights, buffers: decoder.Buffers):
        p, hidden, rank, bias = f"layers.{n}.self_attn", c.hidden_size, c.kv_lora_rank, c.attention_bias
        self.c, q_width = c, c.num_attention_heads * c.q_head_dim
        if c.q_lora_rank is None:
            self.q_proj, self.q_a_proj = Linear(weights.matrix(f"{p}.q_proj", q_width, hidden)), None
        else:
            self.q_a_proj = Linear(weights.matrix(f"{p}.q_a_proj", c.q_lora_rank, hidden, bias=bias))
            self.q_a_layernorm = weights.vector(f"{p}.q_a_layernorm", c.q_lora_rank)
            self.q_proj = Linear(weights.matrix(f"{p}.q_b_proj", q_width, c.q_lora_rank))
            self.q_a = buffers.rows("q_a", c.q_lora_rank)
        self.kv_a_proj = Linear(weights.matrix(f"{p}.kv_a_proj", rank + c.head_dim, hidden, bias=bias))
        self.kv_a_layernorm = weights.vector(f"{p}.kv_a_layernorm", rank)
        if c.fused_kv_b:
            self.k_b_proj, self.v_b_proj = split_kv_b(c, f"{p}.kv_b_proj", weights)
        else:
            self.k_b_proj = weights.matrix(f"{p}.k_b_proj", c.num_attention_heads * rank, c.qk_nope_head_dim)
            self.v_b_proj = weights.matrix(f"{p}.v_b_proj", c.num_attention_heads * c.v_head_dim, rank)
        self.o_proj = Linear(weights.matrix(f"{p}.o_proj", hidden, c.num_attention_heads * c.v_head_dim, bias=bias))
        self.q, self.kv = buffers.rows("q", q_width), buffers.rows("kv", rank + c.head_dim)
        self.q_latent = buffers.rows("latent q", c.num_attention_heads * (rank + c.head_dim))
        self.latent = buffers.rows("latent", c.num_attention_heads * rank)
        self.out = buffers.rows("attention out", c.num_attention_heads * c.v_head_dim)

    def __call__(self, ops: Layers, x: Buffer, h: Buffer, kv, rope, num_tokens: int, position: int) -> None:
        """x [T, H] += attention of the normalised h [T, H]; one latent row per token goes into the cache."""
        c, heads, rank, eps = self.c, self.c.num_attention_heads, self.c.kv_lora_rank, self.c.rms_norm_eps
        if self.q_a_proj is not None:
            self.q_a_proj(ops, h, (self.q_a,), num_tokens)
            ops.rmsnorm(self.q_a, self.q_a, self.q_a_layernorm, num_tokens, c.q_lora_rank, eps)
        self.q_proj(ops, h if self.q_a_proj is None else self.q_a, (self.q,), num_tokens)
        ops.rope(self.q, rope, num_tokens, heads, c.q_head_dim, position, start=c.qk_nope_head_dim)
        self.kv_a_proj(ops, h, (self.kv,), num_tokens)
        ops.rmsnorm_part(self.kv, self.kv_a_layernorm, num_tokens, rank, eps)
        ops.rope(self.kv, rope, num_tokens, 1, rank + c.head_dim, position, start=rank)
        ops.kv_store(kv, self.kv, self.kv, position, num_tokens)
        ops.linear_heads(self.q_latent, self.k_b_proj, self.q, num_tokens, heads, c.q_head_dim, tail=c.head_dim)
        ops.attention(self.latent, self.q_latent, kv, num_tokens, heads, position, c.attention_scale)
        ops.linear_heads(self.out, self.v_b_proj, self.latent, num_tokens, heads, rank)
        self.o_proj(ops, self.out, (x,), num_tokens, add=True)


class LatentDecoder(decoder.Decoder):
    """A decoder whose layers have latent attention."""

    def make_attention(self, n: int, weights):
        return LatentAttention(self.config, n, weights, self.buffers)
