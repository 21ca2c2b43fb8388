"""One exception class per way in which weight files can be wrong.

Every text is one line: what, where, got, expected, what to do. `brief` keeps lists of names short.
"""

from ..errors import ConfigError, FormatError, KernelError, WeightsError


def brief(names, limit: int = 4) -> str:
    """At most `limit` names in order, then how many more there are."""
    names = list(names)
    shown = ", ".join(str(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


# ---- the header ------------------------------------------------------------------------------------------------------


class NotASnapshotError(WeightsError):
    """The path holds no millstream header, or one with another magic."""


class HeaderSyntaxError(WeightsError):
    """A header is cut off, is no JSON, or a field is missing or has the wrong type."""


class HeaderVersionError(WeightsError):
    """The header version is newer than this reader knows."""


class ReaderVersionError(WeightsError):
    """The snapshot asks for a newer millstream."""


class HeaderChangedError(WeightsError):
    """The header is not the one that was written: its identity does not match its content."""


class UnknownArchitectureError(WeightsError):
    """No model of this architecture is known here."""


# ---- formats and layouts ---------------------------------------------------------------------------------------------


class UnknownFormatError(FormatError):
    """A storage format name is not in the registry."""


class FormatVersionError(FormatError):
    """A storage format is known, its version is not."""


class UnknownLayoutError(FormatError):
    """A compute layout does not belong to the tensor's storage format."""


class MissingKernelError(KernelError, FormatError):
    """The layout has no kernel in this build or on this CPU."""


class BlockLengthError(FormatError):
    """A row length is no multiple of the format's block."""


# ---- tensors and files -----------------------------------------------------------------------------------------------


class ShapeError(WeightsError):
    """A tensor's shape, or a config value that shapes tensors, does not fit the model."""


class DtypeError(WeightsError):
    """A tensor has an element type that is not read here."""


class LengthError(WeightsError):
    """A tensor's byte length is not what its shape and format need."""


class OverlapError(WeightsError):
    """Two tensors share bytes of a file."""


class AlignmentError(WeightsError):
    """A tensor or an expert record does not start where direct reads and kernels need it."""


class ExpertRecordError(WeightsError):
    """The three matrices of an expert are not one contiguous record in the order gate, up, down."""


class TruncatedFileError(WeightsError):
    """A file ends before its tensors do."""


class FileLengthError(WeightsError):
    """A file is longer than its header says."""


class MissingFileError(WeightsError):
    """Files that a header or index names are not there."""


class ForeignFileError(WeightsError):
    """A data file belongs to another snapshot, or its own header disagrees with the snapshot's."""


class MissingTensorError(WeightsError):
    """Tensors that the architecture needs are absent."""


class UnexpectedTensorError(WeightsError):
    """Tensors that the architecture does not know are present."""


class DuplicateTensorError(WeightsError):
    """A tensor name occurs twice."""


class ChecksumError(WeightsError):
    """The bytes of a tensor changed since they were written."""


class NonFiniteError(WeightsError):
    """A weight or a scale is NaN or infinite."""


# ---- sources and targets of a conversion -----------------------------------------------------------------------------


class NotAModelDirectoryError(WeightsError):
    """The source is no Hugging Face model directory with safetensors weights."""


class QuantizedSourceError(ConfigError):
    """The source is quantized already, in a way that is not read here."""


class UnreadableFileError(WeightsError):
    """The system refused to read a file."""


class ConversionIOError(WeightsError):
    """The system refused a read or a write during a conversion."""


class SourceChangedError(WeightsError):
    """The checkpoint is not the one a snapshot was made from."""


class OutputExistsError(ConfigError):
    """The target exists."""


class OutputSpaceError(ConfigError):
    """The target's file system has too little room."""
