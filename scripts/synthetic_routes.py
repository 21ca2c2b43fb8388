"""Synthetic routing: what a router might ask for, from a few numbers and a seed. Used by simulate_cache.py.

Each layer draws k distinct experts per token by perturbed logits: log popularity (Zipf, its own permutation per layer
and topic) plus Gumbel noise, of which the k largest are a draw without replacement in proportion to popularity.
Temporal locality: each expert's noise is kept from the token before with probability `locality`, which leaves every
single token's distribution as it was. Weights are the softmax of the logits, so that a strong choice is likelier to
come again, as in models.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """MoE layers, experts of a layer, experts per token."""

    name: str
    num_layers: int
    num_experts: int
    num_experts_per_tok: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("mixtral", 32, 8, 2),
        Shape("olmoe", 16, 64, 8),
        Shape("gpt-oss-120b", 36, 128, 4),
        Shape("qwen3-30b", 48, 128, 8),
        Shape("deepseek-v3", 58, 256, 8),
        Shape("experts-512", 48, 512, 10),
    )
}


@dataclass(frozen=True)
class Workload:
    """zipf: exponent of the popularity; topics: number of permutations; switch: mean tokens of a topic."""

    name: str
    zipf: float
    locality: float
    topics: int = 1
    switch: int = 0


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("uniform", 0.0, 0.0),
        Workload("balanced", 0.3, 0.5),  # trained with a balancing loss, neighbouring tokens alike
        Workload("zipf", 1.0, 0.3),
        Workload("topics", 1.0, 0.3, topics=8, switch=100),
    )
}


def topic_of_tokens(rng: np.random.Generator, workload: Workload, num_tokens: int) -> np.ndarray:
    """int [T]: topics of geometric length, never the same twice in a row."""
    topic = np.zeros(num_tokens, int)
    if workload.topics < 2:
        return topic
    switches = rng.random(num_tokens) < 1 / workload.switch
    steps = np.where(switches, rng.integers(1, workload.topics, num_tokens), 0)
    return np.cumsum(steps) % workload.topics


def route(shape: Shape, workload: Workload, num_tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return ids int32 [L, T, A] and weights float32 [L, T, A], strongest first."""
    rng = np.random.default_rng([seed, shape.num_layers, shape.num_experts])
    topic = topic_of_tokens(rng, workload, num_tokens)
    experts, top = shape.num_experts, shape.num_experts_per_tok
    popularity = -workload.zipf * np.log(np.arange(1, experts + 1)).astype(np.float32)
    ids = np.empty((shape.num_layers, num_tokens, top), np.int32)
    weights = np.empty(ids.shape, np.float32)
    for layer in range(shape.num_layers):
        table = np.stack([rng.permutation(popularity) for _ in range(workload.topics)])
        noise = -np.log(rng.exponential(size=(num_tokens, experts)).astype(np.float32))
        keep = rng.random((num_tokens, experts), np.float32) < workload.locality
        for token in range(1, num_tokens):
            np.copyto(noise[token], noise[token - 1], where=keep[token])
        logits = table[topic] + noise
        best = np.argsort(-logits, axis=1)[:, :top]
        ids[layer] = best
        top_logits = np.take_along_axis(logits, best, 1)
        mass = np.exp(logits - top_logits[:, :1]).sum(1, keepdims=True)
        weights[layer] = np.exp(top_logits - top_logits[:, :1]) / mass
    return ids, weights
