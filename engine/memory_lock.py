"""Locking weights in memory, so that nothing else on the machine can push them out."""

import os
import resource

import numpy as np

from .errors import ConfigError
from .hardware import status_text
from .kernels import Matrix, ffi, lib
from .memory import GIB, MIB, parts_of

_CAP_IPC_LOCK = 14


def may_lock_anything() -> bool:
    """Whether the process has CAP_IPC_LOCK, for which there is no limit."""
    return bool(int(status_text("CapEff") or "0", 16) >> _CAP_IPC_LOCK & 1)


def check_limit(num_bytes: int, budget_bytes: int, source: str) -> None:
    """Raises ConfigError with the remedy when so many bytes may not be locked. Checked before anything is loaded."""
    if num_bytes > budget_bytes:
        raise ConfigError(
            f"--lock: {num_bytes / GIB:.2f} GiB would be locked, the memory plan allows {budget_bytes / GIB:.2f} GiB "
            f"({source}); leave the option out, or raise --ram"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or num_bytes <= limit or may_lock_anything():
        return
    kib = -(-num_bytes // 1024)
    raise ConfigError(
        f"--lock: {num_bytes / MIB:.0f} MiB are to be locked, this process may lock {limit / MIB:.0f} MiB (ulimit -l); "
        f"put '{_user()} - memlock {kib}' into /etc/security/limits.conf and log in again, or use LimitMEMLOCK={kib}K "
        "(systemd) or --ulimit memlock=-1 (containers)"
    )


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def lock(address, num_bytes: int) -> int:
    """Lock a range (and bring it in). Returns the bytes locked. Raises ConfigError when the system refuses."""
    error = lib.moe_lock_memory(ffi.cast("void *", address), num_bytes)
    if error:
        raise ConfigError(
            f"--lock: the system refused to lock {num_bytes / MIB:.0f} MiB: {os.strerror(error)}; leave the option "
            "out, or raise the limit (ulimit -l)"
        )
    return num_bytes


def lock_matrices(root) -> int:
    """Lock the bytes of every matrix that an object holds. Returns how many."""
    return sum(lock_array(value.strips[: value.num_bytes]) for value in parts_of(root) if isinstance(value, Matrix))


def lock_array(array: np.ndarray) -> int:
    return lock(array.ctypes.data, array.nbytes)
