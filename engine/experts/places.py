"""Where each expert lies in the model's files and in a slot of the cache, as the streamer wants to be told.

An expert whose matrices are side by side in a file (a snapshot) is one piece, one whose matrices lie in three slabs
(a GGUF) three. Matrices that a file holds as storage rows are re-coded on their way into the slot, or, when compact,
stay what they are.
"""

from ..kernels import ffi
from ..weights.architectures import EXPERT_PARTS, expert_ids, expert_matrix_name

PAGE_BYTES = 4096
_STRIP_ALIGN_BYTES = 64


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _pieces(records) -> list[list]:
    """Group an expert's records into runs that one read fetches: same file, less than a page between them."""
    pieces = []
    for record in sorted(records, key=lambda r: (r.file, r.offset)):
        last = pieces[-1][-1] if pieces else None
        if last is not None and last.file == record.file and record.offset - last.offset - last.nbytes < PAGE_BYTES:
            pieces[-1].append(record)
        else:
            pieces.append([record])
    return pieces


class ExpertPlaces:
    """Places of all experts of a model; keys are layer * num_experts + expert.

    table: C array of moe_stream_expert by key. offsets: key -> where gate, up and down begin in a slot.
    slot_bytes, staging_bytes: what the largest expert needs (staging_bytes 0: nothing is re-coded).
    file_bytes: bytes of all experts as they lie in the files; expert_bytes: mean of one, without padding.
    """

    def __init__(self, files, context, compact: bool = False):
        ids = expert_ids(files.tensors)
        self.files, self.context, self.compact = files, context, compact
        self.num_experts = 1 + max(expert for _, expert in ids)
        self.num_keys = (1 + max(layer for layer, _ in ids)) * self.num_experts
        self.keys = [layer * self.num_experts + expert for layer, expert in ids]
        self.table = ffi.new("struct moe_stream_expert[]", self.num_keys)
        self.offsets: dict[int, tuple[int, int, int]] = {}
        self.file_names: list[str] = []
        self._file_numbers: dict[str, int] = {}
        self.slot_bytes = self.staging_bytes = self.file_bytes = 0
        for (layer, expert), key in zip(ids, self.keys, strict=True):
            self._place(key, layer, expert)
        self.expert_bytes = self.file_bytes // len(ids)

    def record(self, layer: int, expert: int, part: str):
        return self.files.record(expert_matrix_name(layer, expert, part))

    def first_range(self) -> tuple[str, int, int]:
        """(file, offset, bytes) of the first expert's first piece, whole pages."""
        piece = self.table[self.keys[0]].pieces[0]
        begin = piece.offset // PAGE_BYTES * PAGE_BYTES
        return self.file_names[piece.file], begin, round_up(piece.offset + piece.nbytes, PAGE_BYTES) - begin

    def is_recoded(self, record) -> bool:
        return record.layout is None and not self.compact

    def layout_name(self, record) -> str:
        return record.layout or self.context.layout_of(record.format)

    def _file_number(self, name: str) -> int:
        if name not in self._file_numbers:
            self._file_numbers[name] = len(self.file_names)
            self.file_names.append(name)
        return self._file_numbers[name]

    def _place(self, key: int, layer: int, expert: int) -> None:
        records = [self.record(layer, expert, part) for part in EXPERT_PARTS]
        entry, at, where = self.table[key], 0, {}
        for number, group in enumerate(_pieces(records)):
            first, last = group[0], group[-1]
            piece = entry.pieces[number]
            piece.file, piece.offset = self._file_number(first.file), first.offset
            piece.nbytes, piece.slot_offset = last.offset + last.nbytes - first.offset, at
            entry.num_pieces = number + 1
            for record in group:
                inside = record.offset - first.offset
                where[record.name] = (number, inside, at + first.offset % PAGE_BYTES + inside)
            at += round_up(piece.offset % PAGE_BYTES + piece.nbytes, PAGE_BYTES)
            self.file_bytes += sum(record.nbytes for record in group)
        if any(map(self.is_recoded, records)):
            self.staging_bytes = max(self.staging_bytes, at)
            self.offsets[key], at = self._recode(entry, records, where)
        else:
            self.offsets[key] = tuple(where[record.name][2] for record in records)
        self.slot_bytes = max(self.slot_bytes, at)

    def _recode(self, entry, records, where) -> tuple[tuple, int]:
        """Fill in the re-coding of an expert. Returns the matrices' places in the slot and its size."""
        places, at = [], 0
        entry.num_recodes = len(records)
        for record, recode in zip(records, entry.recodes, strict=True):
            layout = self.layout_name(record)
            recode.format = self.context.format(record.format) if record.layout is None else ffi.NULL
            recode.layout = self.context.layout(layout)
            recode.rows, recode.cols, recode.nbytes = record.rows, record.cols, record.nbytes
            recode.piece, recode.to = where[record.name][0], at
            setattr(recode, "from", where[record.name][1])
            places.append(at)
            at = round_up(at + self.context.matrix_bytes(layout, record.rows, record.cols), _STRIP_ALIGN_BYTES)
        return tuple(places), round_up(at, PAGE_BYTES)
