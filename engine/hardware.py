"""What this process may use of the machine: physical CPUs and memory, with the limits of every cgroup above it.

Reads /proc and /sys below a root directory that tests replace by a made-up tree. Knows nothing of models.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

# The kernel's way of saying "no limit" in version 1 is the largest page-aligned int64.
_V1_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class CgroupDir:
    """One control group above us, on disk."""

    version: int  # 1 or 2
    name: str  # path inside the hierarchy, "/" is the root of what is mounted here
    path: Path


@dataclass(frozen=True)
class CpuQuota:
    """CPU bandwidth limit of one control group."""

    cgroup: str
    version: int
    cpus: float  # quota / period


@dataclass(frozen=True)
class CpuPlan:
    """How many worker threads to run, and why."""

    count: int  # worker threads, at least 1
    cpus: tuple[int, ...]  # one allowed CPU per physical core
    num_allowed: int  # logical CPUs in the affinity mask
    num_online: int  # logical CPUs of the machine
    quotas: tuple[CpuQuota, ...]
    reason: str


@dataclass(frozen=True)
class MemoryLimit:
    """Memory limit of one control group. Page cache that the kernel can drop counts as available."""

    cgroup: str
    version: int
    setting: str  # file the limit stands in
    limit_bytes: int
    usage_bytes: int
    reclaimable_bytes: int

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.usage_bytes + self.reclaimable_bytes)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that can be used without swapping or being killed."""

    total_bytes: int
    mem_available_bytes: int
    limits: tuple[MemoryLimit, ...]

    @property
    def available_bytes(self) -> int:
        """The smallest of MemAvailable and what each control group leaves."""
        return min([self.mem_available_bytes, *(limit.available_bytes for limit in self.limits)])


def parse_cpu_list(text: str) -> set[int]:
    """Return the CPU numbers of a kernel list such as "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Control groups
# ---------------------------------------------------------------------------------------------------------------------


def _mounts(root: Path) -> list[tuple[str, str, str, str]]:
    """Return (file system type, mounted part of the hierarchy, mount point, super options) of every cgroup mount."""
    found = []
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) >= 5 and len(tail) >= 3 and tail[0] in ("cgroup", "cgroup2"):
            found.append((tail[0], fields[3], fields[4], tail[2]))
    return found


def _mount_point(root: Path, controller: str, version: int) -> tuple[str, Path] | None:
    for kind, mounted, point, options in _mounts(root):
        wanted = kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in options.split(",")
        if wanted:
            return mounted, root / point.lstrip("/")
    return None


def cgroup_dirs(controller: str, root: str | Path = "/") -> list[CgroupDir]:
    """Return our own control group for `controller` and every ancestor we can see, innermost first.

    Both hierarchies are listed where a machine runs both: a file that is missing simply sets no limit.
    """
    root, found = Path(root), []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        version = 1 if controllers else 2
        if version == 1 and controller not in controllers.split(","):
            continue
        mount = _mount_point(root, controller, version)
        if mount is None:
            continue
        mounted, point = mount
        # In a container the mount shows a subtree only; a name outside of it means that we are its root.
        inside = mounted == "/" or name == mounted or name.startswith(mounted + "/")
        relative = name.removeprefix(mounted).strip("/") if inside and ".." not in name else ""
        parts = relative.split("/") if relative else []
        for depth in range(len(parts), -1, -1):
            below = "/".join(parts[:depth])
            found.append(CgroupDir(version, "/" + below, point / below))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# CPUs
# ---------------------------------------------------------------------------------------------------------------------


def cpu_quotas(root: str | Path = "/") -> list[CpuQuota]:
    """Return the CPU bandwidth limits of our control group and its ancestors."""
    found = []
    for group in cgroup_dirs("cpu", root):
        if group.version == 2:
            quota, _, period = (_read(group.path / "cpu.max") or "max").partition(" ")
        else:
            quota = _read(group.path / "cpu.cfs_quota_us") or "-1"
            period = _read(group.path / "cpu.cfs_period_us") or ""
        try:
            microseconds, period_us = int(quota), int(period or 100000)
        except ValueError:  # "max"
            continue
        if microseconds > 0 and period_us > 0:
            found.append(CpuQuota(group.name, group.version, microseconds / period_us))
    return found


def physical_cpus(allowed: set[int], root: str | Path = "/") -> list[int]:
    """Return one CPU of `allowed` per physical core, the lowest number of each.

    A CPU without topology files (some virtual machines) counts as a core of its own.
    """
    chosen, taken = [], set()
    for cpu in sorted(allowed):
        if cpu in taken:
            continue
        topology = Path(root) / f"sys/devices/system/cpu/cpu{cpu}/topology"
        text = _read(topology / "thread_siblings_list") or _read(topology / "core_cpus_list") or str(cpu)
        try:
            taken |= parse_cpu_list(text)
        except ValueError:
            taken.add(cpu)
        chosen.append(cpu)
    return chosen


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _reason(count: int, cores: list[int], allowed: set[int], online: set[int], tightest: CpuQuota | None) -> str:
    parts = [f"{len(online)} logical CPUs"]
    if len(allowed) < len(online):
        parts.append(f"{len(allowed)} allowed by the affinity mask")
    if len(cores) < len(allowed):
        parts.append(f"{len(cores)} physical cores (hyper-threads share one)")
    if tightest is not None and int(tightest.cpus) < len(cores):
        parts.append(f"cgroup {tightest.cgroup} (v{tightest.version}) allows {tightest.cpus:g} CPUs")
    return f"{', '.join(parts)} -> {count} thread{'s' if count != 1 else ''}"


def usable_cpus(root: str | Path = "/", affinity: set[int] | None = None) -> CpuPlan:
    """Return how many threads run at full speed here: physical cores we may use, capped by the tightest CPU quota.

    A quota is rounded down (a thread that is throttled holds up all others), to at least one. `affinity` replaces the
    process's own mask.
    """
    allowed = set(_affinity() if affinity is None else affinity)
    online = parse_cpu_list(_read(Path(root) / "sys/devices/system/cpu/online") or "") or set(allowed)
    cores = physical_cpus(allowed, root)
    quotas = cpu_quotas(root)
    tightest = min(quotas, key=lambda quota: quota.cpus, default=None)
    count = len(cores) if tightest is None else min(len(cores), int(tightest.cpus))
    count = max(1, count)
    reason = _reason(count, cores, allowed, online, tightest)
    return CpuPlan(count, tuple(cores), len(allowed), len(online), tuple(quotas), reason)


def cpu_model(root: str | Path = "/") -> str:
    """Return the CPU's name, or "unknown"."""
    for line in (_read(Path(root) / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware"):
            return value.strip()
    return "unknown"


def cpu_flags(root: str | Path = "/") -> set[str]:
    """Return the feature names of the first CPU as the kernel spells them."""
    for line in (_read(Path(root) / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def last_cache_bytes(root: str | Path = "/") -> int:
    """Size of the largest cache of the first CPU, which others may share; 0 when the kernel does not say."""
    sizes = [_read(path) or "" for path in Path(root, "sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if re.fullmatch(r"\d+[KM]", size)), default=0)


def _stat_bytes(group: CgroupDir, *keys: str) -> int | None:
    stat = dict(line.split()[:2] for line in (_read(group.path / "memory.stat") or "").splitlines() if " " in line)
    return next((int(stat[key]) for key in keys if stat.get(key, "").isdigit()), None)


def _v1_limit(group: CgroupDir) -> list[MemoryLimit]:
    limit = _read_int(group.path / "memory.limit_in_bytes")
    # The hierarchical figure includes ancestors that a container does not see.
    above = _stat_bytes(group, "hierarchical_memory_limit")
    limit = min((n for n in (limit, above) if n is not None), default=_V1_UNLIMITED_BYTES)
    if limit >= _V1_UNLIMITED_BYTES:
        return []
    usage = _read_int(group.path / "memory.usage_in_bytes") or 0
    reclaimable = _stat_bytes(group, "total_inactive_file", "inactive_file") or 0
    return [MemoryLimit(group.name, 1, "memory.limit_in_bytes", limit, usage, reclaimable)]


def _v2_limits(group: CgroupDir) -> list[MemoryLimit]:
    found = []
    # Past memory.high a process is not killed but slowed to a crawl, which is no better here.
    for setting in ("memory.max", "memory.high"):
        limit = _read_int(group.path / setting)
        if limit is not None:
            usage = _read_int(group.path / "memory.current") or 0
            reclaimable = _stat_bytes(group, "inactive_file") or 0
            found.append(MemoryLimit(group.name, 2, setting, limit, usage, reclaimable))
    return found


def memory_limits(root: str | Path = "/") -> MemoryPlan:
    """Return MemAvailable and the memory limit of our control group and each ancestor, versions 1 and 2."""
    info = {}
    for line in (_read(Path(root) / "proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields = value.split()
        if fields and fields[0].isdigit():
            info[key] = int(fields[0]) * 1024
    limits = []
    for group in cgroup_dirs("memory", root):
        limits += _v2_limits(group) if group.version == 2 else _v1_limit(group)
    total = info.get("MemTotal", 0)
    return MemoryPlan(total, info.get("MemAvailable", info.get("MemFree", total)), tuple(limits))


def status_text(key: str) -> str | None:
    """Return a line of /proc/self/status without its key, or None where there is none."""
    for line in (_read(Path("/proc/self/status")) or "").splitlines():
        if line.startswith(key + ":"):
            return line.partition(":")[2].strip()
    return None


def status_bytes(key: str) -> int | None:
    """Return a figure of /proc/self/status in bytes (RssAnon, VmHWM ...), or None where there is none."""
    text = status_text(key)
    return None if text is None else int(text.split()[0]) * 1024


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far, file pages included."""
    import resource

    # ru_maxrss survives an exec: it would be that of a large parent.
    peak = status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def resident_bytes() -> int:
    """Return the resident set of this process now, file pages included."""
    pages = (_read(Path("/proc/self/statm")) or "0 0").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
