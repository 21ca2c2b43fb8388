"""The safetensors container: its header, checked in full before any tensor is touched, and the header of a new file.

Source: the format description of the safetensors project: u64 header length, JSON header, data; offsets count from
the end of the header. Knows nothing of models, formats or snapshots.
"""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

from .errors import (
    DtypeError,
    DuplicateTensorError,
    FileLengthError,
    HeaderSyntaxError,
    LengthError,
    OverlapError,
    TruncatedFileError,
)

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_MAX_DIMENSIONS = 8  # of any tensor in use; the product of a long list of counts would take forever
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a safetensors file; offset counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A checked header. data_start is where offset 0 lies in the file."""

    path: Path
    file_bytes: int
    data_start: int
    metadata: dict[str, str]
    tensors: dict[str, SourceTensor]


def unique_keys(pairs):
    """object_pairs_hook that refuses a key which JSON would silently overwrite."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(names) < 1000 else ["(many)"]
        raise DuplicateTensorError(f"key {', '.join(twice)} occurs twice in a JSON object")
    return found


def _header_json(path: Path, file_bytes: int) -> tuple[dict, int]:
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):  # not what the disk reads ahead: megabytes of the tensors behind the header
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        prefix = file.read(8)
        if len(prefix) < 8:
            raise TruncatedFileError(f"{path}: {file_bytes} bytes, too short for a safetensors header; copy it again")
        length = int.from_bytes(prefix, "little")
        if length > _MAX_HEADER_BYTES:
            raise HeaderSyntaxError(f"{path}: header length {length} is out of range; this is no safetensors file")
        # Compared before the read, which would otherwise make a buffer of whatever length the file claims.
        text = file.read(length) if length <= file_bytes - 8 else b""
    if len(text) < length:
        missing = length - (file_bytes - 8)
        raise TruncatedFileError(f"{path}: the safetensors header is cut off, {missing} bytes missing; copy it again")
    try:
        header = json.loads(text, object_pairs_hook=unique_keys)
    except DuplicateTensorError as error:
        raise DuplicateTensorError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise HeaderSyntaxError(f"{path}: the safetensors header is no JSON ({error}); copy it again") from None
    if not isinstance(header, dict):
        raise HeaderSyntaxError(f"{path}: the safetensors header is no JSON object")
    return header, 8 + length


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(path: Path, name: str, entry, data_start: int) -> SourceTensor:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise HeaderSyntaxError(f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise HeaderSyntaxError(f"{where}: shape {repr(shape)[:60]} is no list of at most {_MAX_DIMENSIONS} counts")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise HeaderSyntaxError(f"{where}: data_offsets {repr(offsets)[:60]} are no pair of counts")
    if dtype not in ITEM_BYTES:
        raise DtypeError(f"{where}: dtype {dtype!r} is unknown (known: {', '.join(ITEM_BYTES)})")
    nbytes, expected = offsets[1] - offsets[0], prod(shape) * ITEM_BYTES[dtype]
    if nbytes != expected:
        raise LengthError(f"{where}: got {nbytes} bytes, {dtype} {shape} needs {expected}")
    return SourceTensor(name, dtype, tuple(shape), path, data_start + offsets[0], nbytes)


def check_extents(path: Path, tensors, file_bytes: int) -> int:
    """Refuse tensors (name, offset, nbytes) that share bytes or end past the file; return where the last one ends.

    Raises: OverlapError, TruncatedFileError (with the missing byte count).
    """
    end, last = 0, None
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.nbytes and tensor.offset < end:
            raise OverlapError(
                f"{path}: tensor {tensor.name} starts at {tensor.offset}, inside {last}, which ends at {end}; "
                "the file is broken, make it again"
            )
        if tensor.offset + tensor.nbytes > end:
            end, last = tensor.offset + tensor.nbytes, tensor.name
    if end > file_bytes:
        raise TruncatedFileError(
            f"{path}: tensor {last} ends at {end}, the file has {file_bytes} bytes: {end - file_bytes} bytes are "
            "missing; copy or download it again"
        )
    return end


def read_header(path: Path) -> SafetensorsHeader:
    """Parse and check one file's header; nothing else of the file is read.

    Raises: TruncatedFileError, FileLengthError, HeaderSyntaxError, DuplicateTensorError, DtypeError, LengthError,
    OverlapError.
    """
    file_bytes = path.stat().st_size
    header, data_start = _header_json(path, file_bytes)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise HeaderSyntaxError(f"{path}: __metadata__ is {metadata!r}, expected an object")
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in header.items()}
    end = check_extents(path, tensors.values(), file_bytes)
    if max(end, data_start) < file_bytes:
        extra = file_bytes - max(end, data_start)
        raise FileLengthError(f"{path}: {extra} bytes follow the last tensor; the file is broken, copy it again")
    return SafetensorsHeader(path, file_bytes, data_start, metadata, tensors)


def make_header(tensors: list[tuple[str, int]], metadata: dict[str, str], align_bytes: int) -> bytes:
    """Header of a file of one-dimensional U8 tensors (name, nbytes), laid out back to back in this order.

    Spaces at its end, which the format allows, make the data start at a multiple of align_bytes.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, nbytes in tensors:
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % align_bytes)
    return len(text).to_bytes(8, "little") + text
