"""The layer for multi-token prediction that DeepSeek-V3 and GLM-4.5 store behind their others.

Source: DeepSeek-V3 report, section 2.2; order of the parts and place of the norms as the released weights want them
(the modeling code beside them, vLLM, SGLang).
From the hidden state h_i of position i after the final norm, and the token
t_{i+1} that follows, one decoder layer with keys and values of its own predicts the token after that:

    x_i = eh_proj [enorm(embedding(t_{i+1})) ; hnorm(h_i)]
    h'_i = norm(decoder layer(x_i))        norm: shared_head.norm
    logits of t_{i+2} = lm_head h'_i

A further token is predicted from h'_i in place of h_i. Embedding and lm_head are the model's own, as the report
says; the copies that checkpoints hold of them are not read. Of several such layers the first is used.
Knows nothing of drafts. Shape letters: T pairs, H hidden, V vocabulary.
"""

import numpy as np

from ..kv_cache import KVCache
from ..layers import Buffer, Linear
from . import _decoder as decoder

P = "layers.{n}.mtp"
TENSORS = {
    f"{P}.enorm": "model.layers.{n}.enorm.weight",
    f"{P}.hnorm": "model.layers.{n}.hnorm.weight",
    f"{P}.eh_proj": "model.layers.{n}.eh_proj.weight",
    f"{P}.norm": "model.layers.{n}.shared_head.norm.weight",
}
GGUF_TENSORS = {
    f"{P}.enorm": "blk.{n}.nextn.enorm.weight",
    f"{P}.hnorm": "blk.{n}.nextn.hnorm.weight",
    f"{P}.eh_proj": "blk.{n}.nextn.eh_proj.weight",
    f"{P}.norm": ("blk.{n}.nextn.shared_head_norm.weight", "output_norm.weight"),  # left out where they are equal
}
_DENSE = tuple(f"layers.{{n}}.mlp.{part}_proj" for part in ("gate", "up", "down"))


def shapes(c: decoder.DecoderConfig, of_model: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor template of the layer; of_model: those of the family, of which it has a layer with
    experts."""
    hidden = c.hidden_size
    own = {f"{P}.enorm": (hidden,), f"{P}.hnorm": (hidden,), f"{P}.eh_proj": (hidden, 2 * hidden)}
    layer = {name: shape for name, shape in of_model.items() if "{n}" in name and not name.startswith(_DENSE)}
    return own | layer | {f"{P}.norm": (hidden,)}


class MtpLayer:
    """The layer of a loaded model. weights: the loader that the model was made with."""

    def __init__(self, model: decoder.Decoder, weights):
        c, n = model.config, model.config.num_hidden_layers
        p = P.format(n=n)
        self.model, self.hidden_size = model, c.hidden_size
        self.enorm = weights.vector(f"{p}.enorm", c.hidden_size)
        self.hnorm = weights.vector(f"{p}.hnorm", c.hidden_size)
        self.eh_proj = Linear(weights.matrix(f"{p}.eh_proj", c.hidden_size, 2 * c.hidden_size))
        self.block = decoder.Block(c, n, weights, model.make_attention(n, weights), model.make_mlp(n, weights))
        self.norm = weights.vector(f"{p}.norm", c.hidden_size)
        self.ids = Buffer(1, model.max_tokens, np.int32)
        # Of its own: pairs may be run while the model's x still waits for its head.
        self.x = model.buffers.rows("mtp x", c.hidden_size)
        self.pair = model.buffers.rows("mtp pair", 2 * c.hidden_size)

    def new_kv(self, capacity: int, kind: str) -> KVCache:
        """Keys and values of the layer for `capacity` pairs."""
        return KVCache(self.model.config.kv_shapes[-1:], capacity, kind, self.model.max_tokens)

    def forward(self, hidden: np.ndarray, ids: np.ndarray, kv: KVCache, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Run pairs of hidden states float32 [T, H] and the tokens int32 [T] that follow them, T <= max_tokens, at
        places place .. place + T - 1 of the cache `kv`.

        Returns the last pair's h' [1, H] (a copy) and logits [1, V], valid until anything else runs. The model's h and
        logits are overwritten, its x is not. Raises NumericsError.
        """
        m, ops, width, num_pairs = self.model, self.model.layers, self.hidden_size, len(ids)
        eps, experts_used, ops.keep_rows = m.config.rms_norm_eps, ops.experts_used, None
        kv.extend(place, num_pairs)
        self.ids.array[0, :num_pairs] = ids
        ops.embed(m.h, m.embed_tokens, self.ids, num_pairs)
        ops.rmsnorm(m.h, m.h, self.enorm, num_pairs, width, eps)
        self.pair.array[:num_pairs, :width] = m.h.array[:num_pairs]
        self.x.array[:num_pairs] = hidden
        ops.rmsnorm(m.h, self.x, self.hnorm, num_pairs, width, eps)
        self.pair.array[:num_pairs, width:] = m.h.array[:num_pairs]
        self.eh_proj(ops, self.pair, (self.x,), num_pairs)
        ops.rmsnorm(m.h, self.x, self.block.input_layernorm, num_pairs, width, eps)
        self.block.attention(ops, self.x, m.h, kv.layers[0], m.rope, num_pairs, place)
        ops.rmsnorm(m.h, self.x, self.block.post_attention_layernorm, num_pairs, width, eps)
        self.block.mlp(ops, self.x, m.h, num_pairs)
        ops.experts_used = experts_used  # the count is of the model's own layers
        self.x.array[0] = self.x.array[num_pairs - 1]
        ops.rmsnorm(m.h, self.x, self.norm, 1, width, eps)
        m.lm_head(ops, m.h, (m.logits,), 1)
        return m.h.array[:1].copy(), m.logits.array[:1]
