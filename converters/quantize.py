"""Source tensors to stored bytes, chunk of rows by chunk of rows. Owns no mathematics: formats quantize themselves."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from engine.errors import ConfigError, KernelError
from engine.weights.architectures import Expected
from engine.weights.base import TensorRecord
from engine.weights.checkpoint import read_rows
from engine.weights.checks import check_kernel
from engine.weights.errors import BlockLengthError, NonFiniteError, UnknownFormatError, brief
from engine.weights.safetensors import SourceTensor
from engine.weights.views import ViewSource

LAYOUTS = ("auto", "storage", "compute")
# The compute layout is written when it costs at most this much more than the storage rows (then nothing has to be
# re-coded at load or on arrival).
COMPUTE_LAYOUT_MAX_GROWTH = 1.05
_CHUNK_VALUES = 4 << 20  # 16 MiB as float32
_STRIP_ROWS = 8  # rows of a chunk are a multiple of it, so that strips of chunks are strips of the whole


@dataclass(frozen=True)
class RoleFormats:
    """Storage format per role; None follows experts (gate_up, down) or dense (embed, head).

    MLPs of dense layers and shared experts (mlp, shared) follow dense. Routers, norms and biases are always f32: they
    are small, and a wrong pick costs more than they do.
    """

    experts: str = "q8_0"
    gate_up: str | None = None
    down: str | None = None
    dense: str = "f16"
    embed: str | None = None
    head: str | None = None

    def of(self, role: str) -> str:
        return {
            "gate_up": self.gate_up or self.experts,
            "down": self.down or self.experts,
            "attention": self.dense,
            "mlp": self.dense,
            "shared": self.dense,
            "embed": self.embed or self.dense,
            "head": self.head or self.dense,
            "router": "f32",
            "norm": "f32",
            "bias": "f32",
        }[role]


class Quantizer:
    """Plans and produces the stored form of tensors.

    context: kernels.Context whose threads do the work. formats: engine.formats.FORMATS. layout: one of LAYOUTS.
    """

    def __init__(self, context, formats: Mapping, layout: str = "auto"):
        if layout not in LAYOUTS:
            raise ConfigError(f"layout {layout!r}: expected one of {', '.join(LAYOUTS)}")
        self._context, self._formats, self._layout = context, formats, layout
        self._writable: set[str] = set()

    # ---- planning ----------------------------------------------------------------------------------------------------

    def _check_format(self, name: str) -> None:
        """Refuse a format that cannot be made here, before any work."""
        if name in self._writable:
            return
        if name not in self._formats:
            known = brief(sorted(self._formats), 100)
            raise UnknownFormatError(f"format {name!r} is unknown (known: {known})")
        descriptor = self._formats[name]
        check_kernel("convert", name, descriptor.layout, self._context)
        if not self._can_quantize(name):
            can = brief([other for other in sorted(self._formats) if self._can_quantize(other)], 100)
            raise UnknownFormatError(f"format {name} can be read but not made here (can be made: {can})")
        self._writable.add(name)

    def _can_quantize(self, name: str) -> bool:
        try:
            descriptor = self._formats[name]
            self._context.quantize(name, np.zeros((descriptor.group_rows or 1, descriptor.block_len), np.float32))
        except KernelError:
            return False
        return True

    def plan(self, name: str, want: Expected, format_name: str) -> TensorRecord:
        """The record of a tensor, still without file, offset and checksum.

        Raises: UnknownFormatError, BlockLengthError, MissingKernelError.
        """
        self._check_format(format_name)
        descriptor, cols = self._formats[format_name], want.shape[-1]
        if cols % descriptor.block_len:
            fits = sorted(f for f, d in self._formats.items() if cols % d.block_len == 0 and self._can_quantize(f))
            raise BlockLengthError(
                f"tensor {name}: its row length {cols} is not a multiple of the {descriptor.block_len} values of a "
                f"{format_name} block; formats that fit: {brief(fits, 100)}"
            )
        rows = want.shape[0] if len(want.shape) == 2 else 1
        if descriptor.group_rows and rows % descriptor.group_rows:
            raise BlockLengthError(
                f"tensor {name}: its {rows} rows are not a multiple of the {descriptor.group_rows} that share a scale "
                f"in {format_name}; choose another format"
            )
        nbytes, layout = rows * descriptor.row_bytes(cols), None
        if len(want.shape) == 2 and self._layout != "storage":
            strips = self._context.matrix_bytes(descriptor.layout, rows, cols)
            if self._layout == "compute" or strips <= nbytes * COMPUTE_LAYOUT_MAX_GROWTH:
                nbytes, layout = strips, descriptor.layout
        return TensorRecord(
            name=name, format=format_name, format_version=descriptor.version, layout=layout, shape=want.shape,
            role=want.role, file="", offset=0, nbytes=nbytes, checksum="", params=dict(descriptor.params),
        )  # fmt: skip

    # ---- producing ---------------------------------------------------------------------------------------------------

    def chunks(
        self, record: TensorRecord, source: SourceTensor, tell: Callable[[float], None] = lambda share: None
    ) -> Iterator[np.ndarray]:
        """The stored bytes of a tensor, in order, as uint8 arrays; memory for one chunk of rows, or for the whole
        tensor where its rows share data. Then it takes one chunk, and `tell` hears the share that is done on the way.

        Raises: NonFiniteError for a NaN or infinite weight, or one that the format cannot hold.
        """
        rows, cols = record.rows, record.cols
        step = max(_STRIP_ROWS, _CHUNK_VALUES // cols // _STRIP_ROWS * _STRIP_ROWS)
        if self._formats[record.format].group_rows:
            step = rows
        for first in range(0, rows, step):
            last = min(first + step, rows)
            if getattr(source, "format", None) == record.format:
                yield self._as_stored(record, source, first, last)
                continue
            x = self._floats(source, first, last).reshape(last - first, cols)
            self._check_finite(source, x, first)
            stored = self._quantized(record.format, x, tell)
            bad = self._context.check_rows(record.format, stored, last - first, cols)
            if bad is not None:
                raise NonFiniteError(
                    f"{source.path}: tensor {source.name}: format {record.format} cannot hold its values (largest "
                    f"magnitude {np.abs(x).max():g}); choose bf16 or f32"
                )
            if record.layout is not None:
                stored = self._context.encode(record.format, stored, last - first, cols)
            yield stored.reshape(-1)

    def _quantized(self, format_name: str, x: np.ndarray, tell: Callable[[float], None]) -> np.ndarray:
        if self._formats[format_name].group_rows:
            return self._context.quantize_groups(format_name, x, _CHUNK_VALUES, tell)
        return self._context.quantize(format_name, x)

    def _as_stored(self, record: TensorRecord, source: ViewSource, first: int, last: int) -> np.ndarray:
        """Rows that the checkpoint holds in this format already."""
        stored = source.rows(first, last).reshape(last - first, -1)
        if self._context.check_rows(record.format, stored, last - first, record.cols) is not None:
            raise NonFiniteError(
                f"{source.path}: tensor {source.name}: a scale is not finite; the checkpoint is damaged, download it "
                "again"
            )
        if record.layout is not None:
            stored = self._context.encode(record.format, stored, last - first, record.cols)
        return stored.reshape(-1)

    def _floats(self, source: SourceTensor, first: int, last: int) -> np.ndarray:
        raw = read_rows(source, first, last) if isinstance(source, SourceTensor) else source.rows(first, last)
        if source.dtype == "F32":
            return raw.view("<f4")
        return self._context.to_f32(raw.view("<u2"), source.dtype.lower())

    @staticmethod
    def _check_finite(source: SourceTensor, x: np.ndarray, first_row: int) -> None:
        # min and max carry a NaN along and need no array of flags.
        if np.isfinite(x.min()) and np.isfinite(x.max()):
            return
        row, col = np.argwhere(~np.isfinite(x))[0]
        raise NonFiniteError(
            f"{source.path}: tensor {source.name}: value {x[row, col]} at [{first_row + row}, {col}] is not finite; "
            "the checkpoint is damaged, download it again"
        )
