"""Matches a checkpoint's tensors with what its architecture needs. The names themselves are in engine/models."""

import re

from .architectures import Expected
from .checkpoint import Checkpoint, read_rows
from .errors import (
    DtypeError,
    MissingTensorError,
    ShapeError,
    UnexpectedTensorError,
    brief,
)
from .quantization import FP8_DTYPE, SCALE_SUFFIX, Fp8Source, fp8_source, method_of
from .safetensors import SourceTensor
from .views import View, ViewSource, open_view

FLOAT_DTYPES = ("BF16", "F16", "F32")
# Buffers that older exports saved and that every engine computes for itself.
HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_COMPARE_ROWS = 1024


def match_tensors(
    checkpoint: Checkpoint, expected: dict[str, Expected], config
) -> dict[str, SourceTensor | ViewSource | Fp8Source]:
    """Our name -> source tensor, complete and of the right shapes. config: the family's checked Config.

    Raises: MissingTensorError, UnexpectedTensorError, ShapeError, DtypeError.
    """
    where, tensors = checkpoint.path, checkpoint.tensors
    chosen = {name: _choose(want.checkpoint_name, tensors) for name, want in expected.items()}
    needed = dict.fromkeys(source for found in chosen.values() for source in _names(found))
    missing = [source for source in needed if source not in tensors]
    if missing:
        raise MissingTensorError(
            f"{where}: {len(missing)} of {len(needed)} tensors are missing: {brief(missing)}; the download is "
            "incomplete or config.json belongs to another model"
        )
    unused = getattr(config, "unused_in_checkpoint", lambda name: False)
    extra = [name for name in tensors if name not in needed and not HARMLESS.search(name) and not unused(name)]
    if method_of(checkpoint.config) == "fp8":
        extra = [name for name in extra if name.removesuffix(SCALE_SUFFIX) not in needed]
    if extra == ["lm_head.weight"] and "lm_head" not in expected:
        _refuse_untied_head(checkpoint, expected)
        extra = []
    if extra:
        raise UnexpectedTensorError(
            f"{where}: {len(extra)} tensors are unknown to this architecture and would be ignored: {brief(extra)}"
        )
    return {name: _opened(checkpoint, chosen[name], config, want) for name, want in expected.items()}


def is_listed(checkpoint: Checkpoint, sources) -> bool:
    """Whether the checkpoint has what an Expected.checkpoint_name says."""
    return all(name in checkpoint.tensors for name in _names(_choose(sources, checkpoint.tensors)))


def _names(source: str | View) -> tuple[str, ...]:
    return (source,) if isinstance(source, str) else source.sources


def _choose(sources, tensors) -> str | View:
    """The first of several sources that is there whole; the first one when none is."""
    several = sources if isinstance(sources, tuple) else (sources,)
    return next((one for one in several if all(name in tensors for name in _names(one))), several[0])


def _opened(checkpoint: Checkpoint, source: str | View, config, want: Expected):
    tensors = checkpoint.tensors
    if isinstance(source, View):
        return open_view(checkpoint.path, source, config, [tensors[name] for name in source.sources], want.shape)
    tensor = tensors[source]
    if tensor.dtype == FP8_DTYPE and tensor.shape == want.shape and method_of(checkpoint.config) == "fp8":
        return fp8_source(tensor, tensors, checkpoint.config)
    return _checked(tensor, want)


def _checked(tensor: SourceTensor, want: Expected) -> SourceTensor:
    where = f"{tensor.path}: tensor {tensor.name}"
    if tensor.shape != want.shape:
        raise ShapeError(
            f"{where}: shape {list(tensor.shape)}, config.json needs {list(want.shape)}; they belong to "
            "different models"
        )
    if tensor.dtype not in FLOAT_DTYPES:
        raise DtypeError(
            f"{where}: dtype {tensor.dtype}, expected one of {', '.join(FLOAT_DTYPES)}; get the unquantized checkpoint"
        )
    return tensor


def _refuse_untied_head(checkpoint: Checkpoint, expected: dict[str, Expected]) -> None:
    """tie_word_embeddings with a stored lm_head is a copy of the embedding, or a contradiction."""
    head = checkpoint.tensors["lm_head.weight"]
    embed = checkpoint.tensors[expected["embed_tokens"].checkpoint_name]
    same = head.shape == embed.shape and head.dtype == embed.dtype
    for first in range(0, head.shape[0] if same else 0, _COMPARE_ROWS):
        last = min(first + _COMPARE_ROWS, head.shape[0])
        same = same and bytes(read_rows(head, first, last)) == bytes(read_rows(embed, first, last))
    if not same:
        raise UnexpectedTensorError(
            f"{checkpoint.path}: config.json ties the head to the embedding, but lm_head.weight is stored and differs; "
            "set tie_word_embeddings to false if the stored head is meant"
        )
