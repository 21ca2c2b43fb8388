"""What a weight format is, in numpy: the definition and the oracle of the native codecs, and never on the hot path."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.errors import FormatError


@dataclass(frozen=True)
class Format:
    """A storage format: how the weights of a row lie in a file.

    dequantize: uint8 [rows, row_bytes(cols)], cols -> float32 [rows, cols]; with group_rows, a whole matrix.
    max_relative_error bounds our quantizer on Gaussian weights, as RMS of the error over RMS of the weights; None where
    the format is only read. rotate: x -> x Q where rows hold W Q and not W (dequantize gives the stored rows).
    """

    name: str
    version: int
    block_len: int  # weights per block
    block_bytes: int
    layout: str  # compute layout it is re-coded to, without loss
    ggml_type: int | None  # id in GGUF files
    dequantize: Callable[[np.ndarray, int], np.ndarray]
    max_relative_error: float | None
    source: str
    rotate: Callable[[np.ndarray], np.ndarray] | None = None
    row_extra_bytes: int = 0  # bytes behind the blocks of a row
    group_rows: int = 0  # rows of a matrix that share data; such a matrix is stored as a whole, 0: rows stand alone
    params: dict = field(default_factory=dict)  # what a snapshot's records repeat for the reader, e.g. axis and group

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` weights. Raises: FormatError when blocks do not fit."""
        if cols <= 0 or cols % self.block_len:
            raise FormatError(
                f"format {self.name}: got rows of {cols} weights, expected a positive multiple of {self.block_len}; "
                "store this tensor in a format with shorter blocks"
            )
        return cols // self.block_len * self.block_bytes + self.row_extra_bytes

    def check_rows(self, rows: int) -> None:
        """Raises: FormatError when rows that share data are not complete."""
        if self.group_rows and (rows <= 0 or rows % self.group_rows):
            raise FormatError(
                f"format {self.name}: got {rows} rows, expected a positive multiple of the {self.group_rows} that "
                "share scales; store this tensor in another format"
            )

    @property
    def bits_per_weight(self) -> float:
        return self.block_bytes * 8 / self.block_len


def gguf_dequantize(ggml_type: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """Reference decoder of a GGUF type from the gguf package."""

    def dequantize(storage: np.ndarray, cols: int) -> np.ndarray:
        from gguf import GGMLQuantizationType, quants

        storage = np.ascontiguousarray(storage, dtype=np.uint8)
        out = quants.dequantize(storage, GGMLQuantizationType(ggml_type))
        return out.reshape(len(storage), cols).astype(np.float32, copy=False)

    return dequantize
