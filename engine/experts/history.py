"""How often each expert of a model was used, kept between runs in one file beside the model, and what to pin by it.

The file is JSON: magic, version, fingerprint of the model's source, tokens seen, uses per layer with experts (counted
from 0) and expert. Uses of more than HISTORY_TOKENS tokens are scaled down, so that the last ones count most. Knows
nothing of caches or of files of weights.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from ..atomic_file import AtomicFile, beside
from ..errors import ConfigError
from .route_trace import MAGIC as TRACE_MAGIC
from .route_trace import RecordedTrace, moe_blocks

MAGIC, VERSION = "millstream-usage", 1
HISTORY_TOKENS = 100_000
PIN_SHARE = 0.5  # of the slots; docs/cache-policies.md has the evidence


def model_fingerprint(files) -> str:
    """Identity of a model's source as hex: of the checkpoint a snapshot was made from, else of the file's directory.

    files: what engine.weights.open_model returns.
    """
    source = getattr(files, "header", None) and getattr(files.header, "source", None)
    if isinstance(source, dict) and source.get("sha256"):
        return str(source["sha256"])
    digest = hashlib.sha256()
    layer = files.mtp_names  # loaded or not, the model is the same
    for name, record in sorted((name, record) for name, record in files.tensors.items() if name not in layer):
        digest.update(f"{name}\0{record.format}\0{record.shape}\0{record.offset}\0{record.nbytes}\0".encode())
    return digest.hexdigest()


def history_path(files) -> Path:
    """Beside the model: a snapshot `dir` has `dir.usage.json`, `file.gguf` has `file.gguf.usage.json`."""
    return beside(files.path, ".usage.json")


class Usage:
    """uses: float64 [L, E], how often each expert was asked for in `tokens` tokens."""

    def __init__(self, fingerprint: str, uses: np.ndarray, tokens: float = 0.0):
        self.fingerprint, self.uses, self.tokens = fingerprint, uses, tokens

    @classmethod
    def empty(cls, fingerprint: str, num_layers: int, num_experts: int) -> "Usage":
        return cls(fingerprint, np.zeros((num_layers, num_experts)))

    def add(self, other: "Usage") -> None:
        """Take in what is newer."""
        self.uses, self.tokens = self.uses + other.uses, self.tokens + other.tokens
        if self.tokens > HISTORY_TOKENS:
            self.uses, self.tokens = self.uses * (HISTORY_TOKENS / self.tokens), float(HISTORY_TOKENS)

    def save(self, path: Path) -> None:
        """Raises OSError where the directory cannot be written."""
        rows = [[float(f"{use:.5g}") for use in layer] for layer in self.uses.tolist()]
        head = {"magic": MAGIC, "version": VERSION, "fingerprint": self.fingerprint, "tokens": round(self.tokens, 1)}
        with AtomicFile(path) as file:
            file.handle.write((json.dumps({**head, "uses": rows}) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> "Usage":
        """Of a usage file or a route trace. Raises ConfigError that says what is wrong, FileNotFoundError."""
        try:
            with path.open("rb") as file:
                is_trace = file.read(len(TRACE_MAGIC)) == TRACE_MAGIC
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        return cls._of_trace(path) if is_trace else cls._of_json(path)

    @classmethod
    def _of_trace(cls, path: Path) -> "Usage":
        trace = RecordedTrace(path)
        usage = cls.empty(trace.header.fingerprint, trace.header.num_layers, trace.header.num_experts)
        for record in trace:
            np.add.at(usage.uses[record.layer], record.ids.ravel(), 1)
        usage.tokens = float(trace.header.num_tokens)
        return usage

    @classmethod
    def _of_json(cls, path: Path) -> "Usage":
        try:
            content = json.loads(path.read_bytes())
            if content["magic"] != MAGIC:
                raise ValueError
            version = content["version"]
            if version == VERSION:
                uses = np.array(content["uses"], np.float64)
                usage = cls(str(content["fingerprint"]), uses, float(content["tokens"]))
                numbers = np.append(uses, usage.tokens)
                if uses.ndim != 2 or not np.all(np.isfinite(numbers)) or numbers.min() < 0:
                    raise ValueError
                return usage
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise ConfigError(f"{path}: is no usage history and no route trace, or broken; remove it") from None
        raise ConfigError(
            f"{path}: usage history version {version}, this millstream reads version {VERSION}; remove it"
        )

    def check(self, path: Path, fingerprint: str, shape: tuple[int, int]) -> None:
        """Raises ConfigError when this is another model's. An empty fingerprint fits every model of the shape."""
        if self.uses.shape != shape or (self.fingerprint and self.fingerprint != fingerprint):
            layers, experts = self.uses.shape
            raise ConfigError(
                f"{path}: recorded with another model ({layers} layers of {experts} experts, source "
                f"{self.fingerprint[:12]}; here {shape[0]} of {shape[1]}, {fingerprint[:12]})"
            )

    def most_used(self, limit: int) -> list[tuple[int, int]]:
        """(layer, expert) of at most `limit` experts that were used, the most used first; ties to the lower."""
        order = np.argsort(-self.uses, axis=None, kind="stable")[:limit]
        return [divmod(int(at), self.uses.shape[1]) for at in order if self.uses.flat[at] > 0]


class UsageRecorder:
    """Counts what the MoE blocks of a model report, from `start` to `stop`."""

    def __init__(self, model, fingerprint: str):
        self._blocks = moe_blocks(model)
        self.usage = Usage.empty(fingerprint, len(self._blocks), self._blocks[0].num_experts)
        self._observers = [self._observer(layer) for layer in range(len(self._blocks))]

    def _observer(self, layer: int):
        usage = self.usage

        def record(ids: np.ndarray, weights: np.ndarray) -> None:
            if len(ids) == 1:
                usage.uses[layer, ids[0]] += 1  # distinct within a token
            else:
                usage.uses[layer] += np.bincount(ids.ravel(), minlength=usage.uses.shape[1])
            usage.tokens += len(ids) if layer == 0 else 0

        return record

    def start(self) -> None:
        for block, observer in zip(self._blocks, self._observers, strict=True):
            block.observers.append(observer)

    def stop(self) -> None:
        for block, observer in zip(self._blocks, self._observers, strict=True):
            block.observers.remove(observer)


def update_history(path: Path, run: Usage) -> str:
    """Add a run to the history beside the model; returns the line that says what became of it. Never raises."""
    try:
        usage = Usage.read(path)
        usage.check(path, run.fingerprint, run.uses.shape)
    except FileNotFoundError:
        usage = Usage.empty(run.fingerprint, *run.uses.shape)
    except ConfigError as error:
        return f"note: usage history not kept: {error}"
    usage.add(run)
    try:
        usage.save(path)
    except OSError as error:
        return f"note: usage history not kept: {path}: {error.strerror} (--history off turns it off)"
    return f"usage history: {path}: {run.tokens:.0f} tokens added, {usage.tokens:.0f} in all"
