"""A GGUF file or split set as a model, in place: our tensor names as records that point into the files.

The families say where their tensors lie (GGUF_TENSORS, see slices.py) and what the metadata means (config_from_gguf).
"""

import re
from pathlib import Path

from .. import kernels
from ..errors import ConfigError
from ..formats import FORMATS
from ..models import family, known
from . import checks
from .architectures import Expected, expected_tensors, model_config, mtp_tensors
from .base import ModelFiles, ProgressCallback, TensorRecord
from .errors import (
    DuplicateTensorError,
    ForeignFileError,
    HeaderSyntaxError,
    MissingFileError,
    MissingTensorError,
    NotASnapshotError,
    UnexpectedTensorError,
    UnknownArchitectureError,
    brief,
)
from .gguf_header import GgufHeader, GgufTensor, read_header
from .gguf_keys import GgufKeys
from .scales import refuse_nonfinite, sample, verify_scales
from .slices import Slice, parse, span

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_QUANTIZATION_VERSION = 2
# general.sampling.* -> key of generation_config.json
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repeat_last_n", "mirostat": "mirostat", "xtc_probability": "xtc_probability",
}  # fmt: skip


class GgufModel(ModelFiles):
    """An opened GGUF; see ModelFiles. path: the first (or only) file. gguf_metadata: its keys, decoded when asked for.

    gguf_tensors: name in the file -> GgufTensor.
    """

    kind = "gguf"
    nonfinite_remedy = "a scale or value that is not finite; the file is damaged or its source was, download it again"

    def __init__(self, headers: list[GgufHeader], architecture: str, config: dict):
        first = headers[0]
        super().__init__(first.path, architecture, config, _generation_config(first.metadata))
        self.gguf_metadata = first.metadata
        self.gguf_version, self.gguf_alignment = first.version, first.alignment
        self.files = {header.path.name: header.file_bytes for header in headers}
        self.gguf_tensors: dict[str, GgufTensor] = {}
        self._file_of: dict[str, str] = {}
        for header in headers:
            for name, tensor in header.tensors.items():
                if name in self.gguf_tensors:
                    raise DuplicateTensorError(
                        f"{self.path}: tensor {name} is in {self._file_of[name]} and in {header.path.name}; the "
                        "files do not belong together"
                    )
                self.gguf_tensors[name], self._file_of[name] = tensor, header.path.name

    def tensors_of(self, file: str) -> list[GgufTensor]:
        """Tensors of one file of the set, as it names them."""
        return [tensor for name, tensor in self.gguf_tensors.items() if self._file_of[name] == file]

    def path_of(self, file: str) -> Path:
        return self.path.parent / file

    @classmethod
    def open(cls, path, context=None) -> "GgufModel":
        """Open and check a GGUF file, or the split set that a file is part of.

        Raises: what gguf_header.read_header raises; MissingFileError listing absent shards; UnknownArchitectureError;
        ConfigError; MissingTensorError, UnexpectedTensorError, ShapeError; MissingKernelError; NonFiniteError.
        """
        context = context or kernels.Context(num_threads=1)
        headers = _read_set(Path(path))
        self = cls(headers, "", {})
        self._check_kind()
        module = self._read_config()
        expected = expected_tensors(self.architecture, self.config, len(self.gguf_tensors), module.GGUF_TENSORS)
        mtp = mtp_tensors(self.architecture, self.config, self._is_listed, module.GGUF_TENSORS)
        self.mtp_names = frozenset(mtp)
        self._match(expected | mtp, set(getattr(module, "GGUF_UNUSED", ())))
        self._check_kernels(context)
        self.tied_head = "lm_head" not in self.tensors
        with self.sparse_reads():
            refuse_nonfinite(self, sample(self.tensors.values()), context)
        return self

    # ---- checks at open ----------------------------------------------------------------------------------------------

    def _check_kind(self) -> None:
        kind = self.gguf_metadata.get("general.type", "model")
        if kind != "model":
            raise NotASnapshotError(f"{self.path}: general.type is {kind!r}, expected 'model'; give the model's file")
        version = self.gguf_metadata.get("general.quantization_version", _QUANTIZATION_VERSION)
        if version != _QUANTIZATION_VERSION and any(t.format not in _FLOATS for t in self.gguf_tensors.values()):
            raise HeaderSyntaxError(
                f"{self.path}: general.quantization_version is {version!r}, {_QUANTIZATION_VERSION} is read; make the "
                "file again with a current converter"
            )

    def _read_config(self):
        """Find the family and let it read the keys; returns its module."""
        if "general.architecture" not in self.gguf_metadata:
            raise HeaderSyntaxError(f"{self.path}: metadata key general.architecture is missing; this is no model file")
        keys = GgufKeys(str(self.path), self.gguf_metadata, self.gguf_tensors, self._read_raw)
        module = _family_of(keys)
        self.architecture = module.__name__.rsplit(".", 1)[-1]
        self.config = {"model_type": self.architecture, **module.config_from_gguf(keys)}
        keys.finish(getattr(module, "GGUF_HARMLESS", set()))
        try:
            self.model_config = model_config(self.architecture, self.config)
        except ConfigError as error:  # in the words of config.json, which a GGUF file has not
            text = str(error).removeprefix("config.json: ")
            raise type(error)(f"{self.path}: the metadata, read as config.json: {text}") from None
        return module

    def _read_raw(self, name: str):
        tensor = self.gguf_tensors[name]
        return self._mapped(self._file_of[name])[tensor.offset : tensor.offset + tensor.nbytes]

    def _match(self, expected: dict[str, Expected], unused: set[str]) -> None:
        """Make the records. Raises: MissingTensorError, ShapeError, UnexpectedTensorError."""
        expert_of = {name: int(name.split(".experts.")[1].split(".")[0]) for name in expected if ".experts." in name}
        used, missing = set(), []
        for name, want in expected.items():
            part = self._find(want.checkpoint_name, expert_of.get(name))
            if part is None:
                missing.append(
                    want.checkpoint_name if isinstance(want.checkpoint_name, str) else want.checkpoint_name[0]
                )
                continue
            used.add(part.name)
            self.tensors[name] = self._record(name, want, part)
        if missing:
            names = list(dict.fromkeys(missing))
            raise MissingTensorError(
                f"{self.path}: {len(names)} tensors that {self.architecture} needs are missing: {brief(names)}; the "
                "file is incomplete or of another variant of this architecture"
            )
        extra = [name for name in self.gguf_tensors if name not in used and not self._is_unused(name, unused)]
        if extra:
            raise UnexpectedTensorError(
                f"{self.path}: {len(extra)} tensors are unknown to {self.architecture} and would be ignored: "
                f"{brief(extra)}; update millstream or get another file"
            )

    def _is_unused(self, name: str, unused: set[str]) -> bool:
        """Whether the family lists a tensor ("blk.{n}.x" stands for every layer) as one that changes nothing, or its
        Config says so: layers for multi-token prediction."""
        in_config = getattr(self.model_config, "unused_in_gguf", lambda name: False)
        return name in unused or re.sub(r"^blk\.\d+\.", "blk.{n}.", name) in unused or in_config(name)

    def _is_listed(self, sources) -> bool:
        return any(
            parse(source, None).name in self.gguf_tensors
            for source in ((sources,) if isinstance(sources, str) else sources)
        )

    def _find(self, sources, expert: int | None) -> Slice | None:
        for source in (sources,) if isinstance(sources, str) else sources:
            part = parse(source, expert)
            tensor = self.gguf_tensors.get(part.name)
            if tensor is not None:
                # Old files have a tensor per expert, named with its number.
                own = expert is not None and part.name.endswith((f".{expert}.weight", f".{expert}.bias"))
                return part._replace(expert=None) if own else part
        return None

    def _record(self, name: str, want: Expected, part: Slice) -> TensorRecord:
        tensor = self.gguf_tensors[part.name]
        file = self._file_of[part.name]
        start, nbytes = span(str(self.path_of(file)), part, tensor.shape, tensor.nbytes, want.shape)
        return TensorRecord(
            name=name, format=tensor.format, format_version=FORMATS[tensor.format].version, layout=None,
            shape=want.shape, role=want.role, file=file, offset=tensor.offset + start, nbytes=nbytes, checksum="",
        )  # fmt: skip

    def _check_kernels(self, context) -> None:
        """Once per (format, role): experts by the thousand repeat them."""
        seen = set()
        for record in self.tensors.values():
            if len(record.shape) == 2 and (record.format, record.role) not in seen:
                seen.add((record.format, record.role))
                checks.check_format(str(self.path), record, FORMATS, context)

    def verify(self, progress: ProgressCallback | None = None, threads: int | None = None) -> int:
        """Look at every scale of every tensor; returns the bytes read. GGUF holds no checksums.

        Raises: NonFiniteError.
        """
        return verify_scales(self, progress, threads)


_FLOATS = ("f32", "f16", "bf16")


def _generation_config(metadata) -> dict:
    found = {
        ours: metadata[f"general.sampling.{key}"]
        for key, ours in _SAMPLING.items()
        if f"general.sampling.{key}" in metadata
    }
    if found:
        found["do_sample"] = found.get("temperature", 1.0) != 0
    return found


def _family_of(keys: GgufKeys):
    """Module of the family that reads this architecture; several may share a name and tell their files apart."""
    readable = {}
    for name in known():
        module = family(name)
        names = getattr(module, "GGUF_ARCHITECTURE", ())
        for architecture in (names,) if isinstance(names, str) else names:
            readable.setdefault(architecture, []).append(module)
    for module in readable.get(keys.architecture, ()):
        if not hasattr(module, "gguf_matches") or module.gguf_matches(keys):
            return module
    why = (
        "no family here reads this variant of it" if keys.architecture in readable else "not supported by this version"
    )
    raise UnknownArchitectureError(
        f"{keys.where}: architecture {keys.architecture!r}: {why} (supported: {', '.join(sorted(readable))})"
    )


# ---- split sets ------------------------------------------------------------------------------------------------------


def _read_set(path: Path) -> list[GgufHeader]:
    """Headers of the file, or of all shards of its set, first shard first.

    Raises: MissingFileError listing absent shards, ForeignFileError for files that do not belong together.
    """
    header = read_header(path)
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= 65535:
        raise HeaderSyntaxError(f"{path}: split.count = {count!r}, expected a count; the file is damaged")
    if count <= 1:
        return [header]
    match = _SHARD.match(path.name)
    if match is None or int(match["count"]) != count:
        raise ForeignFileError(
            f"{path}: holds part {header.metadata.get('split.no', 0) + 1} of {count}, but is not named like one; "
            f"rename the parts to NAME-00001-of-{count:05d}.gguf and so on"
        )
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise MissingFileError(
            f"{path.parent}: {len(missing)} of the {count} files of the set are missing: {brief(missing, 20)}; "
            "download them again"
        )
    headers = [header if name == path.name else read_header(path.parent / name) for name in names]
    for number, shard in enumerate(headers):
        found = (shard.metadata.get("split.no"), shard.metadata.get("split.count"))
        if found != (number, count):
            raise ForeignFileError(
                f"{shard.path}: metadata says part {found[0]} of {found[1]} (from 0), its name {number} of {count}; "
                "the files do not belong together"
            )
    promised, listed = headers[0].metadata.get("split.tensors.count"), sum(len(h.tensors) for h in headers)
    if promised is not None and promised != listed:
        raise ForeignFileError(
            f"{path}: the set should hold {promised} tensors, its {count} files hold {listed}; the files do not belong "
            "together"
        )
    return headers
