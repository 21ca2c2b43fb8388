"""Models without their weights: records made from a config.json, and a loader that fills matrices with random blocks.

What runs on it costs what the real model costs: formats, layouts, shapes, number of layers and sizes of pages are the
model's own. Only memory may be shared, where the model is larger than the pool, which is more than a cache holds.
"""

import json
import mmap
from pathlib import Path

import numpy as np

from .doctor import finite_rows
from .errors import ConfigError
from .experts import ResidentExperts
from .experts.layout import ROWS_ARE_STRIPS
from .formats import get_format
from .kernels import Context, Matrix, aligned_empty, weights_empty
from .layers import Vector
from .weights.architectures import EXPERT_PARTS, expected_tensors, expert_ids, expert_matrix_name, model_config
from .weights.base import ModelFiles, TensorRecord
from .weights.loader import WeightLoader

# Weights of norms, so small that a hidden state stays nearly its token's embedding: what attention adds is the same for
# all tokens, and would make them all choose the same experts. The second is for formats that are only read: random
# scales are large.
NORM, SMALL_NORM = 1e-4, 1e-12
_SEED_ROWS = 256  # random rows of a matrix; the others repeat them


class PlannedFiles(ModelFiles):
    """Records of a model that is not here: matrices as storage rows of one format, routers and vectors as float32."""

    kind = "plan"

    def __init__(self, config_path: str, format_name: str):
        config = _read_config(config_path)
        architecture = str(config.get("model_type"))
        super().__init__(Path(config_path), architecture, config, {})
        self.model_config = model_config(architecture, config)
        self.tied_head = self.model_config.tie_word_embeddings
        at = 0
        for name, want in expected_tensors(architecture, config, num_listed=10**9).items():
            small = len(want.shape) == 1 or want.role == "router"
            record_format = get_format("f32" if small else format_name)
            rows = want.shape[0] if len(want.shape) == 2 else 1
            nbytes = rows * record_format.row_bytes(want.shape[-1])
            form = (record_format.name, record_format.version, None, tuple(want.shape))
            self.tensors[name] = TensorRecord(name, *form, want.role, "model", at, nbytes, "")
            at += -(-nbytes // 32) * 32
        self.files = {"model": at}


def _read_config(path: str) -> dict:
    try:
        config = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"--config {path}: not JSON; give the config.json of a Hugging Face model") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--config {path}: got {type(config).__name__}, expected an object")
    return config


class SyntheticLoader(WeightLoader):
    """Weights of the right form with random contents, in memory of their own as far as the pool goes.

    pool_bytes: about what the layers may take; where the model's do not fit, layers share their dense weights, and draw
    their experts, each layer others, from a pool that all share. own_bytes: what was made. mapped: the run uses the
    file's pages where they hold what kernels read, so these lie in small pages here, too, as those of a file do.
    """

    def __init__(self, files, context: Context, *, compact_experts: bool, pool_bytes: int, mapped: bool = True):
        super().__init__(files, context, compact_experts=compact_experts)
        self._rng, self._made, self._pools = np.random.default_rng(1), {}, {}
        self._mapped, self.own_bytes = mapped, 0
        only_read = any(get_format(r.format).max_relative_error is None for r in files.tensors.values())
        self._norm = SMALL_NORM if only_read else NORM
        layers = files.model_config.num_hidden_layers
        experts = {expert_matrix_name(*at, part) for at in expert_ids(files.tensors) for part in EXPERT_PARTS}
        in_layers = {n: r.nbytes for n, r in files.tensors.items() if n.startswith("layers.")}
        dense = sum(nbytes for name, nbytes in in_layers.items() if name not in experts)
        routed = sum(in_layers.values()) - dense
        dense_pool = min(dense, pool_bytes if not routed else pool_bytes // 2)
        self._dense_layers = max(1, min(layers, dense_pool * layers // max(dense, 1)))
        self._expert_share = min(1.0, (pool_bytes - dense_pool) / max(routed, 1))

    def vector(self, name: str, size: int) -> Vector:
        record = self._record(name, (size,))
        return Vector(np.full(size, self._norm if record.role == "norm" else 0.0, np.float32))

    def _matrix(self, name: str, rows: int, cols: int, mapped: bool, compact: bool) -> Matrix:
        record = self._record(name, (rows, cols))
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        if record.role != "router":  # small, and what makes layers choose different experts
            layer %= self._dense_layers
        stem = name.split(".", 2)[2] if name.startswith("layers.") else name
        key = layer, stem, record.format, record.layout, rows, cols
        if key not in self._made:
            in_file = mapped and (record.layout is not None or record.format in ROWS_ARE_STRIPS)
            self._made[key] = self._own(self._random(record, compact), self._mapped and (in_file or compact))
        return Matrix(self.context, *self._made[key])

    def _random(self, record, compact: bool) -> tuple:
        """Arguments of a Matrix. A few random rows, repeated; a router's are its own."""
        context, rows, cols = self.context, record.rows, record.cols
        seed_key = record.format, min(rows, _SEED_ROWS), cols
        if record.role == "router":
            seed = self._router_rows(record)
        elif seed_key in self._made:
            seed = self._made[seed_key]
        else:
            group = context.format(record.format).group_rows
            count = rows if group and rows % _SEED_ROWS else min(rows, _SEED_ROWS)
            seed = self._made[seed_key] = finite_rows(context, record.format, count, cols, self._rng)
        storage = aligned_empty(rows * context.row_bytes(record.format, cols))
        _repeat(storage, seed.reshape(-1))
        matrix = context.matrix(record.format, storage, rows, cols, compact=record.layout is None and compact)
        return matrix.layout, matrix.strips, rows, cols, record.format, matrix.compact

    def _router_rows(self, record) -> np.ndarray:
        """Logits of about 1 in spite of small norms, so that they are no ties."""
        scale = 1 / (self._norm * record.cols**0.5)
        values = self._rng.standard_normal((record.rows, record.cols), np.float32) * scale
        if record.format == "f16":
            values = np.clip(values, -6e4, 6e4)
        return self.context.quantize(record.format, values.astype(np.float32))

    def _own(self, form: tuple, small_pages: bool) -> tuple:
        """Arguments of a Matrix of the same contents in memory of its own."""
        layout, data, *rest = form
        copy = _file_pages(data.nbytes) if small_pages else weights_empty(data.nbytes)
        copy[:] = data.reshape(-1).view(np.uint8)
        self.own_bytes += data.nbytes
        return layout, copy, *rest

    def experts(self, layer: int, num_experts: int, width: int, hidden_size: int):
        """Experts of the pool, in an order of the layer's own."""
        shapes = ((width, hidden_size), (width, hidden_size), (hidden_size, width))
        names = (expert_matrix_name(layer, 0, part) for part in EXPERT_PARTS)
        records = [self._record(name, shape) for name, shape in zip(names, shapes, strict=True)]
        key = tuple((r.format, r.layout, r.rows, r.cols) for r in records)
        pool = self._pools.setdefault(key, [])
        if len(pool) < num_experts or self._expert_share == 1.0:
            wanted = num_experts if self._expert_share == 1.0 else self._pool_size(key, num_experts)
            forms = [self._random(record, self.compact_experts) for record in records]
            as_stored = all(r.layout is not None or r.format in ROWS_ARE_STRIPS for r in records)
            in_file = self.compact_experts or as_stored
            new = [tuple(Matrix(self.context, *self._own(f, self._mapped and in_file)) for f in forms)
                   for _ in range(wanted)]  # fmt: skip
            pool += new
            if self._expert_share == 1.0:
                return ResidentExperts(new)
        chosen = self._rng.choice(len(pool), num_experts, replace=False)
        return ResidentExperts([pool[n] for n in chosen])

    def _pool_size(self, key: tuple, num_experts: int) -> int:
        """Experts of one form: their share of the pool, at least those of one layer."""
        alike = 0
        for layer, expert in expert_ids(self.files.tensors):
            records = (self.files.tensors[expert_matrix_name(layer, expert, part)] for part in EXPERT_PARTS)
            alike += tuple((r.format, r.layout, r.rows, r.cols) for r in records) == key
        return max(num_experts, int(alike * self._expert_share))


def _file_pages(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] in pages as small as those of a mapped file."""
    mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def _repeat(out: np.ndarray, block: np.ndarray) -> None:
    for at in range(0, len(out), len(block)):
        part = out[at : at + len(block)]
        part[:] = block[: len(part)]
