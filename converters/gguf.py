"""GGUF -> snapshot: the same numbers bit for bit, experts side by side so that one read fetches one."""

import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine import __version__
from engine.chat_template import DEFAULT, templates
from engine.formats import FORMATS
from engine.gguf_tokenizer import read_tokenizer
from engine.kernels import Context
from engine.weights.base import ProgressCallback, ProgressMeter, TensorRecord
from engine.weights.errors import ConversionIOError, NonFiniteError
from engine.weights.gguf import GgufModel
from engine.weights.header import Header
from engine.weights.writer import EXPERT_FILE_BYTES, SnapshotWriter, plan_files

from .hf import ConversionReport
from .quantize import COMPUTE_LAYOUT_MAX_GROWTH

FINGERPRINT_METHOD = "sha256(GGUF headers, file sizes, 4096 bytes of every tensor)"
_SAMPLE_BYTES = 4096
_CHUNK_BYTES = 16 << 20


def convert_gguf(
    src,
    out,
    *,
    layout: str = "auto",
    threads: int | None = None,
    force: bool = False,
    progress: ProgressCallback | None = None,
    force_tokenizer: str | None = None,
    expert_file_bytes: int = EXPERT_FILE_BYTES,
) -> ConversionReport:
    """Write the snapshot `out` of the GGUF file or split set `src`, in the formats that the file has.

    layout: as in hf.convert. force_tokenizer: pre-tokenizer in place of one that is not known.
    Raises: EngineError subclasses, all but NonFiniteError and ConversionIOError before anything is written.
    """
    started = time.monotonic()
    try:
        job = _Job(GgufModel.open(src), Context(num_threads=threads), layout, force_tokenizer)
        report = job.run(out, force, progress, expert_file_bytes)
    except OSError as error:
        raise ConversionIOError(f"{error.filename or out}: {error.strerror or error} (converting {src})") from error
    return replace(report, seconds=time.monotonic() - started)


class _Job:
    """One conversion: everything is checked when it is made, everything is written when it runs."""

    def __init__(self, files: GgufModel, context: Context, layout: str, force_tokenizer: str | None):
        self.files, self.context, self.layout = files, context, layout
        self.plan = [self._planned(record, layout) for record in files.tensors.values()]
        self.side_files, self.generation_config = _side_files(files, force_tokenizer)
        self.formats: dict[str, str] = {}
        for record in self.plan:
            names = self.formats.get(record.role, record.format).split("+")
            self.formats[record.role] = "+".join(dict.fromkeys([*names, record.format]))

    def _planned(self, record: TensorRecord, layout: str) -> TensorRecord:
        """The record of the snapshot: the same format, its rows or the strips that kernels read."""
        record = replace(record, file="", offset=0, params=dict(FORMATS[record.format].params))
        if len(record.shape) == 1:
            descriptor = FORMATS["f32"]
            return replace(
                record, format="f32", format_version=descriptor.version, nbytes=descriptor.row_bytes(record.cols)
            )
        if layout == "storage":
            return record
        name = self.context.layout_of(record.format)
        strips = self.context.matrix_bytes(name, record.rows, record.cols)
        if layout == "auto" and strips > record.nbytes * COMPUTE_LAYOUT_MAX_GROWTH:
            return record
        return replace(record, layout=name, nbytes=strips)

    def _produce(self, record: TensorRecord) -> Iterator[np.ndarray]:
        source = self.files.record(record.name)
        stored = self.files.read(record.name)
        row_bytes = source.nbytes // source.rows
        step = max(8, _CHUNK_BYTES // row_bytes // 8 * 8)
        for first in range(0, source.rows, step):
            last = min(first + step, source.rows)
            rows = stored[first * row_bytes : last * row_bytes]
            bad = self.context.check_rows(source.format, rows, last - first, source.cols)
            if bad is not None:
                raise NonFiniteError(
                    f"{self.files.path_of(source.file)}: tensor {record.name}: row {first + _row_of(bad, source)} has "
                    "a scale or value that is not finite; the file is damaged, download it again"
                )
            if source.format != record.format:
                rows = self.context.to_f32(rows.copy().view(np.uint16), source.format).view(np.uint8)
            elif record.layout is not None:
                rows = self.context.encode(record.format, rows, last - first, record.cols)
            yield np.array(rows)  # of its own: the pages of the file are given back while it is still being written
        self.files.release(record.name)

    def _header(self) -> Header:
        return Header(
            architecture=self.files.architecture,
            config=self.files.config,
            generation_config=self.generation_config,
            source=source_fingerprint(self.files),
            created_by=f"millstream {__version__}",
            formats=self.formats,
            tied_head=self.files.tied_head,
        )

    def run(self, out, force: bool, progress: ProgressCallback | None, expert_file_bytes: int) -> ConversionReport:
        planned = plan_files(self.plan, expert_file_bytes)
        total = sum(record.nbytes for record in self.files.tensors.values())
        meter = ProgressMeter(total, progress)

        def produce(record):
            yield from self._produce(record)
            meter.add(self.files.record(record.name).nbytes, record.name)

        with tempfile.TemporaryDirectory() as folder, SnapshotWriter(out, force) as writer:
            paths = []
            for name, content in self.side_files.items():
                paths.append(Path(folder) / name)
                paths[-1].write_text(content, encoding="utf-8")
            writer.check_space(planned)
            written = writer.write(self._header(), planned, paths, produce)
            return ConversionReport(
                writer.out, total, written, len(self.plan), 0.0, self.formats, self.layout, self.context.num_threads
            )


def _row_of(block: int, record: TensorRecord) -> int:
    return block // (record.cols // FORMATS[record.format].block_len)


def _side_files(files: GgufModel, force_tokenizer: str | None) -> tuple[dict[str, str], dict]:
    """(file name -> text, generation_config): what the metadata says, as a checkpoint would hold it."""
    backend, config, ends = read_tokenizer(files.gguf_metadata, str(files.path), force_tokenizer)
    found = templates(files)
    if found.keys() == {DEFAULT}:
        config["chat_template"] = found[DEFAULT]
    elif found:
        config["chat_template"] = [{"name": name, "template": text} for name, text in found.items()]
    generation_config = {**files.generation_config, **ends}
    texts = {"tokenizer_config.json": config, "generation_config.json": generation_config}
    dumped = {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in texts.items()}
    return {"tokenizer.json": backend.to_str(), **dumped}, generation_config


def source_fingerprint(files: GgufModel) -> dict:
    """{"method", "sha256", "files": [{"name", "bytes"}]}: tells a file of other weights of the same shapes apart."""
    digest, listed = hashlib.sha256(), []
    for name, size in files.files.items():
        listed.append({"name": name, "bytes": size})
        digest.update(f"{name}\0{size}\0".encode())
        with files.path_of(name).open("rb") as file:
            tensors = sorted(files.tensors_of(name), key=lambda t: (t.offset, t.name))
            digest.update(file.read(tensors[0].offset if tensors else size))
            for tensor in tensors:
                file.seek(tensor.offset + max(0, (tensor.nbytes - _SAMPLE_BYTES) // 2))
                digest.update(file.read(min(_SAMPLE_BYTES, tensor.nbytes)))
    return {"method": FINGERPRINT_METHOD, "sha256": digest.hexdigest(), "files": listed}
