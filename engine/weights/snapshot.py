"""Reader of our own container: a directory of safetensors files and millstream.json (docs/snapshot.md).

`Snapshot.open` checks everything that can be checked without reading all weights, so that a model that opens also
runs; `verify` reads the rest. Dispatch is by the names in the header, never by byte counts.
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import kernels
from ..errors import ConfigError
from ..formats import FORMATS
from ..models import family
from . import checks
from .architectures import expected_tensors, expert_ids, model_config, mtp_tensors
from .base import ModelFiles, ProgressCallback, ProgressMeter, TensorRecord, reading
from .checkpoint import Checkpoint
from .errors import (
    ChecksumError,
    HeaderChangedError,
    HeaderSyntaxError,
    NotASnapshotError,
    SourceChangedError,
    brief,
)
from .header import HEADER_FILE, Header, header_identity, read_header_file
from .safetensors import read_header
from .scales import refuse_nonfinite, sample

_VERIFY_CHUNK_BYTES = 4 << 20
_CHANGED = "it was edited or damaged after it was written, copy it again or convert the model again"


def checksum_of(chunks: Iterable) -> str:
    """The checksum field over bytes-like chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def default_context():
    """A one-thread context of the best tier; enough to ask for sizes and to look at scales."""
    return kernels.Context(num_threads=1)


class Snapshot(ModelFiles):
    """An opened snapshot; see ModelFiles. header: the typed millstream.json."""

    kind = "snapshot"
    nonfinite_remedy = (
        "a scale or value that is not finite; the file is damaged or its source was, convert the model again"
    )

    def __init__(self, directory: Path, header: Header, context):
        super().__init__(directory, header.architecture, header.config, header.generation_config)
        self.header, self._context = header, context
        self.tensors = {record.name: record for record in header.tensors}
        self.files = header.files
        self.tied_head = header.tied_head
        self.tokenizer_dir = directory if (directory / "tokenizer.json").is_file() else None

    @classmethod
    def open(cls, path, context=None) -> "Snapshot":
        """Open and check a snapshot directory before any work.

        context: kernels.Context to ask for layouts; None makes one.
        Raises: the classes of engine.weights.errors, each for its own way of being broken.
        """
        with reading(path):
            return cls._open(Path(path), context or default_context())

    @classmethod
    def _open(cls, directory: Path, context) -> "Snapshot":
        header_path = directory / HEADER_FILE
        if not header_path.is_file():
            raise NotASnapshotError(
                f"{directory}: no {HEADER_FILE}: this is no snapshot, or its conversion did not finish; "
                "make one with `millstream convert`"
            )
        header, content = read_header_file(header_path)
        self = cls(directory, header, context)
        changed = header_identity(content) != header.identity
        try:
            self._check_model(str(header_path))
        except ConfigError as error:  # speaks of a key of config.json, which is only a part of this file
            if not changed:
                raise
            raise HeaderChangedError(f"{header_path}: {_CHANGED} ({error})") from None
        self._check_files()
        if changed:
            raise HeaderChangedError(
                f"{header_path}: identity {header.identity[:12]} does not match its content; {_CHANGED}"
            )
        with self.sparse_reads():
            refuse_nonfinite(self, sample(self.tensors.values()), context)
        return self

    # ---- checks at open ----------------------------------------------------------------------------------------------

    def _check_model(self, where: str) -> None:
        header = self.header
        self.model_config = model_config(header.architecture, header.config)
        expected = expected_tensors(header.architecture, header.config, len(self.tensors))
        ours = family(header.architecture).TENSORS
        mtp = mtp_tensors(
            header.architecture, header.config, self.tensors.__contains__, {template: template for template in ours}
        )
        self.mtp_names, expected = frozenset(mtp), expected | mtp
        if header.tied_head != self.model_config.tie_word_embeddings:
            raise HeaderSyntaxError(
                f"{where}: tied_head is {header.tied_head}, the config says tie_word_embeddings = "
                f"{self.model_config.tie_word_embeddings}; convert the model again"
            )
        checks.check_names(where, self.tensors, expected)
        for record in self.tensors.values():
            checks.check_format(where, record, FORMATS, self._context, header.min_reader)
        checks.check_shapes(where, self.tensors, expected)
        for record in self.tensors.values():
            checks.check_length(where, record, FORMATS[record.format], self._context)

    def _check_files(self) -> None:
        experts = expert_ids(self.tensors)
        checks.check_files(self.path, self.files, [entry["name"] for entry in self.header.side_files])
        checks.check_layout_of_files(self.path, self.tensors.values(), self.files)
        checks.check_experts(self.path, self.tensors, experts)
        extents = checks.container_extents(self.tensors, experts)
        for name in self.files:
            container = read_header(self.path_of(name))
            checks.check_container(name, container, self.header.identity, extents)

    # ---- verify ------------------------------------------------------------------------------------------------------

    def verify(self, progress: ProgressCallback | None = None, threads: int | None = None) -> int:
        """Read every tensor: checksums, then scales. Returns the bytes checked.

        Raises: ChecksumError naming every tensor that changed, NonFiniteError.
        """
        with reading(self.path):
            changed = self._changed_tensors(progress, threads) + self._changed_side_files()
            if changed:
                raise ChecksumError(
                    f"{self.path}: bytes changed since they were written: {brief(changed)}; copy the files again or "
                    "convert the model again"
                )
            context = kernels.Context(self._context.tier, threads)
            refuse_nonfinite(self, ((record, record.rows) for record in self.tensors.values()), context)
        return sum(record.nbytes for record in self.tensors.values())

    def _changed_tensors(self, progress: ProgressCallback | None, threads: int | None) -> list[str]:
        records = list(self.tensors.values())
        meter = ProgressMeter(sum(record.nbytes for record in records), progress)
        changed = []
        with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
            for record, good in zip(records, pool.map(self._matches, records), strict=True):
                if not good:
                    changed.append(f"{record.name} ({record.file} at {record.offset})")
                meter.add(record.nbytes, record.name)
        return changed

    def _changed_side_files(self) -> list[str]:
        return [
            entry["name"]
            for entry in self.header.side_files
            if checksum_of([self.path_of(entry["name"]).read_bytes()]) != entry["checksum"]
        ]

    def check_source(self, checkpoint: Checkpoint) -> None:
        """Raises: SourceChangedError when this snapshot was made from another checkpoint, of whatever size."""
        found = checkpoint.fingerprint()
        if found["sha256"] != self.header.source.get("sha256"):
            raise SourceChangedError(
                f"{self.path}: made from a checkpoint with fingerprint {str(self.header.source.get('sha256'))[:12]}, "
                f"{checkpoint.path} has {found['sha256'][:12]}; convert the model again"
            )

    def _matches(self, record: TensorRecord) -> bool:
        # Large reads and not the mapping: a cold file would come in by page faults, a few KiB at a time.
        def chunks(handle):
            for done in range(0, record.nbytes, _VERIFY_CHUNK_BYTES):
                yield os.pread(handle, min(_VERIFY_CHUNK_BYTES, record.nbytes - done), record.offset + done)

        handle = os.open(self.path_of(record.file), os.O_RDONLY)
        try:
            return checksum_of(chunks(handle)) == record.checksum
        finally:
            os.close(handle)
