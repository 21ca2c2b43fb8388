"""Loading for a model whose experts are streamed: everything else goes into memory of its own, through read calls.

A mapping would count against the process and leave the pages to whoever evicts them: the experts' stream.
"""

import os

import numpy as np

from ..kernels import Matrix, address, check, lib, weights_empty
from ..layers import Vector
from ..memory import LOAD_CHUNK_BYTES
from .errors import TruncatedFileError
from .loader import WeightLoader


class StreamLoader(WeightLoader):
    """stream: the ExpertStream that hands out layers of experts."""

    def __init__(self, files, context, stream):
        super().__init__(files, context)
        self.stream = stream

    def vector(self, name: str, size: int) -> Vector:
        record = self._record(name, (size,))
        if record.format != "f32":
            return super().vector(name, size)  # which says what is wrong
        out = np.empty(size, np.float32)
        self._read(record, 0, out.view(np.uint8))
        return Vector(out)

    def _matrix(self, name: str, rows: int, cols: int, mapped: bool, compact: bool) -> Matrix:
        record = self._record(name, (rows, cols))
        if record.layout is not None:
            strips = weights_empty(record.nbytes)
            self._read(record, 0, strips)
            return Matrix(self.context, record.layout, strips, rows, cols, record.format)
        return self._recoded(record, rows, cols)

    def _recoded(self, record, rows: int, cols: int) -> Matrix:
        """Storage rows in parts of LOAD_CHUNK_BYTES, so that nothing is in memory twice."""
        context, layout_name = self.context, self.context.layout_of(record.format)
        table, layout = context.format(record.format), context.layout(layout_name)
        out = weights_empty(context.matrix_bytes(layout_name, rows, cols))
        row_bytes = record.nbytes // rows
        step = max(1, LOAD_CHUNK_BYTES // row_bytes // layout.strip_rows) * layout.strip_rows
        if table.group_rows:
            step = rows
        buffer = np.empty(min(step, rows) * row_bytes, np.uint8)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            part = buffer[: count * row_bytes]
            self._read(record, first * row_bytes, part)
            at = out[first // layout.strip_rows * layout.strip_bytes(cols) :]
            args = (address(at), table, layout, address(part), count, cols)
            check(lib.moe_encode(context.handle, *args), f"encode {record.name}")
        return Matrix(context, layout_name, out, rows, cols, record.format)

    def _read(self, record, start: int, out: np.ndarray) -> None:
        """Bytes of a tensor from `start` on; nothing of them stays in the page cache."""
        path = self.files.path_of(record.file)
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            view, offset, done = memoryview(out), record.offset + start, 0
            while done < len(view):
                got = os.preadv(handle, [view[done:]], offset + done)
                if not got:
                    raise TruncatedFileError(f"{path}: tensor {record.name}: the file ended early; copy it again")
                done += got
            os.posix_fadvise(handle, offset, done, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

    def experts(self, layer: int, num_experts: int, width: int, hidden_size: int):
        return self.stream.experts(layer, num_experts)
