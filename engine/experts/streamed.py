"""Experts of one layer that are read from disk when they are needed.

All misses of a layer call are asked for at once, in file order; while they are read, the experts that are there are
computed, then each as it arrives. Outputs stay apart per assignment and are added in rank order by the caller, so the
order of arrival changes no bit. However many tokens a call has, each expert is read at most once in it.
"""

import numpy as np

from ..errors import ExpertReadError
from ..kernels import check, ffi, lib
from .cache import ExpertCache


class _Subset:
    """Arrays for the part of a route plan that is computed now; shared by all layers."""

    def __init__(self, num_experts: int):
        self.ids, self.offsets = np.empty(num_experts, np.int32), np.empty(num_experts + 1, np.int32)
        self.assignments = np.empty(0, np.int32)
        self._pointers = None

    def fill(self, plan: "_Plan", indices: list[int]):
        """The three arrays of moe_route_plan for the experts at `indices` of the plan."""
        if len(self.assignments) < len(plan.assignments):
            self.assignments, self._pointers = np.empty(len(plan.assignments), np.int32), None
        if self._pointers is None:
            self._pointers = tuple(
                ffi.cast("int32_t *", a.ctypes.data) for a in (self.ids, self.offsets, self.assignments)
            )
        at = 0
        for k, i in enumerate(indices):
            start, end = plan.offsets[i], plan.offsets[i + 1]
            self.ids[k], self.offsets[k] = plan.ids[i], at
            self.assignments[at : at + end - start] = plan.assignments[start:end]
            at += end - start
        self.offsets[len(indices)] = at
        return self._pointers


class _Plan:
    """A route plan with its arrays as Python sees them, and what it takes to run a part of it."""

    def __init__(self, layers, name, buffers, pointers, num_used, x, num_tokens, top):
        self.ids = buffers.expert_ids.array[0, :num_used].tolist()
        self.offsets = buffers.offsets.array[0, : num_used + 1].tolist()
        self.assignments = buffers.assignments.array[0, : self.offsets[-1]]
        self._pointers, self._subset, self._name = pointers, None, name
        self._call = (layers.ctx, buffers.out.ptr)
        self._tail = (x.ptr, num_tokens, top)

    def run(self, table, subset: _Subset, indices: list[int]) -> None:
        first, count = indices[0], len(indices)
        if indices[-1] - first == count - 1:
            ids, offsets, assignments = self._pointers
            pointers = (ids + first, offsets + first, assignments)
        else:
            pointers = subset.fill(self, indices)
        check(lib.moe_experts(*self._call, table, *pointers, count, *self._tail), f"{self._name} experts")


class StreamedExperts:
    """The `run` of ResidentExperts on a cache. layer: its number in the model."""

    def __init__(self, stream, layer: int, num_experts: int):
        self._stream, self.layer, self.num_experts = stream, layer, num_experts
        self.first_key = layer * num_experts
        self.cache: ExpertCache | None = None
        self.when_open = None  # called with `table` once there is one: moe.change_experts

    def open(self, cache: ExpertCache, subset: _Subset) -> None:
        """Connect to the cache, which is made when it is known how much memory is left for it."""
        self.cache, self._subset = cache, subset
        first = self.first_key
        self.table = ffi.new("struct moe_expert *[]", [cache.structs + first + i for i in range(self.num_experts)])
        if self.when_open is not None:
            self.when_open(self.table)

    def run(self, layers, name: str, buffers, plan, num_used: int, x, num_tokens: int, top: int) -> None:
        """buffers.out [T * top, H] = the experts' outputs for x [T, H]; plan: the three arrays of moe_route_plan.

        Raises ExpertReadError; the cache is in order afterwards.
        """
        cache = self.cache
        cache.begin_call()
        try:
            self._run(
                _Plan(layers, name, buffers, plan, num_used, x, num_tokens, top),
                buffers,
                (layers, self.layer, x, num_tokens),
            )
        except ExpertReadError:
            cache.settle()
            cache.end_call()
            raise
        cache.end_call()

    def _run(self, routed: _Plan, buffers, look: tuple) -> None:
        cache, first, num_tokens = self.cache, self.first_key, look[-1]
        keys = [first + expert for expert in routed.ids]
        slot_of = cache.slot_of
        if cache.lookahead:
            cache.lookahead.begin(self.layer, keys, num_tokens)
        missing = [i for i, key in enumerate(keys) if slot_of[key] < 0]
        weights = buffers.weights.array.reshape(-1)[routed.assignments]
        cache.policy.touch(keys, np.add.reduceat(weights, routed.offsets[:-1]).tolist())
        cache.counters.hits += len(keys) - len(missing)
        cache.counters.misses += len(missing)
        if not missing:
            if cache.lookahead:
                cache.lookahead.ask(*look, set(keys))
            routed.run(self.table, self._subset, range(len(keys)))
            return
        cache.counters.miss_calls += 1
        self._run_missing(routed, keys, missing, look)

    def run_resident(self, layers, name: str, buffers, plan, num_used: int, x, num_tokens: int, top: int) -> None:
        """`run` when every expert was read at load: that of ResidentExperts."""
        status = lib.moe_experts(layers.ctx, buffers.out.ptr, self.table, *plan, num_used, x.ptr, num_tokens, top)
        check(status, f"{name} experts")

    def _run_missing(self, routed: _Plan, keys: list[int], missing: list[int], look: tuple) -> None:
        cache = self.cache
        waiting = [keys[i] for i in missing]
        index_of = {key: i for i, key in enumerate(keys)}
        here = sorted(set(range(len(keys))) - set(missing))
        busy = {keys[i] for i in here}
        claimed = cache.claim_guesses(waiting)
        waiting = [key for key in waiting if key not in claimed]
        asked = cache.request(waiting, busy)
        del waiting[:asked]
        in_flight = len(claimed) + asked
        if cache.lookahead:
            cache.lookahead.ask(*look, set(keys))
        if here:
            held = [keys[i] for i in here]
            cache.hold(held)
            try:
                routed.run(self.table, self._subset, here)
            finally:
                cache.release(held)
        while in_flight or waiting:
            if waiting:
                asked = cache.request(waiting, ())
                del waiting[:asked]
                in_flight += asked
                if not in_flight:
                    raise ExpertReadError(f"the expert cache has lost its {cache.num_slots} slots; this is a bug")
            arrived = cache.arrivals()
            in_flight -= len(arrived)
            try:
                routed.run(self.table, self._subset, sorted(index_of[key] for key in arrived))
            finally:
                cache.release(arrived)
