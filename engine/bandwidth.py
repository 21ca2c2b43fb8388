"""Measured read bandwidth of memory, for verdicts and predictions."""

import time

import numpy as np

from .hardware import usable_cpus
from .kernels import Context, address, aligned_empty, check, lib

SIZE_BYTES = 256 << 20  # far more than any cache
PASSES = 4


def memory_bandwidth(context: Context, size_bytes: int = SIZE_BYTES) -> float:
    """GB/s that the context's threads read together: the best of a few passes over `size_bytes` of float32."""
    data = aligned_empty(size_bytes).view(np.float32)
    data.fill(1.0)  # a page that was never written is not in memory
    best = float("inf")
    for _ in range(PASSES):
        started = time.perf_counter()
        check(lib.moe_check_finite(context.handle, address(data, "float *"), len(data)), "memory bandwidth")
        best = min(best, time.perf_counter() - started)
    return size_bytes / best / 1e9


def machine_bandwidth() -> float:
    """GB/s that all usable cores read together, on the best tier: what a run of fewer threads could have."""
    return memory_bandwidth(Context(None, usable_cpus().count))
