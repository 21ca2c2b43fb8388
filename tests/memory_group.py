"""A memory control group of our own, below the one we are in, and what the kernel knows of a file's pages."""

import ctypes
import mmap
import os
import subprocess
from contextlib import contextmanager

import numpy as np

from engine.hardware import cgroup_dirs


@contextmanager
def memory_group(limit_bytes: int):
    """A directory of a memory control group (version 1 or 2) with that limit. Raises OSError when none can be made."""
    groups = cgroup_dirs("memory")
    parent = next((g for g in groups if (g.path / limit_file(g.version)).exists() or g.version == 1), None)
    if parent is None:
        raise OSError("no memory control group is mounted")
    path = parent.path / f"millstream-{os.getpid()}"
    path.mkdir()
    try:
        (path / limit_file(parent.version)).write_text(str(limit_bytes))
        yield path
    finally:
        path.rmdir()


def limit_file(version: int) -> str:
    return "memory.limit_in_bytes" if version == 1 else "memory.max"


def run_in(group, command, **options) -> subprocess.CompletedProcess:
    """Run a command with the group's limit from its first instruction on."""
    script = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
    return subprocess.run(["sh", "-c", script, "sh", *command], capture_output=True, text=True, **options)


def cached_share(path) -> float:
    """Share of a file's pages that are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        pages = -(-len(mapping) // mmap.PAGESIZE)
        present = (ctypes.c_ubyte * pages)()
        view = np.frombuffer(mapping, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapping)), present)
        del view
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return sum(byte & 1 for byte in present) / pages


def drop_from_cache(path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
