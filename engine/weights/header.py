"""millstream.json: its fields, their types, its identity. Knows nothing of the bytes in the data files."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import __version__ as READER_VERSION
from .base import TensorRecord
from .errors import (
    DuplicateTensorError,
    HeaderSyntaxError,
    HeaderVersionError,
    NotASnapshotError,
    ReaderVersionError,
)
from .safetensors import unique_keys

HEADER_FILE = "millstream.json"
MAGIC = "millstream-snapshot"
HEADER_VERSION = 1
_MAX_JSON_BYTES = 256 << 20  # more than a header of 700,000 tensors; refused before it is read
MIN_READER = "0.1.0"  # the first millstream that reads what is written here


@dataclass(frozen=True, slots=True)
class Header:
    """The content of millstream.json.

    formats: role -> format name. files: data file name -> bytes. side_files: tokenizer and defaults, each
    {"name", "bytes", "checksum"}. identity: see header_identity.
    """

    architecture: str
    config: dict
    generation_config: dict
    source: dict
    created_by: str
    formats: dict[str, str]
    tied_head: bool
    files: dict[str, int] = field(default_factory=dict)
    side_files: list[dict] = field(default_factory=list)
    tensors: list[TensorRecord] = field(default_factory=list)
    header_version: int = HEADER_VERSION
    min_reader: str = MIN_READER
    identity: str = ""

    def to_json(self) -> dict:
        tensors = [{**asdict(record), "shape": list(record.shape)} for record in self.tensors]
        for entry in tensors:
            if not entry["params"]:
                del entry["params"]
        return {
            "magic": MAGIC,
            "header_version": self.header_version,
            "min_reader": self.min_reader,
            "created_by": self.created_by,
            "identity": self.identity,
            "architecture": self.architecture,
            "config": self.config,
            "generation_config": self.generation_config,
            "source": self.source,
            "formats": self.formats,
            "tied_head": self.tied_head,
            "files": [{"name": name, "bytes": size} for name, size in self.files.items()],
            "side_files": self.side_files,
            "tensors": tensors,
        }


def header_identity(content: dict) -> str:
    """sha256 over the canonical JSON of the header without the identity itself and the checksums.

    Checksums are left out so that the identity is known before the data is: every data file carries it, which tells a
    file of another snapshot from one of this, and it tells an edited header from the one that was written.
    """
    kept = {key: value for key, value in content.items() if key != "identity"}
    kept["tensors"] = [{k: v for k, v in entry.items() if k != "checksum"} for entry in content["tensors"]]
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def dump_header(content: dict) -> bytes:
    """One top-level key per line and one tensor per line: readable with less and diff."""
    lines = []
    for key, value in content.items():
        if key in ("tensors", "files", "side_files"):
            rows = ",\n".join("  " + json.dumps(entry, ensure_ascii=True) for entry in value)
            lines.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=True)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


# ---- reading ---------------------------------------------------------------------------------------------------------


def _version(text: str, where: str) -> tuple[int, ...]:
    parts = text.split(".")
    # Python converts no text of thousands of digits; a version has a few.
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise HeaderSyntaxError(f"{where}: {text[:60]!r} is no version of the form 1.2.3")
    return tuple(map(int, parts))


def _field(table: dict, key: str, kind, where: str, default=None):
    value = table.get(key, default)
    right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if not right or (kind is int and value < 0):
        got = "nothing" if value is None else repr(value)[:60]
        raise HeaderSyntaxError(f"{where}: {key}: got {got}, expected {_KIND_NAMES[kind]}; convert the model again")
    return value


_KIND_NAMES = {int: "a count", str: "a string", dict: "an object", list: "a list", bool: "true or false"}


def load_json(path: Path) -> dict:
    """A JSON object from a file. Raises: HeaderSyntaxError, DuplicateTensorError for a key that occurs twice."""
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise HeaderSyntaxError(
            f"{path}: {path.stat().st_size} bytes, expected at most {_MAX_JSON_BYTES}; make it again"
        )
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
    except DuplicateTensorError as error:
        raise DuplicateTensorError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise HeaderSyntaxError(
            f"{path}: no valid JSON ({error}); the file is cut off or was edited, make it again"
        ) from None
    if not isinstance(content, dict):
        raise HeaderSyntaxError(f"{path}: no JSON object")
    return content


def _check_versions(content: dict, path: Path) -> None:
    if content.get("magic") != MAGIC:
        raise NotASnapshotError(
            f"{path}: magic is {content.get('magic')!r}, expected {MAGIC!r}; this is no millstream snapshot"
        )
    version = _field(content, "header_version", int, str(path))
    min_reader = _field(content, "min_reader", str, str(path))
    if version > HEADER_VERSION:
        raise HeaderVersionError(
            f"{path}: snapshot needs millstream >= {min_reader} (header version {version}, this is millstream "
            f"{READER_VERSION} and reads up to {HEADER_VERSION}); update millstream or convert the model again"
        )
    if _version(min_reader, f"{path}: min_reader") > _version(READER_VERSION, "reader"):
        raise ReaderVersionError(
            f"{path}: snapshot needs millstream >= {min_reader}, this is {READER_VERSION}; update millstream"
        )


def _record(entry, path: Path, files: dict[str, int]) -> TensorRecord:
    if not isinstance(entry, dict):
        raise HeaderSyntaxError(f"{path}: tensors: got {entry!r}, expected an object; convert the model again")
    name = _field(entry, "name", str, f"{path}: tensors")
    where = f"{path}: tensor {name}"
    shape = _field(entry, "shape", list, where)
    if len(shape) not in (1, 2) or not all(
        isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 31 for n in shape
    ):
        raise HeaderSyntaxError(f"{where}: shape: got {repr(shape)[:60]}, expected one or two counts below 2^31")
    layout = entry.get("layout")
    if layout is not None:
        layout = _field(entry, "layout", str, where)
    file = _field(entry, "file", str, where)
    if file not in files:
        raise HeaderSyntaxError(f"{where}: file {file!r} is not in the header's list of files; convert the model again")
    return TensorRecord(
        name=name,
        format=_field(entry, "format", str, where),
        format_version=_field(entry, "format_version", int, where),
        layout=layout,
        shape=tuple(shape),
        role=_field(entry, "role", str, where),
        file=file,
        offset=_field(entry, "offset", int, where),
        nbytes=_field(entry, "nbytes", int, where),
        checksum=_field(entry, "checksum", str, where),
        params=_field(entry, "params", dict, where, {}),
    )


def _files(content: dict, key: str, path: Path) -> dict[str, int]:
    files: dict[str, int] = {}
    for entry in _field(content, key, list, str(path)):
        if not isinstance(entry, dict):
            raise HeaderSyntaxError(f"{path}: {key}: got {entry!r}, expected an object; convert the model again")
        name = _field(entry, "name", str, f"{path}: {key}")
        # A name with a separator could make the reader open files outside of the snapshot.
        if Path(name).name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise HeaderSyntaxError(f"{path}: {key}: {name!r} is no plain file name")
        if name in files:
            raise DuplicateTensorError(f"{path}: file {name} is listed twice; convert the model again")
        files[name] = _field(entry, "bytes", int, f"{path}: file {name}")
    return files


def read_header_file(path: Path) -> tuple[Header, dict]:
    """Parse millstream.json: the typed header and the JSON it came from.

    Raises: NotASnapshotError, HeaderSyntaxError, HeaderVersionError, ReaderVersionError, DuplicateTensorError.
    """
    content = load_json(path)
    _check_versions(content, path)
    where, files = str(path), _files(content, "files", path)
    records = [_record(entry, path, files) for entry in _field(content, "tensors", list, where)]
    seen: set[str] = set()
    for record in records:
        if record.name in seen:
            raise DuplicateTensorError(f"{path}: tensor {record.name} is listed twice; convert the model again")
        seen.add(record.name)
    _files(content, "side_files", path)
    for entry in content["side_files"]:
        _field(entry, "checksum", str, f"{path}: file {entry['name']}")
    header = Header(
        architecture=_field(content, "architecture", str, where),
        config=_field(content, "config", dict, where),
        generation_config=_field(content, "generation_config", dict, where, {}),
        source=_field(content, "source", dict, where),
        created_by=_field(content, "created_by", str, where),
        formats=_field(content, "formats", dict, where),
        tied_head=_field(content, "tied_head", bool, where),
        files=files,
        side_files=content["side_files"],
        tensors=records,
        header_version=content["header_version"],
        min_reader=content["min_reader"],
        identity=_field(content, "identity", str, where),
    )
    return header, content
