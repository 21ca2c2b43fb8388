"""Perplexity and bits per byte of a text under a model, with the forward pass that generation uses.

Owns the choice of windows and the exact count of bytes; knows nothing of files, options or model families.
Letters: T tokens of a window, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .errors import ConfigError
from .kernels import address, check, lib

DEFAULT_CTX = 512


@dataclass(frozen=True)
class Window:
    """Tokens [start, end) of the sequence go through the model; those from `score` on are scored."""

    start: int
    end: int
    score: int

    @property
    def num_scored(self) -> int:
        return self.end - self.score


@dataclass
class Result:
    """What was measured. Probabilities are natural logarithms, summed as negative log-likelihood."""

    nll: float = 0.0
    nll_squared: float = 0.0
    num_scored_tokens: int = 0
    num_scored_bytes: int = 0
    num_windows: int = 0

    @property
    def perplexity(self) -> float:
        mean = self.nll / self.num_scored_tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def perplexity_error(self) -> float:
        """Standard error of the perplexity, from the spread of the token log-probabilities."""
        n, mean = self.num_scored_tokens, self.nll / self.num_scored_tokens
        if n < 2:
            return math.inf
        variance = max(0.0, self.nll_squared / n - mean * mean)
        return math.sqrt(variance / (n - 1)) * self.perplexity

    @property
    def bits(self) -> float:
        return self.nll / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.num_scored_bytes if self.num_scored_bytes else math.inf


def half_windows(num_tokens: int, ctx: int, stride: int | None) -> list[Window]:
    """Windows as llama-perplexity lays them.

    Without stride: windows do not overlap and the second half of each is scored (its first token has no score of its
    own: token i is scored from ctx/2 + 1 on). With stride: a window starts every `stride` tokens, its last `stride`
    tokens are scored. What does not fill a window is left out.
    """
    step = ctx if stride is None else stride
    first_scored = min(ctx // 2 + 1, ctx - 1) if stride is None else ctx - stride
    starts = range(0, num_tokens - ctx + 1, step)
    return [Window(start, start + ctx, start + max(1, first_scored)) for start in starts]


def all_windows(num_tokens: int, ctx: int, stride: int | None) -> list[Window]:
    """Windows that score every token but the first of the sequence exactly once.

    The first window is scored from its start; each later one overlaps its predecessor by ctx - stride tokens, so that
    every token but the first few is predicted from at least that many. Token 0 is the context to start from.
    """
    step = ctx // 2 if stride is None else stride
    windows, end = [], 1
    while end < num_tokens:
        score = end
        end = min(num_tokens, ctx if not windows else end + step)
        windows.append(Window(max(0, end - ctx), end, score))
    return windows


def plan_windows(num_tokens: int, ctx: int, stride: int | None, score: str) -> list[Window]:
    """Return the windows for a sequence of num_tokens. score: "half" or "all".

    Raises ConfigError when the text is too short for one window, or ctx and stride do not fit each other.
    """
    if ctx < 2:
        raise ConfigError(f"ctx: got {ctx}, expected at least 2")
    # The window's first token is scored by nothing before it, so a stride of the whole window would skip tokens.
    if stride is not None and not 1 <= stride < ctx:
        raise ConfigError(f"stride: got {stride}, expected 1 to {ctx - 1} with a context of {ctx}")
    windows = (all_windows if score == "all" else half_windows)(num_tokens, ctx, stride)
    if not windows:
        need = 2 if score == "all" else ctx
        raise ConfigError(
            f"the text has {num_tokens} tokens, one window needs {need}; give a longer text"
            + ("" if score == "all" else ", a smaller --ctx, or --score all")
        )
    return windows


class Scorer:
    """Runs windows through a model and adds up log-probabilities.

    engine: a loaded engine.runtime.Engine whose context holds `ctx` positions.
    """

    def __init__(self, engine, ctx: int):
        self._model, self._context = engine.model, engine.context
        self._kv = engine.new_kv(ctx)

    def logprobs(self, ids: np.ndarray, first: int) -> np.ndarray:
        """float64 [T - first]: log-probability of each token from `first` on, given the ones before it in `ids`.

        Shapes: ids int32 [T], 1 <= first < T.
        """
        self._kv.truncate(0)
        position, out = 0, np.empty(len(ids) - first, np.float64)
        # The logits of token p - 1 score token p; those of the last token score nothing.
        while position < len(ids) - 1:
            scoring = position >= first - 1
            limit = len(ids) - 1 if scoring else first - 1
            end = min(limit, position + self._model.max_tokens)
            logits = self._model.forward(ids[position:end], self._kv, position, logits="all" if scoring else "none")
            if scoring:
                targets = np.ascontiguousarray(ids[position + 1 : end + 1])
                self._score(out[position + 1 - first : end + 1 - first], logits, targets)
            position = end
        return out

    def _score(self, out: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> None:
        pointers = address(out, "double *"), address(logits, "float *"), address(targets, "int32_t *")
        status = lib.moe_token_logprobs(self._context.handle, *pointers, len(targets), logits.shape[1])
        check(status, "token log-probabilities")


def context_token(tokenizer) -> int | None:
    """The token that may stand before a text: bos, else end of text (which ended the text before it), else None."""
    return tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id


def build_sequence(tokenizer, text: str, score: str) -> tuple[np.ndarray, int]:
    """Return (ids int32, number of leading tokens that are not text).

    "all" needs a token to predict the first one from. "half" takes bos only where the tokenizer's rules add it.
    Raises ConfigError when there is none.
    """
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    lead = [tokenizer.bos_id] if tokenizer.adds_bos else []
    if score == "all":
        first = context_token(tokenizer)
        if first is None:
            raise ConfigError(
                "--score all starts from a bos or eos token, and this model has neither; use --score half"
            )
        lead = [first]
    return np.array(lead + ids, np.int32), len(lead)


def evaluate(
    engine,
    ids: np.ndarray,
    windows: list[Window],
    *,
    bos_each_window: int | None = None,
    progress: Callable[[int, int, Result], None] | None = None,
) -> Result:
    """Score the windows of a sequence.

    bos_each_window: put this token in place of every window's first one, as llama-perplexity does for models with bos.
    progress: called with (scored tokens, tokens to score, result so far) after each window.
    Raises ConfigError for a token outside of the model's vocabulary, NumericsError for non-finite logits.
    """
    ctx = max(window.end - window.start for window in windows)
    scorer, result = Scorer(engine, ctx), Result()
    num_bytes = np.array([len(engine.tokenizer.token_bytes(n)) for n in ids], np.int64)
    total = sum(window.num_scored for window in windows)
    for window in windows:
        part = ids[window.start : window.end].copy()
        if bos_each_window is not None:
            part[0] = bos_each_window
        logprobs = scorer.logprobs(part, window.score - window.start)
        result.nll -= math.fsum(logprobs)
        result.nll_squared += math.fsum(logprobs * logprobs)
        result.num_scored_tokens += window.num_scored
        result.num_scored_bytes += int(num_bytes[window.score : window.end].sum())
        result.num_windows += 1
        if progress is not None:
            progress(result.num_scored_tokens, total, result)
    return result
