"""Which form experts take in memory: strips made beforehand, or storage rows that every call re-codes (compact)."""

from dataclasses import dataclass

from ..errors import ConfigError
from ..kernels import Context
from ..weights.architectures import EXPERT_PARTS, expert_matrix_name

ROLES = ("gate_up", "down")
ROWS_ARE_STRIPS = ("f32", "f16", "bf16")  # used where they lie, whatever is chosen


@dataclass(frozen=True)
class ExpertLayout:
    """What was chosen. name: "fast", "compact", or "stored" when the file holds all strips already. num_bytes: what
    the experts then take in memory or in mapped pages."""

    name: str
    reason: str
    num_bytes: int

    @property
    def compact(self) -> bool:
        return self.name == "compact"


def choose_expert_layout(wanted: str, files, context: Context, available_bytes: int) -> ExpertLayout:
    """wanted: one of config.EXPERT_LAYOUTS. available_bytes: memory that re-coded experts may take.

    Raises ConfigError for compact where nothing in the file can be kept compact.
    """
    stored = recoded = compact = 0  # bytes of strips in the file; of the others as strips; as they are
    sizes: dict[tuple, int] = {}
    for record in files.tensors.values():
        if record.role not in ROLES:
            continue
        if record.layout is not None or record.format in ROWS_ARE_STRIPS:
            stored += record.nbytes
            continue
        key = record.format, record.rows, record.cols
        if key not in sizes:
            sizes[key] = context.matrix_bytes(context.layout_of(record.format), record.rows, record.cols)
        recoded += sizes[key]
        compact += record.nbytes
    if not compact:
        if wanted == "compact" and stored:
            raise ConfigError(
                f"--expert-layout compact: {files.path} holds its experts in the compute layout already, so there "
                "are no storage rows to keep; leave the option out, or convert the model again with --layout storage"
            )
        return ExpertLayout("stored", "the file holds strips", stored)
    if wanted == "fast":
        return ExpertLayout("fast", "as asked", stored + recoded)
    if wanted == "compact":
        return ExpertLayout("compact", "as asked", stored + compact)
    need, have = f"{recoded / 2**20:.0f} MiB", f"{available_bytes / 2**20:.0f} MiB"
    if recoded <= available_bytes:
        return ExpertLayout("fast", f"{need} of strips fit into {have}", stored + recoded)
    return ExpertLayout("compact", f"{need} of strips do not fit into {have}", stored + compact)


def expert_bytes(engine, layer: int) -> tuple[int, str]:
    """(bytes of one routed expert of a layer as kernels read it, its formats) of a loaded engine."""
    records = [engine.files.record(expert_matrix_name(layer, 0, part)) for part in EXPERT_PARTS]
    context, formats = engine.context, ", ".join(dict.fromkeys(r.format for r in records))
    if engine.expert_layout.compact:
        return sum(r.nbytes for r in records), formats
    layouts = [r.layout or context.layout_of(r.format) for r in records]
    return sum(context.matrix_bytes(name, r.rows, r.cols) for name, r in zip(layouts, records, strict=True)), formats
