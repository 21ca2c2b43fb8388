"""What a snapshot's tensor table must satisfy before a byte of weights is used.

Each check takes the typed header and raises its own error; none reads weights.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import KernelError
from .architectures import EXPERT_PARTS, ROLES, Expected, expert_matrix_name, expert_record_name
from .base import TensorRecord
from .errors import (
    AlignmentError,
    BlockLengthError,
    ExpertRecordError,
    FileLengthError,
    ForeignFileError,
    FormatVersionError,
    HeaderSyntaxError,
    LengthError,
    MissingFileError,
    MissingKernelError,
    MissingTensorError,
    ShapeError,
    TruncatedFileError,
    UnexpectedTensorError,
    UnknownFormatError,
    UnknownLayoutError,
    brief,
)
from .safetensors import SafetensorsHeader, check_extents

RECORD_ALIGN_BYTES = 4096  # a direct read starts and ends at multiples of this
TENSOR_ALIGN_BYTES = 64  # one cache line, one AVX-512 register
Experts = Iterable[tuple[int, int]]  # (layer, expert)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def check_format(where: str, record: TensorRecord, formats: Mapping, context, min_reader: str = "") -> None:
    """Format, its version, parameters and the layout, by name. min_reader: what the header says it needs.

    Raises: UnknownFormatError, FormatVersionError, UnknownLayoutError, MissingKernelError, BlockLengthError.
    """
    where = f"{where}: tensor {record.name}"
    if record.format not in formats:
        known = brief(sorted(formats), 100)
        needs = f" to {min_reader} or newer" if min_reader else ""
        raise UnknownFormatError(
            f"{where}: format {record.format!r} (version {record.format_version}) is unknown (known: {known}); update "
            f"millstream{needs}"
        )
    descriptor = formats[record.format]
    if record.format_version != descriptor.version:
        raise FormatVersionError(
            f"{where}: format {record.format} has version {record.format_version}, this millstream reads version "
            f"{descriptor.version}; convert the model again or use the millstream that wrote it"
        )
    if descriptor.params and record.params != descriptor.params:
        raise UnknownFormatError(
            f"{where}: format {record.format} with {record.params or 'no parameters'}, this millstream reads "
            f"{descriptor.params}; update millstream or convert the model again"
        )
    if record.layout is not None and record.layout != descriptor.layout:
        raise UnknownLayoutError(
            f"{where}: layout {record.layout!r} is not the compute layout of {record.format} ({descriptor.layout!r}); "
            "convert the model again"
        )
    if record.cols % descriptor.block_len:
        raise BlockLengthError(
            f"{where}: row length {record.cols} is not a multiple of the {descriptor.block_len} of {record.format}"
        )
    if descriptor.group_rows and record.rows % descriptor.group_rows:
        raise BlockLengthError(
            f"{where}: {record.rows} rows are not a multiple of the {descriptor.group_rows} of {record.format}"
        )
    if len(record.shape) == 2:
        check_kernel(where, record.format, descriptor.layout, context)


def check_kernel(where: str, format_name: str, layout: str, context) -> None:
    """Raises: MissingKernelError when the codec or the layout's kernel is absent on this CPU tier."""
    try:
        context.format(format_name)
        context.layout(layout)
    except KernelError as error:
        raise MissingKernelError(
            f"{where}: no kernel for format {format_name} and layout {layout} ({error}); choose another --isa or format"
        ) from None


def stored_bytes(record: TensorRecord, descriptor, context) -> int:
    """Bytes that format, layout and shape need. A vector is one row."""
    if record.layout is None:
        return record.rows * descriptor.row_bytes(record.cols)
    return context.matrix_bytes(record.layout, record.rows, record.cols)


def check_length(where: str, record: TensorRecord, descriptor, context) -> None:
    expected = stored_bytes(record, descriptor, context)
    if record.nbytes != expected:
        raise LengthError(
            f"{where}: tensor {record.name}: got {record.nbytes} bytes, {record.format} {list(record.shape)} in "
            f"{record.layout or 'storage rows'} needs {expected}; convert the model again"
        )


def check_names(where: str, records: Mapping[str, TensorRecord], expected: Mapping[str, Expected]) -> None:
    """Names against the architecture. Raises: MissingTensorError, UnexpectedTensorError, listing what differs."""
    missing = [name for name in expected if name not in records]
    if missing:
        raise MissingTensorError(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing: {brief(missing)}; convert the model again"
        )
    extra = [name for name in records if name not in expected]
    if extra:
        raise UnexpectedTensorError(
            f"{where}: {len(extra)} tensors are unknown to this architecture: {brief(extra)}; convert the model again"
        )


def check_shapes(where: str, records: Mapping[str, TensorRecord], expected: Mapping[str, Expected]) -> None:
    """Shape and role of each tensor against the config. Raises: ShapeError, HeaderSyntaxError for a wrong role."""
    for name, want in expected.items():
        record = records[name]
        if record.shape != want.shape:
            raise ShapeError(
                f"{where}: tensor {name}: shape {list(record.shape)}, the config needs {list(want.shape)}; "
                "the header and its config do not belong together, convert the model again"
            )
        if record.role != want.role:
            raise HeaderSyntaxError(
                f"{where}: tensor {name}: role {record.role!r}, expected {want.role!r} (roles: {', '.join(ROLES)})"
            )
        # Norm vectors are read as float32 without a look at the format.
        if len(record.shape) == 1 and (record.format != "f32" or record.layout is not None):
            raise LengthError(f"{where}: tensor {name}: a vector must be f32 rows, got {record.format}")


def check_files(directory: Path, files: Mapping[str, int], side_files: Iterable[str] = ()) -> None:
    """Presence of all, size of data files.

    Raises: MissingFileError naming every absent file, TruncatedFileError, FileLengthError.
    """
    names = [*files, *side_files]
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise MissingFileError(
            f"{directory}: {len(missing)} of {len(names)} files are missing: {brief(missing, 20)}; copy them again"
        )
    for name, expected in files.items():
        got = (directory / name).stat().st_size
        if got < expected:
            raise TruncatedFileError(
                f"{directory / name}: {got} bytes, expected {expected}: {expected - got} bytes are missing; copy it "
                "again"
            )
        if got > expected:
            raise FileLengthError(
                f"{directory / name}: {got} bytes, expected {expected}: {got - expected} too many; copy it again"
            )


def check_layout_of_files(directory: Path, records: Iterable[TensorRecord], files: Mapping[str, int]) -> None:
    """No shared bytes, nothing past an end, every start aligned.

    Raises: OverlapError, TruncatedFileError, AlignmentError.
    """
    by_file: dict[str, list[TensorRecord]] = {name: [] for name in files}
    for record in records:
        by_file[record.file].append(record)
        if record.offset % TENSOR_ALIGN_BYTES:
            raise AlignmentError(
                f"{directory / record.file}: tensor {record.name} starts at {record.offset}, expected a multiple of "
                f"{TENSOR_ALIGN_BYTES}; convert the model again"
            )
    for name, group in by_file.items():
        check_extents(directory / name, group, files[name])


def check_experts(directory: Path, records: Mapping[str, TensorRecord], experts: Experts) -> None:
    """Each (layer, expert) is one record: gate, up, down in order, 64-aligned parts, start a multiple of 4096.

    Raises: AlignmentError, ExpertRecordError.
    """
    for layer, expert in experts:
        parts = [records[expert_matrix_name(layer, expert, part)] for part in EXPERT_PARTS]
        where = f"{directory / parts[0].file}: {expert_record_name(layer, expert)}"
        if parts[0].offset % RECORD_ALIGN_BYTES:
            raise AlignmentError(
                f"{where} starts at {parts[0].offset}, expected a multiple of {RECORD_ALIGN_BYTES}; "
                "convert the model again"
            )
        place = parts[0].offset
        for part in parts:
            if part.file != parts[0].file or part.offset != place:
                raise ExpertRecordError(
                    f"{where}: {part.name} lies in {part.file} at {part.offset}, expected {parts[0].file} at "
                    f"{place}: gate, up and down must be one record; convert the model again"
                )
            place = round_up(part.offset + part.nbytes, TENSOR_ALIGN_BYTES)


def container_extents(records: Mapping[str, TensorRecord], experts: Experts) -> dict:
    """(file, entry name) -> (offset, nbytes) that the data files' own headers must hold: dense tensors padded to 64
    bytes, experts as records padded to 4096."""
    extents, in_experts = {}, set()
    for layer, expert in experts:
        names = [expert_matrix_name(layer, expert, part) for part in EXPERT_PARTS]
        in_experts.update(names)
        first, last = records[names[0]], records[names[-1]]
        length = round_up(last.offset + last.nbytes - first.offset, RECORD_ALIGN_BYTES)
        extents[first.file, expert_record_name(layer, expert)] = (first.offset, length)
    for name, record in records.items():
        if name not in in_experts:
            extents[record.file, name] = (record.offset, round_up(record.nbytes, TENSOR_ALIGN_BYTES))
    return extents


def check_container(file: str, container: SafetensorsHeader, identity: str, extents: Mapping) -> None:
    """A data file's own header against the snapshot's. Raises: ForeignFileError."""
    if container.metadata.get("snapshot") != identity:
        raise ForeignFileError(
            f"{container.path}: belongs to snapshot {str(container.metadata.get('snapshot'))[:12]}, not to this one "
            f"({identity[:12]}); copy the right file"
        )
    dtypes = {tensor.dtype for tensor in container.tensors.values()}
    if container.metadata.get("format") != "millstream" or not dtypes <= {"U8"}:
        raise ForeignFileError(
            f"{container.path}: format {container.metadata.get('format')!r} with dtypes {', '.join(sorted(dtypes))}, "
            "expected 'millstream' with U8; convert the model again"
        )
    want = {name: extent for (owner, name), extent in extents.items() if owner == file}
    got = {name: (tensor.offset, tensor.nbytes) for name, tensor in container.tensors.items()}
    if got != want:
        name = next(iter(sorted(set(got.items()) ^ set(want.items()))))[0]
        raise ForeignFileError(
            f"{container.path}: {name}: its own header says (offset, bytes) {got.get(name)}, the snapshot says "
            f"{want.get(name)}; convert the model again"
        )
