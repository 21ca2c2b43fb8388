"""The GGUF container: header, metadata and tensor directory of one file, checked in full before any tensor is touched.

Source: the GGUF specification (ggml project), versions 2 and 3, little endian. Every count and length is compared with
the bytes that are there before anything is made of it. Knows nothing of models; see gguf.py.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from .errors import (
    AlignmentError,
    BlockLengthError,
    DuplicateTensorError,
    HeaderSyntaxError,
    HeaderVersionError,
    NotASnapshotError,
    ShapeError,
    TruncatedFileError,
)
from .gguf_types import format_of
from .safetensors import check_extents

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Far beyond every real file; they keep a broken or hostile header from filling memory or taking forever.
_MAX_TENSORS, _MAX_KEYS = 1 << 20, 1 << 16
_MAX_NUMBERS, _MAX_TEXTS, _MAX_ARRAYS = 1 << 24, 1 << 22, 1 << 16  # items of an array
_MAX_KEY_BYTES, _MAX_NAME_BYTES, _MAX_TEXT_BYTES = 65535, 255, 64 << 20
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_SCALAR_BYTES = {kind: struct.calcsize(code) for kind, code in _SCALARS.items()}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: format is a registry name; shape has the slowest axis first; offset counts from the file's start."""

    name: str
    ggml_type: int
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Cursor:
    """Walks the mapped file and refuses to step past its end."""

    def __init__(self, path: Path, data, position: int = 0):
        self.path, self.data, self.position, self.end = path, data, position, len(data)

    def need(self, nbytes: int, what: str) -> None:
        missing = self.position + nbytes - self.end
        if missing > 0:
            raise TruncatedFileError(
                f"{self.path}: the header is cut off in {what} at byte {self.position}: at least {missing} bytes are "
                "missing; copy or download it again"
            )

    def scalar(self, kind: int, what: str):
        self.need(_SCALAR_BYTES[kind], what)
        (value,) = struct.unpack_from(_SCALARS[kind], self.data, self.position)
        self.position += _SCALAR_BYTES[kind]
        return value

    def count(self, what: str, limit: int) -> int:
        value = self.scalar(10, what)
        if value > limit:
            raise HeaderSyntaxError(
                f"{self.path}: {what} is {value}, at most {limit} is possible; the file is damaged, download it again"
            )
        return value

    def text(self, what: str, limit: int) -> bytes:
        length = self.count(f"the length of {what}", limit)
        self.need(length, what)
        start, self.position = self.position, self.position + length
        return self.data[start : self.position]

    def skip_strings(self, count: int, what: str) -> None:
        self.need(8 * count, what)
        unpack, data, position, last = struct.Struct("<Q").unpack_from, self.data, self.position, self.end - 8
        for _ in range(count):
            if position > last:
                position += 8
                break
            position += 8 + unpack(data, position)[0]
        self.need(position - self.position, what)  # a length of any size only moves the position past the end
        self.position = position


class Metadata(Mapping):
    """Key -> value of one file, decoded when asked for: texts as str, arrays as lists.

    Raises: HeaderSyntaxError for a text that is no UTF-8.
    """

    def __init__(self, path: Path, data):
        self._path, self._data = path, data
        self._places: dict[str, tuple[int, int]] = {}  # key -> (value type, position)
        self._values: dict[str, object] = {}

    def __getitem__(self, key: str):
        if key not in self._values:
            kind, position = self._places[key]
            self._values[key] = self._decode(kind, _Cursor(self._path, self._data, position), key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def length(self, key: str) -> int | None:
        """Number of items of an array, without decoding it; None for other values."""
        kind, position = self._places[key]
        return struct.unpack_from("<Q", self._data, position + 4)[0] if kind == _ARRAY else None

    def _decode(self, kind: int, cursor: _Cursor, key: str):
        if kind == _STRING:
            return self._utf8(cursor.text(key, _MAX_TEXT_BYTES), key)
        if kind != _ARRAY:
            return cursor.scalar(kind, key)
        item, count = cursor.scalar(4, key), cursor.scalar(10, key)
        if item == _STRING:
            return self._texts(cursor, count, key)
        if item == _ARRAY:
            return [self._decode(item, cursor, key) for _ in range(count)]
        dtype = np.dtype(_SCALARS[item])
        values = np.frombuffer(self._data, dtype, count, cursor.position).tolist()
        cursor.position += count * dtype.itemsize
        return values

    def _texts(self, cursor: _Cursor, count: int, key: str) -> list[str]:
        """`count` texts; the walk at open found their ends. Vocabularies have a hundred thousand."""
        unpack, data, position, found = struct.Struct("<Q").unpack_from, self._data, cursor.position, []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            if position - start > _MAX_TEXT_BYTES:
                _Cursor(self._path, data, start - 8).text(key, _MAX_TEXT_BYTES)  # which says so
            raw = data[start:position]
            try:
                found.append(raw.decode())
            except UnicodeDecodeError:
                self._utf8(raw, key)  # which says what is wrong
        cursor.position = position
        return found

    def _utf8(self, raw: bytes, key: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise HeaderSyntaxError(
                f"{self._path}: metadata key {key}: not valid UTF-8 ({error.reason} at byte {error.start} of "
                f"{raw[:40]!r}); the file is damaged, download it again"
            ) from None

    # ---- the walk at open --------------------------------------------------------------------------------------------

    def scan(self, cursor: _Cursor, count: int) -> None:
        """Find where each of `count` values starts; decodes no array. Raises: see read_header."""
        for index in range(count):
            what = f"metadata key {index + 1} of {count}"
            key = self._utf8(cursor.text(what, _MAX_KEY_BYTES), what)
            if key in self._places:
                raise DuplicateTensorError(f"{self._path}: metadata key {key} occurs twice; the file is damaged")
            kind = cursor.scalar(4, key)
            self._places[key] = (kind, cursor.position)
            self._skip(cursor, kind, key, 0)

    def _skip(self, cursor: _Cursor, kind: int, key: str, depth: int) -> None:
        what = f"metadata key {key}"
        if kind in _SCALARS:
            cursor.need(_SCALAR_BYTES[kind], what)
            cursor.position += _SCALAR_BYTES[kind]
        elif kind == _STRING:
            cursor.text(what, _MAX_TEXT_BYTES)
        elif kind == _ARRAY and depth < 2:
            item = cursor.scalar(4, what)
            limit = {_STRING: _MAX_TEXTS, _ARRAY: _MAX_ARRAYS}.get(item, _MAX_NUMBERS)
            count = cursor.count(f"the length of {what}", limit)
            if item in _SCALARS:
                cursor.need(count * _SCALAR_BYTES[item], what)
                cursor.position += count * _SCALAR_BYTES[item]
            elif item == _STRING:
                cursor.skip_strings(count, what)
            else:
                cursor.need(12 * count, what)
                for _ in range(count):
                    self._skip(cursor, item, key, depth + 1)
        else:
            raise HeaderSyntaxError(
                f"{self._path}: {what}: value type {kind} {'nested too deep' if kind == _ARRAY else 'is unknown'}; the "
                "file is damaged or newer than this reader"
            )


@dataclass(frozen=True)
class GgufHeader:
    """A checked header. data_start: where offset 0 of the tensors lies in the file."""

    path: Path
    file_bytes: int
    version: int
    alignment: int
    data_start: int
    metadata: Metadata
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a file starts with the magic."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_header(path: Path) -> GgufHeader:
    """Parse and check one file's header; nothing else of the file is read.

    Raises: NotASnapshotError for another magic, HeaderVersionError, HeaderSyntaxError, TruncatedFileError (with the
    missing byte count, also when a tensor ends past the file), DuplicateTensorError, UnknownFormatError,
    BlockLengthError, ShapeError, AlignmentError, OverlapError.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != MAGIC[: len(start)] or not start:
            raise NotASnapshotError(f"{path}: starts with {start[:4]!r}, expected {MAGIC!r}; this is no GGUF file")
        if len(start) < 8:
            raise TruncatedFileError(
                f"{path}: {file_bytes} bytes, at least {24 - file_bytes} bytes of the header are missing; copy it again"
            )
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, data, 4)
    version = _version(path, cursor.scalar(4, "the version"))
    num_tensors = cursor.count("the number of tensors", _MAX_TENSORS)
    num_keys = cursor.count("the number of metadata keys", _MAX_KEYS)
    metadata = Metadata(path, data)
    metadata.scan(cursor, num_keys)
    alignment = _alignment(path, metadata)
    cursor.need(num_tensors * 32, "the tensor directory")  # a name, a dimension, a type, an offset
    entries = [_entry(cursor, index, num_tensors) for index in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        tensor = _tensor(path, *entry, data_start, alignment)
        if tensor.name in tensors:
            raise DuplicateTensorError(f"{path}: tensor {tensor.name} is listed twice; the file is broken")
        tensors[tensor.name] = tensor
    check_extents(path, tensors.values(), file_bytes)
    return GgufHeader(path, file_bytes, version, alignment, data_start, metadata, tensors)


def _version(path: Path, version: int) -> int:
    if version in VERSIONS:
        return version
    if version & 0xFFFF == 0 and version:
        raise HeaderVersionError(f"{path}: a big-endian GGUF file, only little-endian ones are read; get another file")
    newer = "update millstream" if version > max(VERSIONS) else "make the file again with a current converter"
    raise HeaderVersionError(
        f"{path}: GGUF version {version}, versions {VERSIONS[0]} and {VERSIONS[1]} are read; {newer}"
    )


def _alignment(path: Path, metadata: Metadata) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise AlignmentError(
            f"{path}: general.alignment = {alignment!r}, expected a power of two up to {_MAX_ALIGNMENT}; "
            "the file is damaged"
        )
    return alignment


def _entry(cursor: _Cursor, index: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape with the slowest axis first, type id, offset) of the next directory entry."""
    what = f"tensor {index + 1} of {count}"
    raw = cursor.text(f"the name of {what}", _MAX_NAME_BYTES)
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise HeaderSyntaxError(f"{cursor.path}: the name of {what} is no UTF-8; the file is damaged") from None
    dimensions = cursor.scalar(4, what)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ShapeError(
            f"{cursor.path}: tensor {name}: {dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}; the file "
            "is damaged"
        )
    shape = tuple(cursor.scalar(10, what) for _ in range(dimensions))[::-1]
    return name, shape, cursor.scalar(4, what), cursor.scalar(10, what)


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], ggml_type: int, offset: int, data_start: int, alignment: int
):
    if not all(0 < n < 1 << 31 for n in shape):
        raise ShapeError(f"{path}: tensor {name}: shape {list(shape)}, expected counts from 1 to 2^31 - 1")
    descriptor = format_of(str(path), name, ggml_type)
    if shape[-1] % descriptor.block_len:
        raise BlockLengthError(
            f"{path}: tensor {name}: row length {shape[-1]} is not a multiple of the {descriptor.block_len} values of "
            f"a {descriptor.name} block; the file is damaged"
        )
    if offset % alignment:
        raise AlignmentError(
            f"{path}: tensor {name}: offset {offset} is not a multiple of the alignment {alignment}; the file is "
            "damaged"
        )
    nbytes = prod(shape[:-1]) * descriptor.row_bytes(shape[-1])
    return GgufTensor(name, ggml_type, descriptor.name, shape, data_start + offset, nbytes)
