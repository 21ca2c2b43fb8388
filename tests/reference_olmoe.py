"""The OLMoE forward pass in plain float64 numpy: the readable definition that golden files and engines are held to.

Recomputes the whole sequence on every call; no cache, no batching, no speed. Each rule that an engine could get wrong
can be broken on purpose (see Rules), which shows that a comparison would notice.
Shape letters: T tokens, H hidden, N heads, K kv heads, D head_dim, E experts, A active experts, V vocab.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rules:
    """Deliberate mistakes, all off: negative controls for tests."""

    flip_norm_topk: bool = False  # renormalise the top-k weights exactly when the config says not to
    qk_norm_after_rope: bool = False  # q/k norm applied to the rotated vectors
    qk_norm_per_head: bool = False  # q/k norm over each head instead of the full width
    no_clip: bool = False  # clip_qkv ignored
    clip_before_norm: bool = False  # clip_qkv applied to the projections, before the q/k norm
    rope_adjacent_pairs: bool = False  # pairs (2j, 2j + 1) instead of (j, j + D/2)
    default_rope_theta: bool = False  # theta 10000 whatever the config says
    default_eps: bool = False  # eps 1e-5 whatever the config says
    interleaved_kv_heads: bool = False  # query head n reads kv head n % K instead of n // (N / K)
    f16_kv: bool = False  # not a mistake: keys and values rounded to float16, as a float16 KV cache stores them


def mistakes_that_bite(config):
    """Return the names of the Rules that must change the logits of a model with this config."""
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    applies = {
        "flip_norm_topk": True,
        "qk_norm_after_rope": True,
        "qk_norm_per_head": True,
        "rope_adjacent_pairs": True,
        "no_clip": config["clip_qkv"] is not None,
        "clip_before_norm": config["clip_qkv"] is not None,
        "default_rope_theta": rope_theta(config) != 10000.0,
        "interleaved_kv_heads": 1 < num_kv_heads < num_heads,
        # 1e-6 against 1e-5 moves the logits by about 1e-4 only
        "default_eps": config["rms_norm_eps"] >= 1e-3,
    }
    return [name for name, bites in applies.items() if bites]


def forward(weights, config, ids, *, trace=None, **broken):
    """Return the logits of every position.

    `weights` maps checkpoint tensor names to arrays (see float64_weights). If `trace` is a list, one tuple (expert ids
    [T, A], expert weights [T, A], router probabilities [T, E]) per layer is appended to it. `broken` sets Rules.

    Shapes: ids [T] -> [T, V] float64.
    """
    rules = Rules(**broken)
    hidden = _get(weights, "model.embed_tokens.weight")[np.asarray(ids)]  # [T, H]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        hidden = hidden + _attention(
            weights, config, prefix, _norm(weights, config, prefix + "input_layernorm", hidden, rules), rules
        )
        normed = _norm(weights, config, prefix + "post_attention_layernorm", hidden, rules)
        hidden = hidden + _moe(weights, config, prefix + "mlp.", normed, rules, trace)
    hidden = _norm(weights, config, "model.norm", hidden, rules)
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return hidden @ _get(weights, head).T  # [T, V]


def greedy(weights, config, prompt_ids, num_tokens):
    """Continue `prompt_ids` by `num_tokens` arg-max tokens, recomputing everything at each step."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(np.argmax(forward(weights, config, ids)[-1])))
    return ids[len(prompt_ids) :]


def float64_weights(weights):
    """Widen once; forward() would otherwise convert every tensor at every call."""
    return {name: np.asarray(array, np.float64) for name, array in weights.items()}


def relative_error(got, expected):
    """Return max |got - expected| / max |expected|; NaN stays NaN, so `error <= bound` fails on it."""
    return float(np.max(np.abs(np.asarray(got, np.float64) - expected)) / np.max(np.abs(expected)))


def _get(weights, name):
    return np.asarray(weights[name], np.float64)


def _norm(weights, config, name, x, rules):
    return _rms_norm(x, _get(weights, name + ".weight"), 1e-5 if rules.default_eps else config["rms_norm_eps"])


def _rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _silu(x):
    return x / (1.0 + np.exp(-x))


def _softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rope_theta(config):
    """Return theta from the top level or, as newer exports spell it, from rope_parameters."""
    return config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]


def _rope(x, theta, adjacent_pairs):
    """Rotate x [T, heads, D] by its position; pair j turns by position * theta^(-2j/D)."""
    tokens, _, dim = x.shape
    angles = np.arange(tokens)[:, None] * theta ** (-np.arange(0, dim, 2) / dim)  # [T, D/2]
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    out = np.empty_like(x)
    first, second = (
        (np.s_[..., 0::2], np.s_[..., 1::2]) if adjacent_pairs else (np.s_[..., : dim // 2], np.s_[..., dim // 2 :])
    )
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[second] * cos + x[first] * sin
    return out


def _project_qk(weights, config, prefix, name, x, num_heads, rules):
    """Return rotated, normed and clipped queries or keys, [T, heads, D]."""
    width = num_heads * (config["hidden_size"] // config["num_attention_heads"])
    weight = _get(weights, f"{prefix}self_attn.{name}_norm.weight")
    eps = 1e-5 if rules.default_eps else config["rms_norm_eps"]
    theta = 10000.0 if rules.default_rope_theta else rope_theta(config)
    y = x @ _get(weights, f"{prefix}self_attn.{name}_proj.weight").T  # [T, width]
    if rules.clip_before_norm:
        y = _clip(y, config, rules)
    if rules.qk_norm_per_head:
        heads = y.reshape(len(y), num_heads, -1)
        y = _rms_norm(heads, weight.reshape(num_heads, -1), eps).reshape(len(y), width)
    elif not rules.qk_norm_after_rope:
        y = _rms_norm(y, weight, eps)
    if not rules.clip_before_norm:
        y = _clip(y, config, rules)
    y = _rope(y.reshape(len(y), num_heads, -1), theta, rules.rope_adjacent_pairs)
    if rules.qk_norm_after_rope:
        y = _rms_norm(y.reshape(len(y), width), weight, eps).reshape(y.shape)
    return y


def _clip(x, config, rules):
    limit = config["clip_qkv"]
    return x if limit is None or rules.no_clip else np.clip(x, -limit, limit)


def _attention(weights, config, prefix, x, rules):
    """Causal grouped-query attention and its output projection: x [T, H] -> [T, H]."""
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q = _project_qk(weights, config, prefix, "q", x, num_heads, rules)  # [T, N, D]
    k = _project_qk(weights, config, prefix, "k", x, num_kv_heads, rules)  # [T, K, D]
    v = _clip(x @ _get(weights, prefix + "self_attn.v_proj.weight").T, config, rules).reshape(k.shape)
    if rules.f16_kv:
        k, v = (a.astype(np.float16).astype(np.float64) for a in (k, v))
    head_ids = np.arange(num_heads)
    kv_of_head = head_ids % num_kv_heads if rules.interleaved_kv_heads else head_ids // (num_heads // num_kv_heads)
    scores = np.einsum("tnd,snd->nts", q, k[:, kv_of_head]) / np.sqrt(q.shape[-1])  # [N, T, T]
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    out = np.einsum("nts,snd->tnd", _softmax(scores), v[:, kv_of_head])
    return out.reshape(len(x), -1) @ _get(weights, prefix + "self_attn.o_proj.weight").T


def route(x, router, num_active, renormalise):
    """Softmax over all experts, then the top A in rank order, ties to the lowest id.

    Shapes: x [T, H], router [E, H] -> ids [T, A], weights [T, A], probabilities [T, E].
    """
    probs = _softmax(x @ router.T)
    ids = np.argsort(-probs, axis=-1, kind="stable")[:, :num_active]
    chosen = np.take_along_axis(probs, ids, axis=-1)
    if renormalise:
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
    return ids, chosen, probs


def _moe(weights, config, prefix, x, rules, trace):
    """Route each token, run its experts, add them in rank order: x [T, H] -> [T, H]."""
    renormalise = config["norm_topk_prob"] != rules.flip_norm_topk
    router = _get(weights, prefix + "gate.weight")
    ids, chosen, probs = route(x, router, config["num_experts_per_tok"], renormalise)
    if trace is not None:
        trace.append((ids, chosen, probs))
    out = np.zeros_like(x)
    for rank in range(ids.shape[1]):
        for expert in np.unique(ids[:, rank]):
            rows = np.flatnonzero(ids[:, rank] == expert)
            out[rows] += chosen[rows, rank, None] * _expert(weights, f"{prefix}experts.{expert}.", x[rows])
    return out


def _expert(weights, prefix, x):
    activated = _silu(x @ _get(weights, prefix + "gate_proj.weight").T)
    up = x @ _get(weights, prefix + "up_proj.weight").T
    return (activated * up) @ _get(weights, prefix + "down_proj.weight").T
