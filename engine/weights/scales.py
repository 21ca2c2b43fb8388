"""Scales and values that are not finite: a sample when a model is opened, all of them when it is verified."""

from collections.abc import Iterable

import numpy as np

from .. import kernels
from ..formats import FORMATS
from .base import ModelFiles, ProgressCallback, ProgressMeter, TensorRecord
from .errors import NonFiniteError

# Tensors whose first rows are looked at when a model is opened: enough to notice zeroed or random pages, few enough to
# open a cold file at once.
_SAMPLED_TENSORS = 48
_SAMPLED_ROWS = 8
_SCAN_VALUES = 4 << 20


def sample(records: Iterable[TensorRecord]) -> list[tuple[TensorRecord, int]]:
    """(record, rows to look at), spread over all records."""
    records = list(records)
    step = -(-len(records) // _SAMPLED_TENSORS)
    return [(record, _SAMPLED_ROWS) for record in records[::step]]


def refuse_nonfinite(files: ModelFiles, jobs: Iterable[tuple[TensorRecord, int]], context) -> None:
    """Raise NonFiniteError naming file, tensor and row when one of the first rows of a (record, rows) is not finite."""
    for record, rows in jobs:
        row = first_nonfinite_row(context, record, files.read(record.name), min(rows, record.rows))
        if row is not None:
            where = f"{files.path_of(record.file)}: tensor {record.name}: row {row}"
            raise NonFiniteError(f"{where} has {files.nonfinite_remedy}")


def verify_scales(files: ModelFiles, progress: ProgressCallback | None, threads: int | None) -> int:
    """Look at every tensor of a container without checksums; returns the bytes read. Raises: NonFiniteError."""
    context = kernels.Context(num_threads=threads)
    total = sum(record.nbytes for record in files.tensors.values())
    meter = ProgressMeter(total, progress)
    for record in files.tensors.values():
        refuse_nonfinite(files, [(record, record.rows)], context)
        meter.add(record.nbytes, record.name)
    return total


def first_nonfinite_row(context, record: TensorRecord, stored, rows: int) -> int | None:
    """First of the first `rows` rows with a value that is not finite, or None."""
    if FORMATS[record.format].group_rows:
        rows = record.rows  # no row can be cut out of such a matrix
    if record.layout is None:
        row_bytes = record.nbytes // record.rows
        block = context.check_rows(record.format, stored[: rows * row_bytes], rows, record.cols)
        return None if block is None else block // (record.cols // FORMATS[record.format].block_len)
    return _first_nonfinite_strip_row(context, record, stored, rows)


def _first_nonfinite_strip_row(context, record: TensorRecord, stored, rows: int) -> int | None:
    # Layouts have no check of their own: the rows are widened to float32, some at a time, and looked at.
    matrix = kernels.Matrix(context, record.layout, stored, record.rows, record.cols, record.format)
    step = max(1, _SCAN_VALUES // record.cols)
    for first in range(0, rows, step):
        ids = np.arange(first, min(first + step, rows), dtype=np.int32)
        values = np.empty((len(ids), record.cols), np.float32)
        status = kernels.lib.moe_embed(
            context.handle,
            kernels.address(values, "float *"),
            matrix.cdata,
            kernels.address(ids, "int32_t *"),
            len(ids),
        )
        kernels.check(status, f"read {record.name}")
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            return first + int(bad[0])
    return None
