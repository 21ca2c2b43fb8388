"""Direct reads leave the page cache alone: after a streamed run less than 1 % of the experts' pages are in it."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import engine

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from page_cache import cached_pages, cached_share, evict


def expert_ranges(files):
    """{file: [(offset, bytes)]} of the experts."""
    ranges = {}
    for record in files.tensors.values():
        if record.role in ("gate_up", "down"):
            ranges.setdefault(record.file, []).append((record.offset, record.nbytes))
    return ranges


def share_after_run(path, io):
    """Largest share of a file's expert pages that are cached after a streamed run which began with none."""
    for file in path.iterdir():
        evict(file)
    loaded = engine.load(path, expert_slots=3, io=io)
    if loaded.stream.expert_files.mode != io:
        pytest.skip(f"no {io} reads on this file system")
    kv, ids = loaded.new_kv(), np.arange(30, dtype=np.int32)
    loaded.model.forward(ids, kv, 0)
    for position in range(30, 60):
        loaded.model.forward(ids[:1], kv, position)
    stats = loaded.stream.stats()
    assert stats["misses"] > 30 and stats["bytes"] > 10 * loaded.stream.places.expert_bytes
    ranges = expert_ranges(loaded.files)
    return max(cached_share(path / file, where) for file, where in ranges.items())


@pytest.fixture
def model(tiny_snapshot, tmp_path):
    return shutil.copytree(tiny_snapshot("wide", experts="q8_0", dense="q8_0"), tmp_path / "model")


def test_direct_reads_leave_no_expert_pages_behind(model):
    assert share_after_run(model, "direct") < 0.01


def test_buffered_reads_are_seen_by_the_same_measure(model):
    assert share_after_run(model, "buffered") > 0.5


def test_cached_pages_are_told_from_others(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert cached_pages(path).all() and len(cached_pages(path)) == 256
    if evict(path):
        pytest.skip("this file system keeps its pages")
    assert cached_share(path) == 0
    with path.open("rb", buffering=0) as file:
        file.seek(65536)
        file.read(4096)
    assert cached_share(path, [(65536, 4096)]) == 1
    assert cached_share(path, [(65000, 4096)]) == 0  # no whole page
