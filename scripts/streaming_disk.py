"""The disk under a model file, for bench_streaming.py: what it gives to direct reads, in a steady stream and in bursts,
its read-ahead, and a loop device with another one."""

import mmap
import os
import queue
import random
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

ALIGN_BYTES = 4096
BUFFER_BYTES = 4 << 20


def requests_of(offset: int, nbytes: int, request_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the whole pages that one piece of an expert is read with, as the streamer's readers do it: a
    rest of up to a quarter of a request goes with the last one."""
    at, end, found = offset // ALIGN_BYTES * ALIGN_BYTES, -(-(offset + nbytes) // ALIGN_BYTES) * ALIGN_BYTES, []
    while at < end:
        length = end - at if end - at <= request_bytes * 5 // 4 else request_bytes
        found.append((at, length))
        at += length
    return found


def _buffer() -> memoryview:
    buffer = mmap.mmap(-1, BUFFER_BYTES)
    buffer.madvise(mmap.MADV_HUGEPAGE)  # as the streamer's slots
    return memoryview(buffer)


def direct_read_rate(path: Path, experts: list, request_bytes: int, depth: int, seconds: float, seed: int) -> float:
    """Bytes per second of `depth` threads that read experts at random with O_DIRECT. experts: each its pieces, (offset,
    bytes)."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    done, deadline = [0] * depth, time.perf_counter() + seconds

    def reader(number: int) -> None:
        draw, view = random.Random(seed * 1000 + number), _buffer()
        while time.perf_counter() < deadline:
            for piece in draw.choice(experts):
                for at, length in requests_of(*piece, request_bytes):
                    done[number] += os.preadv(handle, [view[:length]], at)

    threads = [threading.Thread(target=reader, args=(n,)) for n in range(depth)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(handle)
    return sum(done) / (time.perf_counter() - started)


def burst_read_rate(path: Path, experts: list, request_bytes: int, depth: int, seconds: float, seed: int,
                    burst: float) -> float:  # fmt: skip
    """The same for bursts: about `burst` experts are asked for at once and the next when all have come, as the misses
    of a layer are. What few requests in flight can get from the device."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    work, done = queue.SimpleQueue(), queue.SimpleQueue()

    def reader() -> None:
        view = _buffer()
        while (request := work.get()) is not None:
            at, length = request
            done.put(os.preadv(handle, [view[:length]], at))

    threads = [threading.Thread(target=reader, daemon=True) for _ in range(depth)]
    for thread in threads:
        thread.start()
    draw, total, spent, deadline = random.Random(seed), 0, 0.0, time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        count = max(1, int(burst) + (draw.random() < burst % 1))
        pieces = [piece for expert in draw.sample(experts, min(count, len(experts))) for piece in expert]
        requests = [request for piece in pieces for request in requests_of(*piece, request_bytes)]
        started = time.perf_counter()
        for request in requests:
            work.put(request)
        total += sum(done.get() for _ in requests)
        spent += time.perf_counter() - started
    for _ in threads:
        work.put(None)
    for thread in threads:
        thread.join()
    os.close(handle)
    return total / spent


@contextmanager
def loop_device(path: Path, read_ahead_kib: int):
    """A read-only loop device on the file, direct, with this read-ahead. Raises OSError with the reason."""
    if path.stat().st_size % 512:
        raise OSError(
            f"{path.name} is not whole sectors of 512 bytes, so a loop device cuts it off; truncate -s %512 it"
        )
    command = ["losetup", "--find", "--show", "--read-only", "--direct-io=on", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise OSError(f"losetup: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        Path(f"/sys/block/{Path(device).name}/queue/read_ahead_kb").write_text(str(read_ahead_kib))
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)


def disk_read_ahead(path: Path) -> int | None:
    """KiB that the kernel reads ahead on the file's disk."""
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return int(setting.read_text()) if setting.exists() else None
