"""Names of source tensors that hold several of ours: an expert of a slab, a part of fused rows.

A family writes for each of its tensors where it lies in a source:

    "blk.{n}.attn_q.weight"                  a tensor of its own
    "blk.{n}.ffn_gate_exps.weight"           for a template with {e}: slice e along the slowest axis
    "blk.{n}.ffn_gate_up_exps.weight[1/2]"   the second of two equal parts of the rows (of slice e)
    ("a", "b")                               the first one that the source has

All of these are contiguous bytes of the source, so a slice is a record like any other.
"""

import re
from math import prod
from typing import NamedTuple

from .errors import ShapeError

_PART = re.compile(r"^(?P<name>.+)\[(?P<part>\d+)/(?P<parts>\d+)\]$")


class Slice(NamedTuple):
    """Part `part` of `parts` of the rows of the tensor `name`, of slice `expert` where that is not None."""

    name: str
    part: int = 0
    parts: int = 1
    expert: int | None = None


def parse(source: str, expert: int | None = None) -> Slice:
    """Read a source name. expert: the slice of a slab, for names that do not contain the expert's number."""
    match = _PART.match(source)
    if match is None:
        return Slice(source, expert=expert)
    return Slice(match["name"], int(match["part"]), int(match["parts"]), expert)


def span(where: str, part: Slice, shape: tuple[int, ...], nbytes: int, want: tuple[int, ...]) -> tuple[int, int]:
    """(offset, bytes) of a slice inside its tensor of that shape and length. want: our shape of the slice.

    Raises: ShapeError.
    """
    whole = want if part.parts == 1 else (want[0] * part.parts, *want[1:])
    if part.expert is not None:
        if len(shape) < 2 or shape[1:] != whole or part.expert >= shape[0]:
            raise ShapeError(
                f"{where}: tensor {part.name}: shape {list(shape)}, the configuration needs at least {part.expert + 1} "
                f"slices of {list(whole)}; they belong to different models"
            )
        start, length = nbytes // shape[0] * part.expert, nbytes // shape[0] // part.parts
    else:
        # A single row may be stored without its first axis; matrices of several heads may be stacked along one more.
        same_rows = shape[-1] == whole[-1] or 1 in (*whole[:-1], *shape[:-1])
        if shape != whole and not (prod(shape) == prod(whole) and same_rows and part.parts == 1):
            raise ShapeError(
                f"{where}: tensor {part.name}: shape {list(shape)}, the configuration needs {list(whole)}; they belong "
                "to different models"
            )
        start, length = 0, nbytes // part.parts
    return start + length * part.part, length
