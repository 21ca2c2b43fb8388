"""Recorded routing: which experts each token of each layer asked for, with the router's weights.

A file is one 1024-byte header (magic, version, length of the JSON, JSON, zeros) and records of one layer and forward
call each, in the order in which they ran: uint32 layer, uint32 tokens T, uint16 ids [T, A], float16 weights [T, A]
(little endian, A = experts per token). Layers are those with experts, counted from 0. 10 MB hold some 16000 tokens of
16 layers at 8 experts. Written by `--route-trace`, read by scripts/simulate_cache.py and by `--pin`.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..atomic_file import AtomicFile, stream_of
from ..errors import ConfigError
from ..moe import MoeBlock

MAGIC, VERSION = b"MSROUTES", 1
HEADER_BYTES = 1024
_LEAD = struct.Struct("<8sII")
_RECORD = struct.Struct("<II")


@dataclass
class TraceHeader:
    """Shape of the model and size of the recording; fingerprint: the model's source, "" where it has none."""

    architecture: str
    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    fingerprint: str = ""
    num_records: int = 0
    num_tokens: int = 0  # per layer

    def pack(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        return (_LEAD.pack(MAGIC, VERSION, len(text)) + text).ljust(HEADER_BYTES, b"\0")


def moe_blocks(model) -> list[MoeBlock]:
    """The MoE blocks of a model's layers, first layer first, wherever a family keeps them inside a layer."""
    found, stack, seen = [], [model.blocks], set()
    while stack:
        value = stack.pop()
        if isinstance(value, MoeBlock):
            found.append(value)
        elif isinstance(value, list | tuple):
            stack += reversed(value)
        elif type(value).__module__.startswith("engine.models.") and id(value) not in seen:
            seen.add(id(value))
            stack += reversed(vars(value).values())
    return found


class RouteTrace:
    """Context manager that writes what the MoE blocks of a model report; a Ctrl-C ends the file cleanly."""

    def __init__(self, path: str | Path, model, architecture: str, fingerprint: str = ""):
        self._blocks = moe_blocks(model)
        if not self._blocks:
            raise ConfigError(f"--route-trace {path}: this model has no experts to route to")
        first = self._blocks[0]
        self.header = TraceHeader(
            architecture, len(self._blocks), first.num_experts, first.num_experts_per_tok, fingerprint
        )
        if stream_of(path) is not None:  # the header is written last
            raise ConfigError(f"--route-trace {path}: a recording needs a file; this is a device or a pipe")
        self._file = AtomicFile(path)
        self.num_bytes = HEADER_BYTES

    def __enter__(self) -> "RouteTrace":
        try:
            self._file.__enter__()
        except OSError as error:
            raise ConfigError(f"--route-trace {self._file.path}: cannot be written: {error.strerror}") from None
        self._file.handle.write(self.header.pack())
        for layer, block in enumerate(self._blocks):
            block.observers.append(self._observer(layer))
        return self

    def _observer(self, layer: int):
        handle, header = self._file.handle, self.header

        def record(ids: np.ndarray, weights: np.ndarray) -> None:
            lead = _RECORD.pack(layer, len(ids))
            self.num_bytes += handle.write(lead + ids.astype("<u2").tobytes() + weights.astype("<f2").tobytes())
            header.num_records += 1
            header.num_tokens += len(ids) if layer == 0 else 0

        return record

    def __exit__(self, kind, error, trace) -> None:
        for block in self._blocks:
            block.observers.pop()
        if kind is KeyboardInterrupt:
            kind = None
        if kind is None:
            self._file.handle.seek(0)
            self._file.handle.write(self.header.pack())
        self._file.__exit__(kind, error, trace)


@dataclass
class RouteRecord:
    """One layer in one forward call. ids uint16 [T, A], weights float16 [T, A]."""

    layer: int
    ids: np.ndarray
    weights: np.ndarray


class RecordedTrace:
    """A trace file, checked whole when it is opened. Raises ConfigError that says what is wrong with it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        self.header = _parse_header(path, data)
        self._data = data
        found = sum(1 for _ in self)
        if found != self.header.num_records:
            raise ConfigError(f"{path}: holds {found} records, its header says {self.header.num_records}")

    def __iter__(self) -> Iterator[RouteRecord]:
        header, data, at = self.header, self._data, HEADER_BYTES
        top = header.num_experts_per_tok
        while at < len(data):
            layer, num_tokens = _RECORD.unpack_from(data, at) if at + _RECORD.size <= len(data) else (0, 0)
            count, at = num_tokens * top, at + _RECORD.size
            if at + 4 * count > len(data) or layer >= header.num_layers or not num_tokens:
                raise ConfigError(f"{self.path}: record at byte {at - _RECORD.size} is cut off or broken; record again")
            ids = np.frombuffer(data, "<u2", count, at).reshape(num_tokens, top)
            weights = np.frombuffer(data, "<f2", count, at + 2 * count).reshape(num_tokens, top)
            if ids.max() >= header.num_experts:
                raise ConfigError(f"{self.path}: expert {ids.max()} at byte {at}, the model has {header.num_experts}")
            yield RouteRecord(layer, ids, weights)
            at += 4 * count


def _parse_header(path, data: bytes) -> TraceHeader:
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise ConfigError(f"{path}: is no route trace (made by generate --route-trace)")
    _, version, length = _LEAD.unpack_from(data)
    if version != VERSION:
        raise ConfigError(f"{path}: route trace version {version}, this millstream reads version {VERSION}")
    try:
        header = TraceHeader(**json.loads(data[_LEAD.size : _LEAD.size + length]))
        sizes = (header.num_layers, header.num_experts, header.num_experts_per_tok)
        if not all(isinstance(size, int) and 0 < size < 1 << 16 for size in sizes):
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: the header of this route trace is broken; record again") from None
    return header
