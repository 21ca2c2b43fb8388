"""Tensors of an opened model as Matrix and Vector objects for one context. Knows names and shapes, no mathematics."""

import numpy as np

from ..errors import WeightsError
from ..experts import ResidentExperts
from ..kernels import Context, Matrix, aligned_empty
from ..layers import Vector
from .architectures import EXPERT_PARTS, expert_matrix_name


class WeightLoader:
    """files: what engine.weights.open_model returned. compact_experts: keep storage rows of experts as they are."""

    def __init__(self, files, context: Context, *, compact_experts: bool = False):
        self.files, self.context, self.compact_experts = files, context, compact_experts

    def _record(self, name: str, shape: tuple[int, ...]):
        record = self.files.tensors.get(name)
        if record is None:
            raise WeightsError(f"{self.files.path}: tensor {name} is missing")
        if tuple(record.shape) != shape:
            got, expected = list(record.shape), list(shape)
            raise WeightsError(f"{self.files.path}: tensor {name} has shape {got}, expected {expected}")
        return record

    def vector(self, name: str, size: int) -> Vector:
        """float32 [size]; stored as f32."""
        record = self._record(name, (size,))
        if record.format != "f32":
            raise WeightsError(f"{self.files.path}: tensor {name} is {record.format}, expected f32")
        return Vector(self.files.read(name).view(np.float32).copy())

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
            return self.context.matrix(record.format, data, rows, cols, compact)
        if not mapped:
            own = aligned_empty(data.nbytes)
            own[:] = data
            data = own
        return Matrix(self.context, record.layout, data, rows, cols, record.format)

    def experts(self, layer: int, num_experts: int, width: int, hidden_size: int) -> ResidentExperts:
        """The routed experts of a layer, gate and up [width, hidden], down [hidden, width]."""
        shapes = ((width, hidden_size), (width, hidden_size), (hidden_size, width))
        return ResidentExperts(
            [
                tuple(
                    self.matrix(expert_matrix_name(layer, e, part), *shape, mapped=True, compact=self.compact_experts)
                    for part, shape in zip(EXPERT_PARTS, shapes, strict=True)
                )
                for e in range(num_experts)
            ]
        )
