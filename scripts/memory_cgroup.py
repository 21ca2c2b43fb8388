"""A memory cgroup (v1 or v2) for one child process, where this machine lets us make one."""

import os
from pathlib import Path


class CgroupError(Exception):
    """No memory cgroup can be made here; the text says why."""


def _mount(kind: str, option: str = "") -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, found, options, *_ = line.split()
        if found == kind and (not option or option in options.split(",")):
            return Path(where)
    return None


class MemoryCgroup:
    """Context manager: a cgroup with a limit in bytes; `enter` is for the child (preexec_fn)."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        v1, v2 = _mount("cgroup", "memory"), _mount("cgroup2")
        if v1 is not None:
            self.version, self._names, root = 1, ("limit_in_bytes", "max_usage_in_bytes"), v1
        elif v2 is not None and "memory" in (v2 / "cgroup.controllers").read_text().split():
            self.version, self._names, root = 2, ("max", "peak"), v2
        else:
            raise CgroupError("no memory controller is mounted")
        self.path = root / f"millstream-bench-{os.getpid()}"

    def __enter__(self) -> "MemoryCgroup":
        try:
            if self.version == 2:
                (self.path.parent / "cgroup.subtree_control").write_text("+memory")
            self.path.mkdir()
            self._file(self._names[0]).write_text(str(self.limit_bytes))
        except OSError as error:
            self.__exit__()
            raise CgroupError(f"{self.path}: {error.strerror}") from None
        return self

    def __exit__(self, *_) -> None:
        if self.path.is_dir():
            self.path.rmdir()

    def _file(self, name: str) -> Path:
        return self.path / f"memory.{name}"

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text("0" if self.version == 2 else str(os.getpid()))

    def figures(self) -> dict:
        """Limit, peak (page cache included), and whether somebody was killed."""
        events = self._file("events" if self.version == 2 else "oom_control").read_text().split()
        peak = self._file(self._names[1])
        return {
            "version": self.version,
            "limit_bytes": self.limit_bytes,
            "peak_bytes": int(peak.read_text()) if peak.exists() else None,
            "oom_kills": int(events[events.index("oom_kill") + 1]) if "oom_kill" in events else None,
        }
