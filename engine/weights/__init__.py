"""Weight files: one entry point that opens whatever a path holds, behind one interface (base.ModelFiles)."""

from pathlib import Path

from .base import ExpertRecord, ModelFiles, Progress, TensorRecord, reading
from .errors import NotASnapshotError, brief
from .gguf import GgufModel
from .gguf_header import is_gguf
from .header import HEADER_FILE
from .huggingface import HuggingFaceModel, is_checkpoint
from .snapshot import Snapshot

__all__ = [
    "ExpertRecord",
    "GgufModel",
    "HuggingFaceModel",
    "ModelFiles",
    "Progress",
    "Snapshot",
    "TensorRecord",
    "open_model",
]


def open_model(path, context=None) -> ModelFiles:
    """Open and check a model: a snapshot directory, a Hugging Face directory, a GGUF file, or any shard of a split one.

    context: kernels.Context to check layouts against; None makes one.
    Raises: NotASnapshotError for anything else, saying what it looks like; see Snapshot.open, HuggingFaceModel.open and
    GgufModel.open.
    """
    with reading(path):
        return _open(Path(path), context)


def _open(path: Path, context) -> ModelFiles:
    if not path.exists():
        raise NotASnapshotError(f"{path}: no such file or directory")
    if not path.is_file() and not path.is_dir():
        raise NotASnapshotError(f"{path}: neither a file nor a directory; give a snapshot directory or a GGUF file")
    if path.is_file() and (path.suffix == ".gguf" or is_gguf(path)):
        return GgufModel.open(path, context)
    if path.is_file():
        hint = (
            f"give the directory {path.parent}"
            if path.name == HEADER_FILE
            else "give a snapshot directory or a GGUF file"
        )
        raise NotASnapshotError(f"{path}: a file, expected a snapshot directory; {hint}")
    if not (path / HEADER_FILE).is_file():
        if is_checkpoint(path):
            return HuggingFaceModel.open(path, context)
        inside = sorted(file.name for file in path.glob("*.gguf"))
        if inside:
            raise NotASnapshotError(f"{path}: a directory; give a GGUF file in it ({brief(inside)})")
    return Snapshot.open(path, context)
