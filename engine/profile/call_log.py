"""What a profiled run writes down while it runs, and how that becomes sums.

Three items are kept per native call, and per change of place. A decode step makes the same calls in the same order
every time: who they belong to is worked out for the first step of a kind, then steps are added up as arrays. So a step
costs a fraction of a microsecond per call instead of several.
"""

from collections import defaultdict

import numpy as np


class Mark:
    """A place in the forward pass: section (attention, mlp, ...; "" outside), layer or -1, tag of a matrix product.
    As an entry of a log: from here on calls belong to it."""

    __slots__ = ("entry", "layer", "section", "tag")

    def __init__(self, section: str = "", layer: int = -1, tag: str = ""):
        self.section, self.layer, self.tag = section, layer, tag
        self.entry = (self, 0, 0)


OUTSIDE = Mark()
_MAX_KINDS = 64


class Kind:
    """All steps that made the same calls. keys: (section, layer, tag, function) per call; ns: int64 sums per call.
    places: (section, layer) of every section that ended."""

    def __init__(self, names: tuple, num_parts: int):
        self.keys, self.calls, self.places = [], [], []
        mark = OUTSIDE
        for i, name in enumerate(names):
            if isinstance(name, Mark):
                if mark.section and name is OUTSIDE:
                    self.places.append((mark.section, mark.layer))
                mark = name
            else:
                self.calls.append(i)
                self.keys.append((mark.section, mark.layer, mark.tag, name))
        self.calls = np.array(self.calls, np.intp)
        self.sections = list(dict.fromkeys(section for section, *_ in self.keys))
        self._section_of = np.array([self.sections.index(section) for section, *_ in self.keys], np.intp)
        self.ns, self.steps = np.zeros(len(self.keys), np.int64), 0
        self.part_ns = np.zeros((len(self.places), num_parts), np.int64)

    def by_section(self, spent: np.ndarray) -> list[dict[str, int]]:
        """ns by section of each step; spent: int64 [steps, calls]."""
        sums = np.stack([spent[:, self._section_of == i].sum(1) for i in range(len(self.sections))], 1)
        return [dict(zip(self.sections, row, strict=True)) for row in sums.tolist()]


class CallLog:
    """log: function name, start ns, end ns of every call and Mark entries, in order, one flat list: objects by the
    thousand that may hold others would set Python's garbage collector to work.

    A section's calls stand between its mark and OUTSIDE; between them only tags change.
    """

    def __init__(self, num_parts: int):
        self.log: list = []
        self._num_parts, self._kinds, self._steps = num_parts, {}, []
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        for kept in (self.log, self._steps, self._kinds):
            kept.clear()
        self._times: dict = defaultdict(lambda: [0, 0])
        self._parts: dict = defaultdict(lambda: [0] * self._num_parts)

    def cut(self, stage: str, num_ends: int, owner) -> int:
        """A step of a stage ends here; num_ends of its sections did. Returns how many steps wait to be added up."""
        if self.log:
            self._steps.append((stage, self.log[:], num_ends, owner))
            self.log.clear()
        return len(self._steps)

    def fold(self, part_ns: np.ndarray) -> list[tuple]:
        """Add up the steps that wait. part_ns: int64 [section ends of all of them, parts], what the parts took in each.

        Returns (kind, owners, start ns [steps, calls], ns [steps, calls]) of all kinds among them.
        """
        groups, row = defaultdict(list), 0
        for stage, log, num_ends, owner in self._steps:
            groups[stage, tuple(log[::3])].append((log[1::3], log[2::3], row, num_ends, owner))
            row += num_ends
        self._steps.clear()
        return [self._add(*key, steps, part_ns) for key, steps in groups.items()]

    def _add(self, stage: str, names: tuple, steps: list[tuple], part_ns: np.ndarray) -> tuple:
        kind = self._kinds.get((stage, names))
        if kind is None:
            if len(self._kinds) >= _MAX_KINDS:  # of a streamed model hardly two steps are alike
                self._spill()
            kind = self._kinds[stage, names] = Kind(names, self._num_parts)
        starts, ends, rows, counts, owners = zip(*steps, strict=True)
        begun = np.array(starts, np.int64)[:, kind.calls]
        spent = np.array(ends, np.int64)[:, kind.calls] - begun
        kind.ns += spent.sum(0)
        kind.steps += len(steps)
        for row, count in zip(rows, counts, strict=True):
            if count == len(kind.places):  # an interruption may come between a section's end and its entry
                kind.part_ns += part_ns[row : row + count]
        return kind, owners, begun, spent

    def _spill(self) -> None:
        for (stage, _), kind in self._kinds.items():
            for key, ns in zip(kind.keys, kind.ns.tolist(), strict=True):
                entry = self._times[(stage, *key)]
                entry[0] += ns
                entry[1] += kind.steps
            for place, row in zip(kind.places, kind.part_ns.tolist(), strict=True):
                total = self._parts[(stage, *place)]
                total[:] = [a + b for a, b in zip(total, row, strict=True)]
        self._kinds.clear()

    def times(self) -> dict[tuple, list[int]]:
        """(stage, section, layer, tag, function) -> [ns, calls]."""
        self._spill()
        return self._times

    def parts(self) -> dict[tuple, list[int]]:
        """(stage, section, layer) -> ns of each part inside the section's native calls."""
        self._spill()
        return self._parts
