"""OLMoE: pre-norm blocks, q/k RMSNorm over the full projection, softmax router over all experts then top-k.

Source: transformers `OlmoeForCausalLM` (modeling_olmoe.py). Owns the order of operations of this family and what its
config.json may say; knows nothing of files, formats or sampling.
"""

from dataclasses import dataclass

import numpy as np

from ..config import ConfigReader, rope_theta
from ..errors import ConfigError
from ..kernels import Context, lib
from ..kv_cache import KVCache, KVShape
from ..layers import Buffer, Layers, Linear, RopeTable
from ..moe import MoeBlock, MoeBuffers, Router
from ._gguf import head_dim_from_gguf, rope_from_gguf

# Keys of config.json that cannot change what a forward pass computes.
HARMLESS = {
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "model_type", "output_router_logits", "pad_token_id", "router_aux_loss_coef", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """config.json of an OLMoE model, checked."""

    hidden_size: int
    intermediate_size: int  # expert width
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    clip_qkv: float | None
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        read = ConfigReader(config)
        hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        kv_heads = read.integer("num_key_value_heads", heads)
        if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
            raise ConfigError(
                f"config.json: hidden_size {hidden}, num_attention_heads {heads}, num_key_value_heads {kv_heads} "
                "do not divide into heads of even width"
            )
        read.only("head_dim", hidden // heads)
        read.only("attention_bias", False)
        read.only("hidden_act", "silu")
        read.only("quantization_config")
        result = cls(
            hidden_size=hidden,
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=hidden // heads,
            num_experts=read.integer("num_experts"),
            num_experts_per_tok=read.integer("num_experts_per_tok"),
            norm_topk_prob=read.boolean("norm_topk_prob", False),
            clip_qkv=read.number("clip_qkv", optional=True),
            rope_theta=rope_theta(read, 10000.0),
            rms_norm_eps=read.number("rms_norm_eps", 1e-5),
            vocab_size=read.integer("vocab_size"),
            max_position_embeddings=read.integer("max_position_embeddings"),
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
        )
        read.finish(HARMLESS)
        top, experts = result.num_experts_per_tok, result.num_experts
        if top > experts:
            raise ConfigError(f"config.json: num_experts_per_tok {top} exceeds num_experts {experts}")
        return result


OUTPUT_AXIS = 0  # weights are those of nn.Linear: [out, in]
# Our tensor name -> name in a Hugging Face checkpoint; {n} layer, {e} expert. Shapes are checked by `shapes`.
TENSORS = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layers.{n}.input_layernorm": "model.layers.{n}.input_layernorm.weight",
    "layers.{n}.post_attention_layernorm": "model.layers.{n}.post_attention_layernorm.weight",
    "layers.{n}.self_attn.q_proj": "model.layers.{n}.self_attn.q_proj.weight",
    "layers.{n}.self_attn.k_proj": "model.layers.{n}.self_attn.k_proj.weight",
    "layers.{n}.self_attn.v_proj": "model.layers.{n}.self_attn.v_proj.weight",
    "layers.{n}.self_attn.o_proj": "model.layers.{n}.self_attn.o_proj.weight",
    "layers.{n}.self_attn.q_norm": "model.layers.{n}.self_attn.q_norm.weight",
    "layers.{n}.self_attn.k_norm": "model.layers.{n}.self_attn.k_norm.weight",
    "layers.{n}.mlp.router": "model.layers.{n}.mlp.gate.weight",
    "layers.{n}.mlp.experts.{e}.gate_proj": "model.layers.{n}.mlp.experts.{e}.gate_proj.weight",
    "layers.{n}.mlp.experts.{e}.up_proj": "model.layers.{n}.mlp.experts.{e}.up_proj.weight",
    "layers.{n}.mlp.experts.{e}.down_proj": "model.layers.{n}.mlp.experts.{e}.down_proj.weight",
}


# Our tensor name -> where it lies in a GGUF file (weights/slices.py); files of older converters and newer ones differ.
GGUF_ARCHITECTURE = "olmoe"
GGUF_TENSORS = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "layers.{n}.input_layernorm": "blk.{n}.attn_norm.weight",
    "layers.{n}.post_attention_layernorm": "blk.{n}.ffn_norm.weight",
    "layers.{n}.self_attn.q_proj": "blk.{n}.attn_q.weight",
    "layers.{n}.self_attn.k_proj": "blk.{n}.attn_k.weight",
    "layers.{n}.self_attn.v_proj": "blk.{n}.attn_v.weight",
    "layers.{n}.self_attn.o_proj": "blk.{n}.attn_output.weight",
    "layers.{n}.self_attn.q_norm": "blk.{n}.attn_q_norm.weight",
    "layers.{n}.self_attn.k_norm": "blk.{n}.attn_k_norm.weight",
    "layers.{n}.mlp.router": "blk.{n}.ffn_gate_inp.weight",
    "layers.{n}.mlp.experts.{e}.gate_proj": ("blk.{n}.ffn_gate_exps.weight", "blk.{n}.ffn_gate_up_exps.weight[0/2]"),
    "layers.{n}.mlp.experts.{e}.up_proj": ("blk.{n}.ffn_up_exps.weight", "blk.{n}.ffn_gate_up_exps.weight[1/2]"),
    "layers.{n}.mlp.experts.{e}.down_proj": "blk.{n}.ffn_down_exps.weight",
}


def config_from_gguf(keys) -> dict:
    """config.json of the model in a GGUF file. keys: engine.weights.gguf_keys.GgufKeys.

    Source: llama.cpp's converter and graph of "olmoe": top-k probabilities are not renormalised.
    """
    return {
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length")),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": keys.integer("attention.head_count"),
        "num_key_value_heads": keys.integer("attention.head_count_kv", keys.integer("attention.head_count")),
        **head_dim_from_gguf(keys),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "clip_qkv": keys.number("attention.clamp_kqv", None) or None,
        **rope_from_gguf(keys, 10000.0),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": keys.rows("token_embd.weight"),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
    }


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template in TENSORS; a tied head has no lm_head."""
    hidden, kv_width, width = c.hidden_size, c.num_key_value_heads * c.head_dim, c.intermediate_size
    result = {
        "embed_tokens": (c.vocab_size, hidden),
        "norm": (hidden,),
        "lm_head": (c.vocab_size, hidden),
        "layers.{n}.input_layernorm": (hidden,),
        "layers.{n}.post_attention_layernorm": (hidden,),
        "layers.{n}.self_attn.q_proj": (hidden, hidden),
        "layers.{n}.self_attn.k_proj": (kv_width, hidden),
        "layers.{n}.self_attn.v_proj": (kv_width, hidden),
        "layers.{n}.self_attn.o_proj": (hidden, hidden),
        "layers.{n}.self_attn.q_norm": (hidden,),
        "layers.{n}.self_attn.k_norm": (kv_width,),
        "layers.{n}.mlp.router": (c.num_experts, hidden),
        "layers.{n}.mlp.experts.{e}.gate_proj": (width, hidden),
        "layers.{n}.mlp.experts.{e}.up_proj": (width, hidden),
        "layers.{n}.mlp.experts.{e}.down_proj": (hidden, width),
    }
    if c.tie_word_embeddings:
        del result["lm_head"]
    return result


class Layer:
    """Weights of one transformer block."""

    def __init__(self, c: Config, n: int, weights):
        p, hidden, kv_width = f"layers.{n}", c.hidden_size, c.num_key_value_heads * c.head_dim
        self.name = f"layer {n}"
        self.input_layernorm = weights.vector(f"{p}.input_layernorm", hidden)
        self.qkv_proj = Linear(
            weights.matrix(f"{p}.self_attn.q_proj", hidden, hidden),
            weights.matrix(f"{p}.self_attn.k_proj", kv_width, hidden),
            weights.matrix(f"{p}.self_attn.v_proj", kv_width, hidden),
        )
        self.q_norm = weights.vector(f"{p}.self_attn.q_norm", hidden)
        self.k_norm = weights.vector(f"{p}.self_attn.k_norm", kv_width)
        self.o_proj = Linear(weights.matrix(f"{p}.self_attn.o_proj", hidden, hidden))
        self.post_attention_layernorm = weights.vector(f"{p}.post_attention_layernorm", hidden)
        self.mlp = MoeBlock(
            self.name,
            weights.matrix(f"{p}.mlp.router", c.num_experts, hidden),
            weights.experts(n, c.num_experts, c.intermediate_size, hidden),
            Router(lib.MOE_SOFTMAX_THEN_TOPK, c.norm_topk_prob),
            c.num_experts,
            c.num_experts_per_tok,
        )


class Buffers:
    """Activations of up to max_tokens tokens."""

    def __init__(self, c: Config, max_tokens: int):
        kv_width = c.num_key_value_heads * c.head_dim
        self.ids = Buffer(1, max_tokens, np.int32)
        self.x = Buffer(max_tokens, c.hidden_size)  # residual stream
        self.h = Buffer(max_tokens, c.hidden_size)  # normalised input of a block
        self.q = Buffer(max_tokens, c.hidden_size)
        self.k = Buffer(max_tokens, kv_width)
        self.v = Buffer(max_tokens, kv_width)
        self.attn = Buffer(max_tokens, c.hidden_size)
        self.moe = MoeBuffers(max_tokens, c.hidden_size, c.num_experts, c.num_experts_per_tok)


class Model:
    """A loaded OLMoE. max_tokens: largest number of tokens in one forward call (longer input is split)."""

    def __init__(self, config: dict, weights, context: Context, num_positions: int, max_tokens: int):
        c = self.config = Config.from_dict(config)
        self.max_tokens = max_tokens
        self.layers = Layers(context)
        self.embed_tokens = weights.matrix("embed_tokens", c.vocab_size, c.hidden_size)
        self.blocks = [Layer(c, n, weights) for n in range(c.num_hidden_layers)]
        self.norm = weights.vector("norm", c.hidden_size)
        head = self.embed_tokens if c.tie_word_embeddings else weights.matrix("lm_head", c.vocab_size, c.hidden_size)
        self.lm_head = Linear(head)
        self.rope = RopeTable(c.rope_theta, c.head_dim, num_positions)
        self.buffers = Buffers(c, max_tokens)
        self.logits = Buffer(1, c.vocab_size)

    def new_kv(self, capacity: int, kind: str = "f16") -> KVCache:
        c = self.config
        shape = KVShape(c.num_key_value_heads, c.head_dim)
        return KVCache([shape] * c.num_hidden_layers, capacity, kind, self.max_tokens)

    def forward(self, ids: np.ndarray, kv: KVCache, position: int, logits: str = "last") -> np.ndarray | None:
        """Run tokens ids int32 [T], T <= max_tokens, at positions position .. position + T - 1.

        Returns float32 logits, valid until the next call: [1, V] of the last token ("last"), [T, V] ("all"), or None
        ("none", for all but the last part of a prefill). Raises NumericsError naming the layer.
        """
        b, num_tokens = self.buffers, len(ids)
        kv.extend(position, num_tokens)
        b.ids.array[0, :num_tokens] = ids
        self.layers.embed(b.x, self.embed_tokens, b.ids, num_tokens)
        for block, layer_kv in zip(self.blocks, kv.layers, strict=True):
            self.attention(block, layer_kv, num_tokens, position)
            self.moe(block, num_tokens)
        return self.head(num_tokens, logits)

    def attention(self, block: Layer, layer_kv, num_tokens: int, position: int) -> None:
        """x += o_proj(attention(rope(norm(q)), rope(norm(k)), v)) of the normalised x."""
        c, b, ops = self.config, self.buffers, self.layers
        heads, kv_heads, dim, eps = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps
        ops.rmsnorm(b.h, b.x, block.input_layernorm, num_tokens, c.hidden_size, eps)
        block.qkv_proj(ops, b.h, (b.q, b.k, b.v), num_tokens)
        ops.rmsnorm(b.q, b.q, block.q_norm, num_tokens, b.q.width, eps)
        ops.rmsnorm(b.k, b.k, block.k_norm, num_tokens, b.k.width, eps)
        if c.clip_qkv is not None:
            for x in (b.q, b.k, b.v):
                ops.clip(x, num_tokens * x.width, c.clip_qkv)
        ops.rope(b.q, self.rope, num_tokens, heads, dim, position)
        ops.rope(b.k, self.rope, num_tokens, kv_heads, dim, position)
        ops.kv_store(layer_kv, b.k, b.v, position, num_tokens)
        ops.attention(b.attn, b.q, layer_kv, num_tokens, heads, position, dim**-0.5)
        block.o_proj(ops, b.attn, (b.x,), num_tokens, add=True)

    def moe(self, block: Layer, num_tokens: int) -> None:
        """x += experts(norm(x))."""
        c, b, ops = self.config, self.buffers, self.layers
        ops.rmsnorm(b.h, b.x, block.post_attention_layernorm, num_tokens, c.hidden_size, c.rms_norm_eps)
        block.mlp(ops, b.moe, b.x, b.h, num_tokens)

    def head(self, num_tokens: int, logits: str) -> np.ndarray | None:
        """Final norm and lm_head of the last token, all tokens, or nothing."""
        c, b, ops = self.config, self.buffers, self.layers
        if logits == "none":
            return None
        rows = num_tokens if logits == "all" else 1
        if len(self.logits.array) < rows:
            self.logits = Buffer(self.max_tokens, c.vocab_size)
        if rows == 1:
            b.x.array[0] = b.x.array[num_tokens - 1]
        ops.rmsnorm(b.h, b.x, self.norm, rows, c.hidden_size, c.rms_norm_eps)
        self.lm_head(ops, b.h, (self.logits,), rows)
        return self.logits.array[:rows]
