"""Runtime options, and typed reads of a model's config.json that refuse what would change the mathematics."""

import os
import re
from dataclasses import dataclass
from numbers import Integral

from .errors import ConfigError

ISA_VARIABLE = "MILLSTREAM_ISA"
MAX_THREADS = 1024
DRAFT_SOURCES = ("lookup", "mtp", "model")  # in the order in which they are asked
MAX_WINDOW_ROWS = 8  # rows of a verify window: as many as one kernel call takes
MAX_READERS = 64
EXPERT_LAYOUTS = ("auto", "fast", "compact")
ARITHMETICS = ("canonical", "float")
IO_MODES = ("auto", "direct", "buffered", "mmap")
LOOKAHEAD_MODES = ("auto", "on", "off")
TUNE_ENDING = ".tune.json"  # of the settings kept beside a model
CACHE_POLICIES = ("score", "lru", "lfu")  # docs/cache-policies.md
_MAX_INTEGER = (1 << 31) - 1  # sizes and positions are C ints in the native code


@dataclass(frozen=True)
class RuntimeConfig:
    """What the user chooses for a run.

    threads: worker threads including the caller; None = one per usable physical CPU.
    isa: exact CPU tier; None = MILLSTREAM_ISA when set (for tests), else the best this CPU runs.
    ctx: positions kept in the KV cache; None = the model's max_position_embeddings.
    kv: element type of the KV cache, "f16" or "f32".
    arith: "canonical" = quantized weights meet int8 activations; "float" = float32 activations, weights dequantized.
    expert_layout: "fast" = experts re-coded to strips as they are used, "compact" = storage rows re-coded in every
    call, "auto".
    draft_model: directory or file of a small model that drafts tokens for speculation.
    cut_drafts: whether a window loses drafts whose experts would have to be read, where that is worth more.
    mtp: load the model's own layer for multi-token prediction, which drafts for speculation.
    ram: GiB that this process may take; None = what it can have without swapping or being killed.
    expert_slots: experts in memory; None = as many as ram allows, or all of them without streaming.
    io: how experts are read: "auto", "direct", "buffered" or "mmap". readers: threads that read; None = default.
    lookahead: "on" = read experts that the next layer will probably want, "auto" = while that pays, "off".
    cache_policy: who leaves the cache, one of CACHE_POLICIES. pin: usage history or route trace whose most used experts
    stay in memory, or "auto" for the history beside the model. history: whether a run that streams adds to it.
    lock: keep weights locked in memory.
    force_tokenizer: name of the pre-tokenizer to use with a GGUF file, whatever the file says.
    """

    threads: int | None = None
    isa: str | None = None
    ctx: int | None = None
    kv: str = "f16"
    expert_layout: str = "auto"
    arith: str = "canonical"
    draft_model: str | None = None
    cut_drafts: bool = True
    mtp: bool = False
    ram: float | None = None
    expert_slots: int | None = None
    io: str = "auto"
    readers: int | None = None
    lookahead: str = "auto"
    cache_policy: str = "score"
    pin: str | None = None
    history: bool = True
    lock: bool = False
    force_tokenizer: str | None = None

    def __post_init__(self):
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"threads: got {self.threads}, expected 1 to {MAX_THREADS}")
        if self.ctx is not None and self.ctx < 1:
            raise ConfigError(f"ctx: got {self.ctx}, expected at least 1")
        if self.kv not in ("f16", "f32"):
            raise ConfigError(f"kv: got {self.kv!r}, expected f16 or f32")
        if self.arith not in ARITHMETICS:
            raise ConfigError(f"arith: got {self.arith!r}, expected canonical or float")
        if self.expert_layout not in EXPERT_LAYOUTS:
            raise ConfigError(f"expert_layout: got {self.expert_layout!r}, expected auto, fast or compact")
        if self.ram is not None and not 0 < self.ram < 1 << 20:
            raise ConfigError(f"ram: got {self.ram}, expected GiB, more than 0")
        if self.io not in IO_MODES:
            raise ConfigError(f"io: got {self.io!r}, expected auto, direct, buffered or mmap")
        if self.lookahead not in LOOKAHEAD_MODES:
            raise ConfigError(f"lookahead: got {self.lookahead!r}, expected auto, on or off")
        if self.readers is not None and not 1 <= self.readers <= MAX_READERS:
            raise ConfigError(f"readers: got {self.readers}, expected 1 to {MAX_READERS}")
        if self.cache_policy not in CACHE_POLICIES:
            raise ConfigError(f"cache_policy: got {self.cache_policy!r}, expected one of {', '.join(CACHE_POLICIES)}")
        if self.isa is None and os.environ.get(ISA_VARIABLE):
            object.__setattr__(self, "isa", os.environ[ISA_VARIABLE])


def parse_spec(spec) -> int | str:
    """Rows of a verify window, 0 to 8, or "auto". Raises ConfigError."""
    if isinstance(spec, str):
        if spec == "auto":
            return spec
        rows = int(spec) if re.fullmatch("[0-9]{1,4}", spec) else -1
    else:  # a truth value or a fraction is a mistake, not a number of rows
        rows = int(spec) if isinstance(spec, Integral) and not isinstance(spec, bool) else -1
    if not 0 <= rows <= MAX_WINDOW_ROWS:
        raise ConfigError(f"--spec: got {spec!r}, expected 0 to {MAX_WINDOW_ROWS} rows of a window, or auto")
    return rows


def check_draft_sources(names) -> None:
    """Raise ConfigError for names that are no draft sources, none at all, or one twice."""
    if not isinstance(names, list | tuple):
        raise ConfigError(f"--draft: got {names!r}, expected a list of {', '.join(DRAFT_SOURCES)}")
    unknown = [name for name in names if name not in DRAFT_SOURCES]
    if unknown or not names:
        got, known = ", ".join(map(str, unknown)) or "nothing", ", ".join(DRAFT_SOURCES)
        raise ConfigError(f"--draft: got {got}, expected one or more of {known}")
    if len(set(names)) < len(names):
        raise ConfigError(f"--draft: {', '.join(names)} names a source twice")


class ConfigReader:
    """Typed access to config.json: a missing key or a wrong type is an error that names the key; every key must be
    read, listed as harmless, or absent, so that a setting that changes the model is never ignored."""

    def __init__(self, config: dict, where: str = "config.json"):
        self._config, self._where, self._seen = config, where, set()

    def _get(self, key, default, required):
        self._seen.add(key)
        value = self._config.get(key)
        if value is None:
            if required:
                raise ConfigError(f"{self._where}: key {key!r} is missing")
            return default
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Integer from minimum to 2^31 - 1; required when default is None."""
        value = self._get(key, default, default is None)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"{self._where}: {key} = {value!r}, expected an integer >= {minimum}")
        if value > _MAX_INTEGER:
            raise ConfigError(f"{self._where}: {key} is out of range (at most {_MAX_INTEGER})")
        return value

    def number(self, key: str, default: float | None = None, *, optional: bool = False) -> float | None:
        """Finite number; required when default is None and not optional."""
        value = self._get(key, default, default is None and not optional)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value != value
            or abs(value) == float("inf")
        ):
            raise ConfigError(f"{self._where}: {key} = {value!r}, expected a number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """Finite number above 0; required when default is None."""
        value = self.number(key, default)
        if not value > 0:
            raise ConfigError(f"{self._where}: {key} = {value!r}, expected a positive number")
        return value

    def numbers(self, key: str) -> list[float]:
        """List of positive finite numbers."""
        value = self._get(key, None, True)
        if not isinstance(value, list) or not all(isinstance(x, int | float) and 0 < x < float("inf") for x in value):
            raise ConfigError(f"{self._where}: {key} = {str(value)[:60]}, expected a list of positive numbers")
        return [float(x) for x in value]

    def integers(self, key: str) -> list[int]:
        """List of whole numbers, empty when absent."""
        value = self._get(key, [], False)
        if not isinstance(value, list) or not all(type(x) is int for x in value):
            raise ConfigError(f"{self._where}: {key} = {str(value)[:60]}, expected a list of whole numbers")
        return value

    def strings(self, key: str, default: list[str]) -> list[str]:
        """List of texts."""
        value = self._get(key, default, False)
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise ConfigError(f"{self._where}: {key} = {str(value)[:60]}, expected a list of texts")
        return value

    def text(self, key: str, default: str | None) -> str | None:
        value = self._get(key, default, False)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self._where}: {key} = {value!r}, expected a text")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self._where}: {key} = {value!r}, expected true or false")
        return value

    def table(self, key: str) -> dict:
        value = self._get(key, {}, False)
        if not isinstance(value, dict):
            raise ConfigError(f"{self._where}: {key} = {value!r}, expected an object")
        return value

    def only(self, key: str, *allowed) -> None:
        """Refuse the model when the key is present with a value this engine does not compute."""
        value = self._get(key, None, False)
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{self._where}: {key} = {value!r} is not supported (only {', '.join(map(repr, allowed)) or 'null'})"
            )

    def finish(self, harmless: set[str]) -> None:
        """Refuse keys that nobody read and that are not known to be harmless."""
        unknown = sorted(k for k in self._config if k not in self._seen and k not in harmless and not k.startswith("_"))
        if unknown:
            raise ConfigError(
                f"{self._where}: unknown keys {', '.join(unknown)} may change the mathematics of this architecture; "
                "remove them if they do not"
            )
