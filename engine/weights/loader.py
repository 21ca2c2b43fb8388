"""Tensors of an opened model as Matrix and Vector objects for one context. Knows names and shapes, no mathematics."""

import numpy as np

from ..errors import WeightsError
from ..experts import LazyExperts, Recoder, ResidentExperts
from ..experts.layout import ROWS_ARE_STRIPS as _FLOATS
from ..kernels import Context, Matrix, weights_empty
from ..layers import Vector
from .architectures import EXPERT_PARTS, expert_matrix_name


class WeightLoader:
    """files: what engine.weights.open_model returned.

    compact_experts: keep storage rows of experts as they are; otherwise each expert is re-coded when it is used again.
    recoder: what does that, and counts; None when there is nothing to re-code.
    """

    def __init__(self, files, context: Context, *, compact_experts: bool = False):
        self.files, self.context, self.compact_experts = files, context, compact_experts
        self.recoder: Recoder | None = None

    def _record(self, name: str, shape: tuple[int, ...]):
        record = self.files.tensors.get(name)
        if record is None:
            raise WeightsError(f"{self.files.path}: tensor {name} is missing")
        if tuple(record.shape) != shape:
            got, expected = list(record.shape), list(shape)
            raise WeightsError(f"{self.files.path}: tensor {name} has shape {got}, expected {expected}")
        return record

    def vector(self, name: str, size: int) -> Vector:
        """float32 [size]; stored as f32, or in 16 bits, which float32 holds exactly."""
        record = self._record(name, (size,))
        if record.format not in _FLOATS:
            raise WeightsError(f"{self.files.path}: tensor {name} is {record.format}, expected f32, f16 or bf16")
        data = self.files.read(name).copy()  # a mapped file may hold it at any address
        if record.format == "f32":
            return Vector(data.view(np.float32))
        return Vector(self.context.to_f32(data.view(np.uint16), record.format))

    def matrix(
        self, name: str, rows: int, cols: int, *, mapped: bool = False, compact: bool = False, bias: bool = False
    ) -> Matrix:
        """Matrix [rows, cols]. mapped: use the file's pages when they hold the compute layout; otherwise the bytes are
        copied or re-coded into memory of our own, where streaming other weights cannot evict them. compact: use the
        file's pages where they hold storage rows. bias: the vector NAME.bias is added to every product."""
        matrix = self._matrix(name, rows, cols, mapped, compact)
        if bias:
            matrix.set_bias(self.vector(f"{name}.bias", rows).array)
        return matrix

    def _matrix(self, name: str, rows: int, cols: int, mapped: bool, compact: bool) -> Matrix:
        record = self._record(name, (rows, cols))
        data = self.files.read(name)
        if record.layout is None:
            as_it_is = compact or (mapped and record.format in _FLOATS)
            matrix = self.context.matrix(record.format, data, rows, cols, as_it_is)
            if not as_it_is:
                self.files.release(name)
            return matrix
        if not mapped:
            own = weights_empty(data.nbytes)
            own[:] = data
            data = own
        return Matrix(self.context, record.layout, data, rows, cols, record.format)

    def experts(self, layer: int, num_experts: int, width: int, hidden_size: int):
        """The routed experts of a layer, gate and up [width, hidden], down [hidden, width]: an object with the `run` of
        ResidentExperts."""
        shapes = ((width, hidden_size), (width, hidden_size), (hidden_size, width))
        records = [
            tuple(
                self._record(expert_matrix_name(layer, e, part), shape)
                for part, shape in zip(EXPERT_PARTS, shapes, strict=True)
            )
            for e in range(num_experts)
        ]
        rows = (r for expert in records for r in expert if r.layout is None and r.format not in _FLOATS)
        if not self.compact_experts and any(rows):
            self.recoder = self.recoder or Recoder(self.files, self.context)
            return LazyExperts(self.recoder, records)
        return ResidentExperts(
            [
                tuple(
                    self.matrix(expert_matrix_name(layer, e, part), *shape, mapped=True, compact=self.compact_experts)
                    for part, shape in zip(EXPERT_PARTS, shapes, strict=True)
                )
                for e in range(num_experts)
            ]
        )
