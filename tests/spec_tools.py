"""Runs with and without drafts, compared token by token and logit by logit. Used by the tests of speculation and by
scripts/prove_spec.py, which runs the whole matrix."""

import json
import zlib

import family_models
import latent_and_sink_models
import numpy as np
import tiny_models

from converters.hf import RoleFormats, convert
from engine import generate
from engine.sampler import Sampler, SamplingParams
from engine.spec import PLAIN, AutoPolicy, FixedPolicy, LookupSource, Speculator
from engine.spec.probes import OracleSource, RandomSource, SpoiledSource

GREEDY = SamplingParams()
SOURCES = ("lookup", "oracle", "spoiled", "random")
# Every model_type that is supported, and of most of them more than one rule; "olmoe" and "kimi_k2" have no golden file
# of that name.
FAMILIES = sorted({*family_models.CONFIGS, *latent_and_sink_models.CONFIGS, "olmoe", "kimi_k2"})


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


def family(folder, name, form="f32", **changes):
    """The snapshot of a tiny random model of FAMILIES with all weights in one format, made in `folder` unless it is
    there. changes: of its config.json."""
    hf, out = folder / "hf", folder / form
    if not hf.exists():
        _family_checkpoint(hf, name)
        config = json.loads((hf / "config.json").read_text())
        (hf / "config.json").write_text(json.dumps(config | changes))
    if not out.exists():
        convert(hf, out, formats=RoleFormats(experts=form, dense=form), threads=1)
    return out


def _family_checkpoint(hf, name):
    if name == "olmoe":
        tiny_models.make_hf_dir(hf, "gqa_norm")
    elif name == "kimi_k2":  # computes what DeepSeek-V3 does
        latent_and_sink_models.checkpoint(hf, "deepseek_v3")
        config = json.loads((hf / "config.json").read_text())
        (hf / "config.json").write_text(json.dumps(config | {"model_type": name}))
    else:
        latent_and_sink_models.checkpoint(hf, name)


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
    source itself, when it is none of SOURCES, or a list of several; cut: see Speculator."""
    made = made or source(name, plain[4], engine.model.config.vocab_size)
    speculator = Speculator(made if isinstance(made, list) else [made], policy(rows), cut)
    found = run(engine, prompt, speculator, **options)
    for what, ours, theirs in zip(("tokens", "finish reason", "text", "logits"), found, plain, strict=False):
        assert ours == theirs, f"{what} differ with {rows} rows of {name} drafts"
    return speculator.stats
