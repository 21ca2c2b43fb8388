"""A model that is not here: its records, made from a config.json and the name of a format."""

import json
from collections import Counter
from pathlib import Path

from .errors import ConfigError, EngineError, FormatError
from .experts.layout import ROLES as EXPERT_ROLES
from .formats import get_format
from .weights.architectures import expected_tensors, model_config, readable_quantization
from .weights.base import ModelFiles, TensorRecord
from .weights.quantization import method_of

# For rows that are no whole blocks of the format asked for, as converters choose in practice: the first that fits.
FALLBACKS = ("q8_0", "f16")


class PlannedFiles(ModelFiles):
    """Records of a model that is not here: matrices as storage rows of a format, routers and vectors as float32.

    Experts that a checkpoint holds quantized in a way that is kept when it is converted keep that format; any other
    quantization_config counts for nothing: the weights are taken as if converted to the format asked for. A matrix
    that does not divide into the format's blocks takes one of FALLBACKS. assumptions: sentences that say so.
    """

    kind = "plan"

    def __init__(self, config_path: str, format_name: str):
        config = _read_config(config_path)
        architecture, method = str(config.get("model_type")), method_of(config)
        config.pop("quantization_config", None)
        super().__init__(Path(config_path), architecture, config, {})
        try:
            self.model_config = model_config(architecture, config)
        except EngineError as error:
            raise type(error)(str(error).replace("config.json", str(self.path), 1)) from None
        self.tied_head = self.model_config.tie_word_embeddings
        kept = method if method in readable_quantization(architecture) else None
        self.assumptions = [] if method is None else [_about_quantization(method, kept, format_name)]
        replaced, at = Counter(), 0
        forms: dict[tuple, tuple] = {}  # tens of thousands of experts have a few
        for name, want in expected_tensors(architecture, config, num_listed=10**9).items():
            if want[:2] not in forms:
                small = len(want.shape) == 1 or want.role == "router"
                wanted = "f32" if small else kept if kept and want.role in EXPERT_ROLES else format_name
                rows = want.shape[0] if len(want.shape) == 2 else 1
                found = _fitting(wanted, rows, want.shape[-1])
                nbytes = rows * found.row_bytes(want.shape[-1])
                forms[want[:2]] = wanted, nbytes, (found.name, found.version, None, tuple(want.shape))
            wanted, nbytes, form = forms[want[:2]]
            if form[0] != wanted:
                replaced[wanted, want.role, want.shape, form[0]] += 1
            self.tensors[name] = TensorRecord(name, *form, want.role, "model", at, nbytes, "")
            at += -(-nbytes // 32) * 32
        self.files = {"model": at}
        self.assumptions += _about_replaced(replaced)


def _fitting(wanted: str, rows: int, cols: int):
    """The format wanted, or the first of FALLBACKS that can hold such a matrix. Raises FormatError when none can."""
    for name in (wanted, *FALLBACKS):
        found = get_format(name)
        try:
            found.row_bytes(cols)
            found.check_rows(rows)
        except FormatError:
            continue
        return found
    raise FormatError(f"no format here holds a matrix of {rows} x {cols}; is the config.json that of a model?")


def _about_quantization(method: str, kept: str | None, format_name: str) -> str:
    if kept is None:
        return f"quantization_config ({method}) is left out: weights are taken as converted to {format_name}"
    return f"experts stay {kept}, as released (quantization_config); {format_name} is for the other matrices"


def _about_replaced(replaced: Counter) -> list[str]:
    """A line for each format that could not hold all of its matrices."""
    lines = []
    for wanted in dict.fromkeys(key[0] for key in replaced):
        parts = [
            f"{count} {role} of {shape[0]} x {shape[1]} {found}"
            for (name, role, shape, found), count in replaced.items()
            if name == wanted
        ]
        form = get_format(wanted)
        whole = f"rows of whole blocks of {form.block_len} weights" + (
            f" and {form.group_rows} rows together" if form.group_rows else ""
        )
        lines.append(f"{wanted} holds {whole}; matrices that are not take another format: {', '.join(parts)}")
    return lines


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
