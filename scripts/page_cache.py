"""How much of a file is in the page cache, and how to get it out of there."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def cached_pages(path: str | Path) -> np.ndarray:
    """bool [pages]: which pages of a regular file are in the page cache. Touches none of them."""
    with Path(path).open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        if not length:
            return np.zeros(0, bool)
        mapping = mmap.mmap(file.fileno(), length, mmap.MAP_SHARED, mmap.PROT_READ)
    try:
        view = np.frombuffer(mapping, np.uint8)
        pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
        if _libc.mincore(view.ctypes.data, length, pages.ctypes.data):
            raise OSError(ctypes.get_errno(), f"mincore: {path}")
        del view
        return (pages & 1).astype(bool)
    finally:
        mapping.close()


def cached_share(path: str | Path, ranges: list[tuple[int, int]] | None = None) -> float:
    """Share of the pages that lie wholly in the ranges (offset, bytes) that are cached; of the file without ranges."""
    pages = cached_pages(path)
    if ranges is None:
        return float(pages.mean()) if len(pages) else 0.0
    inside = np.zeros(len(pages), bool)
    for offset, nbytes in ranges:
        inside[-(-offset // mmap.PAGESIZE) : (offset + nbytes) // mmap.PAGESIZE] = True
    return float(pages[inside].mean()) if inside.any() else 0.0


def evict(path: str | Path) -> float:
    """Ask the kernel to drop a file's clean pages; returns the share that stayed (mapped by somebody, or dirty)."""
    with Path(path).open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_share(path)
