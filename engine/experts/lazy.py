"""Experts that are re-coded as they are used: a model is ready at once, and memory holds what is used.

The source is the storage rows of a mapped file. The first call that wants an expert re-codes it strip by strip on the
way, as compact experts always do; the second call re-codes it for good. So the first token waits for no memory of the
engine's own, the dearest part of re-coding, and an expert that is wanted once never takes any. After an expert is
re-coded its pages of the file are given back, so that a model in memory takes its fast copy and not both. Knows nothing
of containers beyond `files.read` and `release`.
"""

import mmap
import time
from collections.abc import Callable

import numpy as np

from ..errors import ConfigError
from ..kernels import ALIGNMENT_BYTES, Context, address, check, ffi, lib

_CHUNK_BYTES = 64 << 20


class Arena:
    """Memory that is handed out and never given back; pages exist once they are written."""

    def __init__(self):
        self._chunk, self._used = None, 0

    def take(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], 64-byte aligned. Raises: ConfigError when the system has no more memory."""
        num_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._chunk is None or self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = self._map(max(num_bytes, _CHUNK_BYTES)), 0
        start, self._used = self._used, self._used + num_bytes
        return self._chunk[start : self._used]

    @staticmethod
    def _map(num_bytes: int) -> np.ndarray:
        try:
            # Private: shared memory, the default, would be a file without huge pages.
            mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, MemoryError) as error:
            raise ConfigError(
                f"no memory for {num_bytes} bytes of experts ({error}); choose --expert-layout compact"
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults while experts arrive by the hundred
        return np.frombuffer(mapping, np.uint8)


class Recoder:
    """What all layers of a model share: memory, and how much is done.

    total_bytes: storage bytes of all experts. progress: called with (done_bytes, total_bytes, seconds spent) after
    every expert; None for nobody.
    """

    def __init__(self, files, context: Context):
        self.files, self.context, self.arena = files, context, Arena()
        self.total_bytes = self.done_bytes = 0
        self.seconds = 0.0
        self.progress: Callable[[int, int, float], None] | None = None

    def point_at_rows(self, records, structs) -> None:
        """Let the moe_matrix structs of one expert use the file's pages: storage rows are re-coded in every call.

        For rows that lie in the file as they are, so that `files.read` returns its pages and no copy.
        """
        for record, w in zip(records, structs, strict=True):
            w.data = address(self.files.read(record.name))
            if record.layout is None:
                w.storage = self.context.format(record.format)

    def recode(self, records, structs) -> np.ndarray:
        """Re-code the matrices of one expert into one piece of memory, and point their moe_matrix structs at it.

        Returns the memory; the caller keeps it alive.
        """
        started, context = time.perf_counter(), self.context
        sizes = [
            lib.moe_matrix_bytes(w.layout, w.rows, w.cols) if record.layout is None else 0
            for record, w in zip(records, structs, strict=True)
        ]
        starts = np.cumsum([0, *(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)]).tolist()
        memory = self.arena.take(starts[-1])
        for record, w, start in zip(records, structs, starts, strict=False):
            if record.layout is not None:
                w.data = address(self.files.read(record.name))
                continue
            out, rows = memory[start:], self.files.read(record.name)
            status = lib.moe_encode(
                context.handle, address(out), context.format(record.format), w.layout, address(rows), w.rows, w.cols
            )
            check(status, f"re-code {record.name}")
            w.data, w.storage = address(out), ffi.NULL
            self.files.release(record.name)
            self.done_bytes += record.nbytes
        self.seconds += time.perf_counter() - started
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes, self.seconds)
        return memory


class LazyExperts:
    """The experts of one layer; `run` as in ResidentExperts.

    records: per expert its three TensorRecords (gate, up, down); those that hold the compute layout stay in the file.
    """

    def __init__(self, recoder: Recoder, records: list[tuple]):
        self._recoder, self._records = recoder, records
        self._structs = ffi.new("struct moe_expert[]", len(records))
        self.table = ffi.new("struct moe_expert *[]", [self._structs + e for e in range(len(records))])
        self._memory: list[np.ndarray] = []
        self._complete = False
        # Rows that a file does not hold as they are wanted live as long as one read of them: re-coded at once.
        made = recoder.files.made
        self._unused = np.array([not any(record.name in made for record in expert) for expert in records], bool)
        self._missing = np.ones(len(records), bool)
        self.num_bytes = 0
        context = recoder.context
        for struct, expert in zip(self._structs, records, strict=True):
            for w, record in zip(_matrices(struct), expert, strict=True):
                w.layout = context.layout(context.layout_of(record.format))
                w.rows, w.cols = record.rows, record.cols
                self.num_bytes += context.matrix_bytes(context.layout_of(record.format), record.rows, record.cols)
                recoder.total_bytes += record.nbytes if record.layout is None else 0

    def prepare(self, expert_ids: np.ndarray) -> None:
        """Re-code those of the experts that are not there yet."""
        wanted = expert_ids[self._missing[expert_ids]].tolist()
        for e in wanted:
            self._memory.append(self._recoder.recode(self._records[e], _matrices(self._structs[e])))
            self._missing[e] = False
        if wanted:
            self._complete = not self._missing.any()

    def regions(self) -> list[np.ndarray]:
        """The memory of the experts that are there, and the file's pages of matrices that needed no re-coding."""
        stored = (record for expert in self._records for record in expert if record.layout is not None)
        return self._memory + [self._recoder.files.read(record.name) for record in stored]

    def _use(self, expert_ids: np.ndarray) -> None:
        """Experts that were used before are re-coded, new ones are read from the file's pages this once."""
        new = self._unused[expert_ids]
        self.prepare(expert_ids[~new])
        for e in expert_ids[new & self._missing[expert_ids]].tolist():
            self._recoder.point_at_rows(self._records[e], _matrices(self._structs[e]))
        self._unused[expert_ids] = False

    def run(self, layers, name: str, buffers, plan, num_used: int, x, num_tokens: int, top: int) -> None:
        """See ResidentExperts.run; experts that a call before this one used are re-coded first."""
        if not self._complete:
            self._use(buffers.expert_ids.array[0, :num_used])
        status = lib.moe_experts(layers.ctx, buffers.out.ptr, self.table, *plan, num_used, x.ptr, num_tokens, top)
        check(status, f"{name} experts")


def _matrices(struct) -> tuple:
    return struct.gate, struct.up, struct.down
