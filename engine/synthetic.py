"""Models without their weights: a loader that fills matrices with random blocks.

What runs on it costs what the real model costs: formats, layouts, shapes, number of layers and sizes of pages are the
model's own. Only memory may be shared, where the model is larger than the pool, which is more than a cache holds.
"""

import mmap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from .doctor import finite_rows
from .experts import ResidentExperts
from .experts.layout import ROLES as EXPERT_ROLES
from .experts.layout import ROWS_ARE_STRIPS
from .formats import get_format
from .kernels import Context, Matrix, aligned_empty, weights_empty
from .layers import Vector
from .weights.architectures import EXPERT_PARTS, expert_ids, expert_matrix_name
from .weights.loader import WeightLoader

# Weights of norms, so small that a hidden state stays nearly its token's embedding: what attention adds is the same for
# all tokens, and would make them all choose the same experts. The second is for formats that are only read: random
# scales are large.
NORM, SMALL_NORM = 1e-4, 1e-12
MIN_POOL = 16  # experts that layers share, at least
EMBEDDED_IDS = 256  # token ids below it have an embedding, and no others: most of a table is never looked at
_SEED_ROWS = 32  # random rows of another matrix; further ones repeat them
_SMALL_BYTES = 1 << 20  # what one thread fills


class SyntheticLoader(WeightLoader):
    """Weights of the right form with random contents, in memory of their own as far as the pool goes.

    pool_bytes: about what the layers may take; where the model's do not fit, layers share their dense weights, and draw
    their experts, each layer others, from a pool that all share. own_bytes: what was made. mapped: the run uses the
    file's pages where they hold what kernels read, so these lie in small pages here, too, as those of a file do.
    layers: those that will be asked for, None for all. head_rows: of the head, that are made.
    """

    def __init__(self, files, context: Context, *, compact_experts: bool, pool_bytes: int, mapped: bool = True,
                 layers=None, head_rows: int | None = None):  # fmt: skip
        super().__init__(files, context, compact_experts=compact_experts)
        self._head_rows = head_rows
        self._rng, self._made, self._pools = np.random.default_rng(1), {}, {}
        self._mapped, self.own_bytes = mapped, 0
        only_read = any(get_format(r.format).max_relative_error is None for r in files.tensors.values())
        self._norm = SMALL_NORM if only_read else NORM
        chosen = range(files.model_config.num_hidden_layers) if layers is None else sorted(layers)
        self._place = {layer: place for place, layer in enumerate(chosen)}
        in_layers = [r for n, r in files.tensors.items() if n.startswith("layers.") and _layer_of(n) in self._place]
        dense = sum(r.nbytes for r in in_layers if r.role not in EXPERT_ROLES)
        routed = sum(r.nbytes for r in in_layers) - dense
        self._alike = self._experts_alike()
        dense_pool = min(dense, pool_bytes if not routed else pool_bytes // 2)
        self._dense_layers = max(1, min(len(self._place), dense_pool * len(self._place) // max(dense, 1)))
        self._expert_share = min(1.0, (pool_bytes - dense_pool) / max(routed, 1))

    def vector(self, name: str, size: int) -> Vector:
        record = self._record(name, (size,))
        return Vector(np.full(size, self._norm if record.role == "norm" else 0.0, np.float32))

    def _matrix(self, name: str, rows: int, cols: int, mapped: bool, compact: bool) -> Matrix:
        record = self._record(name, (rows, cols))
        if record.role == "head" and self._head_rows:
            rows = self._head_rows
            record = replace(record, shape=(rows, cols))
        layer = self._place[_layer_of(name)] if name.startswith("layers.") else 0
        if record.role != "router":  # small, and what makes layers choose different experts
            layer %= self._dense_layers
        stem = name.split(".", 2)[2] if name.startswith("layers.") else name
        key = layer, stem, record.format, record.layout, rows, cols
        if key not in self._made:
            in_file = mapped and (record.layout is not None or record.format in ROWS_ARE_STRIPS)
            lookup = record.role == "embed" and not self.files.tied_head
            if lookup and self.context.format(record.format).group_rows:
                record = replace(record, format="f16", layout=None)  # rows that stand alone; looking them up is nothing
            small_pages = self._mapped and (in_file or compact)
            self._made[key] = self._own(self._random(record, compact), small_pages, lookup)
        return Matrix(self.context, *self._made[key])

    def _random(self, record, compact: bool) -> tuple:
        """(its first bytes, which repeat; their number in all; arguments of a Matrix but its bytes). A few random rows,
        repeated; a router's are its own."""
        context, rows, cols, name = self.context, record.rows, record.cols, record.format
        compact = record.layout is None and compact
        # Rows that share data are stored as a whole; their strips stand alone like all others.
        most = rows if context.format(name).group_rows and compact else _SEED_ROWS
        count = min(rows, EMBEDDED_IDS if record.role == "embed" else most)
        seed_key = name, count, cols
        if record.role == "router":
            seed = self._router_rows(record)
        elif seed_key in self._made:
            seed = self._made[seed_key]
        else:
            seed = self._made[seed_key] = finite_rows(context, name, count, cols, self._rng)
        storage = aligned_empty(seed.size)
        storage[:] = seed.reshape(-1)
        matrix = context.matrix(name, storage, len(seed), cols, compact=compact)
        if matrix.compact:
            total = rows * context.row_bytes(name, cols)
        else:
            total = context.matrix_bytes(matrix.layout, rows, cols)
        first = matrix.strips.reshape(-1).view(np.uint8)[: matrix.num_bytes]
        return first, total, (matrix.layout, rows, cols, name, matrix.compact)

    def _router_rows(self, record) -> np.ndarray:
        """Logits of about 1 in spite of small norms, so that they are no ties."""
        scale = 1 / (self._norm * record.cols**0.5)
        values = self._rng.standard_normal((record.rows, record.cols), np.float32) * scale
        if record.format == "f16":
            values = np.clip(values, -6e4, 6e4)
        return self.context.quantize(record.format, values.astype(np.float32))

    def _own(self, form: tuple, small_pages: bool, lookup: bool = False) -> tuple:
        """Arguments of a Matrix of such contents in memory of its own. lookup: only its first rows will be read."""
        first, num_bytes, (layout, *rest) = form
        own = _file_pages(num_bytes) if small_pages else weights_empty(num_bytes)
        self._repeat(own[: len(first)] if lookup else own, first)
        self.own_bytes += num_bytes
        return layout, own, *rest

    def _repeat(self, out: np.ndarray, block: np.ndarray) -> None:
        """Fill out with copies of block, by several threads: memory that nobody used yet takes long to get."""
        count = self.context.num_threads
        if count == 1 or len(out) <= _SMALL_BYTES:
            _repeat(out, block, 0, len(out))
            return
        bounds = [len(out) * n // count for n in range(count + 1)]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda start, end: _repeat(out, block, start, end), bounds[:-1], bounds[1:]))

    def experts(self, layer: int, num_experts: int, width: int, hidden_size: int):
        """Experts of the pool, in an order of the layer's own."""
        shapes = ((width, hidden_size), (width, hidden_size), (hidden_size, width))
        names = (expert_matrix_name(layer, 0, part) for part in EXPERT_PARTS)
        records = [self._record(name, shape) for name, shape in zip(names, shapes, strict=True)]
        key = _form(records)
        if self._expert_share == 1.0:
            return ResidentExperts(self._new_experts(records, num_experts))
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._new_experts(records, self._pool_size(key, num_experts))
        # An expert twice in a layer is as far away in memory as two others, as long as the pool outgrows the caches.
        chosen = self._rng.choice(len(pool), num_experts, replace=len(pool) < num_experts)
        return ResidentExperts([pool[n] for n in chosen])

    def _new_experts(self, records, count: int) -> list[tuple]:
        forms = [self._random(record, self.compact_experts) for record in records]
        as_stored = all(r.layout is not None or r.format in ROWS_ARE_STRIPS for r in records)
        small_pages = self._mapped and (self.compact_experts or as_stored)
        return [tuple(Matrix(self.context, *self._own(form, small_pages)) for form in forms) for _ in range(count)]

    def _experts_alike(self) -> Counter:
        """How many experts there are of each form."""
        found = Counter()
        for layer, expert in expert_ids(self.files.tensors):
            if layer in self._place:
                found[
                    _form([self.files.tensors[expert_matrix_name(layer, expert, part)] for part in EXPERT_PARTS])
                ] += 1
        return found

    def _pool_size(self, key: tuple, num_experts: int) -> int:
        """Experts of one form: their share of the pool, at least a few."""
        return max(min(num_experts, MIN_POOL), int(self._alike[key] * self._expert_share))


def _layer_of(name: str) -> int:
    return int(name.split(".", 2)[1])


def _form(records) -> tuple:
    """What experts have in common that can stand for each other."""
    return tuple((r.format, r.layout, r.rows, r.cols) for r in records)


def _file_pages(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] in pages as small as those of a mapped file."""
    mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def _repeat(out: np.ndarray, block: np.ndarray, start: int, end: int) -> None:
    """Bytes start .. end of out = those of block after block."""
    at = start
    while at < end:
        inside = at % len(block)
        count = min(len(block) - inside, end - at)
        out[at : at + count] = block[inside : inside + count]
        at += count
