"""A Hugging Face model directory: config.json and safetensors shards, checked before any tensor is read.

Knows nothing of what the tensors mean.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import (
    DuplicateTensorError,
    HeaderSyntaxError,
    MissingFileError,
    MissingTensorError,
    NotAModelDirectoryError,
    TruncatedFileError,
    brief,
)
from .fingerprint import source_fingerprint
from .header import load_json
from .safetensors import ITEM_BYTES, SourceTensor, read_header

INDEX_FILE = "model.safetensors.index.json"
_MAX_SHARDS = 99_999  # what five digits can number; the count in a file name is no reason to make a list of any length
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")


@dataclass(frozen=True)
class Checkpoint:
    """config and generation_config: dictionaries. shards: weight files. tensors: name -> where it lies."""

    path: Path
    config: dict
    generation_config: dict
    shards: list[Path]
    tensors: dict[str, SourceTensor]

    @classmethod
    def open(cls, path) -> "Checkpoint":
        """Read config.json and every shard's header.

        Raises: NotAModelDirectoryError, MissingFileError listing absent shards, MissingTensorError for tensors that the
        index promises, DuplicateTensorError, and what safetensors.read_header raises.
        """
        path = Path(path)
        if not path.is_dir():
            raise NotAModelDirectoryError(
                f"{path}: {'not a' if path.exists() else 'no such'} directory; give a Hugging Face model directory"
            )
        if not (path / "config.json").is_file():
            raise NotAModelDirectoryError(f"{path}: no config.json; give a Hugging Face model directory")
        config = load_json(path / "config.json")
        generation = path / "generation_config.json"
        shards, promised = _shards(path)
        tensors: dict[str, SourceTensor] = {}
        for shard in shards:
            for name, tensor in read_header(shard).tensors.items():
                if name in tensors:
                    raise DuplicateTensorError(
                        f"{path}: tensor {name} is in {tensors[name].path.name} and in {shard.name}; remove "
                        "the wrong file"
                    )
                tensors[name] = tensor
        absent = [name for name in promised if name not in tensors]
        if absent:
            raise MissingTensorError(
                f"{path / INDEX_FILE}: {len(absent)} tensors are in none of the shards: {brief(absent)}; the index "
                "belongs to other files, download again"
            )
        return cls(path, config, load_json(generation) if generation.is_file() else {}, shards, tensors)

    def fingerprint(self) -> dict:
        """See fingerprint.source_fingerprint."""
        return source_fingerprint(self.path / "config.json", self.shards)


def _shards(path: Path) -> tuple[list[Path], list[str]]:
    """Weight files, and the tensor names that an index promises."""
    index = path / INDEX_FILE
    if index.is_file():
        weight_map = load_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise HeaderSyntaxError(f"{index}: no weight_map; download it again")
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise HeaderSyntaxError(f"{index}: weight_map names files outside of the directory")
        _refuse_missing(path, names, f"named by {INDEX_FILE}")
        return [path / name for name in names], list(weight_map)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        other = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; {brief(other)} cannot be read here, get the safetensors files" if other else ""
        raise NotAModelDirectoryError(f"{path}: no *.safetensors weights{hint}")
    if "model.safetensors" in names:  # what transformers loads, whatever else lies there
        return [path / "model.safetensors"], []
    shards = [match for match in map(_SHARD.match, names) if match]
    if shards:
        names = _whole_set(shards)
        _refuse_missing(path, names, "of the numbered set")
    return [path / name for name in names], []


def _whole_set(shards: list[re.Match]) -> list[str]:
    """Names of the complete set that the numbered files found belong to."""
    kinds = {(match["stem"], match["count"]) for match in shards}
    if len(kinds) > 1:
        found = brief(sorted(f"{stem}-*-of-{count}" for stem, count in kinds))
        raise DuplicateTensorError(f"several sets of shards lie side by side ({found}); remove all but one")
    stem, count = kinds.pop()
    # Its digits are counted first: Python converts no text of thousands of digits.
    if len(count.lstrip("0")) > len(str(_MAX_SHARDS)):
        raise HeaderSyntaxError(
            f"{shards[0].string}: a set of {count[:20]} files is out of range (at most {_MAX_SHARDS}); rename it"
        )
    width = len(shards[0]["number"])
    return [f"{stem}-{number:0{width}d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]


def _refuse_missing(path: Path, names: list[str], which: str) -> None:
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise MissingFileError(
            f"{path}: {len(missing)} of {len(names)} weight files {which} are missing: {brief(missing, 20)}; "
            "download them again"
        )


def read_rows(tensor: SourceTensor, first: int, last: int) -> np.ndarray:
    """Rows [first, last) of a tensor as stored: uint8 [rows * row_bytes]. A vector is one row.

    Read calls and not a mapping, so that memory stays at one chunk and a file that shrinks is an error, not a signal.
    Raises: TruncatedFileError.
    """
    row_bytes = tensor.nbytes if len(tensor.shape) < 2 else ITEM_BYTES[tensor.dtype] * tensor.shape[1]
    out = np.empty((last - first) * row_bytes, np.uint8)
    handle = os.open(tensor.path, os.O_RDONLY)
    try:
        done, view = 0, memoryview(out)
        while done < out.nbytes:
            got = os.preadv(handle, [view[done:]], tensor.offset + first * row_bytes + done)
            if not got:
                raise TruncatedFileError(
                    f"{tensor.path}: tensor {tensor.name}: the file ended {out.nbytes - done} bytes early"
                )
            done += got
    finally:
        os.close(handle)
    return out
