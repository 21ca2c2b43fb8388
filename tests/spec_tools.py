"""Runs with and without drafts, compared token by token and logit by logit. Used by test_spec.py and by
scripts/prove_spec.py, which runs the whole matrix."""

import zlib

import numpy as np

from engine import generate
from engine.sampler import Sampler, SamplingParams
from engine.spec import PLAIN, AutoPolicy, FixedPolicy, LookupSource, Speculator
from engine.spec.probes import OracleSource, RandomSource, SpoiledSource

GREEDY = SamplingParams()
SOURCES = ("lookup", "oracle", "spoiled", "random")


class RecordingSampler(Sampler):
    """Keeps a checksum of the logits that every position was picked from (the last one, when picked again)."""

    def pick(self, logits, history, position):
        self.crc = self.__dict__.setdefault("crc", {})
        self.crc[position] = zlib.crc32(np.ascontiguousarray(logits).tobytes())
        token = super().pick(logits, history, position)
        RecordingSampler.last = self
        return token


def run(engine, prompt, speculator=PLAIN, sampling=GREEDY, **options):
    """(token ids, finish reason, text, {position: checksum of logits}, Generation) of one run."""
    previous, generate.Sampler = generate.Sampler, RecordingSampler
    try:
        generation = generate.Generation(engine, prompt, speculator=speculator, sampling=sampling, **options)
        text = "".join(generation)
    finally:
        generate.Sampler = previous
    first = len(generation.prompt_token_ids)
    emitted = len(generation.token_ids) + (generation.finish_reason == "eos")
    crc = {p: c for p, c in RecordingSampler.last.crc.items() if p < first + emitted}
    return generation.token_ids, generation.finish_reason, text, crc, generation


def source(name, plain_generation, vocab_size):
    """One of SOURCES; the oracle and its spoiled twin know the plain run's tokens."""
    known = [*plain_generation.prompt_token_ids, *plain_generation.token_ids]
    return {
        "lookup": lambda: LookupSource(),
        "oracle": lambda: OracleSource(known),
        "spoiled": lambda: SpoiledSource(OracleSource(known), 3, vocab_size),
        "random": lambda: RandomSource(vocab_size, seed=len(known)),
    }[name]()


def policy(rows):
    return AutoPolicy() if rows == "auto" else FixedPolicy(rows)


def assert_same(engine, prompt, rows, name, plain, *, made=None, cut=None, **options):
    """Compare a speculative run with `plain` (what run() returned without drafts); returns its SpecStats. made: the
    source itself, when it is none of SOURCES; cut: see Speculator."""
    made = made or source(name, plain[4], engine.model.config.vocab_size)
    speculator = Speculator([made], policy(rows), cut)
    found = run(engine, prompt, speculator, **options)
    for what, ours, theirs in zip(("tokens", "finish reason", "text", "logits"), found, plain, strict=False):
        assert ours == theirs, f"{what} differ with {rows} rows of {name} drafts"
    return speculator.stats
