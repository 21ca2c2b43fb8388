"""Sampling options and the call that picks a token. Owns the ranges and defaults of the options; the arithmetic is
native/sampler.c, and knows nothing of models or text."""

import math
from dataclasses import dataclass, fields

import numpy as np

from .errors import ConfigError, KernelError, NumericsError
from .kernels import address, check, ffi, lib

FLOAT32_MAX = float(np.finfo(np.float32).max)
# name -> (type, test of the value as the native code sees it, text of the range)
_RANGES = {
    "temperature": (float, lambda v: v >= 0, "0 (greedy) or more"),
    "top_k": (int, lambda v: 0 <= v < 2**31, "0 (off) to 2147483647"),
    "top_p": (float, lambda v: 0 < v <= 1, "more than 0, at most 1 (off)"),
    "min_p": (float, lambda v: 0 <= v < 1, "0 (off) or more, less than 1"),
    "repeat_penalty": (float, lambda v: v > 0, "more than 0; 1 is off"),
    "repeat_last_n": (int, lambda v: -1 <= v < 2**31, "-1 (the whole text), 0 (off) or a number of tokens"),
    "frequency_penalty": (float, lambda v: True, "a finite number; 0 is off"),
    "presence_penalty": (float, lambda v: True, "a finite number; 0 is off"),
    "seed": (int, lambda v: 0 <= v < 2**64, "0 to 18446744073709551615"),
}
# generation_config.json: our names for its keys, and keys that would change the choice of tokens unless they have this
# value. Source: transformers, class GenerationConfig.
_GENERATION_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",  # only from GGUF files
}
_GENERATION_NEUTRAL = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "penalty_alpha": None,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "mirostat": 0,
    "xtc_probability": 0.0,
}


def _as_native(value, kind) -> float | int | None:
    """The number that native code will see (float32 for a float), or None when it cannot."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    if not math.isfinite(value):
        return None
    if kind is int:
        return int(value) if value == int(value) else None
    return float(np.float32(value)) if abs(value) < FLOAT32_MAX else None


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Penalties look at the last repeat_last_n tokens of the text, prompt included;
    then temperature, top_k, top_p and min_p cut the candidates in this order, and one is drawn. Defaults: greedy.

    Raises: ConfigError naming the option, what was given and the allowed range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self):
        for field in fields(self):
            kind, in_range, text = _RANGES[field.name]
            given = getattr(self, field.name)
            value = _as_native(given, kind)
            if value is None or not in_range(value):
                raise ConfigError(f"sampling option {field.name}: got {given!r}, expected {text}")
            object.__setattr__(self, field.name, kind(given))

    @classmethod
    def from_generation_config(cls, config: dict) -> "SamplingParams":
        """Defaults that a model ships. What the file leaves out is off; without "do_sample": true it is greedy.

        Raises: ConfigError for a value out of range, or for a way of choosing tokens that does not exist here.
        """
        for key, neutral in _GENERATION_NEUTRAL.items():
            if config.get(key) not in (neutral, None):
                raise ConfigError(
                    f"generation_config.json: {key} = {config[key]!r} is not supported; "
                    "remove the key or give sampling options explicitly"
                )
        options = {ours: config[key] for key, ours in _GENERATION_KEYS.items() if config.get(key) is not None}
        if config.get("do_sample", False):
            options.setdefault("temperature", 1.0)
        else:
            options = {"temperature": 0.0} | {k: v for k, v in options.items() if k.startswith("repeat_")}
        options.setdefault("repeat_last_n", -1)
        try:
            return cls(**options)
        except ConfigError as error:
            raise ConfigError(f"generation_config.json: {error}") from None


class Sampler:
    """Picks tokens on one context. context: a kernels.Context, or its `struct moe_ctx *`."""

    def __init__(self, context, params: SamplingParams):
        self._context, self.params = context, params  # the context is kept alive
        self._ctx = getattr(context, "handle", context)
        self._token = ffi.new("int32_t *")
        names = {field.name for field in fields(params)} - {"repeat_last_n"}
        self._sampling = ffi.new("struct moe_sampling *", {name: getattr(params, name) for name in names})

    def pick(self, logits: np.ndarray, history, position: int) -> int:
        """The token for `position`, a function of (logits, history, options, position) alone.

        Shapes: logits float32 [V]. history: ids of the text so far, a list or an integer array.
        Raises: NumericsError for NaN or +Inf logits, KernelError for ids outside the vocabulary.
        """
        if logits.dtype != np.float32 or logits.ndim != 1:
            raise KernelError(f"sample: logits are {logits.dtype} {logits.shape}, expected float32 [V]")
        last_n = self.params.repeat_last_n
        recent = history[-last_n:] if last_n > 0 else history if last_n < 0 else ()
        recent = np.ascontiguousarray(recent, np.int32)
        status = lib.moe_sample(
            self._ctx, self._token, address(logits, "float *"), len(logits), self._sampling,
            address(recent, "int32_t *"), len(recent), position,
        )  # fmt: skip
        if status == lib.MOE_NONFINITE:
            raise NumericsError("logits: NaN, +Inf or no token left; the weights are damaged or out of range")
        check(status, f"sample at position {position}, vocabulary of {len(logits)}")
        return self._token[0]
