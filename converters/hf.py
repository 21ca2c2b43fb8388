"""Hugging Face directory -> snapshot: check everything, then stream tensor by tensor."""

import time
from dataclasses import dataclass
from pathlib import Path

from engine import __version__
from engine.errors import ConfigError
from engine.kernels import Context
from engine.weights.architectures import expected_tensors
from engine.weights.base import ProgressCallback, ProgressMeter
from engine.weights.checkpoint import Checkpoint
from engine.weights.errors import QuantizedSourceError, UnknownArchitectureError
from engine.weights.fingerprint import source_fingerprint
from engine.weights.header import Header
from engine.weights.writer import EXPERT_FILE_BYTES, SnapshotWriter, plan_files

from .names import match_tensors
from .quantize import Quantizer, RoleFormats

__all__ = ["ConversionReport", "RoleFormats", "convert"]

SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class ConversionReport:
    """What was written: target, bytes of the source's tensors and of the snapshot's files, tensors, seconds."""

    path: Path
    source_bytes: int
    snapshot_bytes: int
    num_tensors: int
    seconds: float
    formats: dict[str, str]


def _refuse_quantized(config: dict) -> None:
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise QuantizedSourceError(
            f"config.json: quantization_config is present (method {method!r}); quantized checkpoints are not read "
            "here, get the bf16, f16 or f32 one"
        )


def _model_type(checkpoint: Checkpoint) -> str:
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str):
        raise UnknownArchitectureError(f"{checkpoint.path / 'config.json'}: model_type is {model_type!r}, no name")
    return model_type


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
    Progress (source bytes) after every tensor. expert_file_bytes: when a new expert file is begun.
    Raises: EngineError subclasses, all but NonFiniteError and those of the file system before anything is written.
    """
    started, formats = time.monotonic(), formats or RoleFormats()
    checkpoint = Checkpoint.open(src)
    architecture = _model_type(checkpoint)
    _refuse_quantized(checkpoint.config)
    expected = expected_tensors(architecture, checkpoint.config)
    sources = match_tensors(checkpoint, expected)
    from engine.formats import FORMATS

    quantizer = Quantizer(Context(num_threads=threads), FORMATS, layout)
    roles = _role_summary(formats, expected)
    plan = [quantizer.plan(name, want, formats.of(want.role)) for name, want in expected.items()]
    files = plan_files(plan, expert_file_bytes)
    meter = ProgressMeter(sum(source.nbytes for source in sources.values()), progress)

    def produce(record):
        yield from quantizer.chunks(record, sources[record.name])
        meter.add(sources[record.name].nbytes, record.name)

    with SnapshotWriter(out, force) as writer:
        writer.check_space(files)
        header = Header(
            architecture=architecture,
            config=checkpoint.config,
            generation_config=checkpoint.generation_config,
            source=source_fingerprint(checkpoint.path / "config.json", checkpoint.shards),
            created_by=f"millstream {__version__}",
            formats=roles,
            tied_head="lm_head" not in expected,
            files={},
            tensors=[],
        )
        side_files = [checkpoint.path / name for name in SIDE_FILES if (checkpoint.path / name).is_file()]
        written = writer.write(header, files, side_files, produce)
        return ConversionReport(
            path=writer.out,
            source_bytes=sum(source.nbytes for source in sources.values()),
            snapshot_bytes=written,
            num_tensors=len(plan),
            seconds=time.monotonic() - started,
            formats=roles,
        )
