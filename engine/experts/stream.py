"""Streaming of a model's experts as a whole: whether it is needed, its plan, and its parts put together."""

from dataclasses import dataclass, replace

from .. import memory
from ..errors import ConfigError
from ..kernels import Context, lib
from ..memory_lock import check_limit, lock, lock_matrices
from ..moe import MoeBlock
from ..weights.architectures import model_config
from .cache import DEFAULT_READERS, ExpertCache
from .files import ExpertFiles
from .fitting import is_cold
from .layout import ExpertLayout, choose_expert_layout
from .lookahead import LookAhead
from .pinning import pin_experts
from .places import ExpertPlaces
from .policy import make_policy
from .streamed import StreamedExperts, _Subset

# Above this ratio of strips to storage bytes a cache of storage rows holds so many more experts that it wins.
_COMPACT_RATIO = 1.25


@dataclass
class ExpertStream:
    """Made before the weights are loaded; `open` makes the cache when it is known what memory is left."""

    files: object
    context: Context
    options: object
    budget: memory.Budget
    dense_bytes: int
    compact: bool
    preload: bool = False  # everything fits: read all of it at load

    def __post_init__(self):
        self.places = ExpertPlaces(self.files, self.context, self.compact)
        self.layers: list[StreamedExperts] = []
        self.cache: ExpertCache | None = None

    def experts(self, layer: int, num_experts: int) -> StreamedExperts:
        self.layers.append(StreamedExperts(self, layer, num_experts))
        return self.layers[-1]

    def open(self, model, kv_bytes: int, progress=None) -> None:
        """Plan, open the files, make the slots. progress: called with (bytes done, bytes in all) when everything is
        read at load. Raises ConfigError when memory is short, ExpertReadError."""
        options, places = self.options, self.places
        readers = options.readers or DEFAULT_READERS
        staging = places.staging_bytes * (readers + 2) if places.staging_bytes else 0
        top = model.config.num_experts_per_tok
        fixed = {
            "program": max(0, memory.resident_bytes() - self.dense_bytes) + memory.GROWTH_BYTES,
            "dense weights": self.dense_bytes,
            "kv cache": kv_bytes,
            "activations": memory.buffer_bytes(model)
            + memory.scratch_estimate(self.files, model.max_tokens, self.context.num_threads),
            "read buffers": staging,
            "page cache": memory.PAGE_CACHE_FLOOR_BYTES,
        }
        self.plan = memory.make_plan(self.budget, fixed, places.slot_bytes, len(places.keys), top, options.expert_slots)
        if options.lock:
            locked = self.dense_bytes + self.plan.num_slots * places.slot_bytes
            check_limit(locked, self.budget.total_bytes, self.budget.source)
        self.expert_files = ExpertFiles(places, options.io)
        policy = make_policy(options.cache_policy, self.plan.num_slots, places.num_keys)
        self.cache = ExpertCache(places, self.expert_files, self.plan.num_slots, policy, readers)
        self.files.close()  # mapped pages of what was looked at count against the process
        subset = _Subset(places.num_experts)
        for layer in self.layers:
            layer.open(self.cache, subset)
        self.pins = None if options.pin is None else pin_experts(self, model, options.pin)
        if options.lookahead != "off" and len(self.layers) > 1 and self.plan.num_slots < len(places.keys):
            blocks = {b.experts.layer: b for b in memory.parts_of(model) if isinstance(b, MoeBlock)}
            self.cache.lookahead = LookAhead(self.cache, blocks, options.lookahead)
        self.locked_bytes = self._lock(model) if options.lock else 0
        if self.preload and self.plan.num_slots == len(places.keys):
            self.cache.load_all(progress)
            for layer in self.layers:
                layer.run = layer.run_resident  # nothing is left to decide while decoding
        asked = options.expert_slots is not None
        self.warning = memory.cliff_warning(self.plan.num_slots, len(self.layers), top, places.expert_bytes, asked)

    def _lock(self, model) -> int:
        first = lib.moe_streamer_slot(self.cache.handle, 0)
        return lock_matrices(model) + lock(first, self.plan.num_slots * self.places.slot_bytes)

    def cache_line(self) -> str:
        """Slots, form of experts, and how they are read."""
        plan, cache = self.plan, self.cache
        form = "compact" if self.compact else "re-coded on arrival" if self.places.staging_bytes else "as stored"
        return (
            f"experts: {plan.num_slots} of {plan.num_experts} ({plan.percent:.1f} %) in slots of "
            f"{plan.slot_bytes / memory.MIB:.2f} MiB, {form}; io {self.expert_files.mode}, {cache.readers} readers, "
            f"policy {cache.policy.name}, look-ahead {self.options.lookahead if cache.lookahead else 'off'}"
        )

    def notes(self) -> list[str]:
        """Lines to print before a run: the plan, how experts are read, what is wrong with it."""
        lines = [self.plan.line(), self.cache_line()]
        if self.locked_bytes:
            lines.append(f"locked: {self.locked_bytes / memory.MIB:.0f} MiB")
        extra = (self.pins, self.budget.note, self.expert_files.note, self.warning)
        return lines + [line for line in extra if line]

    def stats(self) -> dict:
        """Figures for --json: see ExpertCache.stats, and the plan's."""
        plan = self.plan
        return {
            "slots": plan.num_slots,
            "experts": plan.num_experts,
            "slot_bytes": plan.slot_bytes,
            "io": self.expert_files.mode,
            "readers": self.cache.readers,
            "policy": self.cache.policy.name,
            "locked_bytes": self.locked_bytes,
            "plan_bytes": plan.planned_bytes,
            "plan": plan.roles,
            "anonymous_bytes": memory.anonymous_bytes(),
            "file_pages_bytes": memory.file_resident_bytes(),
            **self.cache.stats(),
        }


def _guesses(stats: dict) -> str:
    if stats["lookahead"] == "off":
        return ""
    return (
        f"; look-ahead {stats['lookahead']}, recall {100 * stats['lookahead_recall']:.0f} %, "
        f"{stats['lookahead_used_bytes'] / 1e6:.1f} MB used, {stats['lookahead_wasted_bytes'] / 1e6:.1f} MB wasted"
    )


def summary(stats: dict) -> str:
    """The line that is always printed when experts were streamed."""
    pages = f"; file pages {stats['file_pages_bytes'] / memory.MIB:.0f} MiB on top" if stats["io"] == "mmap" else ""
    return (
        f"experts: {stats['hits']} hits, {stats['misses']} misses ({100 * stats['hit_rate']:.1f} % hits); "
        f"{stats['bytes'] / 1e6:.1f} MB in {stats['reads']} reads, {stats['mb_per_s']:.0f} MB/s while reading; "
        f"service {stats['service_s']:.3f} s, wait {stats['wait_s']:.3f} s{pages}{_guesses(stats)}"
    )


def _streamed_layout(wanted: str, files, context: Context) -> ExpertLayout:
    """The form of experts in slots."""
    fast = choose_expert_layout("fast", files, context, 0)
    if wanted != "auto" or fast.name == "stored":
        return choose_expert_layout(wanted, files, context, 0)
    compact = choose_expert_layout("compact", files, context, 0)
    ratio = fast.num_bytes / compact.num_bytes
    chosen = compact if ratio > _COMPACT_RATIO else fast
    return replace(chosen, reason=f"re-coded they take {ratio:.2f} times the bytes of the file")


def plan_experts(
    files, context: Context, options, positions: int, max_tokens: int
) -> tuple[ExpertLayout, ExpertStream | None]:
    """The form of experts in memory, and an ExpertStream when they do not fit in the budget (or slots were asked for).

    Raises ConfigError before anything is loaded when not even the rest of the model fits.
    """
    budget = memory.make_budget(options.ram)
    config = model_config(files.architecture, files.config)
    dense = memory.dense_bytes(files, context)
    kv = memory.kv_estimate(config, positions, max_tokens, options.kv, options.mtp)
    others = dense + kv + memory.resident_bytes() + memory.GROWTH_BYTES + memory.PAGE_CACHE_FLOOR_BYTES
    left = budget.total_bytes - others
    if not any(record.role in memory.EXPERT_ROLES for record in files.tensors.values()):
        if options.expert_slots is not None:
            raise ConfigError(f"--expert-slots: {files.path} has no routed experts; leave the option out")
        return choose_expert_layout(options.expert_layout, files, context, max(0, left)), None
    if left < 0 and options.ram is not None:
        raise ConfigError(
            f"not enough memory: {memory.gib(budget.total_bytes)} ({budget.source}), more than "
            f"{others / memory.GIB:.3f} GiB needed: weights other than experts {dense / memory.MIB:.0f} MiB, keys and "
            f"values of {positions} positions {kv / memory.MIB:.0f} MiB, program and page cache "
            f"{(others - dense - kv) / memory.MIB:.0f} MiB; raise --ram, or choose a smaller --ctx"
        )
    if options.expert_slots is None:
        layout = choose_expert_layout(options.expert_layout, files, context, max(0, left))
        into_slots = options.io == "direct" or (options.io == "auto" and layout.name == "fast" and is_cold(files))
        if layout.num_bytes <= left and (files.made or not into_slots):
            if options.lock:
                check_limit(dense + layout.num_bytes, budget.total_bytes, budget.source)
            return layout, None
        if layout.num_bytes <= left and not files.made:
            layout = replace(layout, reason=f"{layout.reason}, read into memory of its own")
            return layout, ExpertStream(files, context, options, budget, dense, layout.compact, preload=True)
    if files.made:
        raise ConfigError(
            f"{files.path}: its experts do not fit into memory, and they cannot be streamed from this checkpoint, "
            "which stores them in another order; make a snapshot with `millstream convert`"
        )
    layout = _streamed_layout(options.expert_layout, files, context)
    return layout, ExpertStream(files, context, options, budget, dense, layout.compact)
