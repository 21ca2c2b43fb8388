"""DeepSeek-V3 and GLM-4.5 with their layer for multi-token prediction in float64 numpy, as published.

A whole text at a time, no cache, no code of the engine: the layers as in the DeepSeek-V3 report (latent attention
2.1.1, experts 2.1.2, multi-token prediction 2.2) and in the GLM-4.5 report, names as in the released checkpoints.
"""

import math

import numpy as np


def rmsnorm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Reference:
    """config: of a checkpoint, with rope_parameters. weights: its tensors."""

    def __init__(self, config: dict, weights: dict):
        self.c, self.w = config, {name: array.astype(np.float64) for name, array in weights.items()}
        self.eps, self.latent = config["rms_norm_eps"], "kv_lora_rank" in config

    # ---- rotary embedding --------------------------------------------------------------------------------------------

    def inverse_frequencies(self, dim):
        rope = self.c["rope_parameters"]
        base, i = rope["rope_theta"], np.arange(dim // 2)
        fast = base ** (-2.0 * i / dim)
        if rope["rope_type"] != "yarn":
            return fast
        original = rope["original_max_position_embeddings"]

        def border(turns):
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(border(rope["beta_fast"])), 0)
        high = min(math.ceil(border(rope["beta_slow"])), dim - 1)
        ramp = np.clip((i - low) / max(high - low, 0.001), 0, 1)
        return fast / rope["factor"] * ramp + fast * (1 - ramp)

    def rotate(self, x, dim):
        """The first `dim` numbers of the last axis of x [T, N, D] at positions 0 .. T - 1. Pairs are neighbours in
        DeepSeek, halves in GLM."""
        angles = np.arange(len(x))[:, None, None] * self.inverse_frequencies(dim)
        cos, sin = np.cos(angles), np.sin(angles)
        a, b = (x[..., 0:dim:2], x[..., 1:dim:2]) if self.latent else (x[..., : dim // 2], x[..., dim // 2 : dim])
        first, second = a * cos - b * sin, a * sin + b * cos
        if self.latent:
            turned = np.stack([first, second], -1).reshape(*x.shape[:-1], dim)
        else:
            turned = np.concatenate([first, second], -1)
        return np.concatenate([turned, x[..., dim:]], -1)

    # ---- a decoder layer ---------------------------------------------------------------------------------------------

    def linear(self, x, name):
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, x, name):
        return rmsnorm(x, self.w[f"{name}.weight"], self.eps)

    def attend(self, q, k, v, scale):
        """Causal attention of q, k [T, N, D] and v [T, N, V]."""
        scores = np.einsum("tnd,snd->nts", q, k) * scale
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        return np.einsum("nts,snv->tnv", softmax(scores), v).reshape(len(q), -1)

    def latent_attention(self, x, p):
        c, heads, length = self.c, self.c["num_attention_heads"], len(x)
        nope, turned, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        q = self.linear(self.norm(self.linear(x, f"{p}.q_a_proj"), f"{p}.q_a_layernorm"), f"{p}.q_b_proj")
        q = q.reshape(length, heads, nope + turned)
        kv = self.linear(x, f"{p}.kv_a_proj_with_mqa")
        shared = self.rotate(kv[:, None, rank:], turned)
        kv = self.linear(self.norm(kv[:, :rank], f"{p}.kv_a_layernorm"), f"{p}.kv_b_proj").reshape(length, heads, -1)
        q = np.concatenate([q[..., :nope], self.rotate(q[..., nope:], turned)], -1)
        k = np.concatenate([kv[..., :nope], np.repeat(shared, heads, 1)], -1)
        rope, scale = c["rope_parameters"], (nope + turned) ** -0.5
        if rope["rope_type"] == "yarn":
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
        return self.linear(self.attend(q, k, kv[..., nope:], scale), f"{p}.o_proj")

    def grouped_attention(self, x, p):
        c, length, dim = self.c, len(x), self.c["head_dim"]
        q, k, v = (self.linear(x, f"{p}.{part}_proj").reshape(length, -1, dim) for part in "qkv")
        q, k = self.norm(q, f"{p}.q_norm"), self.norm(k, f"{p}.k_norm")
        turned = int(dim * c["rope_parameters"]["partial_rotary_factor"])
        q, k = self.rotate(q, turned), self.rotate(k, turned)
        times = c["num_attention_heads"] // c["num_key_value_heads"]
        k, v = np.repeat(k, times, 1), np.repeat(v, times, 1)
        return self.linear(self.attend(q, k, v, dim**-0.5), f"{p}.o_proj")

    def swiglu(self, x, p):
        return self.linear(silu(self.linear(x, f"{p}.gate_proj")) * self.linear(x, f"{p}.up_proj"), f"{p}.down_proj")

    def experts(self, x, p):
        c = self.c
        scores = 1 / (1 + np.exp(-self.linear(x, f"{p}.gate")))
        choice = scores + self.w[f"{p}.gate.e_score_correction_bias"]
        groups = choice.reshape(len(x), c.get("n_group") or 1, -1)
        best = np.sort(groups, -1)[..., -2:].sum(-1)
        out = self.swiglu(x, f"{p}.shared_experts")
        for t, row in enumerate(groups.copy()):
            row[np.argsort(-best[t])[c.get("topk_group") or 1 :]] = -np.inf
            chosen = np.argsort(-row.ravel())[: c["num_experts_per_tok"]]
            weights = scores[t, chosen]
            weights = weights / (weights.sum() + 1e-20) * c["routed_scaling_factor"]
            for e, weight in zip(chosen, weights, strict=True):
                out[t] += weight * self.swiglu(x[t : t + 1], f"{p}.experts.{e}")[0]
        return out

    def layer(self, x, n):
        p = f"model.layers.{n}"
        attention = self.latent_attention if self.latent else self.grouped_attention
        x = x + attention(self.norm(x, f"{p}.input_layernorm"), f"{p}.self_attn")
        dense = n < self.c["first_k_dense_replace"]
        return x + (self.swiglu if dense else self.experts)(self.norm(x, f"{p}.post_attention_layernorm"), f"{p}.mlp")

    # ---- the model, and its layer for multi-token prediction ---------------------------------------------------------

    def hidden(self, ids):
        """[T, H] after the final norm."""
        x = self.w["model.embed_tokens.weight"][ids]
        for n in range(self.c["num_hidden_layers"]):
            x = self.layer(x, n)
        return self.norm(x, "model.norm")

    def head(self, x):
        return x @ self.w["lm_head.weight"].T

    def predicted(self, hidden, following):
        """h' [T, H] of pairs: hidden states [T, H] after the final norm, and the tokens [T] that follow them."""
        n = self.c["num_hidden_layers"]
        p = f"model.layers.{n}"
        embedding = self.norm(self.w["model.embed_tokens.weight"][following], f"{p}.enorm")
        x = self.linear(np.concatenate([embedding, self.norm(hidden, f"{p}.hnorm")], -1), f"{p}.eh_proj")
        return self.norm(self.layer(x, n), f"{p}.shared_head.norm")

    def chained(self, ids, drafts):
        """Logits [1 + D, V] behind the text ids [T + 1]: the first is for the token after it, each further one for the
        token after one more of the drafts [D]; the layer goes on from its own hidden state."""
        hidden, rows = self.hidden(ids[:-1]), []
        for count in range(len(drafts) + 1):
            made = self.predicted(hidden, np.concatenate([ids[1:], drafts[:count]]))
            rows.append(self.head(made[-1]))
            hidden = np.concatenate([hidden, made[-1:]])
        return np.stack(rows)
