"""What this machine offers the engine, and whether its kernels compute the right thing here.

Every check becomes an entry in a report; what is wrong becomes a line in `problems`. Needs no model.
"""

import itertools
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from . import hardware, kernels
from .config import ISA_VARIABLE
from .errors import EngineError

FEATURES = ("avx", "avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni",
            "avx512vbmi", "avx512_bf16", "asimd", "asimddp", "i8mm", "sve")  # fmt: skip
ROWS, COLS = 264, 512  # not a multiple of a thread's share; two blocks of the longest format
TOKEN_COUNTS = (1, 8)
SPEED_BYTES, COMPACT_SPEED_BYTES = 64 << 20, 8 << 20  # read per format for the speed figures


@dataclass
class FormatCheck:
    """What one storage format gets on the tier in use."""

    format: str
    layout: str
    codec: str  # tier of the codec that is used
    kernel: str  # tier of the kernel that is used
    parity: str  # "equal", or what differs: strips, products, compact rows, float arithmetic
    gb_per_s: float  # strips read by one thread at one token, from the cache
    compact_gb_per_s: float  # storage bytes re-coded and multiplied by one thread at one token


def finite_rows(context, name: str, rows: int, cols: int, rng) -> np.ndarray:
    """Random storage rows: values quantized by the format, or random blocks with finite scales where it only reads."""
    try:
        return context.quantize(name, rng.standard_normal((rows, cols), np.float32))
    except EngineError:
        pass
    out = np.empty((rows, context.row_bytes(name, cols)), np.uint8)
    for row in range(rows):
        out[row] = rng.integers(0, 256, out.shape[1], np.uint8)
        while context.check_rows(name, out[row], 1, cols) is not None:
            out[row] = rng.integers(0, 256, out.shape[1], np.uint8)
    return out


class _Product:
    """y [T, rows] = x [T, cols] W^T on one context, for one format."""

    def __init__(self, context, name: str, storage: np.ndarray, x: np.ndarray, compact: bool = False):
        from .layers import Buffer, Layers, Linear

        rows, cols = len(storage), x.shape[1]
        self.context = context
        self.matrix = context.matrix(name, storage, rows, cols, compact)
        self._layers, self._linear = Layers(context), Linear(self.matrix)
        self._x, self._y = Buffer(len(x), cols), Buffer(len(x), rows)
        self._x.array[:] = x

    def __call__(self, num_tokens: int) -> np.ndarray:
        self._y.array[:num_tokens] = np.nan  # an output that is not written must show
        self._linear(self._layers, self._x, (self._y,), num_tokens)
        return self._y.array[:num_tokens].copy()

    def gb_per_s(self, total_bytes: int) -> float:
        calls = max(1, total_bytes // self.matrix.num_bytes)
        started = time.thread_time()  # a busy machine does not count
        for _ in range(calls):
            self._linear(self._layers, self._x, (self._y,), 1)
        return calls * self.matrix.num_bytes / (time.thread_time() - started) / 1e9


def compare(got: np.ndarray, want: np.ndarray) -> str:
    """ "equal" when every bit agrees and every value is finite, else a description."""
    if not np.isfinite(want).all() or not np.isfinite(got).all():
        return "not finite"
    differing = int((got.view(np.uint32) != want.view(np.uint32)).sum())
    return "equal" if differing == 0 else f"{differing} of {got.size} values differ"


def check_format(name: str, context, reference, floats) -> FormatCheck:
    """Compare one format on `context` with the scalar tier, for one token and for several: codec, kernel, compact rows,
    and the float arithmetic. floats: contexts of the float arithmetic, on this tier and on the scalar one."""
    layout = context.layout_of(name)
    tables = context.format(name), context.layout(layout)
    codec, kernel = (kernels.text(t.same_as) or kernels.text(t.tier) for t in tables)
    rng = np.random.default_rng(1)
    group = context.format(name).group_rows or 1
    storage = finite_rows(reference, name, -(-ROWS // group) * group, COLS, rng)
    x = rng.standard_normal((max(TOKEN_COUNTS), COLS), np.float32)
    here, scalar = _Product(context, name, storage, x), _Product(reference, name, storage, x)
    compact = _Product(context, name, storage, x, compact=True)
    here_float, scalar_float = (_Product(c, name, storage, x) for c in floats)
    parity = "equal"
    if not np.array_equal(here.matrix.strips, scalar.matrix.strips):
        parity = "codec differs"
    pairs = ((here, scalar, ""), (compact, scalar, "compact: "), (here_float, scalar_float, "float arithmetic: "))
    for (got, want, what), num_tokens in itertools.product(pairs, TOKEN_COUNTS):
        if parity == "equal" and (found := compare(got(num_tokens), want(num_tokens))) != "equal":
            parity = what + found
    return FormatCheck(
        name, layout, codec, kernel, parity, here.gb_per_s(SPEED_BYTES), compact.gb_per_s(COMPACT_SPEED_BYTES)
    )


def check_formats(tier: str | None, problems: list[str]) -> tuple[str | None, list[FormatCheck]]:
    """Return (tier in use, one entry per format); failures are added to `problems`."""
    try:
        context, reference = kernels.Context(tier, 1), kernels.Context("scalar", 1)
        floats = kernels.Context(tier, 1, "float"), kernels.Context("scalar", 1, "float")
    except EngineError as error:
        problems.append(str(error) + (f"; {ISA_VARIABLE} asks for it: unset it" if tier else ""))
        return None, []
    found = []
    for name in dict.fromkeys(table.name for table in kernels.formats()):
        try:
            entry = check_format(name, context, reference, floats)
        except EngineError as error:
            problems.append(f"format {name}: {error}")
            continue
        found.append(entry)
        if entry.parity != "equal":
            todo = "run with --isa scalar, and report it" if context.tier != "scalar" else "install the package again"
            problems.append(
                f"format {name}: tier {context.tier} does not compute what the scalar tier does: {entry.parity}; {todo}"
            )
    return context.tier, found


def check_shipped_model(problems: list[str]) -> dict:
    """Open the model that ships with the package, and compare its checksums."""
    from .runtime import SHIPPED_MODEL
    from .weights import open_model

    try:
        files = open_model(SHIPPED_MODEL)
        checked = files.verify()
    except EngineError as error:
        problems.append(f"shipped model: {error}; install the package again")
        return {"path": str(SHIPPED_MODEL), "ok": False}
    return {"path": str(SHIPPED_MODEL), "ok": True, "bytes": checked}


def memory_report(root: str | Path) -> dict:
    """MemAvailable and every cgroup limit, with the smallest as what can be used."""
    plan = hardware.memory_limits(root)
    limits = [{**asdict(limit), "available_bytes": limit.available_bytes} for limit in plan.limits]
    return {
        "total_bytes": plan.total_bytes,
        "mem_available_bytes": plan.mem_available_bytes,
        "available_bytes": plan.available_bytes,
        "limits": limits,
    }


def machine_report(root: str | Path, model: str | Path | None, tier: str | None, problems: list[str]) -> list[dict]:
    """The checks of machine_checks as JSON; what is wrong is added to `problems`."""
    from .machine_checks import check_machine

    checks = check_machine(kernels.Context(tier) if tier else None, root, model)
    problems += [check.line() for check in checks if not check.ok]
    return [{**asdict(check), "line": check.line()} for check in checks]


def examine(root: str | Path = "/", model: str | Path | None = None, isa: str | None = None) -> dict:
    """The whole report, ready for JSON; `problems` is empty when all is well. model: whose disk is measured. isa: the
    tier to examine; raises KernelError for one that does not run here."""
    from . import __version__
    from .config import RuntimeConfig

    if isa is not None:
        kernels.Context(isa, 1)
    problems: list[str] = []
    flags = hardware.cpu_flags(root)
    threads = hardware.usable_cpus(root)
    tier, formats = check_formats(RuntimeConfig(isa=isa).isa, problems)
    return {
        "version": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": hardware.cpu_model(root),
        "features": [feature for feature in FEATURES if feature in flags],
        "tiers": [
            {"tier": name, "supported": ok, "missing": missing, "reason": kernels.tier_reason(missing)}
            for name, ok, missing in kernels.tiers()
        ],
        "machine_reason": kernels.MACHINE_REASONS.get(platform.machine()),
        "tier": tier,
        "tier_forced_by": "--isa" if isa else ISA_VARIABLE if os.environ.get(ISA_VARIABLE) else None,
        "threads": asdict(threads),
        "memory": memory_report(root),
        "checks": machine_report(root, model, tier, problems),
        "formats": [asdict(entry) for entry in formats],
        "shipped_model": check_shipped_model(problems),
        "problems": problems,
    }
