"""Models without their weights: records made from a config.json, and a loader that fills matrices with random blocks.

What runs on it costs what the real model costs: formats, layouts, shapes and number of layers are the model's own. Only
the memory is shared: layer n uses the bytes of layer n mod `distinct`, which are more than a cache holds where the
model's are.
"""

import json
from pathlib import Path

import numpy as np

from .doctor import finite_rows
from .errors import ConfigError
from .experts import ResidentExperts
from .formats import get_format
from .kernels import Context, Matrix, aligned_empty
from .layers import Vector
from .weights.architectures import expected_tensors, model_config
from .weights.base import ModelFiles, TensorRecord
from .weights.loader import WeightLoader

NORM, SMALL_NORM = 1e-2, 1e-4  # the second keeps finite what random scales of formats that are only read produce
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
    """Weights of the right form with random contents. pool_bytes: about what distinct layers may take."""

    def __init__(self, files, context: Context, *, compact_experts: bool, pool_bytes: int):
        super().__init__(files, context, compact_experts=compact_experts)
        self._rng, self._made, self._experts = np.random.default_rng(1), {}, {}
        only_read = any(get_format(r.format).max_relative_error is None for r in files.tensors.values())
        self._norm = SMALL_NORM if only_read else NORM
        layers = files.model_config.num_hidden_layers
        in_layers = sum(r.nbytes for r in files.tensors.values() if r.name.startswith("layers."))
        self.distinct = max(1, min(layers, pool_bytes * layers // max(in_layers, 1)))

    def vector(self, name: str, size: int) -> Vector:
        record = self._record(name, (size,))
        return Vector(np.full(size, self._norm if record.role == "norm" else 0.0, np.float32))

    def _matrix(self, name: str, rows: int, cols: int, mapped: bool, compact: bool) -> Matrix:
        record = self._record(name, (rows, cols))
        layer = int(name.split(".")[1]) % self.distinct if name.startswith("layers.") else -1
        stem = name.split(".", 2)[2] if layer >= 0 else name
        key = layer, stem, record.format, record.layout, rows, cols
        if key not in self._made:
            self._made[key] = self._random(record, compact)
        return Matrix(self.context, *self._made[key])

    def _random(self, record, compact: bool) -> tuple:
        """Arguments of a Matrix. A few random rows, repeated."""
        context, rows, cols = self.context, record.rows, record.cols
        seed_key = record.format, min(rows, _SEED_ROWS), cols
        if seed_key not in self._made:
            group = context.format(record.format).group_rows
            count = rows if group and rows % _SEED_ROWS else min(rows, _SEED_ROWS)
            self._made[seed_key] = finite_rows(context, record.format, count, cols, self._rng)
        seed = self._made[seed_key]
        storage = aligned_empty(rows * context.row_bytes(record.format, cols))
        _repeat(storage, seed.reshape(-1))
        if record.layout is None and compact:
            matrix = context.matrix(record.format, storage, rows, cols, compact=True)
        else:
            matrix = context.matrix(record.format, storage, rows, cols)
        return matrix.layout, matrix.strips, rows, cols, record.format, matrix.compact

    def experts(self, layer: int, num_experts: int, width: int, hidden_size: int):
        key = layer % self.distinct, num_experts, width, hidden_size
        if key not in self._experts:
            shapes = {"gate_proj": (width, hidden_size), "up_proj": (width, hidden_size),
                      "down_proj": (hidden_size, width)}  # fmt: skip
            prefix = f"layers.{layer}.mlp.experts"
            self._experts[key] = ResidentExperts(
                [
                    tuple(
                        self._matrix(f"{prefix}.{e}.{part}", *shape, True, self.compact_experts)
                        for part, shape in shapes.items()
                    )
                    for e in range(num_experts)
                ]
            )
        return self._experts[key]


def _repeat(out: np.ndarray, block: np.ndarray) -> None:
    for at in range(0, len(out), len(block)):
        part = out[at : at + len(block)]
        part[:] = block[: len(part)]
