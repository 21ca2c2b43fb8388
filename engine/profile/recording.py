"""Native calls as the native side recorded them, taken over as arrays. Knows nothing of models."""

import numpy as np

from ..kernels import check, ffi, lib

PARTS = ("quantize", "gate_up", "down")  # enum moe_time
CALL = np.dtype([
    ("function", np.uint64), ("subject", np.uint64), ("start", np.int64), ("end", np.int64),
    ("parts", np.int64, len(PARTS)), ("num_experts", np.int64),
])  # struct moe_call; times in ns  # fmt: skip
EXPERT_USE = np.dtype([("expert", np.int32), ("num_tokens", np.int32)])  # struct moe_expert_use


class Source:
    """Calls of one context or one streamer. own: not those of a model that drafts."""

    def __init__(self, handle, record, take, own: bool):
        self.own, self._handle, self._record, self._take = own, handle, record, take
        self._taken = ffi.new("struct moe_calls *")

    def switch(self, on: bool) -> None:
        check(self._record(self._handle, on), "record native calls")

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """(CALL [n], EXPERT_USE [m]) since the last time, valid until the next."""
        self._take(self._handle, self._taken)
        taken = self._taken
        if taken.lost:
            check(lib.MOE_NO_MEMORY, f"record native calls: {taken.lost} are lost")
        return (
            _array(taken.calls, taken.num_calls, CALL),
            _array(taken.experts, taken.num_experts, EXPERT_USE),
        )


def _array(pointer, count: int, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(ffi.buffer(pointer, count * dtype.itemsize), dtype) if count else np.empty(0, dtype)


def context_calls(context, own: bool = True) -> Source:
    return Source(context.handle, lib.moe_record, lib.moe_take_calls, own)


def _sources(engine, own: bool) -> list[Source]:
    found = [context_calls(engine.context, own)]
    if engine.stream:
        handle = engine.stream.cache.handle
        found.append(Source(handle, lib.moe_streamer_record, lib.moe_streamer_take_calls, own))
    return found


class Recording:
    """All native calls of an engine and of its draft model, whoever makes them."""

    def __init__(self, engine):
        self._sources = _sources(engine, True) + (_sources(engine.draft, False) if engine.draft else [])

    def start(self) -> None:
        """Raises KernelError when somebody records already."""
        for n, source in enumerate(self._sources):
            try:
                source.switch(True)
            except BaseException:
                for earlier in self._sources[:n]:
                    earlier.switch(False)
                raise

    def stop(self) -> None:
        for source in self._sources:
            source.switch(False)

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(calls CALL [n] by start, own bool [n], EXPERT_USE [m]: the experts of own calls, call by call).

        Valid until the next time. Raises KernelError when the native side had no memory for some.
        """
        taken = [(source.own, *source.take()) for source in self._sources]
        experts = [uses for own, _, uses in taken if own]
        taken = [(own, calls) for own, calls, _ in taken if len(calls)] or [(True, np.empty(0, CALL))]
        calls = np.concatenate([calls for _, calls in taken]) if len(taken) > 1 else taken[0][1]
        own = np.repeat([own for own, _ in taken], [len(calls) for _, calls in taken])
        if len(taken) > 1:
            order = np.argsort(calls["start"], kind="stable")
            calls, own = calls[order], own[order]
        return calls, own, experts[0]  # a streamer's calls have none
