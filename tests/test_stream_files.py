"""The files of streamed experts: a split set, descriptors after an error, short reads while a fitting model is read in,
and what a forked process is told.
"""

import errno
import os
import re
import signal

import gguf_models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import engine
from engine.errors import ExpertReadError
from engine.experts import files, fitting

FORMATS = {"ffn_(gate|up)_exps": Type.Q4_0, "ffn_down_exps": Type.Q8_0}
IDS = np.random.default_rng(5).integers(0, 320, 30).astype(np.int32)


def logits(loaded):
    kv, rows = loaded.new_kv(), []
    for first, last in ((0, 20), *((n, n + 1) for n in range(20, 30))):
        rows.append(loaded.model.forward(IDS[first:last], kv, first, logits="all").copy())
    return np.concatenate(rows).view(np.uint32)


def descriptors_of(path) -> int:
    found = (os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd"))
    return sum(name == os.path.realpath(path) for name in found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    gguf_models.write_gguf(path, "wide", FORMATS)
    return path


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """Two tensors per file: the three slabs of an expert lie in different files."""
    folder = tmp_path_factory.mktemp("split")
    gguf_models.write_gguf(folder / "m.gguf", "wide", FORMATS, shard_tensors=2)
    return sorted(folder.glob("m-00001-of-*.gguf"))[0]


@pytest.mark.parametrize("io", ["direct", "buffered", "mmap"])
def test_split_gguf_is_streamed_with_the_bits_of_the_whole_one(whole, split, io):
    want = logits(engine.load(whole))
    loaded = engine.load(split, expert_slots=3, io=io, lookahead="off")
    places = loaded.stream.places
    used = {places.table[places.keys[0]].pieces[i].file for i in range(3)}
    assert len(used) > 1 and len(places.file_names) > 2
    np.testing.assert_array_equal(logits(loaded), want)
    stats = loaded.stream.stats()
    assert (stats["io"], stats["failures"], stats["direct_refused"]) == (io, 0, 0)
    assert stats["reads"] == 3 * stats["misses"] and stats["bytes"] == stats["misses"] * places.expert_bytes


def test_a_missing_file_of_a_split_set_is_named(split, tmp_path):
    for path in split.parent.iterdir():
        os.link(path, tmp_path / path.name)
    last = sorted(tmp_path.iterdir())[-1]
    last.unlink()
    with pytest.raises(engine.errors.EngineError, match=re.escape(last.name)):
        engine.load(tmp_path / split.name, expert_slots=3)


@pytest.mark.parametrize("trouble", ["probe", "second file"])
def test_descriptors_are_closed_when_opening_fails(split, monkeypatch, trouble):
    places = engine.load(split, expert_slots=3, io="buffered").stream.places
    paths = [places.files.path_of(name) for name in places.file_names]
    before = [descriptors_of(path) for path in paths]
    system_open = os.open

    def broken_read(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def refused_open(path, *args, **options):
        if path == paths[1]:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return system_open(path, *args, **options)

    if trouble == "probe":
        monkeypatch.setattr(files.os, "preadv", broken_read)
    else:
        monkeypatch.setattr(files.os, "open", refused_open)
    with pytest.raises(ExpertReadError) as caught:
        files.ExpertFiles(places, "direct")
    assert os.strerror(errno.EIO if trouble == "probe" else errno.EACCES) in str(caught.value)
    assert [descriptors_of(path) for path in paths] == before


@pytest.mark.parametrize("ends_early", [False, True])
def test_short_reads_of_a_model_that_fits_are_continued(whole, monkeypatch, ends_early):
    monkeypatch.setattr(fitting, "SMALL_BYTES", 0)
    monkeypatch.setattr(fitting, "is_cached", lambda *_: False)
    system_read, seen = os.preadv, []

    def short(descriptor, buffers, offset, *flags):
        part = memoryview(buffers[0])[: max(1, len(buffers[0]) // 3)]
        got = 0 if ends_early and len(seen) > 4 else system_read(descriptor, [part], offset, *flags)
        seen.append((offset, got))
        return got

    opened = engine.load(whole, io="mmap").files
    monkeypatch.setattr(fitting.os, "preadv", short)
    if ends_early:
        with pytest.raises(ExpertReadError, match=r"m\.gguf: read at \d+: the file ended early"):
            fitting.read_in(opened, 1, None)
        return
    total = sum(nbytes for _, _, nbytes in fitting.expert_blocks(opened))
    assert fitting.read_in(opened, 1, None) == total == sum(got for _, got in seen)
    covered = {at for offset, got in seen for at in range(offset, offset + got)}
    assert len(covered) == total


def test_a_forked_process_is_told_what_to_do(whole):
    """In a thread-free child of its own: pytest's process forks once and the child leaves at once."""
    loaded = engine.load(whole, expert_slots=3)
    logits(loaded)
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)  # a lock that nobody will ever release must not hold the test up
        try:
            loaded.model.forward(IDS[:1], loaded.new_kv(), 0)
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        loaded.stream.stats()
        os.write(write_end, said.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert (
        said.startswith("ExpertReadError: experts cannot be streamed in a forked process") and "load the model" in said
    )
