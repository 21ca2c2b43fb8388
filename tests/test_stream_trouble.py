"""What may happen in the middle of a streamed step: Ctrl-C between any two statements, a mapped file that is cut
while it is copied. Neither loses a slot, hangs or kills the process.
"""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import engine
from engine.experts import cache, lookahead, streamed
from engine.kernels import ffi, lib

SLOTS, STEPS = 5, 10
TRACED = {cache.__file__, lookahead.__file__, streamed.__file__}


@pytest.fixture
def model(tiny_snapshot):
    return tiny_snapshot("wide", experts="q8_0", dense="q8_0")


def decode(loaded):
    kv = loaded.new_kv()
    rows = [loaded.model.forward(np.array([7 * i + 3], np.int32), kv, i, logits="all").copy() for i in range(STEPS)]
    return np.concatenate(rows)


def interrupted_at(number, function):
    """Run `function` with a KeyboardInterrupt at line event `number` of the streamer's Python. Returns events seen."""
    seen = 0

    def line(frame, event, arg):
        nonlocal seen
        seen += event == "line"
        if seen == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: line if frame.f_code.co_filename in TRACED else None)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return seen


@pytest.fixture
def alarm():
    def late(number, frame):
        raise AssertionError("the streamer waits for something that never comes")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_an_interruption_anywhere_leaves_a_cache_that_works(model, alarm):
    want = decode(engine.load(model, expert_slots=SLOTS))
    loaded = engine.load(model, expert_slots=SLOTS, lookahead="on")
    total = interrupted_at(0, lambda: decode(loaded))
    raw, streamer = ffi.new("struct moe_stream_stats *"), loaded.stream.cache
    for number in np.linspace(5, total * 0.7, 60).astype(int).tolist():
        assert interrupted_at(number, lambda: decode(loaded)) == number
        np.testing.assert_array_equal(decode(loaded).view(np.uint32), want.view(np.uint32))
        lib.moe_streamer_stats(streamer.handle, raw)
        resident = sum(slot >= 0 for slot in streamer.slot_of)
        assert (raw.used_slots, raw.unfinished, streamer._in_flight) == (0, 0, 0)
        assert len(streamer._free) + resident + len(streamer.lookahead.coming) == SLOTS


CUT = """
import os, sys, threading, time
import numpy as np
import engine
from engine.errors import ExpertReadError
from engine.kernels import ffi, lib
loaded = engine.load(sys.argv[1], expert_slots=2, io="mmap")
fault = ffi.new("struct moe_stream_fault *", {"max_sleep_us": 900000, "seed": 1})
lib.moe_streamer_set_fault(loaded.stream.cache.handle, fault)
threading.Timer(0.05, os.truncate, (sys.argv[2], 4096 + 100)).start()
try:
    loaded.model.forward(np.arange(20, dtype=np.int32), loaded.new_kv(), 0)
except ExpertReadError as error:
    print(error)
"""


def test_mapped_file_that_is_cut_while_it_is_copied_is_an_error(model, tmp_path):
    path = shutil.copytree(model, tmp_path / "model")
    command = [sys.executable, "-c", CUT, str(path), str(next(path.glob("experts-*")))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, f"killed by signal {-done.returncode}\n{done.stderr}"
    assert "the file ended early" in done.stdout
