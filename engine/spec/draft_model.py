"""A second, smaller model as a draft source. It must have the same token table; its text is never seen."""

import time

import numpy as np

from ..errors import ConfigError, NumericsError
from ..sampler import Sampler, SamplingParams
from .drafts import MAX_ROWS, NOT_FINITE, DraftSource, Offer

CHANCE = 0.7  # first belief in a small model's draft


def check_same_tokens(target, draft) -> None:
    """Raise ConfigError with the first token in which two engines' tables differ."""
    sizes = target.tokenizer.vocab_size, draft.tokenizer.vocab_size
    for token in range(min(sizes)):
        ours, theirs = (t.token_bytes(token) for t in (target.tokenizer, draft.tokenizer))
        if ours != theirs:
            raise ConfigError(
                f"--draft-model: token {token} is {theirs!r} there and {ours!r} in the model; both need the same tokens"
            )
    if sizes[0] != sizes[1]:
        raise ConfigError(f"--draft-model: it has {sizes[1]} tokens, the model {sizes[0]}; both need the same tokens")


class ModelSource(DraftSource):
    """engine: the loaded draft model. sampling: the target's, so that its draws are guessed with the same numbers.

    vocab_size, capacity: logits and context of the target. Equal token tables may be padded to different numbers of
    logits; an id that only one of the two models has is neither drafted nor run.
    """

    name = "model"

    def __init__(self, engine, sampling: SamplingParams, vocab_size: int, capacity: int):
        self._engine, self._capacity = engine, min(capacity, engine.max_context)
        self._vocab_size = min(vocab_size, engine.model.config.vocab_size)
        self._sampler = Sampler(engine.context, sampling)
        self._kv = engine.new_kv(self._capacity)
        self._ids = np.empty(self._capacity + MAX_ROWS, np.int32)  # what the draft model's cache holds
        self._num_ids = 0
        self._text: np.ndarray | None = None
        self.ms_per_draft = 0.0

    def offer(self, text: np.ndarray, limit: int) -> Offer | None:
        """See DraftSource. Abstains past its own context, and on a text with ids that its model does not have."""
        count = min(limit, self._capacity - len(text))
        if self.ended or count < 1 or text.max() >= self._vocab_size:
            return None
        self._text = text
        return Offer(count, 0, CHANCE)

    def draft(self, count: int) -> list[int]:
        """Catch up with the text, then decode `count` tokens. Fewer where a value is not finite."""
        from ..generate import prefill

        started = time.perf_counter()
        text, engine, n = self._text, self._engine, len(self._text)
        known = min(self._num_ids, n - 1)
        differ = np.nonzero(self._ids[:known] != text[:known])[0]
        known = int(differ[0]) if len(differ) else known
        history = np.concatenate([text, np.empty(count, np.int32)])
        made = 0
        try:
            with engine.lock:
                known = self._kv.truncate(known)
                while made < count:
                    start, end = n + made - 1 if made else known, n + made
                    logits = prefill(engine.model, self._kv, history[start:end], start)
                    history[end] = self._sampler.pick(logits[0, : self._vocab_size], history[:end], end)
                    made += 1
        except NumericsError:
            self.ended = NOT_FINITE
        self._num_ids = n + count - 1
        self._ids[: self._num_ids] = history[: self._num_ids]
        spent = (time.perf_counter() - started) * 1e3 / count
        # The first call pays for the prompt, which says nothing about the next.
        self.ms_per_draft = 0.0 if known == 0 else 0.8 * (self.ms_per_draft or spent) + 0.2 * spent
        return history[n : n + made].tolist()
