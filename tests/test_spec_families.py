"""Speculation on every family, resident and streamed through caches from the smallest to the whole: nothing changes."""

from functools import cache

import numpy as np
import pytest
import spec_tools

import engine
from engine import models
from engine.sampler import SamplingParams

NAMES = spec_tools.FAMILIES
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, repeat_penalty=1.1, seed=5)
LENGTHS = (*range(2, 9), "auto")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """load(name, options ...) -> an engine on a float32 snapshot of the golden checkpoint of that name."""

    @cache
    def folder(name):
        return spec_tools.family(tmp_path_factory.mktemp(name), name)

    return lambda name, **options: engine.load(folder(name), threads=1, **options)


def prompt(loaded, length=20):
    ids = np.random.default_rng(2).integers(0, loaded.model.config.vocab_size, length).tolist()
    return ids[: length // 2] * 2  # half of it repeated, so that lookup has something to find


@pytest.mark.parametrize("name", NAMES)
def test_every_family_gives_the_text_of_plain_decode(load, name):
    loaded, turn = load(name), NAMES.index(name)
    ids = prompt(loaded)
    options = {"max_tokens": min(256, loaded.max_context - len(ids)), "ignore_eos": True}
    for sampling in (spec_tools.GREEDY, DRAWN):
        plain = spec_tools.run(loaded, ids, sampling=sampling, **options)
        for i, source in enumerate(spec_tools.SOURCES):
            rows = LENGTHS[(turn + 3 * i) % len(LENGTHS)]
            spec_tools.assert_same(loaded, ids, rows, source, plain, sampling=sampling, **options)


def test_no_family_is_left_out(load):
    assert {load(name).files.architecture for name in NAMES} == set(models.known())


@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe", "gpt_oss", "mixtral_window", "qwen2_moe"])
def test_streamed_experts_give_the_same_text(load, name):
    """Caches of the smallest size, a little more and everything: the tokens and logits of resident plain decode."""
    resident = load(name)
    ids, options = prompt(resident), {"max_tokens": 64, "ignore_eos": True}
    plain = spec_tools.run(resident, ids, **options)
    top, experts = resident.model.config.num_experts_per_tok, resident.model.config.num_experts
    every = experts * (resident.model.config.num_hidden_layers - len(resident.model.config.dense_layers))
    for slots in (top, top + 1, every):
        streamed = load(name, expert_slots=slots)
        assert streamed.stream is not None
        for rows, source in ((8, "oracle"), (5, "spoiled"), (4, "random")):
            spec_tools.assert_same(streamed, ids, rows, source, plain, **options)
