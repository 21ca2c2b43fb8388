"""The thread pool and the bracket of every call: sleeping workers, floating-point mode, forks, concurrent callers."""

import ctypes
import multiprocessing
import platform
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from engine._native import ffi, lib
from native_calls import Experts, Matrix, assert_same_bits, context, linear, run_experts, softmax, swiglu

ODD_MODE = 0x1F80 | 0x8040 | 0x4000  # x86: flush to zero, subnormals are zero, round up
CONTROL = """
#include <xmmintrin.h>
unsigned get_mode(void) { return _mm_getcsr(); }
void set_mode(unsigned mode) { _mm_setcsr(mode); }
float tiny(float x) { return x * 0.5f; }
"""


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, W = normal(1, 40, 256), [normal(2, 400, 256), *(normal(i, 256, 256) for i in range(3))]
X[5] *= np.float32(1e-38)  # small enough for subnormal numbers to matter
X20, X30 = X * 20, X * 30  # made here: numpy obeys the caller's floating-point mode


def work(ctx):
    """Results of calls that use the pool."""
    w = [Matrix(ctx, fmt, W[0]) for fmt in ("q8_0", "f32")]
    experts = Experts([tuple(Matrix(ctx, "q8_0", part) for part in W[1:])])
    ids = np.zeros((40, 1), np.int32)
    return [*linear(ctx, w, X), softmax(ctx, X30), swiglu(ctx, X20, X), run_experts(ctx, experts, X, ids)]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_caller_floating_point_mode_changes_nothing_and_is_restored(threads, tmp_path):
    if not shutil.which("gcc") or "x86" not in platform.machine():
        pytest.skip("needs gcc on x86")
    (tmp_path / "control.c").write_text(CONTROL)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "control.c", "-o", "control.so"], check=True, cwd=tmp_path)
    control = ctypes.CDLL(str(tmp_path / "control.so"))
    control.tiny.restype, control.tiny.argtypes = ctypes.c_float, [ctypes.c_float]
    ctx = context(None, threads)
    want = work(ctx)
    before = control.get_mode()
    control.set_mode(ODD_MODE)
    try:
        assert control.tiny(3e-38) > 0
        assert control.tiny(1.2e-38) == 0, "the odd mode is not in force"
        other = context(None, threads)  # workers inherit the mode of the thread that starts them
        got, fresh = work(ctx), work(other)
        after = control.get_mode()
    finally:
        control.set_mode(before)
    assert after & 0xFFC0 == ODD_MODE & 0xFFC0
    for a, b, c in zip(want, got, fresh, strict=True):
        assert_same_bits(b, a)
        assert_same_bits(c, a)


def test_idle_workers_sleep():
    contexts = [context(None, 2), context(None, 4)]
    for ctx in contexts:
        work(ctx)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.04


def test_many_short_batches_lose_no_wake_up():
    """Sleeps of every length around the spin limit, so that workers are met awake, falling asleep and asleep."""
    x = normal(3, 3, 9000)
    for threads in (2, 5):
        ctx = context(None, threads)
        want = softmax(ctx, x)
        for i in range(3000):
            if i % 3 == 0:
                time.sleep(i % 17 * 1e-5)
            assert_same_bits(softmax(ctx, x), want)


def test_callers_of_one_context_take_turns():
    ctx, x = context(None, 2), normal(4, 64, 1000)
    want, failures = softmax(ctx, x), []

    def caller():
        for _ in range(100):
            if not np.array_equal(softmax(ctx, x), want):
                failures.append(1)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


def _child(ctx, x, want, queue):
    same = np.array_equal(softmax(ctx, x), want)
    ffi.release(ctx)  # must not wait for threads that the child does not have
    queue.put(same)


def test_an_inherited_context_works_in_a_forked_child():
    """Another thread is inside a call, and so holds the context's lock, while this one forks."""
    ctx, x, busy = context(None, 4), normal(5, 64, 1000), threading.Event()
    want, big = softmax(ctx, x), normal(7, 400, 20000)

    def keep_busy():
        while not busy.is_set():
            softmax(ctx, big)

    other = threading.Thread(target=keep_busy)
    other.start()
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    children = [fork.Process(target=_child, args=(ctx, x, want, queue)) for _ in range(3)]
    try:
        for child in children:
            time.sleep(0.02)
            child.start()
        assert all(queue.get(timeout=20) for _ in children)
        for child in children:
            child.join(20)
            assert child.exitcode == 0
    finally:
        busy.set()
        other.join()
        for child in children:
            child.kill()
    assert_same_bits(softmax(ctx, x), want)


def test_contexts_come_and_go():
    before = len(list_tasks())
    for threads in range(1, 9):
        for _ in range(5):
            ctx = context(None, threads)
            if threads % 2:
                softmax(ctx, normal(6, 64, 1000))
            ffi.release(ctx)
    assert len(list_tasks()) == before


def list_tasks():
    return list(Path("/proc/self/task").iterdir())


def test_context_refuses_bad_arguments():
    error = ffi.new("const char **")
    assert not lib.moe_ctx_create(ffi.NULL, 0, error)
    assert b"num_threads" in ffi.string(error[0])
    assert not lib.moe_ctx_create(b"mmx", 1, error)
    assert b"tier" in ffi.string(error[0])
