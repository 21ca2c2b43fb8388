"""Writes a snapshot: planned records in, stored bytes streamed through, one rename at the end.

Nothing appears under the target's name before every file is complete and on disk; millstream.json is written last.
Knows nothing of where the bytes come from.
"""

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from .architectures import EXPERT_PARTS, expert_record_name
from .base import TensorRecord
from .checks import RECORD_ALIGN_BYTES, TENSOR_ALIGN_BYTES, round_up
from .errors import OutputExistsError, OutputSpaceError
from .header import HEADER_FILE, Header, dump_header, header_identity
from .safetensors import make_header

DENSE_FILE = "dense.safetensors"
EXPERT_FILE_BYTES = 4 << 30  # a new expert file is begun past this
_QUEUED_WRITES = 4  # chunks in flight to the disk; bounds memory


class PlannedFile:
    """A data file before it is written: its entries in order, and the tensors inside each entry."""

    def __init__(self, name: str):
        self.name = name
        self.entries: list[tuple[str, int]] = []  # (entry name, padded bytes)
        self.parts: list[list[TensorRecord]] = []  # records of each entry, in order
        self.data_bytes = 0

    def add(self, name: str, records: list[TensorRecord], align_bytes: int) -> None:
        length = sum(round_up(record.nbytes, TENSOR_ALIGN_BYTES) for record in records)
        self.entries.append((name, round_up(length, align_bytes)))
        self.parts.append(records)
        self.data_bytes += self.entries[-1][1]

    def header(self, identity: str) -> bytes:
        return make_header(self.entries, {"format": "millstream", "snapshot": identity}, RECORD_ALIGN_BYTES)

    def place(self) -> None:
        """Give every record its file and absolute offset."""
        start = len(self.header("0" * 64))  # an identity has always 64 digits
        for index, (_, length) in enumerate(self.entries):
            place = start
            for i, record in enumerate(self.parts[index]):
                self.parts[index][i] = replace(record, file=self.name, offset=place)
                place += round_up(record.nbytes, TENSOR_ALIGN_BYTES)
            start += length


def plan_files(records: Iterable[TensorRecord], expert_file_bytes: int = EXPERT_FILE_BYTES) -> list[PlannedFile]:
    """Dense tensors into one file, experts as contiguous records into files of about expert_file_bytes.

    records: in forward order, the matrices of an expert side by side as in EXPERT_PARTS.
    """
    dense, experts, pending = PlannedFile(DENSE_FILE), [], []
    for record in records:
        if record.role not in ("gate_up", "down"):
            dense.add(record.name, [record], TENSOR_ALIGN_BYTES)
            continue
        pending.append(record)
        if len(pending) == len(EXPERT_PARTS):
            if not experts or experts[-1].data_bytes >= expert_file_bytes:
                experts.append(PlannedFile(f"experts-{len(experts) + 1:05d}.safetensors"))
            _, layer, _, _, expert, _ = record.name.split(".")
            experts[-1].add(expert_record_name(int(layer), int(expert)), pending, RECORD_ALIGN_BYTES)
            pending = []
    files = [dense, *experts]
    for file in files:
        file.place()
    return files


class SnapshotWriter:
    """Context manager that owns the temporary directory; on any exception, Ctrl-C included, it is removed."""

    def __init__(self, out, force: bool = False):
        self.out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that --force replaces)
        self._force = force
        self._dir = self.out.with_name(f"{self.out.name}.tmp-{os.getpid()}")
        self._refuse_existing()

    def _refuse_existing(self) -> None:
        if not os.path.lexists(self.out):
            return
        if not self._force:
            raise OutputExistsError(f"{self.out}: exists; choose another name, or --force to replace it")
        is_snapshot = self.out.is_dir() and not self.out.is_symlink() and (self.out / HEADER_FILE).is_file()
        if not is_snapshot:
            raise OutputExistsError(
                f"{self.out}: exists and is no snapshot; --force replaces snapshots only, remove it"
            )

    def __enter__(self) -> "SnapshotWriter":
        self.out.parent.mkdir(parents=True, exist_ok=True)
        if self._dir.exists():  # left by a killed process that had our number
            shutil.rmtree(self._dir)
        self._dir.mkdir()
        self._pool = ThreadPoolExecutor(1)
        self._writes: deque[Future] = deque()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self._dir, ignore_errors=True)

    def check_space(self, files: list[PlannedFile]) -> None:
        need = sum(file.data_bytes for file in files)
        free = shutil.disk_usage(self.out.parent).free
        if free < need:
            raise OutputSpaceError(f"{self.out.parent}: {free} bytes free, the snapshot needs {need}; make room")

    def write(self, header: Header, files: list[PlannedFile], side_files: Iterable[Path], produce) -> int:
        """Write all files and the header, then publish. Returns the bytes of the data files.

        header: complete but for files, side files, tensors and identity.
        produce(record) yields the tensor's bytes as uint8 arrays.
        """
        sizes = {file.name: len(file.header("0" * 64)) + file.data_bytes for file in files}
        records = [record for file in files for parts in file.parts for record in parts]
        contents = {path.name: path.read_bytes() for path in side_files}
        side = [
            {"name": name, "bytes": len(content), "checksum": _checksum(hashlib.sha256(content))}
            for name, content in contents.items()
        ]
        header = replace(header, files=sizes, side_files=side, tensors=records)
        identity = header_identity(header.to_json())
        checksums: dict[str, str] = {}
        for file in files:
            self._write_data_file(file, identity, produce, checksums)
        for name, content in contents.items():
            self._write_file(name, content)
        records = [replace(record, checksum=checksums[record.name]) for record in records]
        content = replace(header, tensors=records, identity=identity).to_json()
        self._write_file(HEADER_FILE, dump_header(content))
        self._publish()
        return sum(sizes.values())

    def _write_data_file(self, file: PlannedFile, identity: str, produce, checksums: dict[str, str]) -> None:
        with (self._dir / file.name).open("wb") as handle:
            handle.write(file.header(identity))
            for (_, length), records in zip(file.entries, file.parts, strict=True):
                start = records[0].offset
                for record in records:
                    digest, done = hashlib.sha256(), 0
                    for chunk in produce(record):
                        done += chunk.nbytes
                        self._submit(_write_chunk, handle, digest, chunk)
                    if done != record.nbytes:
                        raise AssertionError(f"{record.name}: {done} bytes made, {record.nbytes} planned")
                    last = record is records[-1]
                    end = start + length if last else round_up(record.offset + done, TENSOR_ALIGN_BYTES)
                    self._submit(handle.write, bytes(end - record.offset - done))
                    self._submit(_finish, checksums, record.name, digest)
            self._drain(0)
            _sync(handle)

    def _submit(self, *call) -> None:
        self._writes.append(self._pool.submit(*call))
        self._drain(_QUEUED_WRITES)

    def _drain(self, keep: int) -> None:
        while len(self._writes) > keep:
            self._writes.popleft().result()

    def _write_file(self, name: str, content: bytes) -> None:
        with (self._dir / name).open("wb") as handle:
            handle.write(content)
            _sync(handle)

    def _publish(self) -> None:
        _sync_dir(self._dir)
        self._refuse_existing()  # once more: hours may have passed
        if self.out.exists():
            old = self.out.with_name(f"{self.out.name}.old-{os.getpid()}")
            self.out.rename(old)
            try:
                self._dir.rename(self.out)
            except OSError:
                old.rename(self.out)
                raise
            shutil.rmtree(old)
        else:
            self._dir.rename(self.out)
        _sync_dir(self.out.parent)


def _write_chunk(handle, digest, chunk: np.ndarray) -> None:
    digest.update(chunk)
    handle.write(chunk)


def _finish(checksums: dict[str, str], name: str, digest) -> None:
    checksums[name] = _checksum(digest)


def _checksum(digest) -> str:
    return f"sha256:{digest.hexdigest()}"


def _sync(handle) -> None:
    handle.flush()
    os.fsync(handle.fileno())


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
