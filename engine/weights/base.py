"""What every kind of model file looks like to the engine: records by name, bytes by mapping, experts by position.

Knows nothing of how a container stores its directory; snapshot.py and later readers fill this in.
"""

import copy
import mmap
import os
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from .architectures import EXPERT_PARTS, expert_matrix_name
from .errors import MissingTensorError, TruncatedFileError, UnreadableFileError

_FAULT_AROUND_BYTES = 2 << 20  # as much as Linux maps around a page fault in a file that it read in large folios


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies and how to read it.

    layout: compute layout of the bytes, or None when they are the storage format's rows.
    shape: (rows, cols), or (length,) for a float32 vector. offset: bytes from the start of the file.
    """

    name: str
    format: str
    format_version: int
    layout: str | None
    shape: tuple[int, ...]
    role: str
    file: str
    offset: int
    nbytes: int
    checksum: str
    params: dict = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        return self.shape[-1]


class ExpertRecord(NamedTuple):
    """One expert as a single read: `nbytes` bytes of `file` from `offset`, both multiples of 4096.

    parts: matrix name ("gate_proj", "up_proj", "down_proj") -> (offset inside the record, bytes).
    """

    file: str
    offset: int
    nbytes: int
    parts: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Progress:
    """Handed to a progress callback: bytes done and in all, seconds since the start, the tensor just finished."""

    done_bytes: int
    total_bytes: int
    seconds: float
    name: str

    @property
    def bytes_per_second(self) -> float:
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_seconds(self) -> float:
        rate = self.bytes_per_second
        return (self.total_bytes - self.done_bytes) / rate if rate else 0.0


ProgressCallback = Callable[[Progress], None]


@contextmanager
def reading(path):
    """Turn what the system refuses into UnreadableFileError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UnreadableFileError(
            f"{error.filename or path}: {reason}; check that it exists and may be read"
        ) from error


class ProgressMeter:
    """Adds up bytes and calls back; a callback of None is fine."""

    def __init__(self, total_bytes: int, callback: ProgressCallback | None):
        self._total, self._callback, self._done, self._start = total_bytes, callback, 0, time.monotonic()

    def add(self, nbytes: int, name: str) -> None:
        self._done += nbytes
        if self._callback is not None:
            self._callback(Progress(self._done, self._total, time.monotonic() - self._start, name))


class ModelFiles:
    """An opened and checked model. Readers subclass it; the engine sees only this.

    kind: container name, e.g. "snapshot". path: the directory.
    config, generation_config: the dictionaries of the checkpoint.
    tokenizer_dir: directory with tokenizer.json, or None. tensors: name -> TensorRecord, in forward order.
    files: file name -> bytes of every data file. tied_head: the head is embed_tokens.
    mtp_names: those of the tensors that belong to the layer for multi-token prediction; empty without a whole one.
    made: names of the tensors that lie in no file as `read` gives them; such bytes live as long as the array.
    gguf_metadata: all keys of a GGUF file, or None.
    """

    kind = ""
    nonfinite_remedy = ""  # end of the error about a row: what it has, and what to do
    made: Mapping[str, object] = MappingProxyType({})
    gguf_metadata: Mapping[str, object] | None = None

    def __init__(self, directory: Path, architecture: str, config: dict, generation_config: dict):
        self.path, self.architecture = directory, architecture
        self.config, self.generation_config = config, generation_config
        self.tokenizer_dir: Path | None = None
        self.tensors: dict[str, TensorRecord] = {}
        self.files: dict[str, int] = {}
        self.tied_head = False
        self.mtp_names: frozenset[str] = frozenset()
        self._maps: dict[str, np.ndarray] = {}
        self._mappings: dict[str, mmap.mmap] = {}

    @property
    def file_bytes(self) -> int:
        """Bytes of all data files together."""
        return sum(self.files.values())

    def path_of(self, file: str) -> Path:
        return self.path / file

    def record(self, name: str) -> TensorRecord:
        """Raises: MissingTensorError when the model has no such tensor."""
        try:
            return self.tensors[name]
        except KeyError:
            raise MissingTensorError(f"{self.path}: the model has no tensor {name}") from None

    def without_mtp(self) -> "ModelFiles":
        """The same files, the layer for multi-token prediction not among `tensors`: it takes no memory then."""
        if not self.mtp_names:
            return self
        other = copy.copy(self)
        other.tensors = {name: record for name, record in self.tensors.items() if name not in self.mtp_names}
        return other

    def _mapped(self, file: str) -> np.ndarray:
        if file not in self._maps:
            with self.path_of(file).open("rb") as handle:
                if os.fstat(handle.fileno()).st_size < self.files[file]:
                    # Touching a page past the end would kill the process instead of raising.
                    raise TruncatedFileError(f"{self.path_of(file)}: the file became shorter while it was in use")
                mapping = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            self._mappings[file], self._maps[file] = mapping, np.frombuffer(mapping, np.uint8)
        return self._maps[file]

    @contextmanager
    def sparse_reads(self):
        """Within it a page fault brings in its own page only: a look at a few rows of a large cold file must not fetch
        what the disk reads ahead, megabytes each time."""
        for file in self.files:
            self._mapped(file)
        if hasattr(mmap, "MADV_RANDOM"):
            for mapping in self._mappings.values():
                mapping.madvise(mmap.MADV_RANDOM)
        yield
        if hasattr(mmap, "MADV_RANDOM"):
            for mapping in self._mappings.values():
                mapping.madvise(mmap.MADV_NORMAL)

    def read(self, name: str) -> np.ndarray:
        """The tensor's bytes: a read-only uint8 view of the mapped file [nbytes], no copy."""
        record = self.record(name)
        return self._mapped(record.file)[record.offset : record.offset + record.nbytes]

    def release(self, name: str) -> None:
        """Give back the pages of a tensor that was read through the mapping; a later read brings them in again.

        The pages around it go too: a page fault maps neighbours, and those of tensors read before would stay.
        """
        record = self.record(name)
        mapping = self._mappings.get(record.file)
        if mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = record.offset // _FAULT_AROUND_BYTES * _FAULT_AROUND_BYTES
        end = -(-(record.offset + record.nbytes) // _FAULT_AROUND_BYTES) * _FAULT_AROUND_BYTES
        mapping.madvise(mmap.MADV_DONTNEED, start, min(end, len(mapping)) - start)

    def release_file(self, file: str) -> None:
        """Give back all pages of a file that reading its mapping brought into the page cache."""
        mapping = self._mappings.get(file)
        if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)
        with self.path_of(file).open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Copy the tensor's bytes into `out` (uint8, at least nbytes) through read calls, not through a mapping.

        Raises: TruncatedFileError when the file ends early.
        """
        record = self.record(name)
        view = memoryview(out).cast("B")[: record.nbytes]
        with self.path_of(record.file).open("rb", buffering=0) as file:
            file.seek(record.offset)
            done = 0
            while done < record.nbytes:
                got = file.readinto(view[done:])
                if not got:
                    raise TruncatedFileError(
                        f"{self.path_of(record.file)}: tensor {name}: the file ended {record.nbytes - done} bytes early"
                    )
                done += got

    def vector(self, name: str) -> np.ndarray:
        """A norm vector as float32 [length], a view."""
        return self.read(name).view("<f4")

    def expert(self, layer: int, expert: int) -> ExpertRecord:
        """Where one expert lies. The start of gate is the start of the record."""
        records = [self.record(expert_matrix_name(layer, expert, part)) for part in EXPERT_PARTS]
        start = records[0].offset
        end = records[-1].offset + records[-1].nbytes
        parts = {p: (r.offset - start, r.nbytes) for p, r in zip(EXPERT_PARTS, records, strict=True)}
        return ExpertRecord(records[0].file, start, -(-(end - start) // 4096) * 4096, parts)

    def close(self) -> None:
        """Drop the mappings; views handed out keep theirs alive."""
        self._maps.clear()
        self._mappings.clear()
