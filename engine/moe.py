"""The mixture-of-experts block: route, run the experts that were asked for, add them in rank order.

Which experts are in memory is somebody else's business (engine.experts), which also runs them as they arrive.
"""

from dataclasses import dataclass

import numpy as np

from .errors import NumericsError
from .kernels import check, ffi, lib
from .layers import Buffer, Layers, Linear, nonfinite_message
from .weights.architectures import EXPERT_PARTS, expert_matrix_name


@dataclass(frozen=True)
class Groups:
    """Neighbouring experts in `num_groups` groups, of which the top_groups best are eligible; score: how a group is
    judged, lib.MOE_GROUP_MAX or lib.MOE_GROUP_TOP2_SUM."""

    num_groups: int
    top_groups: int
    score: int


class Router:
    """Scores of one family: which rule turns logits into experts and weights (see moe_router_rule).

    correction: a Vector [E] that takes part in the selection, not in the weights; norm_epsilon: added to the sum that
    norm_topk_prob divides by.
    """

    def __init__(
        self,
        score: int,
        norm_topk_prob: bool,
        scale: float = 1.0,
        *,
        correction=None,
        groups: Groups | None = None,
        norm_epsilon: float = 0.0,
    ):
        self.rule = rule = ffi.new("struct moe_router_rule *")
        rule.score, rule.norm_topk_prob, rule.scale, rule.norm_epsilon = score, norm_topk_prob, scale, norm_epsilon
        self._correction = correction  # keeps the memory alive
        if correction is not None:
            rule.correction = correction.ptr
        if groups is not None:
            rule.num_groups, rule.top_groups, rule.group_score = groups.num_groups, groups.top_groups, groups.score


def change_experts(experts, change) -> None:
    """Call change(table) with the C array of struct moe_expert pointers of a layer: now, or when a cache of streamed
    experts is made. What it sets stays, whatever holds the matrices' bytes."""
    if hasattr(experts, "table"):
        change(experts.table)
    else:
        experts.when_open = change


class ExpertBiases:
    """Biases of the experts of a layer, in memory; called with their table it points the experts at them."""

    def __init__(self, layer: int, num_experts: int, width: int, hidden_size: int, weights):
        sizes = (width, width, hidden_size)
        self._vectors = [
            [
                weights.vector(f"{expert_matrix_name(layer, e, part)}.bias", size)
                for part, size in zip(EXPERT_PARTS, sizes, strict=True)
            ]
            for e in range(num_experts)
        ]

    def __call__(self, table) -> None:
        for e, vectors in enumerate(self._vectors):
            for matrix, vector in zip((table[e].gate, table[e].up, table[e].down), vectors, strict=True):
                matrix.bias = vector.ptr


class ClampedSwiglu:
    """The activation of gpt-oss for the experts of a layer."""

    def __init__(self, num_experts: int, limit: float):
        self.num_experts, self.limit = num_experts, limit

    def __call__(self, table) -> None:
        for e in range(self.num_experts):
            table[e].activation, table[e].limit = lib.MOE_SWIGLU_CLAMPED, self.limit


class MoeBuffers:
    """Scratch of one MoE block for up to max_tokens tokens; shared by all layers."""

    def __init__(self, max_tokens: int, hidden_size: int, num_experts: int, num_experts_per_tok: int):
        assignments = max_tokens * num_experts_per_tok
        self.logits = Buffer(max_tokens, num_experts)
        self.ids = Buffer(max_tokens, num_experts_per_tok, np.int32)
        self.weights = Buffer(max_tokens, num_experts_per_tok)
        self.expert_ids = Buffer(1, min(num_experts, assignments), np.int32)
        self.offsets = Buffer(1, min(num_experts, assignments) + 1, np.int32)
        self.assignments = Buffer(1, assignments, np.int32)
        self.out = Buffer(assignments, hidden_size)


class MoeBlock:
    """Router and experts of one layer. experts: an object with the `run` of ResidentExperts."""

    def __init__(self, name: str, router_weights, experts, router: Router, num_experts: int, num_experts_per_tok: int):
        self.name, self.experts, self.router = name, experts, router
        self.router_linear = Linear(router_weights)
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.observers = []  # called with (ids [T, A], weights [T, A]) of every forward call; copy to keep

    def __call__(self, layers: Layers, buffers: MoeBuffers, y: Buffer, x: Buffer, num_tokens: int) -> int:
        """y [T, H] += sum over the top experts of x [T, H]. Returns T, or how many rows layers.keep_rows left of it.
        Raises NumericsError with the layer's name."""
        ctx, b, top = layers.ctx, buffers, self.num_experts_per_tok
        self.router_linear(layers, x, (b.logits,), num_tokens)
        status = lib.moe_route(
            ctx, b.ids.ptr, b.weights.ptr, b.logits.ptr, num_tokens, self.num_experts, top, self.router.rule
        )
        self._check(status, "router")
        if layers.keep_rows is not None:
            num_tokens = layers.keep_rows(self, b.ids.array[:num_tokens])
        for observe in self.observers:
            observe(b.ids.array[:num_tokens], b.weights.array[:num_tokens])
        plan = (b.expert_ids.ptr, b.offsets.ptr, b.assignments.ptr)
        num_used = check(lib.moe_route_plan(ctx, *plan, b.ids.ptr, num_tokens, top, self.num_experts), "route plan")
        layers.experts_used += num_used
        self.experts.run(layers, self.name, b, plan, num_used, x, num_tokens, top)
        self._check(lib.moe_experts_combine(ctx, y.ptr, b.out.ptr, b.weights.ptr, num_tokens, top, x.width), "output")
        return num_tokens

    def _check(self, status: int, what: str) -> None:
        if status == lib.MOE_NONFINITE:
            raise NumericsError(nonfinite_message(f"{self.name} {what}"))
        check(status, f"{self.name} {what}")
