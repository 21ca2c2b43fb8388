"""Hugging Face directory -> snapshot: check everything, then stream tensor by tensor."""

import json
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from engine import __version__
from engine.chat_template import directory_templates
from engine.errors import ConfigError
from engine.formats import FORMATS
from engine.kernels import Context
from engine.weights.architectures import expected_tensors, model_config, mtp_tensors, output_axis, readable_quantization
from engine.weights.base import ProgressCallback, ProgressMeter
from engine.weights.checkpoint import Checkpoint
from engine.weights.errors import ConversionIOError, UnknownArchitectureError
from engine.weights.header import Header
from engine.weights.match import is_listed, match_tensors
from engine.weights.quantization import method_of, refuse_quantized
from engine.weights.writer import EXPERT_FILE_BYTES, SnapshotWriter, plan_files

from .quantize import Quantizer, RoleFormats

__all__ = ["ConversionReport", "RoleFormats", "convert"]

SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def _side_files(source: Path, folder: Path) -> list[Path]:
    """Files of the checkpoint that go along as they are. A snapshot has no directories, so named chat templates in one
    are gathered into a chat_template.json, made in `folder`."""
    paths = {name: source / name for name in SIDE_FILES if (source / name).is_file()}
    if any((source / "additional_chat_templates").glob("*.jinja")):
        found = [{"name": name, "template": text} for name, text in directory_templates(source).items()]
        paths["chat_template.json"] = folder / "chat_template.json"
        paths["chat_template.json"].write_text(json.dumps({"chat_template": found}), encoding="utf-8")
    return list(paths.values())


@dataclass(frozen=True)
class ConversionReport:
    """What was written: target, bytes of the source's tensors and of the snapshot's files, and how."""

    path: Path
    source_bytes: int
    snapshot_bytes: int
    num_tensors: int
    seconds: float
    formats: dict[str, str]
    layout: str
    num_threads: int


def _model_type(checkpoint: Checkpoint) -> str:
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str):
        raise UnknownArchitectureError(f"{checkpoint.path / 'config.json'}: model_type is {model_type!r}, no name")
    return model_type


def _refuse_other_axis(architecture: str, plan) -> None:
    """A format that shares scales along an axis means the output dimension of the source's tensors."""
    axis = output_axis(architecture)
    for record in plan:
        if record.params.get("axis", axis) != axis:
            raise ConfigError(
                f"tensor {record.name}: format {record.format} shares scales along axis {record.params['axis']}, but "
                f"the output dimension of {architecture} weights is axis {axis}; choose another format"
            )


def _role_summary(formats: RoleFormats, expected: dict) -> dict[str, str]:
    """Role -> format of the tensors that are there. A tied head has no tensor and takes the embedding's format."""
    roles = dict.fromkeys(want.role for want in expected.values())
    summary = {role: formats.of(role) for role in roles}
    if "head" not in summary:
        if formats.head is not None and formats.head != summary["embed"]:
            raise ConfigError(
                f"head format {formats.head}: this model ties its head to the embedding, which is "
                f"{summary['embed']}; give the embedding that format"
            )
        summary["head"] = summary["embed"]
    return summary


def convert(
    src,
    out,
    *,
    formats: RoleFormats | None = None,
    layout: str = "auto",
    threads: int | None = None,
    force: bool = False,
    progress: ProgressCallback | None = None,
    expert_file_bytes: int = EXPERT_FILE_BYTES,
) -> ConversionReport:
    """Write the snapshot `out` of the checkpoint directory `src`.

    layout: "compute" writes what kernels read, "storage" the formats' own rows, "auto" the first where it costs at most
    5 % more bytes. threads: None = one per usable CPU; the output does not depend on it. progress: called with a
    Progress (source bytes) after every chunk of rows. expert_file_bytes: when a new expert file is begun.
    Raises: EngineError subclasses, all but NonFiniteError and ConversionIOError before anything is written.
    """
    started = time.monotonic()
    try:
        job = _Job(Checkpoint.open(src), formats or RoleFormats(), layout, threads)
        written = job.run(out, force, progress, expert_file_bytes)
    except OSError as error:
        reason = error.strerror or error
        raise ConversionIOError(f"{error.filename or out}: {reason} (converting {src})") from error
    return replace(written, seconds=time.monotonic() - started)


class _Job:
    """One conversion: everything is checked when it is made, everything is written when it runs."""

    def __init__(self, checkpoint: Checkpoint, formats: RoleFormats, layout: str, threads: int | None):
        self.checkpoint, self.architecture, self.layout = checkpoint, _model_type(checkpoint), layout
        refuse_quantized(checkpoint.config, readable_quantization(self.architecture))
        self.config = dict(checkpoint.config)
        if method_of(self.config) == "fp8":
            del self.config["quantization_config"]  # what is written is not quantized that way
        checked = model_config(self.architecture, self.config)
        expected = expected_tensors(self.architecture, self.config, len(checkpoint.tensors))
        expected |= mtp_tensors(self.architecture, self.config, partial(is_listed, checkpoint))
        self.sources = match_tensors(checkpoint, expected, checked)
        context = Context(num_threads=threads)
        self.num_threads, self.quantizer = context.num_threads, Quantizer(context, FORMATS, layout)
        self.roles = _role_summary(formats, expected)
        self.roles |= {want.role: f for name, want in expected.items() if (f := self._stored_format(name))}
        self.plan = [self.quantizer.plan(name, want, self._format(name, want)) for name, want in expected.items()]
        _refuse_other_axis(self.architecture, self.plan)
        self.source_bytes = sum(source.nbytes for source in self.sources.values())

    def _stored_format(self, name: str) -> str | None:
        """The format that the checkpoint itself holds a tensor in; it is kept, whatever was asked for."""
        return getattr(self.sources[name], "format", None)

    def _format(self, name: str, want) -> str:
        return self._stored_format(name) or self.roles[want.role]

    def _header(self) -> Header:
        return Header(
            architecture=self.architecture,
            config=self.config,
            generation_config=self.checkpoint.generation_config,
            source=self.checkpoint.fingerprint(),
            created_by=f"millstream {__version__}",
            formats=self.roles,
            tied_head=all(record.role != "head" for record in self.plan),
        )

    def run(self, out, force: bool, progress: ProgressCallback | None, expert_file_bytes: int) -> ConversionReport:
        files = plan_files(self.plan, expert_file_bytes)
        meter = ProgressMeter(self.source_bytes, progress)

        def produce(record):
            source, made, told = self.sources[record.name], 0, 0

            def tell(share: float):  # a large tensor takes minutes: every chunk moves the bar
                nonlocal told
                done = int(source.nbytes * share)
                if done > told:
                    meter.add(done - told, record.name)
                told = done

            for chunk in self.quantizer.chunks(record, source, tell):
                made += chunk.nbytes
                tell(made / record.nbytes)
                yield chunk

        with tempfile.TemporaryDirectory() as folder, SnapshotWriter(out, force) as writer:
            writer.check_space(files)
            written = writer.write(self._header(), files, _side_files(self.checkpoint.path, Path(folder)), produce)
            return ConversionReport(
                writer.out, self.source_bytes, written, len(self.plan), 0.0, self.roles, self.layout, self.num_threads
            )
