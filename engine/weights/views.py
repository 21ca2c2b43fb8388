"""Our tensors as a checkpoint stores them when it arranges numbers in another way: fused, transposed, interleaved.

A family names a View in place of a checkpoint's name: which tensors it takes and the function that makes ours of them.
A view moves numbers, it never changes one. Knows no family.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from .errors import DtypeError, ShapeError, TruncatedFileError
from .safetensors import SourceTensor

_RAW = {"BF16": "<u2", "F16": "<u2", "F32": "<f4", "U8": "u1"}


@dataclass(frozen=True)
class View:
    """take(config, *arrays): ours, [rows, cols] or [length], of the sources' arrays (16-bit floats as uint16); for a
    template with {e} they are slice e along the first axis. format: the storage format of the rows that come out
    (uint8), None when they are numbers of the source's type."""

    sources: tuple[str, ...]
    take: Callable
    format: str | None = None
    expert: int | None = None

    def filled(self, n: int | None, e: int | None) -> "View":
        return replace(self, sources=tuple(name.format(n=n, e=e) for name in self.sources), expert=e)


@dataclass
class ViewSource:
    """A View over tensors that were found; used by converters as a safetensors.SourceTensor is."""

    view: View
    config: object
    tensors: list[SourceTensor]
    shape: tuple[int, ...]
    _made: np.ndarray | None = field(default=None, repr=False)

    @property
    def path(self):
        return self.tensors[0].path

    @property
    def name(self) -> str:
        return " + ".join(tensor.name for tensor in self.tensors)

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype

    @property
    def format(self) -> str | None:
        return self.view.format

    @property
    def nbytes(self) -> int:
        return sum(_part(tensor, self.view.expert)[1] for tensor in self.tensors)

    def rows(self, first: int, last: int) -> np.ndarray:
        """uint8 bytes of rows [first, last); a vector is one row. The whole is made for the first and dropped after the
        last. Raises: TruncatedFileError."""
        if self._made is None:
            arrays = [_read(tensor, self.view.expert) for tensor in self.tensors]
            made = self.view.take(self.config, *arrays)
            self._made = np.ascontiguousarray(made.reshape(1, -1) if len(self.shape) == 1 else made)
        part = self._made[first:last].reshape(-1).view(np.uint8)
        if last == len(self._made):
            self._made = None
        return part


def open_view(where, view: View, config, tensors: list[SourceTensor], want: tuple[int, ...]) -> ViewSource:
    """Check types and shapes of a view's tensors. want: our shape. Raises: DtypeError, ShapeError."""
    for tensor in tensors:
        allowed = ("U8",) if view.format else ("BF16", "F16", "F32")
        if tensor.dtype not in allowed:
            raise DtypeError(
                f"{tensor.path}: tensor {tensor.name}: dtype {tensor.dtype}, expected one of {', '.join(allowed)}"
            )
    shapes = tuple(tensor.shape if view.expert is None else tensor.shape[1:] for tensor in tensors)
    found = _shape_of(view.take, config, shapes, tuple(_RAW[tensor.dtype] for tensor in tensors))
    enough = view.expert is None or all(len(t.shape) > 1 and view.expert < t.shape[0] for t in tensors)
    if not enough or found is None or (found != want if view.format is None else found[0] != want[0]):
        listed = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors)
        raise ShapeError(
            f"{where}: {listed}: config.json needs other shapes (for {list(want)} of ours); they belong to different "
            "models"
        )
    return ViewSource(view, config, tensors, want)


@lru_cache(maxsize=256)
def _shape_of(take: Callable, config, shapes: tuple, dtypes: tuple) -> tuple[int, ...] | None:
    """What a view makes of arrays of these shapes, tried once on zeros; None where it cannot."""
    try:
        return take(config, *(np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))).shape
    except (ValueError, IndexError):
        return None


def _part(tensor: SourceTensor, expert: int | None) -> tuple[int, int]:
    """Offset and bytes of a slice of a tensor, or of all of it."""
    if expert is None:
        return tensor.offset, tensor.nbytes
    size = tensor.nbytes // tensor.shape[0]
    return tensor.offset + expert * size, size


def _read(tensor: SourceTensor, expert: int | None) -> np.ndarray:
    offset, nbytes = _part(tensor, expert)
    out = np.empty(nbytes, np.uint8)
    handle = os.open(tensor.path, os.O_RDONLY)
    try:
        done, view = 0, memoryview(out)
        while done < nbytes:
            got = os.preadv(handle, [view[done:]], offset + done)
            if not got:
                raise TruncatedFileError(
                    f"{tensor.path}: tensor {tensor.name}: the file ended {nbytes - done} bytes early"
                )
            done += got
    finally:
        os.close(handle)
    return out.view(_RAW[tensor.dtype]).reshape(tensor.shape if expert is None else tensor.shape[1:])
