"""The model's own layer for multi-token prediction as a draft source (engine.models._mtp has the layer).

The layer is fed with every position of the text, so that drafts look back at all of it. It lags behind: hidden states
are kept as forward passes produce them, and run in one call when a draft is asked for or the room for them is used up.
"""

import time

import numpy as np

from ..errors import NumericsError
from ..sampler import Sampler, SamplingParams
from .drafts import NOT_FINITE, DraftSource, Offer

CHANCE = 0.8  # first belief in a draft: what reports on released models say of the first token


class MtpState:
    """What the layer knows of one sequence. It follows the sequence's KV cache (KVCache.follower).

    Pair i is the hidden state of position i and the token of position i + 1; it lies at place i - shift of the layer's
    cache. Pairs before `first` have been run, `count` hidden states from there on wait for it.
    """

    def __init__(self, layer, capacity: int, kind: str):
        rows = layer.model.max_tokens
        self.layer, self.kv = layer, layer.new_kv(capacity, kind)
        self._hidden = np.empty((rows, layer.hidden_size), np.float32)
        self._ids = np.empty(rows, np.int32)  # the tokens at the waiting positions
        self.num_bytes = self.kv.num_bytes + self._hidden.nbytes
        self.clear()

    def clear(self) -> None:
        """The sequence is another one."""
        self.first = self.count = self.shift = 0
        self.broken = False  # a value was not finite: no drafts of this sequence

    def take(self, ids: np.ndarray, position: int) -> None:
        """The layers of the model have run tokens ids [T] at positions position ..; their results are in its x."""
        if self.broken:
            return
        self.align(position)
        num_tokens, model = len(ids), self.layer.model
        if self.count + num_tokens > len(self._ids):
            try:
                self.run(int(ids[0]))
            except NumericsError:
                self.broken = True
                return
        model.rmsnorm(model.norm, num_tokens)
        rows = slice(self.count, self.count + num_tokens)
        self._hidden[rows], self._ids[rows] = model.h.array[:num_tokens], ids
        self.count += num_tokens

    def align(self, position: int) -> None:
        """The text is known to be the same before `position` and may be another from there on."""
        if self.first <= position <= self.first + self.count:
            self.count = position - self.first
            return
        # Before `first`, pair position - 1 has the wrong token and its hidden state is gone: the place is taken by the
        # next pair. Beyond, positions were filled from elsewhere, and nothing is known of them.
        keep = max(0, position - 1 - self.shift) if position < self.first else 0
        self.first, self.count, self.shift = position, 0, position - keep

    def run(self, following: int) -> tuple[np.ndarray, np.ndarray]:
        """Run the pairs that wait, at least one; following: the token behind the last. Returns what MtpLayer.forward
        does."""
        ids = np.append(self._ids[1 : self.count], np.int32(following))
        made = self.layer.forward(self._hidden[: self.count], ids, self.kv, self.first - self.shift)
        self.first, self.count = self.first + self.count, 0
        return made

    def chain(self, hidden: np.ndarray, token: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Run a pair beyond the text, step 0, 1 ...; the next `run` overwrites it."""
        return self.layer.forward(hidden, np.array([token], np.int32), self.kv, self.first - self.shift + step)


class MtpSource(DraftSource):
    """sampling: that of the text, so that its draws are guessed with the same numbers."""

    name = "mtp"

    def __init__(self, context, sampling: SamplingParams):
        self._sampler = Sampler(context, sampling)
        self._state: MtpState | None = None
        self._text: np.ndarray | None = None
        self.ms_per_draft = 0.0
        self._calls = 0

    @property
    def ended(self) -> str | None:
        """See DraftSource."""
        return NOT_FINITE if self._state is not None and self._state.broken else None

    def follow(self, kv) -> None:
        """See DraftSource."""
        self._state = kv.follower

    def offer(self, text: np.ndarray, limit: int) -> Offer | None:
        """See DraftSource."""
        state, end = self._state, len(text) - 1  # hidden states are known before `end`
        if limit < 1 or state.broken or not state.first < end <= state.first + state.count:
            return None
        self._text = text
        return Offer(limit, 0, CHANCE)

    def draft(self, count: int) -> list[int]:
        """Catch up with the text, then chain the layer on its own hidden state. Fewer where a value is not finite."""
        started = time.perf_counter()
        text, state, n = self._text, self._state, len(self._text)
        history = np.concatenate([text, np.empty(count, np.int32)])
        made = 0
        try:
            state.align(n - 1)
            hidden, logits = state.run(int(text[-1]))
            while True:
                history[n + made] = self._sampler.pick(logits[0], history[: n + made], n + made)
                made += 1
                if made == count:
                    break
                hidden, logits = state.chain(hidden, int(history[n + made - 1]), made - 1)
        except NumericsError:
            state.broken = True
        spent = (time.perf_counter() - started) * 1e3 / count
        # The first call pays for the prompt, which says nothing about the next.
        self.ms_per_draft = 0.8 * (self.ms_per_draft or spent) + 0.2 * spent if self._calls else 0.0
        self._calls += 1
        return history[n : n + made].tolist()
