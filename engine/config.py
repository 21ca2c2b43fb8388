"""Runtime options, and typed reads of a model's config.json that refuse what would change the mathematics."""

import os
from dataclasses import dataclass

from .errors import ConfigError

ISA_VARIABLE = "MILLSTREAM_ISA"
MAX_THREADS = 1024
_MAX_INTEGER = (1 << 31) - 1  # sizes and positions are C ints in the native code


@dataclass(frozen=True)
class RuntimeConfig:
    """What the user chooses for a run.

    threads: worker threads including the caller; None = one per usable physical CPU.
    isa: exact CPU tier; None = MILLSTREAM_ISA when set (for tests), else the best this CPU runs.
    ctx: positions kept in the KV cache; None = the model's max_position_embeddings.
    kv: element type of the KV cache, "f16" or "f32".
    expert_layout: "fast" = experts re-coded to strips at load, "compact" = storage rows re-coded in every call, "auto".
    """

    threads: int | None = None
    isa: str | None = None
    ctx: int | None = None
    kv: str = "f16"
    expert_layout: str = "auto"

    def __post_init__(self):
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"threads: got {self.threads}, expected 1 to {MAX_THREADS}")
        if self.ctx is not None and self.ctx < 1:
            raise ConfigError(f"ctx: got {self.ctx}, expected at least 1")
        if self.kv not in ("f16", "f32"):
            raise ConfigError(f"kv: got {self.kv!r}, expected f16 or f32")
        if self.expert_layout not in ("auto", "fast", "compact"):
            raise ConfigError(f"expert_layout: got {self.expert_layout!r}, expected auto, fast or compact")
        if self.isa is None and os.environ.get(ISA_VARIABLE):
            object.__setattr__(self, "isa", os.environ[ISA_VARIABLE])


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
