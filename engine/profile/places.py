"""Which part of a model a native call belongs to, told by what the call works with.

A norm's weights, the matrices of a product and the table of a layer's experts lie where they lie for as long as the
model does, so their addresses name layer and product, whoever asks for them. Calls that work with nothing of the model
(RoPE, attention, the choice of experts) belong to the section that runs: a section begins with its norm (or with the
embedding) and ends where the next one begins, the last with the choice of a token.
"""

from typing import NamedTuple

import numpy as np

from ..kernels import ffi
from ..layers import Linear

DRAFT, MTP = "draft", "mtp"


class Place(NamedTuple):
    """section: attention, mlp, ..., "" outside of all; layer or -1; tag: a product with a name, or ""."""

    section: str
    layer: int = -1
    tag: str = ""


OUTSIDE, DRAFTING, FOLLOWING = Place(""), Place(DRAFT), Place(MTP)
ENDS = "moe_sample"  # the call that is in no section, and after which none runs


def address(cdata) -> int:
    return int(ffi.cast("uintptr_t", cdata))


class Lookup:
    """Numbers by address, for arrays of addresses."""

    def __init__(self, numbers: dict[int, int]):
        self._keys = np.array(sorted(numbers), np.uint64)
        self._numbers = np.array([numbers[key] for key in self._keys.tolist()], np.int64)

    def __call__(self, addresses: np.ndarray) -> np.ndarray:
        """int64 [n], -1 for an address that is not among them."""
        if not len(self._keys):
            return np.full(len(addresses), -1)
        at = np.minimum(np.searchsorted(self._keys, addresses), len(self._keys) - 1)
        return np.where(self._keys[at] == addresses, self._numbers[at], -1)


class Places:
    """Places of a loaded model; a place's number is its index in `all`.

    bytes: place of a product -> (bytes of weights that one call reads, their formats). num_experts: layer -> routed
    experts it has.
    """

    def __init__(self, model):
        self.all: list[Place] = [OUTSIDE, DRAFTING, FOLLOWING]
        self.bytes: dict[Place, tuple[int, str]] = {}
        self.num_experts: dict[int, int] = {}
        self._subjects: dict[int, int] = {}
        self._begins: set[int] = set()
        self._begin(model.embed_tokens.cdata, Place("embed"))
        for n, block in enumerate(model.blocks):
            attention, mlp = Place("attention", n), Place("mlp", n)
            self._begin(block.input_layernorm.ptr, attention)
            self._products(block.attention, attention)
            self._begin(block.post_attention_layernorm.ptr, mlp)
            self._mlp(block.mlp, mlp)
        self._begin(model.norm.ptr, Place("head"))
        self._products(model, Place("head"))
        self.find = Lookup(self._subjects)
        self.begins = np.array([number in self._begins for number in range(len(self.all))])
        sections = list(dict.fromkeys(place.section for place in self.all))
        self.sections = sections
        self.section_of = np.array([sections.index(place.section) for place in self.all], np.intp)
        self.layer_of = np.array([place.layer for place in self.all], np.int64)

    def _add(self, subject, place: Place) -> int:
        number = self._subjects[address(subject)] = len(self.all)
        self.all.append(place)
        return number

    def _begin(self, subject, place: Place) -> None:
        self._begins.add(self._add(subject, place))

    def _product(self, linear: Linear, place: Place, tag: str) -> None:
        place = place._replace(tag=tag)
        formats = ", ".join(dict.fromkeys(m.format or m.layout for m in linear.matrices))
        self.bytes[place] = (sum(m.num_bytes for m in linear.matrices), formats)
        self._add(linear.w, place)

    def _products(self, owner, place: Place) -> None:
        for name, value in vars(owner).items():
            if isinstance(value, Linear):
                self._product(value, place, name)

    def _mlp(self, mlp, place: Place) -> None:
        routed, shared = getattr(mlp, "routed", None), getattr(mlp, "shared", None)
        if routed is not None:
            self._product(routed.router_linear, place, "router")
            self._add(routed.experts.table, place)
            self.num_experts[place.layer] = routed.num_experts
        dense = mlp if routed is None else getattr(shared, "mlp", None)
        if shared is not None and getattr(shared, "gate_linear", None) is not None:
            self._product(shared.gate_linear, place, "shared gate")
        if dense is not None:
            kind = "dense" if routed is None else "shared"
            self._product(dense.gate_up, place, f"{kind} gate_up")
            self._product(dense.down, place, f"{kind} down")
