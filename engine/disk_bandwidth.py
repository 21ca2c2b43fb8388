"""Measured read bandwidth of a disk, by size of a request and number of requests under way."""

import collections
import errno
import itertools
import mmap
import os
import random
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ConfigError

REQUEST_BYTES = (64 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 4, 16)
SECONDS_EACH, SECONDS_IN_ALL = 0.12, 1.5
TEMPORARY_BYTES = 64 << 20
_WRITE_BYTES = 4 << 20


@dataclass(frozen=True)
class DiskSpeed:
    request_bytes: int
    depth: int  # requests under way at a time
    gb_per_s: float


@dataclass
class DiskReport:
    """What reads of one file gave. notes: what makes the figures other than those of direct reads of a large file."""

    path: str
    mode: str  # "direct" or "buffered"
    speeds: list[DiskSpeed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def enough_depth(self, request_bytes: int, share: float = 0.9) -> int | None:
        """The smallest depth that gives `share` of the best bandwidth at this size, or None without figures."""
        found = {s.depth: s.gb_per_s for s in self.speeds if s.request_bytes == request_bytes}
        best = max(found.values(), default=0)
        return min((depth for depth, speed in found.items() if speed >= share * best), default=None)


def largest_file(path: str | Path) -> Path:
    """The file to read: `path` itself, or the largest one in that directory. Raises ConfigError without one."""
    path = Path(path)
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    try:
        largest = max(files, key=lambda file: file.stat().st_size, default=None)
        size = 0 if largest is None else largest.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a model file or directory") from None
    if size < min(REQUEST_BYTES):
        raise ConfigError(f"{path}: no file of at least {min(REQUEST_BYTES) >> 10} KiB to read; name a model")
    return largest


@contextmanager
def temporary_file(directory: str | Path | None = None, num_bytes: int = TEMPORARY_BYTES):
    """Path of a file with random bytes (a disk may compress or skip zeros), which is on disk; deleted at the end."""
    with tempfile.NamedTemporaryFile(prefix="millstream-doctor-", dir=directory) as file:
        block = random.Random(1).randbytes(_WRITE_BYTES)
        for _ in range(num_bytes // _WRITE_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


def _open(path: Path) -> tuple[int, str, str | None]:
    """(descriptor, mode, note)"""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
        try:
            os.preadv(descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
            return descriptor, "direct", None
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    note = "the file system refuses direct reads (O_DIRECT), so the page cache has a part in the figures"
    return os.open(path, flags), "buffered", note


class _Bursts:
    """Requests as workers take them: one burst after the other, each begun when all have finished the one before."""

    def __init__(self, bursts: list[list[tuple[int, int]]], depth: int, seconds: float):
        self._bursts, self._seconds, self._depth = itertools.cycle(bursts), seconds, depth
        self._left: collections.deque = collections.deque()
        self.barrier, self.finished = threading.Barrier(depth, self._refill), False
        self._taken, self._started = 0, time.perf_counter()

    def _time_is_up(self) -> bool:
        return self._taken >= self._depth and time.perf_counter() - self._started >= self._seconds

    def _refill(self) -> None:
        self.finished = self._time_is_up()
        self._left = collections.deque(next(self._bursts))

    def take(self) -> tuple[int, int] | None:
        """A request of this burst, None when it has no more or the time is up."""
        if self._time_is_up():
            return None
        try:
            request = self._left.popleft()
        except IndexError:
            return None
        self._taken += 1
        return request


def _measure(descriptor: int, mode: str, bursts: list[list[tuple[int, int]]], depth: int, seconds: float) -> float:
    """GB/s of reads of (offset, bytes) by `depth` threads (a read releases the interpreter lock)."""
    largest = max(nbytes for burst in bursts for _, nbytes in burst)
    buffers = [mmap.mmap(-1, largest) for _ in range(depth)]
    done, errors = [0] * depth, []
    work, started = _Bursts(bursts, depth, seconds), time.perf_counter()

    def read(worker: int) -> None:
        block = memoryview(buffers[worker])
        try:
            while True:
                work.barrier.wait()
                if work.finished:
                    return
                while request := work.take():
                    offset, nbytes = request
                    if mode == "buffered":
                        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
                    done[worker] += os.preadv(descriptor, [block[:nbytes]], offset)
        except threading.BrokenBarrierError:
            return
        except OSError as error:
            errors.append(error)
            work.barrier.abort()

    threads = []
    try:
        for worker in range(depth):
            thread = threading.Thread(target=read, args=(worker,))
            thread.start()
            threads.append(thread)
    except RuntimeError:  # limits of processes or of address space; those that run wait for the others
        errors.append(OSError(errno.EAGAIN, f"only {len(threads)} of {depth} threads can be started"))
        work.barrier.abort()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    if errors:
        raise errors[0]
    return sum(done) / elapsed / 1e9


def _pages_of(offset: int, nbytes: int, largest: int) -> list[tuple[int, int]]:
    """Requests for the whole pages of a range, in pieces of about `largest` bytes: no small rest."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    found = []
    while start < end:
        length = end - start if end - start <= largest + largest // 4 else largest
        found.append((start, length))
        start += length
    return found


def measure_bursts(
    path: Path, bursts: list[list[tuple[int, int]]], largest: int, depth: int, seconds: float
) -> tuple[str, DiskSpeed]:
    """(mode, speed) of reads as the streamer does them: the ranges (offset, bytes) of a burst are asked for together,
    `depth` requests at a time, the next burst when all have arrived. Raises OSError when a read fails."""
    requests = [[request for at in burst for request in _pages_of(*at, largest)] for burst in bursts]
    descriptor, mode, _ = _open(path)
    try:
        speed = _measure(descriptor, mode, requests, depth, seconds)
    finally:
        os.close(descriptor)
    return mode, DiskSpeed(max(nbytes for burst in requests for _, nbytes in burst), depth, speed)


def measure_file(path: Path, sizes=REQUEST_BYTES, depths=DEPTHS, seconds: float = SECONDS_IN_ALL) -> DiskReport:
    """Read one file at every size and depth. Stops after about `seconds`. Raises OSError when a read fails."""
    descriptor, mode, note = _open(path)
    report = DiskReport(str(path), mode, notes=[note] if note else [])
    try:
        if mode == "direct":  # pages in the page cache must be written back or given up before every direct read
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size, started, left_out = os.fstat(descriptor).st_size, time.perf_counter(), []
        for request, depth in ((request, depth) for depth in depths for request in sizes):
            if size < request or time.perf_counter() - started > seconds:
                left_out.append(f"{request >> 10} KiB x {depth}")
                continue
            requests = [(offset, request) for offset in range(0, size - request + 1, request)]
            random.Random(request + depth).shuffle(requests)
            speed = _measure(descriptor, mode, [requests], depth, SECONDS_EACH)
            report.speeds.append(DiskSpeed(request, depth, speed))
        if left_out:
            report.notes.append(f"left out, for the file or the time is too short: {', '.join(left_out)}")
    finally:
        os.close(descriptor)
    return report


def disk_bandwidth(model: str | Path | None = None) -> DiskReport:
    """Read the largest file of `model`, or a temporary file. Raises ConfigError when there is nothing to read, OSError
    when a read fails."""
    if model is not None:
        return measure_file(largest_file(model))
    with temporary_file() as path:
        report = measure_file(path)
    report.notes.append("a temporary file: --model FILE measures the disk that a model is on")
    return report
