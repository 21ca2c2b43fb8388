"""A Hugging Face directory as a model, in place: its floats are used as they are, no snapshot is made first."""

from functools import partial
from pathlib import Path

import numpy as np

from .. import kernels
from ..formats import FORMATS
from . import checks
from .architectures import expected_tensors, model_config, mtp_tensors, readable_quantization
from .base import ModelFiles, ProgressCallback, TensorRecord
from .checkpoint import Checkpoint
from .errors import QuantizedSourceError, UnknownArchitectureError
from .match import is_listed, match_tensors
from .quantization import method_of, refuse_quantized
from .scales import refuse_nonfinite, sample, verify_scales
from .views import ViewSource

_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class HuggingFaceModel(ModelFiles):
    """An opened checkpoint; see ModelFiles. made: names of the tensors that are arranged anew whenever they are read,
    because the checkpoint stores their numbers in another order; their records have no place in a file."""

    kind = "huggingface"
    nonfinite_remedy = "a value that is not finite; the checkpoint is damaged, download it again"

    def __init__(self, checkpoint: Checkpoint, architecture: str):
        super().__init__(checkpoint.path, architecture, checkpoint.config, checkpoint.generation_config)
        self.files = {path.name: path.stat().st_size for path in checkpoint.shards}
        if (checkpoint.path / "tokenizer.json").is_file():
            self.tokenizer_dir = checkpoint.path
        self.made: dict[str, ViewSource] = {}

    @classmethod
    def open(cls, path, context=None) -> "HuggingFaceModel":
        """Open and check a model directory.

        Raises: what Checkpoint.open and match_tensors raise; UnknownArchitectureError; QuantizedSourceError;
        NonFiniteError.
        """
        context = context or kernels.Context(num_threads=1)
        checkpoint = Checkpoint.open(path)
        architecture = checkpoint.config.get("model_type")
        if not isinstance(architecture, str):
            raise UnknownArchitectureError(
                f"{checkpoint.path / 'config.json'}: model_type is {architecture!r}, expected a name"
            )
        refuse_quantized(checkpoint.config, readable_quantization(architecture))
        if method_of(checkpoint.config) == "fp8":
            raise QuantizedSourceError(
                f"{checkpoint.path}: an FP8 checkpoint is not run in place; make a snapshot with `millstream convert "
                f"{checkpoint.path} OUT`"
            )
        self = cls(checkpoint, architecture)
        self.model_config = model_config(architecture, self.config)
        expected = expected_tensors(architecture, self.config, len(checkpoint.tensors))
        mtp = mtp_tensors(architecture, self.config, partial(is_listed, checkpoint))
        self.mtp_names, expected = frozenset(mtp), expected | mtp
        sources = match_tensors(checkpoint, expected, self.model_config)
        for name, want in expected.items():
            self.tensors[name] = self._record(name, want, sources[name])
        self.tied_head = "lm_head" not in self.tensors
        for record in self.tensors.values():
            if len(record.shape) == 2:
                checks.check_format(str(self.path), record, FORMATS, context)
        refuse_nonfinite(self, sample(self.tensors.values()), context)
        return self

    def _record(self, name: str, want, source) -> TensorRecord:
        made = isinstance(source, ViewSource)
        format_name = (source.format if made else None) or _FORMATS[source.dtype]
        descriptor = FORMATS[format_name]
        rows = want.shape[0] if len(want.shape) == 2 else 1
        if made:
            self.made[name] = source
        return TensorRecord(
            name=name, format=format_name, format_version=descriptor.version, layout=None, shape=tuple(want.shape),
            role=want.role, file=source.path.name, offset=0 if made else source.offset,
            nbytes=rows * descriptor.row_bytes(want.shape[-1]), checksum="",
        )  # fmt: skip

    def read(self, name: str) -> np.ndarray:
        if name in self.made:
            record = self.record(name)
            return self.made[name].rows(0, record.rows)
        return super().read(name)

    def read_into(self, name: str, out: np.ndarray) -> None:
        if name in self.made:
            out.reshape(-1).view(np.uint8)[: self.record(name).nbytes] = self.read(name)
        else:
            super().read_into(name, out)

    def release(self, name: str) -> None:
        if name not in self.made:
            super().release(name)

    def verify(self, progress: ProgressCallback | None = None, threads: int | None = None) -> int:
        """Look at every value; returns the bytes read. A checkpoint holds no checksums. Raises: NonFiniteError."""
        return verify_scales(self, progress, threads)


def is_checkpoint(path: Path) -> bool:
    return path.is_dir() and (path / "config.json").is_file()
