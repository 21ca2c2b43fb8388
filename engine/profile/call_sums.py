"""Sums of recorded calls by stage, place and function. All of it is array work on many calls at a time."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ..kernels import ffi
from .places import DRAFTING, ENDS, FOLLOWING, OUTSIDE, Lookup, Places
from .recording import PARTS

STAGES = ("prefill", "decode")
_NOWHERE = len(STAGES)  # neither in the prefill nor in a round: somebody else's


@dataclass
class Spans:
    """Stretches of time, in order and apart; starts, ends: ns."""

    starts: list[int]
    ends: list[int]

    def index_of(self, times: np.ndarray) -> np.ndarray:
        """Of the span that each time lies in, or -1; times int64 [n], ascending."""
        found = np.full(len(times), -1)
        first, last = np.searchsorted(times, self.starts), np.searchsorted(times, self.ends)
        inside = last - first
        before = np.cumsum(inside) - inside
        found[np.arange(inside.sum()) + np.repeat(first - before, inside)] = np.repeat(np.arange(len(inside)), inside)
        return found


@dataclass
class Timeline:
    """What was going on when. prefill_end: ns, or None while it is; drafting: the making of windows; following: runs
    of the layer that drafts."""

    prefill_end: int | None
    rounds: Spans
    drafting: Spans
    following: Spans


@dataclass
class Sorted:
    """Calls with where they belong. place, function: numbers; round: index in Timeline.rounds, or -1."""

    stage: np.ndarray
    place: np.ndarray
    function: np.ndarray
    round: np.ndarray
    start: np.ndarray
    ns: np.ndarray


class CallSums:
    """times: (stage, section, layer, tag, function) -> [ns, calls]; parts: the same -> ns of PARTS within the calls;
    experts_run: (stage, layer) -> experts read by moe_experts; experts: layer -> int64 [E], tokens of each expert.

    A call belongs to the prefill or to a round, by when it began; what is in neither does not count.
    """

    def __init__(self, places: Places):
        self.places, self.functions = places, []
        self.times: dict = defaultdict(lambda: [0, 0])
        self.parts: dict = defaultdict(lambda: [0] * len(PARTS))
        self.experts_run: dict = defaultdict(int)
        self.experts = {layer: np.zeros(count, np.int64) for layer, count in places.num_experts.items()}
        self._numbers: dict[int, int] = {}  # address of a function's name -> its number
        self._lookup = Lookup({})

    def add(self, calls: np.ndarray, own: np.ndarray, experts: np.ndarray, timeline: Timeline) -> Sorted:
        """Take in calls by start (see Recording.take), of whole forward passes; timeline: of their time."""
        function, start = self._functions(calls["function"].copy()), calls["start"].copy()  # one after the other
        rounds = timeline.rounds.index_of(start)
        stage = np.where(rounds >= 0, STAGES.index("decode"), _NOWHERE)
        if timeline.prefill_end is None:
            stage[:] = STAGES.index("prefill")
        else:
            stage[start < timeline.prefill_end] = STAGES.index("prefill")
        place = self._places(calls["subject"], function, own)
        place[timeline.following.index_of(start) >= 0] = self.places.all.index(FOLLOWING)
        place[timeline.drafting.index_of(start) >= 0] = self.places.all.index(DRAFTING)
        found = Sorted(stage, place, function, rounds, start, calls["end"] - start)
        self._sum(found, calls)
        self._count_experts(found, calls["num_experts"], own, experts)
        return found

    def by_section(self, found: Sorted, num_rounds: int) -> list[dict[str, int]]:
        """ns of each round by section."""
        sections, inside = self.places.sections, found.round >= 0
        key = found.round[inside] * len(sections) + self.places.section_of[found.place[inside]]
        sums = np.bincount(key, found.ns[inside], num_rounds * len(sections)).astype(np.int64)
        return [
            {name: ns for name, ns in zip(sections, row, strict=True) if ns}
            for row in sums.reshape(num_rounds, len(sections)).tolist()
        ]

    def events(self, found: Sorted) -> list[tuple]:
        """(name, section, start ns, ns, layer) of every call that counts."""
        made = []
        columns = (found.stage, found.place, found.function, found.start, found.ns)
        for stage, place, function, start, ns in zip(*(column.tolist() for column in columns), strict=True):
            if stage != _NOWHERE:
                section, layer, tag = self.places.all[place]
                made.append((tag or self.functions[function].removeprefix("moe_"), section, start, ns, layer))
        return made

    def _functions(self, addresses: np.ndarray) -> np.ndarray:
        found = self._lookup(addresses)
        unknown = found < 0
        while unknown.any():  # numpy's unique would be simpler, and imports for 10 ms when it is first used
            name = int(addresses[unknown.argmax()])
            same = addresses == name
            found[same] = self._numbers[name] = len(self.functions)
            unknown &= ~same
            self.functions.append(ffi.string(ffi.cast("char *", name)).decode())
            self._lookup = Lookup(self._numbers)
        return found

    def _places(self, subjects: np.ndarray, function: np.ndarray, own: np.ndarray) -> np.ndarray:
        """What a call works with decides; else the section that runs, none at first."""
        outside = self.places.all.index(OUTSIDE)
        place = np.where(own, self.places.find(subjects), outside)
        ends = self.functions.index(ENDS) if ENDS in self.functions else -1
        place[function == ends] = outside
        changes = own & (self.places.begins[place] & (place >= 0) | (function == ends))
        last = np.maximum.accumulate(np.where(changes, np.arange(len(place)), -1))
        return np.where(place >= 0, place, np.where(last >= 0, place[last], outside))

    def _sum(self, found: Sorted, calls: np.ndarray) -> None:
        places, functions = self.places.all, self.functions
        key = (found.stage * len(places) + found.place) * len(functions) + found.function
        size = _NOWHERE * len(places) * len(functions)
        counts = np.bincount(key, minlength=size)[:size]
        used = np.flatnonzero(counts)

        def sums(weights):
            return np.bincount(key, weights, size)[used].astype(np.int64).tolist()

        parts = zip(*(sums(calls["parts"][:, part]) for part in range(len(PARTS))), strict=True)
        rows = zip(used.tolist(), counts[used].tolist(), sums(found.ns), sums(calls["num_experts"]), parts, strict=True)
        for number, count, ns, num_experts, part_ns in rows:
            number, function = divmod(number, len(functions))
            stage, place = divmod(number, len(places))
            stage, place = STAGES[stage], places[place]
            entry = (stage, *place, functions[function])
            self.times[entry][0] += ns
            self.times[entry][1] += count
            self.parts[entry] = [a + b for a, b in zip(self.parts[entry], part_ns, strict=True)]
            if num_experts and place.section == "mlp":
                self.experts_run[stage, place.layer] += num_experts

    def _count_experts(self, found: Sorted, num_experts: np.ndarray, own: np.ndarray, experts: np.ndarray) -> None:
        users = np.flatnonzero(own & (num_experts > 0))
        call_of = np.repeat(users, num_experts[users])
        layer, counts = self.places.layer_of[found.place[call_of]], found.stage[call_of] != _NOWHERE
        for n, total in self.experts.items():
            of_layer = counts & (layer == n)
            total += np.bincount(experts["expert"][of_layer], experts["num_tokens"][of_layer], len(total)).astype(
                np.int64
            )
