"""Checks of the machine around the kernels: where threads run, limits, huge pages, disk and memory bandwidth.

Each check is one line: what was found, and what to do about it. Only what keeps the engine from working well at all is
wrong (`ok` False); a setting that could be better is advice.
"""

import errno
import resource
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import hardware
from .bandwidth import SIZE_BYTES, memory_bandwidth
from .disk_bandwidth import DiskReport, disk_bandwidth
from .kernels import Context
from .memory_lock import may_lock_anything

LITTLE_MEMORY_BYTES, LITTLE_ADDRESS_SPACE_BYTES = 256 << 20, 1 << 30
_LIMIT_ERRORS = (errno.EAGAIN, errno.ENOMEM)
_READER_REQUEST_BYTES = 1 << 20  # about what the streamer asks for at a time


@dataclass
class Check:
    """name: what was looked at. found: in words. todo: what to do, "" for nothing. figures: for scripts."""

    name: str
    found: str
    todo: str = ""
    ok: bool = True
    figures: dict = field(default_factory=dict)

    def line(self) -> str:
        return f"{self.name}: {self.found}" + (f" -> {self.todo}" if self.todo else "")


def cpu_list(cpus) -> str:
    """CPU numbers as the kernel writes them: 0-3,8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def thread_placement(root: str | Path = "/", affinity: set[int] | None = None) -> Check:
    """Physical cores, hyper-threads, affinity mask and quota, with what limits the number of threads."""
    plan = hardware.usable_cpus(root, affinity)
    tightest = min((quota.cpus for quota in plan.quotas), default=None)
    smt = "on" if plan.num_allowed > len(plan.cpus) else "off or not visible"
    quota = "no CPU quota" if tightest is None else f"quota {tightest:g} CPUs"
    found = (
        f"{plan.count} thread{'s' * (plan.count > 1)} on {len(plan.cpus)} physical core{'s' * (len(plan.cpus) > 1)} "
        f"(CPU {cpu_list(plan.cpus)}), "
        f"SMT {smt}, affinity {plan.num_allowed} of {plan.num_online} CPUs, {quota}"
    )
    todo, ok = "", True
    if tightest is not None and tightest < 1:
        todo, ok = (
            "give the container at least one whole CPU (--cpus, CPUQuota=): less stops every thread in turn",
            False,
        )
    elif tightest is not None and int(tightest) < len(plan.cpus):
        todo = f"raise the container's CPU quota to {len(plan.cpus)} to use every core"
    elif plan.num_allowed < plan.num_online:
        todo = "widen the affinity mask (taskset, cpuset) if the other CPUs are free"
    return Check("placement", found, todo, ok, {**asdict(plan), "quota_cpus": tightest})


def memory_room(root: str | Path = "/") -> Check:
    """The limit that binds first, and whether it leaves anything."""
    plan = hardware.memory_limits(root)
    mib = plan.available_bytes >> 20
    tight = min(plan.limits, key=lambda limit: limit.available_bytes, default=None)
    binds = tight is not None and tight.available_bytes < plan.mem_available_bytes
    source = f"{tight.setting} of cgroup {tight.cgroup}" if binds else "MemAvailable"
    found = f"{mib} MiB can be used, which {source} sets"
    ok = not plan.total_bytes or plan.available_bytes >= LITTLE_MEMORY_BYTES
    todo = f"free memory or raise {source}: only {mib} MiB of memory are available" if not ok else ""
    return Check("memory limit", found, todo, ok, {"available_bytes": plan.available_bytes, "source": source})


def huge_pages(root: str | Path = "/") -> Check:
    """The setting of transparent huge pages; the engine asks for them with madvise."""
    try:
        text = (Path(root) / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Check("huge pages", "this kernel has no transparent huge pages", figures={"setting": None})
    setting = text.partition("[")[2].partition("]")[0] or "unknown"
    enable = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root): fewer page faults and TLB misses"
    return Check(
        "huge pages", setting, "" if setting in ("always", "madvise") else enable, figures={"setting": setting}
    )


def lock_limit(limit_bytes: int | None = None, unlimited: bool | None = None) -> Check:
    """RLIMIT_MEMLOCK, which --lock needs. The arguments replace the process's own."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit_bytes is None else limit_bytes
    free = (soft == resource.RLIM_INFINITY or may_lock_anything()) if unlimited is None else unlimited
    if free:
        return Check("lock limit", "none, --lock works with any model", figures={"limit_bytes": None})
    todo = "only for --lock: raise ulimit -l (limits.conf 'memlock', LimitMEMLOCK=, --ulimit memlock=-1)"
    return Check("lock limit", f"{soft / (1 << 20):.4g} MiB", todo, figures={"limit_bytes": soft})


def address_space(limit_bytes: int | None = None) -> Check:
    """RLIMIT_AS, against which mapped model files count. limit_bytes replaces the process's own."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0] if limit_bytes is None else limit_bytes
    if soft == resource.RLIM_INFINITY:
        return Check("address space", "no limit", figures={"limit_bytes": None})
    todo = (
        "lift it (ulimit -v unlimited): model files are mapped and count against it, and the memory plan does not know"
    )
    ok = soft >= LITTLE_ADDRESS_SPACE_BYTES
    return Check("address space", f"{soft / (1 << 30):.4g} GiB (ulimit -v)", todo, ok, {"limit_bytes": soft})


def read_memory(context: Context, available_bytes: int) -> Check:
    """GB/s that all threads read together, which bounds decoding of a resident model."""
    size = min(SIZE_BYTES, available_bytes // 4) & ~4095
    try:
        speed = memory_bandwidth(context, size) if size >= 32 << 20 else None
    except MemoryError:
        speed = None
    if speed is None:
        return Check("memory bandwidth", "not measured: too little memory", figures={"gb_per_s": None})
    threads = f"{context.num_threads} thread{'s' if context.num_threads > 1 else ''}"
    found = f"{speed:.1f} GB/s with {threads}; a token that reads 1 GB takes at least {1e3 / speed:.0f} ms"
    todo = "to decode faster: a smaller format, --spec, or memory in every channel"
    return Check("memory bandwidth", found, todo, figures={"gb_per_s": speed, "threads": context.num_threads})


def _describe_disk(report: DiskReport) -> str:
    sizes = dict.fromkeys(speed.request_bytes for speed in report.speeds)
    parts = []
    for size in sorted(sizes):
        by_depth = {s.depth: s.gb_per_s for s in report.speeds if s.request_bytes == size}
        name = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
        parts.append(name + " " + "/".join(f"{by_depth[depth]:.2f}" for depth in sorted(by_depth)))
    depths = "/".join(str(depth) for depth in dict.fromkeys(speed.depth for speed in report.speeds))
    text = f"{report.mode} reads, GB/s with {depths} at a time: {', '.join(parts)} ({report.path})"
    return "; ".join([text, *report.notes])


def read_disk(model: str | Path | None = None, measure=disk_bandwidth) -> Check:
    """GB/s by request size and depth, which bounds a model that is streamed."""
    try:
        report = measure(model)
    except OSError as error:
        limits = "raise the limits of this process (ulimit -u, -v)" if error.errno in _LIMIT_ERRORS else ""
        if model is not None:
            todo = limits or "check the disk and permissions"
            return Check("disk", f"{error.filename or model}: {error.strerror}", todo, False)
        todo = limits or "--model FILE measures the disk of a model"
        return Check("disk", f"not measured ({error.strerror})", todo)
    depth = report.enough_depth(_READER_REQUEST_BYTES)
    todo = f"for models that are streamed: --readers {depth} is enough here" if depth else ""
    if report.mode == "buffered":
        todo = "keep models that are streamed on a file system with direct reads (ext4, xfs, btrfs)"
    return Check("disk", _describe_disk(report), todo, figures=asdict(report))


def check_machine(context: Context | None, root: str | Path = "/", model: str | Path | None = None) -> list[Check]:
    """Every check, one entry each. context: the one whose threads read memory, or None without a usable tier."""
    room = memory_room(root)
    found = [thread_placement(root), room, address_space(), huge_pages(root), lock_limit()]
    if context is not None:
        found.append(read_memory(context, room.figures["available_bytes"]))
    return [*found, read_disk(model)]
