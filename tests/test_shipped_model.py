"""The model that ships: its size, that its snapshot is what the converter makes, and that it still predicts text.

Figures are compared with those of scripts/heldout_bits.py in data/heldout/snapshot_bits_per_byte.json.
"""

import itertools
import sys

import numpy as np
import pytest
from conftest import supported_tiers
from snapshot_tools import ROOT, directory_bytes, read_json

import engine
from converters.hf import convert
from engine import perplexity
from engine.runtime import SHIPPED_MODEL
from engine.sampler import SamplingParams

sys.path.insert(0, str(ROOT / "scripts"))

import heldout_bits

DATA = ROOT / "engine" / "data"
RECORDED = read_json(heldout_bits.HELDOUT / "snapshot_bits_per_byte.json")
MAX_DATA_BYTES = 24_000_000  # of the package
MIN_SAVING = 0.15  # over xz, on the same bytes
PROMPT = "In the beginning"


@pytest.fixture(scope="module")
def shipped():
    return engine.load(threads=2)


def test_what_ships_is_small():
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) <= MAX_DATA_BYTES


def test_snapshot_is_what_the_converter_makes_of_the_checkpoint(tmp_path):
    convert(DATA / "tiny-moe" / "hf", tmp_path / "s")
    fresh, committed = directory_bytes(tmp_path / "s"), directory_bytes(SHIPPED_MODEL)
    assert sorted(fresh) == sorted(committed)
    # Names, not contents: a diff of megabytes would take pytest hours.
    assert [name for name in fresh if fresh[name] != committed[name]] == []


def test_held_out_bits_per_byte(shipped):
    """Beginning of each text: the recorded figure, and far fewer bits than xz needs for the same bytes."""
    found = heldout_bits.measure_part(shipped)
    assert RECORDED["settings"]["part"] == heldout_bits.PART and set(RECORDED["part"]) == set(found)
    for domain, row in found.items():
        recorded = RECORDED["part"][domain]
        assert row["bytes"] == recorded["bytes"]
        assert row["snapshot"] == pytest.approx(recorded["snapshot"], rel=0.01), domain
        assert row["snapshot"] <= (1 - MIN_SAVING) * row["xz"], domain


def test_recorded_figures_of_whole_texts_agree_with_the_reference_implementation():
    """Same windows, another program: transformers with the bf16 weights."""
    reference = read_json(heldout_bits.HELDOUT / "bits_per_byte.json")
    assert {key: reference["settings"][key] for key in ("context", "stride")} == RECORDED["settings"]["full"]
    for domain, row in RECORDED["full"].items():
        want = reference["domains"][domain]
        assert row["bytes"] == want["bytes"] == (heldout_bits.HELDOUT / f"{domain}.txt").stat().st_size
        assert row["f32"] == pytest.approx(want["model_bits_per_byte"], abs=2e-4)
        assert row["snapshot"] == pytest.approx(want["model_bits_per_byte"], rel=1e-3)
        assert row["snapshot"] <= (1 - MIN_SAVING) * row["xz"]


def expert_shares(shipped, monkeypatch, domain):
    """float64 [layers, experts]: share of the routed tokens of one window of a text."""
    config, counts = shipped.model.config, {}
    for n, block in enumerate(shipped.model.blocks):
        real = block.mlp.routed

        def spy(layers, buffers, y, x, num_tokens, n=n, real=real):
            left = real(layers, buffers, y, x, num_tokens)
            chosen = buffers.ids.array[:num_tokens].reshape(-1)
            counts[n] = counts.get(n, 0) + np.bincount(chosen, minlength=config.num_experts)
            return left

        monkeypatch.setattr(block.mlp, "routed", spy)
    text = heldout_bits.first_lines((heldout_bits.HELDOUT / f"{domain}.txt").read_bytes(), 6000).decode()
    ids, _ = perplexity.build_sequence(shipped.tokenizer, text, "all")
    window = perplexity.Window(0, len(ids), 1)
    perplexity.evaluate(shipped, ids, [window])
    monkeypatch.undo()
    shares = np.array([counts[n] for n in range(config.num_hidden_layers)], np.float64)
    # Every token but the last, which predicts nothing, went to top-k experts of every layer.
    assert (shares.sum(axis=1) == (len(ids) - 1) * config.num_experts_per_tok).all()
    return shares / shares.sum(axis=1, keepdims=True)


def test_experts_specialise(shipped, monkeypatch):
    """Different texts use different experts: a router that ignores its input, or wrong ids, would not."""
    shares = {domain: expert_shares(shipped, monkeypatch, domain) for domain in heldout_bits.DOMAINS}
    for a, b in itertools.combinations(heldout_bits.DOMAINS, 2):
        distance = np.abs(shares[a] - shares[b]).sum(axis=1) / 2
        assert distance.max() > (0.3 if {a, b} == {"kjv", "man"} else 0.1), (a, b, distance)


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=7),
}


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_text_is_printable_and_the_same_for_every_thread_count_and_tier(name):
    texts = {}
    for tier, threads in itertools.product(supported_tiers(), (1, 2)):
        model = engine.load(threads=threads, isa=tier)
        texts[tier, threads] = "".join(model.generate(PROMPT, max_tokens=64, sampling=SAMPLINGS[name], ignore_eos=True))
    assert len(set(texts.values())) == 1, texts
    text = next(iter(texts.values()))
    assert len(text) > 100 and all(c.isprintable() or c in "\n\t" for c in text), text
    assert name == "greedy" or len(set(text.split())) > 5, text  # greedy text of so small a model soon repeats itself


def test_seeds_differ(shipped):
    seeds = [SamplingParams(temperature=0.8, seed=seed) for seed in (1, 2, 1)]
    texts = ["".join(shipped.generate(PROMPT, max_tokens=32, sampling=params)) for params in seeds]
    assert texts[0] == texts[2] != texts[1]
