"""The decoder that families are written with: pre-norm blocks of attention and a dense or mixture-of-experts MLP.

A family's file holds its Config, the names and shapes of its tensors, and what differs in a block; the steps of a
forward pass are here, in the order of the block diagram. Knows nothing of files, formats or sampling.
Shape letters: T tokens, H hidden, N heads, K kv heads, D head_dim, I MLP width, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np

from ..config import MAX_WINDOW_ROWS, ConfigReader
from ..errors import ConfigError
from ..kernels import Context
from ..kv_cache import KVCache, KVShape
from ..layers import Buffer, Layers, Linear
from ..moe import ClampedSwiglu, ExpertBiases, MoeBlock, MoeBuffers, Router, change_experts
from ..rope import RopeSpec, RopeTable, read_rope

# Keys of config.json that cannot change what a forward pass computes, in every family.
HARMLESS = {
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "model_type", "output_router_logits", "pad_token_id", "router_aux_loss_coef", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What every family's config.json says. num_experts is 0 in a dense model."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    rope: RopeSpec
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool

    @property
    def kv_shapes(self) -> list[KVShape]:
        """What each layer keeps of a position."""
        return [KVShape(self.num_key_value_heads, self.head_dim)] * self.num_hidden_layers

    @property
    def dense_layers(self) -> frozenset[int]:
        """Layers with a dense MLP in place of experts."""
        return frozenset() if self.num_experts else frozenset(range(self.num_hidden_layers))


def decoder_fields(
    read: ConfigReader, *, theta: float, eps: float, head_dim: bool | int = True, tied: bool = False,
    rotary: float = 1.0, interleaved: bool = False,
) -> dict:  # fmt: skip
    """The fields of DecoderConfig but the experts. theta, eps, tied, rotary (the part of a head that turns) and
    interleaved: the family's defaults for absent keys; head_dim: a key of that name is allowed, otherwise it may only
    repeat hidden_size / num_attention_heads, or the number given."""
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", heads)
    default = head_dim if type(head_dim) is int else hidden // heads or 1
    if head_dim is not True:
        read.only("head_dim", default)
    dim = read.integer("head_dim", default)
    if heads % kv_heads or dim % 2 or (head_dim is False and hidden % heads):
        raise ConfigError(
            f"config.json: hidden_size {hidden}, num_attention_heads {heads}, num_key_value_heads {kv_heads}, head_dim "
            f"{dim} do not divide into heads of even width"
        )
    if dim % 8:
        raise ConfigError(f"config.json: head_dim {dim} is not supported (multiples of 8 only)")
    read.only("hidden_act", "silu")
    read.only("quantization_config")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": read.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "rope": read_rope(read, dim, theta, rotary, interleaved),
        "rms_norm_eps": read.number("rms_norm_eps", eps),
        "vocab_size": read.integer("vocab_size"),
        "max_position_embeddings": read.integer("max_position_embeddings"),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", tied),
    }


def expert_fields(read: ConfigReader, num_experts: str = "num_experts") -> dict:
    """num_experts (under the family's key for it) and num_experts_per_tok."""
    experts, top = read.integer(num_experts), read.integer("num_experts_per_tok")
    if top > experts:
        raise ConfigError(f"config.json: num_experts_per_tok {top} exceeds {num_experts} {experts}")
    return {"num_experts": experts, "num_experts_per_tok": top}


# Our tensor name -> name in a Hugging Face checkpoint; {n} layer. Which of them a model has, `shapes` says.
TENSORS = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layers.{n}.input_layernorm": "model.layers.{n}.input_layernorm.weight",
    "layers.{n}.post_attention_layernorm": "model.layers.{n}.post_attention_layernorm.weight",
    **{
        f"layers.{{n}}.self_attn.{name}": f"model.layers.{{n}}.self_attn.{name}.weight"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    },
    **{
        f"layers.{{n}}.self_attn.{name}.bias": f"model.layers.{{n}}.self_attn.{name}.bias"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    },
}


def decoder_shapes(
    c: DecoderConfig, *, bias: bool = False, output_bias: bool = False, head_norms: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of embedding, norms, attention and head; a tied head has no tensor of its own. head_norms: q and k have a
    norm per head."""
    hidden, q_width, kv_width = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    p = "layers.{n}.self_attn"
    shapes = {
        "embed_tokens": (c.vocab_size, hidden),
        "norm": (hidden,),
        "lm_head": (c.vocab_size, hidden),
        "layers.{n}.input_layernorm": (hidden,),
        "layers.{n}.post_attention_layernorm": (hidden,),
        f"{p}.q_proj": (q_width, hidden),
        f"{p}.k_proj": (kv_width, hidden),
        f"{p}.v_proj": (kv_width, hidden),
        f"{p}.o_proj": (hidden, q_width),
    }
    if bias:
        shapes |= {f"{p}.{name}_proj.bias": shapes[f"{p}.{name}_proj"][:1] for name in "qkv"}
    if output_bias:
        shapes[f"{p}.o_proj.bias"] = (hidden,)
    if head_norms:
        shapes |= {f"{p}.{name}_norm": (c.head_dim,) for name in "qk"}
    if c.tie_word_embeddings:
        del shapes["lm_head"]
    return shapes


def layers_of(c: DecoderConfig, template: str) -> range | list[int]:
    """Layers that have the template's tensor: dense ones an MLP, the others a router, experts, shared experts."""
    every, dense_layers = range(c.num_hidden_layers), c.dense_layers
    if ".mlp." not in template:
        return every
    dense = template.startswith(tuple(f"layers.{{n}}.mlp.{name}_proj" for name in ("gate", "up", "down")))
    return [n for n in every if (n in dense_layers) == dense]


def mlp_tensors(prefix: str) -> dict[str, str]:
    """Checkpoint names of an MLP that has the same prefix there."""
    return {f"{prefix}.{name}_proj": f"model.{prefix}.{name}_proj.weight" for name in ("gate", "up", "down")}


def mlp_shapes(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, int]]:
    """gate_proj, up_proj and down_proj of a dense MLP, a shared expert, or (with {e} in the prefix) the experts."""
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


class Buffers:
    """Activations of up to max_tokens tokens, made when they are first asked for and shared by all layers."""

    def __init__(self, max_tokens: int):
        self.max_tokens, self._made = max_tokens, {}

    def rows(self, name: str, width: int, dtype=np.float32) -> Buffer:
        """[max_tokens, width]; the same memory for the same name and width."""
        return self._once((name, width), lambda: Buffer(self.max_tokens, width, dtype))

    def moe(self, hidden_size: int, num_experts: int, num_experts_per_tok: int) -> MoeBuffers:
        key = (hidden_size, num_experts, num_experts_per_tok)
        return self._once(key, lambda: MoeBuffers(self.max_tokens, *key))

    def _once(self, key, make):
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class Attention:
    """Grouped-query attention of layer n.

    bias, output_bias: q, k and v, or o, have one. qk_norm: RMSNorm of q and k before RoPE, over the whole "width" or
    per "head". clip: q, k and v are clamped to +-clip. scale: of the scores, None for D^-1/2. output_scale: factor of
    what is added to the residual stream. window: positions seen, 0 for all. sinks: the softmax has a sink per head.
    """

    def __init__(
        self, c: DecoderConfig, n: int, weights, buffers: Buffers, *,
        bias: bool = False, output_bias: bool = False, qk_norm: str | None = None, clip: float | None = None,
        scale: float | None = None, output_scale: float = 1.0, window: int = 0, sinks: bool = False,
    ):  # fmt: skip
        p, hidden, self.eps = f"layers.{n}.self_attn", c.hidden_size, c.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        q_width, kv_width = self.heads * c.head_dim, self.kv_heads * c.head_dim
        self.q, self.out = buffers.rows("q", q_width), buffers.rows("attention out", q_width)
        self.k, self.v = buffers.rows("k", kv_width), buffers.rows("v", kv_width)
        self.qkv_proj = Linear(
            weights.matrix(f"{p}.q_proj", q_width, hidden, bias=bias),
            weights.matrix(f"{p}.k_proj", kv_width, hidden, bias=bias),
            weights.matrix(f"{p}.v_proj", kv_width, hidden, bias=bias),
        )
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            self.norm_widths = (q_width, kv_width) if qk_norm == "width" else (c.head_dim, c.head_dim)
            self.q_norm = weights.vector(f"{p}.q_norm", self.norm_widths[0])
            self.k_norm = weights.vector(f"{p}.k_norm", self.norm_widths[1])
        self.o_proj = Linear(weights.matrix(f"{p}.o_proj", hidden, q_width, bias=output_bias))
        self.clip, self.window, self.output_scale = clip, window, output_scale
        self.scale = c.head_dim**-0.5 if scale is None else scale
        self.sinks = weights.vector(f"{p}.sinks", c.num_attention_heads) if sinks else None

    def __call__(self, ops: Layers, x: Buffer, h: Buffer, kv, rope: RopeTable, num_tokens: int, position: int) -> None:
        """x [T, H] += attention of the normalised h [T, H]; the tokens' keys and values go into the cache."""
        q, k, v = self.q, self.k, self.v
        self.qkv_proj(ops, h, (q, k, v), num_tokens)
        if self.q_norm is not None:
            for y, weight, width in ((q, self.q_norm, self.norm_widths[0]), (k, self.k_norm, self.norm_widths[1])):
                ops.rmsnorm(y, y, weight, num_tokens * (y.width // width), width, self.eps)
        if self.clip is not None:
            for y in (q, k, v):
                ops.clip(y, num_tokens * y.width, self.clip)
        ops.rope(q, rope, num_tokens, self.heads, self.head_dim, position)
        ops.rope(k, rope, num_tokens, self.kv_heads, self.head_dim, position)
        ops.kv_store(kv, k, v, position, num_tokens)
        ops.attention(self.out, q, kv, num_tokens, self.heads, position, self.scale, self.window, self.sinks)
        if self.output_scale != 1.0:
            ops.scale(self.out, num_tokens * self.out.width, self.output_scale)
        self.o_proj(ops, self.out, (x,), num_tokens, add=True)


class DenseMLP:
    """down(silu(gate(h)) * up(h)) of a layer without experts, or of a shared expert. output_scale: factor of what is
    added to the residual stream."""

    def __init__(
        self, prefix: str, width: int, hidden: int, weights, buffers: Buffers, *, output_scale: float = 1.0
    ):  # fmt: skip
        self.name, self.output_scale = prefix, output_scale
        self.gate_up = Linear(
            weights.matrix(f"{prefix}.gate_proj", width, hidden), weights.matrix(f"{prefix}.up_proj", width, hidden)
        )
        self.down = Linear(weights.matrix(f"{prefix}.down_proj", hidden, width))
        self.gate, self.up = buffers.rows("gate", width), buffers.rows("up", width)

    def run(self, ops: Layers, out: Buffer, h: Buffer, num_tokens: int, *, add: bool) -> None:
        """out [T, H] = MLP of h [T, H], or += it when add."""
        self.gate_up(ops, h, (self.gate, self.up), num_tokens)
        count = num_tokens * self.gate.width
        ops.swiglu(self.gate, self.gate, self.up, count)
        if self.output_scale != 1.0:
            ops.scale(self.gate, count, self.output_scale)
        self.down(ops, self.gate, (out,), num_tokens, add=add)

    def __call__(self, ops: Layers, x: Buffer, h: Buffer, num_tokens: int) -> int:
        """x [T, H] += MLP of h; returns T. Raises NumericsError with the layer's name."""
        self.run(ops, x, h, num_tokens, add=True)
        ops.check_finite(x, num_tokens * x.width, self.name)
        return num_tokens


class SharedExpert:
    """A dense MLP beside the routed experts; gated: its output counts sigmoid(own gate)."""

    def __init__(self, prefix: str, width: int, hidden: int, weights, buffers: Buffers, *, gated: bool):
        self.mlp = DenseMLP(prefix, width, hidden, weights, buffers)
        self.gate_linear = Linear(weights.matrix(f"{prefix}_gate", 1, hidden)) if gated else None
        self.gate, self.out = buffers.rows("shared gate", 1), buffers.rows("shared out", hidden)

    def __call__(self, ops: Layers, x: Buffer, h: Buffer, num_tokens: int) -> None:
        """x [T, H] += shared expert of h."""
        if self.gate_linear is None:
            self.mlp.run(ops, x, h, num_tokens, add=True)
            return
        self.gate_linear(ops, h, (self.gate,), num_tokens)
        self.mlp.run(ops, self.out, h, num_tokens, add=False)
        ops.add_gated(x, self.out, self.gate, num_tokens, x.width)


class MoeMLP:
    """Routed experts of layer n, and the shared one where there is one. bias: router and experts have biases; clamp:
    limit of gpt-oss's clamped SwiGLU, None for the plain one."""

    def __init__(
        self, c: DecoderConfig, n: int, width: int, weights, buffers: Buffers, router: Router, *,
        shared: SharedExpert | None = None, bias: bool = False, clamp: float | None = None,
    ):  # fmt: skip
        hidden, experts, top = c.hidden_size, c.num_experts, c.num_experts_per_tok
        self.shared, self.buffers = shared, buffers.moe(hidden, experts, top)
        matrices = weights.experts(n, experts, width, hidden)
        changes = [ExpertBiases(n, experts, width, hidden, weights)] if bias else []
        changes += [ClampedSwiglu(experts, clamp)] if clamp is not None else []
        if changes:
            self._changes = changes  # keeps the biases alive
            change_experts(matrices, lambda table: [change(table) for change in changes])
        router_weights = weights.matrix(f"layers.{n}.mlp.router", experts, hidden, bias=bias)
        self.routed = MoeBlock(f"layer {n}", router_weights, matrices, router, experts, top)

    def __call__(self, ops: Layers, x: Buffer, h: Buffer, num_tokens: int) -> int:
        """x [T, H] += experts of h; returns the rows that go on. Raises NumericsError with the layer's name."""
        if self.shared is not None:
            self.shared(ops, x, h, num_tokens)
        return self.routed(ops, self.buffers, x, h, num_tokens)  # last: it finds what is not finite


class Block:
    """One transformer block: x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, c: DecoderConfig, n: int, weights, attention, mlp):
        self.name = f"layer {n}"
        self.input_layernorm = weights.vector(f"layers.{n}.input_layernorm", c.hidden_size)
        self.attention = attention
        self.post_attention_layernorm = weights.vector(f"layers.{n}.post_attention_layernorm", c.hidden_size)
        self.mlp = mlp


class Decoder:
    """A loaded model. A family derives its Model from it and says how the parts of a block are made.

    max_tokens: largest number of tokens in one forward call (longer input is split).
    """

    config_class: type[DecoderConfig]
    embedding_scale = 1.0  # factor of the embedding rows
    logits_scale = 1.0  # factor of the logits
    mtp = None  # the layer for multi-token prediction, when it was asked for

    def __init__(self, config: dict, weights, context: Context, num_positions: int, max_tokens: int):
        c = self.config = self.config_class.from_dict(config)
        self.max_tokens, self.layers = max_tokens, Layers(context)
        self.buffers = Buffers(max_tokens)
        self.ids = Buffer(1, max_tokens, np.int32)
        self.x = self.buffers.rows("x", c.hidden_size)  # residual stream
        self.h = self.buffers.rows("h", c.hidden_size)  # normalised input of a block's part
        # A table that is no head is looked up a row at a time: re-coding all of it would only delay the first token.
        lookup = not c.tie_word_embeddings
        self.embed_tokens = weights.matrix("embed_tokens", c.vocab_size, c.hidden_size, compact=lookup)
        self.blocks = [self.make_block(n, weights) for n in range(c.num_hidden_layers)]
        self.norm = weights.vector("norm", c.hidden_size)
        head = self.embed_tokens if c.tie_word_embeddings else weights.matrix("lm_head", c.vocab_size, c.hidden_size)
        self.lm_head = Linear(head)
        self.rope = RopeTable(c.rope, num_positions)
        self.logits = Buffer(min(MAX_WINDOW_ROWS, max_tokens), c.vocab_size)

    def make_block(self, n: int, weights) -> Block:
        """Layer n."""
        return Block(self.config, n, weights, self.make_attention(n, weights), self.make_mlp(n, weights))

    def make_attention(self, n: int, weights):
        """The attention of layer n: called as Attention is."""
        raise NotImplementedError

    def make_mlp(self, n: int, weights):
        """The MLP of layer n: called as DenseMLP and MoeMLP are."""
        raise NotImplementedError

    def new_kv(self, capacity: int, kind: str = "f16") -> KVCache:
        return KVCache(self.config.kv_shapes, capacity, kind, self.max_tokens)

    def forward(
        self, ids: np.ndarray, kv: KVCache, position: int, logits: str = "last", keep_rows=None
    ) -> np.ndarray | None:
        """Run tokens ids int32 [T], T <= max_tokens, at positions position .. position + T - 1.

        Returns float32 logits, valid until the next call: [1, V] of the last token ("last"), [T, V] ("all"), or None
        ("none", for all but the last part of a prefill). Raises NumericsError naming the layer.
        keep_rows: called with a layer's MoeBlock and its routing int32 [T, A], before its experts are read; how many of
        the first rows go on, at least 1. The logits are those of the rows that were left, and so is what `kv` holds.
        """
        num_tokens = len(ids)
        self.layers.keep_rows = keep_rows
        kv.extend(position, num_tokens)
        self.ids.array[0, :num_tokens] = ids
        self.embed(num_tokens)
        for block, layer_kv in zip(self.blocks, kv.layers, strict=True):
            self.attention(block, layer_kv, num_tokens, position)
            num_tokens = self.mlp(block, num_tokens)
        if num_tokens < len(ids):
            kv.truncate(position + num_tokens)
        if kv.follower is not None:
            kv.follower.take(ids[:num_tokens], position)
        return self.head(num_tokens, logits)

    def embed(self, num_tokens: int) -> None:
        """x = embedding rows of the ids."""
        self.layers.embed(self.x, self.embed_tokens, self.ids, num_tokens)
        if self.embedding_scale != 1.0:
            self.layers.scale(self.x, num_tokens * self.x.width, self.embedding_scale)

    def attention(self, block: Block, layer_kv, num_tokens: int, position: int) -> None:
        """x += attention(norm(x))."""
        self.rmsnorm(block.input_layernorm, num_tokens)
        block.attention(self.layers, self.x, self.h, layer_kv, self.rope, num_tokens, position)

    def mlp(self, block: Block, num_tokens: int) -> int:
        """x += mlp(norm(x)); returns how many rows go on."""
        self.rmsnorm(block.post_attention_layernorm, num_tokens)
        return block.mlp(self.layers, self.x, self.h, num_tokens)

    def head(self, num_tokens: int, logits: str) -> np.ndarray | None:
        """Final norm and lm_head of the last token, all tokens, or nothing."""
        if logits == "none":
            return None
        rows = num_tokens if logits == "all" else 1
        if len(self.logits.array) < rows:
            self.logits = Buffer(self.max_tokens, self.config.vocab_size)
        if rows == 1:
            self.x.array[0] = self.x.array[num_tokens - 1]
        self.rmsnorm(self.norm, rows)
        self.lm_head(self.layers, self.h, (self.logits,), rows)
        if self.logits_scale != 1.0:
            self.layers.scale(self.logits, rows * self.logits.width, self.logits_scale)
        return self.logits.array[:rows]

    def rmsnorm(self, weight, num_rows: int) -> None:
        """h = norm(x)."""
        self.layers.rmsnorm(self.h, self.x, weight, num_rows, self.x.width, self.config.rms_norm_eps)
