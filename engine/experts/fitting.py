"""A model whose experts fit: its file is read in by several threads at load, instead of page fault by page fault while
the first tokens wait, and can be locked in memory."""

import errno
import os
import queue
import threading
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np

from ..errors import ExpertReadError
from ..memory import parts_of
from ..memory_lock import lock_array, lock_matrices
from .cache import DEFAULT_READERS
from .layout import ROLES
from .lazy import LazyExperts
from .pinning import check_pin_file

Progress = Callable[[int, int], None]  # bytes done, bytes in all
BLOCK_BYTES = 4 << 20
SMALL_BYTES = 64 << 20  # not worth a thread
_PROBES = 64


def expert_blocks(files) -> list[tuple[str, int, int]]:
    """(file, offset, bytes) of blocks that cover all routed experts, in file order."""
    blocks, end = [], {}
    records = (r for r in files.tensors.values() if r.role in ROLES and r.name not in files.made)
    for record in sorted(records, key=lambda record: (record.file, record.offset)):
        at = max(record.offset, end.get(record.file, 0))
        end[record.file] = max(at, record.offset + record.nbytes)
        while at < record.offset + record.nbytes:
            last = blocks[-1] if blocks else None
            if last and last[0] == record.file and 0 <= at - last[1] - last[2] < 4096 and last[2] < BLOCK_BYTES:
                take = min(BLOCK_BYTES, record.offset + record.nbytes - last[1])
                blocks[-1] = (record.file, last[1], take)
                at = last[1] + take
            else:
                take = min(BLOCK_BYTES, record.offset + record.nbytes - at)
                blocks.append((record.file, at, take))
                at += take
    return blocks


def is_cached(descriptors: dict[str, int], blocks) -> bool:
    """Whether the page cache holds what is to be read, by a sample: a read that may not wait."""
    page = bytearray(4096)
    for file, offset, _ in blocks[:: max(1, len(blocks) // _PROBES)]:
        try:
            if os.preadv(descriptors[file], [page], offset, os.RWF_NOWAIT) <= 0:
                return False
        except OSError:  # it would have to wait, or the file system cannot say
            return False
    return True


@contextmanager
def _opened(files, blocks):
    """File name -> descriptor of the files that blocks lie in."""
    descriptors: dict[str, int] = {}
    try:
        for name in dict.fromkeys(file for file, _, _ in blocks):
            descriptors[name] = os.open(files.path_of(name), os.O_RDONLY | os.O_CLOEXEC)
        yield descriptors
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _total(blocks) -> int:
    return sum(nbytes for _, _, nbytes in blocks)


def is_cold(files) -> bool:
    """Whether the experts are many and not in the page cache. Those that are re-coded are then read past it: it would
    have to hold them besides their strips."""
    blocks = expert_blocks(files)
    if _total(blocks) < SMALL_BYTES:
        return False
    with _opened(files, blocks) as descriptors:
        return not is_cached(descriptors, blocks)


def read_in(files, readers: int, progress: Progress | None) -> int:
    """Bring all experts into the page cache with large reads, in file order. Returns the bytes read; 0 when they are
    there already, or few. Raises ExpertReadError."""
    blocks = expert_blocks(files)
    total = _total(blocks)
    with _opened(files, blocks) as descriptors:
        if total < SMALL_BYTES or is_cached(descriptors, blocks):
            return 0
        return _read_blocks(files, descriptors, blocks, readers, progress, total)


def _read_all(descriptor: int, block: memoryview, offset: int) -> None:
    """Fill the block, however short the reads are. Raises OSError, also where the file ends early."""
    while block:
        got = os.preadv(descriptor, [block], offset)
        if not got:
            raise OSError(errno.ENODATA, "the file ended early")
        block, offset = block[got:], offset + got


def _read_blocks(files, descriptors, blocks, readers: int, progress, total: int) -> int:
    work, done = queue.SimpleQueue(), queue.SimpleQueue()
    for block in blocks:
        work.put(block)

    def reader():
        buffer = bytearray(BLOCK_BYTES)
        while True:
            try:
                file, offset, nbytes = work.get_nowait()
            except queue.Empty:
                return
            try:
                _read_all(descriptors[file], memoryview(buffer)[:nbytes], offset)
                done.put(nbytes)
            except OSError as error:
                path = files.path_of(file)
                done.put(ExpertReadError(f"{path}: read at {offset}: {error.strerror}; check the disk and the file"))

    for _ in range(readers):
        threading.Thread(target=reader, daemon=True).start()
    finished, failed = 0, None
    for _ in blocks:
        result = done.get()
        if isinstance(result, ExpertReadError):
            failed = failed or result
            continue
        finished += result
        if progress is not None:
            progress(finished, total)
    if failed:
        raise failed
    return finished


def load_fitting(engine, progress: Progress | None) -> tuple[int, int]:
    """Read a model that fits, unless mapped reading was asked for, and lock it if that was. Returns (bytes read, bytes
    locked). Raises ExpertReadError, ConfigError."""
    options = engine.options
    if options.pin is not None:
        check_pin_file(engine.files, engine.model, options.pin)
    read = 0 if options.io == "mmap" else read_in(engine.files, options.readers or DEFAULT_READERS, progress)
    return read, lock_everything(engine.model) if options.lock else 0


def lock_everything(model) -> int:
    """Lock dense weights and experts; experts that are re-coded as they are used are re-coded before."""
    lazy = [part for part in parts_of(model) if isinstance(part, LazyExperts)]
    for part in lazy:
        part.prepare(np.arange(len(part.table)))
    return lock_matrices(model) + sum(lock_array(array) for part in lazy for array in part.regions())
