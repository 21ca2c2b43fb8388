"""THE decode loop: prefill, decode step, and a generation that yields text as it becomes certain.

Owns token bookkeeping (stop rules, history, positions) and timing; knows no model family and no file format.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .errors import ConfigError, ExpertReadError, NumericsError
from .hardware import peak_rss_bytes
from .sampler import Sampler, SamplingParams
from .session import Session
from .spec import PLAIN, SpecStats
from .tokenizer import StopMatcher, StreamDecoder


@dataclass
class Stats:
    """Times in seconds, sizes in bytes. Decode counts the tokens after the first, which prefill produces."""

    load_s: float = 0.0
    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # leading prompt tokens that the session had in its cache; prefill runs the others
    generated_tokens: int = 0
    peak_rss_bytes: int = 0
    spec: SpecStats | None = None  # None: plain decode

    @property
    def prefill_tok_s(self) -> float:
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        return max(self.generated_tokens - 1, 0) / self.decode_s if self.decode_s else 0.0


def prefill(model, kv, ids: np.ndarray, position: int = 0) -> np.ndarray:
    """Run ids int32 [T] in parts of at most model.max_tokens; logits [1, V] of the last token."""
    for start in range(0, len(ids) - model.max_tokens, model.max_tokens):
        model.forward(ids[start : start + model.max_tokens], kv, position + start, logits="none")
    done = (len(ids) - 1) // model.max_tokens * model.max_tokens
    return model.forward(ids[done:], kv, position + done)


def decode_step(model, kv, ids: np.ndarray, position: int, keep_rows=None) -> np.ndarray:
    """Run a window of ids int32 [R] (the last token and R - 1 drafts); logits [R, V], row r for what follows ids[r], or
    fewer rows where keep_rows (see Decoder.forward) drops the last."""
    return model.forward(ids, kv, position, logits="all", keep_rows=keep_rows)


class Generation:
    """One continuation of a prompt. Iterating it yields pieces of text (complete UTF-8 characters only).

    After (or during) iteration: token_ids, text, finish_reason ("eos", "stop", "length", "context" or None while it
    runs), stats. A token's draw depends on (seed, position), so it can be stopped and repeated.
    session: its cache is used and left filled; prompt tokens that are in it are not run again. None = one of its own.
    """

    def __init__(
        self,
        engine,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        session: Session | None = None,
        speculator=PLAIN,
    ):
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 0):
            raise ConfigError(f"max_tokens: got {max_tokens!r}, expected a whole number, 0 or more")
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) for s in self.stop):
            raise ConfigError(f"stop: got {stop!r}, expected strings")
        self.engine, self.ignore_eos = engine, ignore_eos
        self.session, self.speculator = session, speculator
        self.sampling = sampling or engine.default_sampling()
        self.stats = Stats(load_s=engine.load_s, spec=speculator.stats)
        self.prompt_token_ids = self._encode(prompt)
        room = engine.max_context - len(self.prompt_token_ids)
        if room < 1:
            raise ConfigError(
                f"the prompt has {len(self.prompt_token_ids)} tokens, the context holds {engine.max_context} and needs "
                f"room for at least one more; shorten the prompt{engine.larger_context_hint()}"
            )
        self.max_tokens = room if max_tokens is None else min(max_tokens, room)
        self._limit = "length" if max_tokens is not None and max_tokens <= room else "context"
        self.token_ids: list[int] = []
        self.text, self.finish_reason = "", None
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def _encode(self, prompt) -> list[int]:
        started = time.perf_counter()
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
        elif isinstance(prompt, list | tuple | range | np.ndarray) and all(
            isinstance(t, int | np.integer) for t in prompt
        ):
            ids = [int(t) for t in prompt]
        else:
            raise ConfigError(f"prompt: got {type(prompt).__name__}, expected text or a list of token ids")
        if not ids and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id]
        if not ids:
            raise ConfigError("the prompt is empty and this model has no token to start a text with; give a prompt")
        vocab_size = self.engine.model.config.vocab_size
        bad = next((t for t in ids if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise ConfigError(f"prompt token id {bad} is outside the model's vocabulary of {vocab_size}")
        self.stats.tokenize_s = time.perf_counter() - started
        return ids

    def tokens(self) -> Iterator[int]:
        """The decode loop: prefill, then round after round until a limit or an end-of-text token (not yielded)."""
        stats, position = self.stats, len(self.prompt_token_ids)
        end = position + self.max_tokens
        if position == end:
            self.finish_reason = self._limit
            return
        sequence = np.empty(end, np.int32)
        sequence[:position] = self.prompt_token_ids
        sampler = Sampler(self.engine.context, self.sampling)
        session = self.session or Session(self.engine, end)
        reused = session.begin(sequence, position)
        stats.prompt_tokens, stats.reused_tokens = position, reused
        clock = time.perf_counter()
        with self.engine.lock:  # logits live in the model's buffers until the next forward pass, of anybody
            logits = prefill(self.engine.model, session.kv, sequence[reused:position], reused)
            session.length = session.kv.length
            picks = [sampler.pick(logits[0], sequence[:position], position)]
        self.speculator.start(session.kv)
        stats.prefill_s = time.perf_counter() - clock
        while True:
            for token in picks:
                stats.generated_tokens += 1
                if self._ends(token):
                    self.finish_reason = "eos"
                    return
                sequence[position] = token
                position += 1
                self.token_ids.append(token)
                try:
                    yield token
                except GeneratorExit:  # stopped within a window: what was accepted behind this token is not its text
                    session.end(sequence, position - 1)
                    raise
            if position == end:
                self.finish_reason = self._limit
                return
            clock = time.perf_counter()
            with self.engine.lock:
                picks = self._round(sampler, session, sequence, position)
            stats.decode_s += time.perf_counter() - clock

    def _round(self, sampler: Sampler, session: Session, sequence: np.ndarray, position: int) -> list[int]:
        """Verify one window behind sequence[:position]; the model's own picks up to the first that no draft foresaw."""
        layers = self.engine.model.layers
        experts_before = layers.experts_used  # other generations of this engine count there, too
        window = self.speculator.window(sequence[:position], len(sequence) - position)
        try:
            logits = decode_step(self.engine.model, session.kv, window.ids, position - 1, window.keep_rows)
        except (NumericsError, ExpertReadError) as error:  # of a draft, perhaps, which plain decode would not have run
            if len(window.ids) == 1:
                raise
            window.ids, window.failure = window.ids[:1], str(error)
            logits = decode_step(self.engine.model, session.kv, window.ids, position - 1)
        window.ids = window.ids[: len(logits)]
        picks: list[int] = []
        for row, expected in enumerate([*window.ids[1:].tolist(), None]):
            at = position + row
            try:
                token = sampler.pick(logits[row], sequence[:at], at)
            except NumericsError:
                if not picks:
                    raise
                break  # plain decode emits what was picked so far, then says so
            picks.append(token)
            if token != expected or self._ends(token):
                break
            sequence[at] = token  # the next row's penalties look at it
        session.length = session.kv.truncate(position - 1 + len(picks))
        self.speculator.commit(window, len(picks), layers.experts_used - experts_before)
        return picks

    def _ends(self, token: int) -> bool:
        return token in self.engine.tokenizer.eos_ids and not self.ignore_eos

    def _run(self) -> Iterator[str]:
        decoder, matcher = StreamDecoder(self.engine.tokenizer), StopMatcher(self.stop)
        try:
            for token in self.tokens():
                piece = matcher.push(decoder.push(token))
                if piece:
                    self.text += piece
                    yield piece
                if matcher.matched:
                    self.finish_reason = "stop"
                    return
            piece = matcher.push(decoder.flush()) + ("" if matcher.matched else matcher.flush())
            if matcher.matched:
                self.finish_reason = "stop"
            if piece:
                self.text += piece
                yield piece
        finally:
            self.stats.peak_rss_bytes = peak_rss_bytes()
