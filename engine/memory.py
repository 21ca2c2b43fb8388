"""How much memory a run may take and what it is spent on: the budget, and the plan that is printed and kept.

The plan's promise: anonymous and locked memory stay within it in every mode, and so does the whole resident set when
experts are read into slots (direct and buffered reads). File pages that the kernel keeps on top can be dropped at any
time; a floor is left for them.
"""

from dataclasses import dataclass

from .errors import ConfigError
from .hardware import MemoryPlan, memory_limits, resident_bytes, status_bytes
from .layers import Buffer
from .rope import RopeTable
from .weights.architectures import expert_ids

GIB, MIB = 1 << 30, 1 << 20
PAGE_CACHE_FLOOR_BYTES = 64 * MIB
GROWTH_BYTES = 32 * MIB  # Python objects, allocator slack and thread stacks of a run
LOAD_CHUNK_BYTES = 32 * MIB
EXPERT_ROLES = ("gate_up", "down")


@dataclass(frozen=True)
class Budget:
    """total_bytes: what this process may hold in all. source: which limit that is. note: what was asked for and is not
    possible, or None."""

    total_bytes: int
    source: str
    note: str | None = None


def _tightest(plan: MemoryPlan) -> tuple[int, str]:
    found = [(plan.mem_available_bytes, "MemAvailable")]
    found += [(limit.available_bytes, f"{limit.setting} of cgroup {limit.cgroup}") for limit in plan.limits]
    return min(found)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def make_budget(ram: float | None, limits: MemoryPlan | None = None, rss_bytes: int | None = None) -> Budget:
    """ram: GiB for this process, or None for all that it may take without swapping or being killed."""
    available, source = _tightest(memory_limits() if limits is None else limits)
    possible = available + (resident_bytes() if rss_bytes is None else rss_bytes)
    if ram is None:
        return Budget(possible, source)
    wanted = int(ram * GIB)
    if wanted <= possible:
        return Budget(wanted, f"--ram {ram:g}")
    note = f"--ram {ram:g}: {source} leaves {gib(possible)}; that is used"
    return Budget(possible, source, note)


def dense_bytes(files, context) -> int:
    """Bytes that everything but the routed experts takes in memory."""
    total = 0
    for record in files.tensors.values():
        if record.role in EXPERT_ROLES:
            continue
        if record.layout is not None or len(record.shape) == 1:
            total += record.nbytes
        else:
            total += context.matrix_bytes(context.layout_of(record.format), record.rows, record.cols)
    return total


def kv_estimate(config, positions: int, max_tokens: int, kind: str, mtp: bool = False) -> int:
    """KV bytes of that many positions, at most max_tokens in a call, before there is a model to ask. config: the
    family's checked one. mtp: with the layer for multi-token prediction, which is like the last one."""
    shapes = config.kv_shapes + config.kv_shapes[-1:] * mtp
    return sum(shape.num_bytes(positions, kind, max_tokens) for shape in shapes)


def scratch_estimate(files, max_tokens: int, num_threads: int) -> int:
    """Upper bound of the native calls' scratch: quantized activations of a call, hidden rows of a window of experts."""
    cols = max(record.cols for record in files.tensors.values() if len(record.shape) == 2)
    width = max((record.rows for record in files.tensors.values() if record.role == "gate_up"), default=cols)
    return max_tokens * cols * 2 + 1024 * width * 6 + num_threads * 8 * (cols + width) * 4 + 8 * MIB


def parts_of(root):
    """Every object of this package that `root` holds, directly or not, once each."""
    seen, stack = set(), [root]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, dict):
            stack += value.values()
        elif type(value).__module__.startswith("engine."):
            yield value
            if hasattr(value, "__dict__") and not isinstance(value, RopeTable):  # its buffers are filled at load
                stack += vars(value).values()


def buffer_bytes(root) -> int:
    """Bytes of all activation buffers that an object holds."""
    return sum(value.array.nbytes for value in parts_of(root) if isinstance(value, Buffer))


@dataclass(frozen=True)
class Plan:
    """Bytes by role, in the order in which they are printed; their sum stays within budget.total_bytes."""

    budget: Budget
    roles: dict[str, int]
    num_slots: int
    num_experts: int
    slot_bytes: int
    locked: bool = False

    @property
    def planned_bytes(self) -> int:
        return sum(self.roles.values())

    @property
    def percent(self) -> float:
        return 100.0 * self.num_slots / self.num_experts

    def line(self) -> str:
        parts = ", ".join(f"{role} {num_bytes / MIB:.0f}" for role, num_bytes in self.roles.items())
        budget = f"{gib(self.budget.total_bytes)} ({self.budget.source})"
        return f"memory: {gib(self.planned_bytes)} of {budget}; MiB: {parts}"


def make_plan(budget: Budget, fixed: dict[str, int], slot_bytes: int, num_experts: int, minimum: int,
              asked: int | None = None) -> Plan:  # fmt: skip
    """Spend what `fixed` leaves on expert slots. asked: exactly that many slots.

    Raises ConfigError when not even `minimum` slots fit.
    """
    left = budget.total_bytes - sum(fixed.values())
    slots = min(num_experts, left // slot_bytes) if asked is None else asked
    if asked is not None and not minimum <= asked <= num_experts:
        raise ConfigError(f"--expert-slots: got {asked}, expected {minimum} (one layer of one token) to {num_experts}")
    if slots < minimum or left < slots * slot_bytes:
        need = sum(fixed.values()) + max(slots, minimum) * slot_bytes
        parts = ", ".join(f"{role} {num_bytes / MIB:.0f} MiB" for role, num_bytes in fixed.items() if num_bytes)
        raise ConfigError(
            f"not enough memory: {gib(budget.total_bytes)} ({budget.source}), at least {need / GIB:.3f} GiB needed: "
            f"{parts}, experts {max(slots, minimum)} x {slot_bytes / MIB:.1f} MiB; raise --ram, or choose a "
            "smaller --ctx"
        )
    return Plan(budget, {**fixed, "experts": slots * slot_bytes}, slots, num_experts, slot_bytes)


def cliff_warning(num_slots: int, num_layers: int, top: int, expert_bytes: int, asked: bool) -> str | None:
    """What to say when the cache is smaller than what one token uses. asked: --expert-slots says how large it is."""
    demand = num_layers * top
    if num_slots >= demand:
        return None
    return (
        f"warning: the cache holds {num_slots} experts, one token uses {num_layers} layers x {top} = {demand}: a cache "
        f"below that rarely hits (least recently used: never), so up to {demand * expert_bytes / MIB:.0f} MiB are read "
        f"for every token; raise --{'expert-slots' if asked else 'ram'}"
    )


def count_moe_layers(files) -> int:
    return len({layer for layer, _ in expert_ids(files.tensors)})


def file_resident_bytes() -> int:
    """File pages in this process's resident set now."""
    return (status_bytes("RssFile") or 0) + (status_bytes("RssShmem") or 0)


def anonymous_bytes() -> int:
    """Anonymous memory of this process now."""
    return status_bytes("RssAnon") or 0
