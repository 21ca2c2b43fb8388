"""Rotary position embedding: what a config may say about it, and the tables that a model rotates with.

Owns every scaling rule; families say only their default theta. Frequencies are computed natively in extended precision
and rounded to float32 once, never with libm, whose last bit differs between systems.
"""

from dataclasses import dataclass

import numpy as np

from .config import ConfigReader
from .errors import ConfigError
from .hardware import memory_limits
from .kernels import address, check, lib
from .layers import Buffer


@dataclass(frozen=True)
class RopeSpec:
    """One rotation: pair j of the first rotary_dim values of a head turns by position * theta^(-2j/rotary_dim).

    interleaved: pairs are (2j, 2j + 1), as in checkpoints whose q and k rows were permuted for it; otherwise
    (j, j + rotary_dim / 2).
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False

    def inv_freq(self) -> np.ndarray:
        """float32 [rotary_dim / 2]."""
        out = np.empty(self.rotary_dim // 2, np.float32)
        check(lib.moe_rope_inv_freq(address(out, "float *"), self.theta, self.rotary_dim), "rope frequencies")
        return out


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
        check(lib.moe_rope_table(*pointers, half, 0, num_positions, 1.0), "rope table")


def read_rope(read: ConfigReader, head_dim: int, default_theta: float) -> RopeSpec:
    """rope_theta at the top level or under rope_parameters; a scaling that is not computed here is refused by name."""
    scaling, parameters = read.table("rope_scaling"), read.table("rope_parameters")
    for where, entry in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        kind = entry.get("rope_type", entry.get("type", "default" if entry is parameters or not entry else None))
        if kind != "default":
            raise ConfigError(f"config.json: {where}.rope_type = {kind!r} is not supported (only 'default')")
    extra = sorted(set(parameters) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if extra or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"config.json: rope_parameters has unsupported entries {extra or ['partial_rotary_factor']}")
    top = read.number("rope_theta", optional=True)
    nested = parameters.get("rope_theta")
    if top is not None and nested is not None and float(nested) != top:
        raise ConfigError(f"config.json: rope_theta is {top} at the top level and {nested} under rope_parameters")
    value = float(nested) if nested is not None else top if top is not None else default_theta
    if not value > 0:
        raise ConfigError(f"config.json: rope_theta = {value}, expected a positive number")
    return RopeSpec(value, head_dim, read.boolean("rope_interleave", False))
