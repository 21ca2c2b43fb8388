"""Rotary position embedding: what a config may say about it, and the tables that a model rotates with.

Owns every scaling rule; families say only their default theta. Frequencies and logarithms come from native code that is
alike on every machine; the rules on top use only + - * / on float64, and the result is rounded to float32 once.
Source of the rules: transformers `modeling_rope_utils.py`.
"""

import math
from dataclasses import dataclass

import numpy as np

from .config import ConfigReader
from .errors import ConfigError
from .hardware import memory_limits
from .kernels import address, check, ffi, lib
from .layers import Buffer


@dataclass(frozen=True)
class Scaling:
    """Frequencies unscaled: rope_type "default"."""

    def apply(self, frequencies: list[float], spec: "RopeSpec") -> list[float]:
        """Frequencies of the pairs, changed."""
        return frequencies

    @property
    def attention_factor(self) -> float:
        """Factor of cos and sin."""
        return 1.0


@dataclass(frozen=True)
class Linear(Scaling):
    """Positions divided by factor."""

    factor: float

    def apply(self, frequencies, spec):
        return [f / self.factor for f in frequencies]


@dataclass(frozen=True)
class FrequencyFactors(Scaling):
    """Every frequency divided by its own factor: how GGUF files store the llama3 rule."""

    factors: tuple[float, ...]

    def apply(self, frequencies, spec):
        if len(self.factors) != len(frequencies):
            raise ConfigError(f"rope frequency factors: got {len(self.factors)}, expected {len(frequencies)}")
        return [f / factor for f, factor in zip(frequencies, self.factors, strict=True)]


@dataclass(frozen=True)
class Llama3(Scaling):
    """Long wavelengths divided by factor, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def apply(self, frequencies, spec):
        return [self._scaled(f) for f in frequencies]

    def _scaled(self, frequency: float) -> float:
        turns = self.original_positions * frequency / (2 * math.pi)  # within the original context
        if turns < self.low_freq_factor:
            return frequency / self.factor
        if turns > self.high_freq_factor:
            return frequency
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True)
class Yarn(Scaling):
    """Pairs that turn often are kept, those that turn less than once are divided by factor, with a ramp between.

    attention_scale: factor of cos and sin, None for the value inferred from factor, mscale and mscale_all_dim.
    """

    factor: float
    original_positions: int
    attention_scale: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def apply(self, frequencies, spec):
        low, high = self._dim_of(self.beta_fast, spec), self._dim_of(self.beta_slow, spec)
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, spec.rotary_dim - 1.0)
        if low == high:
            high += 0.001
        scaled = []
        for i, frequency in enumerate(frequencies):
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            scaled.append(frequency / self.factor * ramp + frequency * (1.0 - ramp))
        return scaled

    def _dim_of(self, num_turns: float, spec) -> float:
        """The pair, as a real number, that turns num_turns times in the original context."""
        wavelengths = lib.moe_log(self.original_positions / (num_turns * 2 * math.pi))
        return spec.rotary_dim * wavelengths / (2 * lib.moe_log(spec.theta))

    @property
    def attention_factor(self):
        if self.attention_scale is not None:
            return self.attention_scale
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1, the attention temperature of YaRN; 1 for a factor that extends nothing."""
    return 0.1 * mscale * lib.moe_log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeSpec:
    """One rotation: pair j of the first rotary_dim values of a head turns by position * theta^(-2j/rotary_dim), scaled.

    interleaved: pairs are (2j, 2j + 1), as in checkpoints whose q and k rows were permuted for it; otherwise
    (j, j + rotary_dim / 2).
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: Scaling = Scaling()

    def inv_freq(self) -> np.ndarray:
        """float32 [rotary_dim / 2]."""
        out = ffi.new("double[]", self.rotary_dim // 2)
        check(lib.moe_rope_frequencies(out, self.theta, self.rotary_dim), "rope frequencies")
        return np.array(self.scaling.apply(list(out), self), np.float64).astype(np.float32)


class RopeTable:
    """cos and sin [num_positions, rotary_dim / 2] of one RopeSpec.

    Raises ConfigError when they do not fit into memory: num_positions may come from a config.json that nothing in the
    weights contradicts.
    """

    def __init__(self, spec: RopeSpec, num_positions: int):
        half = spec.rotary_dim // 2
        need, available = 2 * num_positions * half * 4, memory_limits().available_bytes
        if need > available:
            raise ConfigError(
                f"{num_positions} positions need {need} bytes of rotary tables, {available} bytes of memory are "
                "available; choose a smaller --ctx"
            )
        self.rotary_dim, self.num_positions, self.interleaved = spec.rotary_dim, num_positions, spec.interleaved
        inv_freq = spec.inv_freq()
        self.cosines, self.sines = Buffer(num_positions, half), Buffer(num_positions, half)
        pointers = (self.cosines.ptr, self.sines.ptr, address(inv_freq, "float *"))
        check(lib.moe_rope_table(*pointers, half, 0, num_positions, spec.scaling.attention_factor), "rope table")


# ---- what config.json may say ----


def read_rope(
    read: ConfigReader, head_dim: int, default_theta: float, rotary: float = 1.0, interleaved: bool = False
) -> RopeSpec:
    """theta, scaling and the rotated part of a head: at the top level, under rope_scaling or rope_parameters.

    rotary, interleaved: the family's defaults for partial_rotary_factor and rope_interleave.
    Raises ConfigError for a rule that is not computed here, or an entry that its rule does not know, by name.
    """
    where, entry = _entry(read)
    theta = _one_of(read, entry, where, "rope_theta", default_theta)
    rotated = _one_of(read, entry, where, "partial_rotary_factor", rotary)
    rotary_dim = int(head_dim * rotated)
    if not theta > 0:
        raise ConfigError(f"config.json: rope_theta = {theta}, expected a positive number")
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(f"config.json: partial_rotary_factor {rotated} of head_dim {head_dim} is no even part of it")
    scaling = _read_scaling(read, ConfigReader(entry, f"config.json: {where}"), where)
    return RopeSpec(theta, rotary_dim, read.boolean("rope_interleave", interleaved), scaling)


def _entry(read: ConfigReader) -> tuple[str, dict]:
    """Name and content of the object that holds the scaling."""
    found = [(where, read.table(where)) for where in ("rope_scaling", "rope_parameters")]
    for where, entry in found:
        if entry and where == "rope_scaling" and "rope_type" not in entry and "type" not in entry:
            raise ConfigError("config.json: rope_scaling has no rope_type")
    (_, scaling), (_, parameters) = found
    if scaling and parameters and scaling != parameters:
        raise ConfigError("config.json: rope_scaling and rope_parameters are both given and differ; remove one")
    return found[0] if scaling else found[1]


def _one_of(read: ConfigReader, entry: dict, where: str, key: str, default: float) -> float:
    top, nested = (
        read.number(key, optional=True),
        ConfigReader(entry, f"config.json: {where}").number(key, optional=True),
    )
    if top is not None and nested is not None and top != nested:
        raise ConfigError(f"config.json: {key} is {top} at the top level and {nested} under {where}")
    return nested if nested is not None else top if top is not None else default


def _read_scaling(read: ConfigReader, entry: ConfigReader, where: str) -> Scaling:
    kind = entry.text("rope_type", None) or entry.text("type", None) or "default"
    entry.text("type", None)
    if kind not in _READERS:
        raise ConfigError(
            f"config.json: {where}.rope_type = {kind!r} is not supported (only {', '.join(sorted(_READERS))})"
        )
    scaling = _READERS[kind](read, entry)
    entry.finish({"rope_theta", "partial_rotary_factor"})
    return scaling


def _original(read: ConfigReader, entry: ConfigReader) -> int:
    return entry.integer("original_max_position_embeddings", read.integer("max_position_embeddings"))


def _read_llama3(read: ConfigReader, entry: ConfigReader) -> Llama3:
    low, high = entry.positive("low_freq_factor"), entry.positive("high_freq_factor")
    if not low < high:
        raise ConfigError(f"config.json: rope low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3(entry.positive("factor"), low, high, _original(read, entry))


def _read_yarn(read: ConfigReader, entry: ConfigReader) -> Yarn:
    original = _original(read, entry)
    return Yarn(
        factor=entry.positive("factor", read.integer("max_position_embeddings") / original),
        original_positions=original,
        attention_scale=entry.number("attention_factor", optional=True),
        mscale=entry.number("mscale", optional=True),
        mscale_all_dim=entry.number("mscale_all_dim", optional=True),
        beta_fast=entry.number("beta_fast", optional=True) or 32.0,
        beta_slow=entry.number("beta_slow", optional=True) or 1.0,
        truncate=entry.boolean("truncate", True),
    )


_READERS = {
    "default": lambda read, entry: Scaling(),
    "linear": lambda read, entry: Linear(entry.positive("factor")),
    "frequency_factors": lambda read, entry: FrequencyFactors(tuple(entry.numbers("factors"))),
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}
