"""Ties sources and policy together for one generation, and counts what happened."""

import time
from dataclasses import dataclass, field

import numpy as np

from ..config import parse_spec
from .cut import DraftCut
from .drafts import MAX_ROWS, DraftSource
from .policy import AutoPolicy, FixedPolicy


@dataclass
class SourceStats:
    """Drafts of one source: proposed, and kept."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class SpecStats:
    """What speculation did. Index of the lists: position in the window (acceptance) or number of rows (windows, ms)."""

    policy: object  # FixedPolicy or AutoPolicy
    cut: DraftCut | None = None
    draft_s: float = 0.0
    windows: list[int] = field(default_factory=lambda: [0] * (MAX_ROWS + 1))
    window_ms: list[float] = field(default_factory=lambda: [0.0] * (MAX_ROWS + 1))
    window_experts: list[int] = field(default_factory=lambda: [0] * (MAX_ROWS + 1))
    expert_bytes: int = 0  # of one expert on average, as kernels read it
    offered_at: list[int] = field(default_factory=lambda: [0] * MAX_ROWS)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_ROWS)
    sources: dict[str, SourceStats] = field(default_factory=dict)
    draft_sources: list[DraftSource] = field(default_factory=list)
    failed_windows: int = 0  # run again without their drafts
    failure: str | None = None  # why the last of these was

    @property
    def rounds(self) -> int:
        return sum(self.windows)

    @property
    def drafted(self) -> int:
        return sum(source.drafted for source in self.sources.values())

    @property
    def accepted(self) -> int:
        return sum(source.accepted for source in self.sources.values())

    @property
    def tokens(self) -> int:
        """Found: one a round, and the accepted drafts. A stop text may end the text before the last of them."""
        return self.rounds + self.accepted

    def unmeasured(self) -> str | None:
        """Why nothing can be compared with plain decode; None where it can."""
        if not self.rounds:
            return "no round"
        return None if self.windows[1] else "no plain step"

    def extra_expert_bytes(self) -> int | None:
        """Expert bytes that windows read beyond what as many plain steps as there were rounds would have; None where no
        plain step was made."""
        if not self.windows[1]:
            return None
        plain = self.window_experts[1] / self.windows[1]
        return round((sum(self.window_experts) - plain * self.rounds) * self.expert_bytes)

    def report(self) -> dict:
        """For --json: counts, rates, and by window length the rounds and mean ms."""
        rounds, total_ms = max(self.rounds, 1), sum(self.window_ms)
        plain_ms = self.window_ms[1] / self.windows[1] if self.windows[1] else None
        ms_per_round, tokens_per_round = total_ms / rounds, self.tokens / rounds
        gain = tokens_per_round * plain_ms / ms_per_round if plain_ms and ms_per_round else None
        return {
            "policy": self.policy.name,
            "reason": self.policy.reason,  # of the last choice
            "switches": [
                {"round": n, "from_rows": before, "to_rows": after, "why": why}
                for n, before, after, why in self.policy.switches
            ],
            "rounds": self.rounds,
            "ms_per_round": ms_per_round,
            "tokens_per_round": tokens_per_round,
            "plain_ms_per_token": plain_ms,
            "gain": gain,  # tokens per round / (ms per round / ms per token); None where no plain step was measured
            "gain_reason": self.unmeasured(),  # why there is no gain, and no extra_expert_bytes
            "drafted": self.drafted,
            "accepted": self.accepted,
            "cut_windows": self.cut.windows if self.cut else None,  # None: no window may be cut short
            "cut_drafts": self.cut.drafts if self.cut else None,
            "draft_s": self.draft_s,
            "acceptance_by_position": [
                a / o if o else None for a, o in zip(self.accepted_at, self.offered_at, strict=True)
            ][: MAX_ROWS - 1],
            "windows": {n: count for n, count in enumerate(self.windows) if count},
            "ms_by_window": {n: self.window_ms[n] / count for n, count in enumerate(self.windows) if count},
            "experts_by_window": {n: self.window_experts[n] / count for n, count in enumerate(self.windows) if count},
            "experts_per_round": sum(self.window_experts) / rounds,
            "extra_expert_bytes": self.extra_expert_bytes(),
            "sources": {name: vars(s) for name, s in self.sources.items()},
            "ended": {source.name: source.ended for source in self.draft_sources if source.ended},
            "failed_windows": self.failed_windows,
            "failure": self.failure,
        }


class Window:
    """Rows to verify: ids int32 [R], row 0 = the last accepted token. Made by Speculator.window; whoever verifies fewer
    rows shortens ids. key: source and confidence; keep_rows: for the forward pass, see Decoder.forward. failure: why
    its drafts could not be run, None where they could."""

    __slots__ = ("asked", "draft_ms", "failure", "ids", "keep_rows", "key", "started")

    def __init__(self, ids: np.ndarray, key, started: float, keep_rows=None, draft_s: float = 0.0):
        self.ids, self.key, self.started, self.keep_rows, self.draft_ms = ids, key, started, keep_rows, draft_s * 1e3
        self.asked, self.failure = len(ids), None


class Speculator:
    """One generation's sources (the first whose offer the policy takes is used) and policy. cut: drops drafts whose
    experts are not in memory; None: no draft is."""

    def __init__(self, sources: list[DraftSource], policy, cut: DraftCut | None = None):
        self.sources, self.policy, self.cut = sources, policy, cut
        self.stats = SpecStats(policy, cut, draft_sources=sources)
        self.stats.sources = {source.name: SourceStats() for source in sources}  # those never used count, too
        self._rest = 0  # rounds before sources are asked again

    def start(self, kv=None) -> None:
        """The prefill is over. kv: the text's cache."""
        if self.cut:
            self.cut.start()
        for source in self.sources:
            source.follow(kv)

    def window(self, text: np.ndarray, room: int) -> Window:
        """text: int32 [n], all tokens so far; room: tokens that may still be emitted, >= 1."""
        started = time.perf_counter()
        if self._rest:  # what plain decode does, and a countdown
            self._rest -= 1
            return Window(text[-1:], None, started)
        limit = min(self.policy.max_rows(), room) - 1
        rows, key, drafts = 0, None, []
        for source in self.sources if limit > 0 else ():
            offer = source.offer(text, limit)
            if offer is None:
                continue
            key = (source.name, offer.bucket)
            rows = self.policy.rows(key, offer.count, source.ms_per_draft, offer.chance)
            if rows > 1:  # else it does not pay with these drafts; perhaps with those of the next source
                drafts = source.draft(rows - 1)
                break
        if rows:
            self.policy.use(rows)
            draft_s = time.perf_counter() - started
            self.stats.draft_s += draft_s
        if not drafts:
            self._rest = self.policy.rest()
            return Window(text[-1:], None, started)
        keep_rows = None
        if self.cut:
            self.cut.begin(key, offer.chance)
            keep_rows = self.cut.keep_rows
        return Window(np.array([text[-1], *drafts], np.int32), key, started, keep_rows, draft_s)

    def commit(self, window: Window, num_picked: int, experts_used: int = 0) -> None:
        """The window emitted num_picked tokens: its accepted drafts and the model's own next one. experts_used: of its
        forward pass, distinct ones of each layer."""
        ms = (time.perf_counter() - window.started) * 1e3
        # A window that was cut short counts as one of the rows that were asked for: its time is what asking costs.
        rows, s = window.asked, self.stats
        if self.cut:
            self.cut.end(window.key, rows, len(window.ids), num_picked - 1, ms)
        s.window_experts[rows] += experts_used
        s.windows[rows] += 1
        s.window_ms[rows] += ms
        if rows == 1:
            self.policy.record_plain(ms)
            return
        if window.failure:
            s.failed_windows, s.failure = s.failed_windows + 1, window.failure
        drafts, accepted, verified = rows - 1, num_picked - 1, len(window.ids) - 1
        self.policy.record(window.key, rows, accepted, ms, verified, window.draft_ms)
        for i in range(min(accepted + 1, verified)):
            s.offered_at[i] += 1
            s.accepted_at[i] += i < accepted
        source = s.sources.setdefault(window.key[0], SourceStats())
        source.drafted += drafts
        source.accepted += accepted


class _Plain:
    """No speculation: every window is the last token alone."""

    stats = None

    def start(self, kv=None) -> None:
        """Nothing to count."""

    def window(self, text: np.ndarray, room: int) -> Window:
        return Window(text[-1:], None, 0.0)

    def commit(self, window: Window, num_picked: int, experts_used: int = 0) -> None:
        """Nothing to count."""


PLAIN = _Plain()


def make_speculator(spec, sources: list[DraftSource], cut: DraftCut | None = None):
    """spec: rows of a window (0 and 1: plain decode) or "auto"; cut: see Speculator."""
    rows = parse_spec(spec)
    if rows in (0, 1):
        return PLAIN
    return Speculator(sources, AutoPolicy() if rows == "auto" else FixedPolicy(rows), cut)
