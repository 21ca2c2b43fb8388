"""OLMoE against transformers: logits and greedy tokens of committed golden files, with float32 weights.

The oracle is transformers (scripts/make_golden.py); the negative controls break one rule of the engine's own forward
pass and must be noticed by the same comparison.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import reference_olmoe as reference
import tiny_models

import engine
from engine.errors import ConfigError, NumericsError
from engine.generate import decode_step, prefill
from engine.models import olmoe
from engine.sampler import SamplingParams

GOLDEN_DIR = Path(__file__).parent / "data" / "golden"
NAMES = list(tiny_models.CONFIGS)
MAX_ERROR = {"f32": 1e-4, "f16": 2e-3}  # sum |a - b| / sum |b|; the f16 KV cache rounds keys and values
MAX_SINGLE_ERROR = 1e-4  # largest |a - b| / largest |b|, where nothing is rounded to float16 or the oracle rounds too


@cache
def golden(name):
    with np.load(GOLDEN_DIR / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def relative_error(got, want):
    """sum |got - want| / sum |want|; NaN stays NaN, and a comparison with it is false."""
    return np.abs(got.astype(np.float64) - want).sum() / np.abs(want).sum()


def largest_error(got, want):
    """max |got - want| / max |want|."""
    return np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()


def run(model_engine, file):
    """Prefill the golden prompt and decode along the golden tokens; logits [P + G, V]."""
    model, kv = model_engine.model, model_engine.new_kv()
    prompt, greedy = file["prompt_ids"].astype(np.int32), file["greedy_ids"]
    rows = [model.forward(prompt, kv, 0, logits="all").copy()]
    for i, token in enumerate(greedy[:-1]):
        rows.append(decode_step(model, kv, np.array([token], np.int32), len(prompt) + i).copy())
    return np.concatenate(rows)


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_match_transformers(tiny_snapshot, name, kv):
    file = golden(name)
    got = run(engine.load(tiny_snapshot(name), kv=kv), file)
    want = np.concatenate([file["prefill_logits"], file["decode_logits"]])
    assert got.shape == want.shape
    assert relative_error(got, want) <= MAX_ERROR[kv]
    if kv == "f32":
        assert largest_error(got, want) <= MAX_SINGLE_ERROR


@pytest.mark.parametrize("name", NAMES)
def test_f16_kv_cache_costs_its_rounding_and_nothing_else(tiny_snapshot, name):
    file = golden(name)
    config = tiny_models.hf_config(name)
    weights = reference.float64_weights(tiny_models.make_weights(config, tiny_models.golden_seed(name)))
    ids = [*file["prompt_ids"], *file["greedy_ids"][:-1]]
    want = reference.forward(weights, config, ids, f16_kv=True)
    got = run(engine.load(tiny_snapshot(name), kv="f16"), file)
    # A key within float32 error of a rounding border may go the other way: rare, and 1 float16 ulp of one value.
    assert relative_error(got, want) <= MAX_SINGLE_ERROR
    assert largest_error(got, want) <= 5 * MAX_SINGLE_ERROR


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_match_transformers(tiny_snapshot, name):
    file = golden(name)
    want = file["greedy_ids"].tolist()
    assert len(want) >= 64
    generation = engine.load(tiny_snapshot(name), kv="f32").generate(
        file["prompt_ids"].tolist(), max_tokens=len(want), sampling=SamplingParams(temperature=0), ignore_eos=True
    )
    "".join(generation)
    assert generation.token_ids == want


def broken_engine(path, monkeypatch, rule):
    """An engine with one rule of the forward pass broken on purpose."""
    if rule == "norm_topk_prob":
        original = olmoe.Router
        monkeypatch.setattr(olmoe, "Router", lambda score, norm, *rest: original(score, not norm, *rest))
        return engine.load(path, kv="f32")
    broken = engine.load(path, kv="f32")
    ops = broken.model.layers
    if rule == "no q/k norm":
        original = ops.rmsnorm
        skipped = {id(w) for block in broken.model.blocks for w in (block.attention.q_norm, block.attention.k_norm)}
        monkeypatch.setattr(ops, "rmsnorm", lambda out, x, w, *rest: id(w) in skipped or original(out, x, w, *rest))
    if rule == "q/k norm after rope":
        pending = []
        norm, rope = ops.rmsnorm, ops.rope
        moved = {id(w) for block in broken.model.blocks for w in (block.attention.q_norm, block.attention.k_norm)}

        def later(out, x, w, *rest):
            if id(w) in moved:
                pending.append((out, x, w, *rest))
            else:
                norm(out, x, w, *rest)

        def rope_then_norm(x, *rest):
            rope(x, *rest)
            for call in [p for p in pending if p[0] is x]:
                norm(*call)
                pending.remove(call)

        monkeypatch.setattr(ops, "rmsnorm", later)
        monkeypatch.setattr(ops, "rope", rope_then_norm)
    if rule == "no clip":
        monkeypatch.setattr(ops, "clip", lambda *args: None)
    return broken


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("mha_base", "norm_topk_prob"),
        ("gqa_norm", "norm_topk_prob"),
        ("mha_base", "no q/k norm"),
        ("gqa_norm", "q/k norm after rope"),
        ("odd", "q/k norm after rope"),
        ("clip", "no clip"),
    ],
)
def test_a_broken_rule_is_noticed(tiny_snapshot, monkeypatch, name, rule):
    file = golden(name)
    got = run(broken_engine(tiny_snapshot(name), monkeypatch, rule), file)
    want = np.concatenate([file["prefill_logits"], file["decode_logits"]])
    assert not relative_error(got, want) <= 10 * MAX_ERROR["f16"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "beta_fast"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling"),
        ({"num_experts_per_tok": 9}, "exceeds num_experts"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_theta": 500.0}}, "500"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor = 0"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
)
def test_config_that_changes_the_mathematics_is_refused_by_name(change, message):
    config = {**tiny_models.hf_config("mha_base"), **change}
    with pytest.raises(ConfigError, match=message):
        olmoe.Config.from_dict(config)


def test_a_default_rope_scaling_is_no_scaling():
    config = {**tiny_models.hf_config("mha_base"), "rope_scaling": {"type": "default"}}
    assert olmoe.Config.from_dict(config) == olmoe.Config.from_dict(tiny_models.hf_config("mha_base"))


def test_a_value_that_is_not_finite_stops_the_run_with_the_layer(tiny_snapshot):
    loaded = engine.load(tiny_snapshot("mha_base"))
    loaded.model.blocks[1].post_attention_layernorm.array[3] = np.nan
    with pytest.raises(NumericsError, match="layer 1"):
        prefill(loaded.model, loaded.new_kv(), np.array([1, 2, 3], np.int32))


def test_one_model_serves_several_threads_with_the_same_text(tiny_snapshot):
    from concurrent.futures import ThreadPoolExecutor

    loaded = engine.load(tiny_snapshot("mha_base"))

    def text(_=None):
        return "".join(loaded.generate("The router picks experts", max_tokens=40, temperature=0, ignore_eos=True))

    alone = text()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(text, range(8))) == {alone}


def test_settings_are_named_and_checked(tiny_snapshot):
    loaded = engine.load(tiny_snapshot("mha_base"))
    generation = loaded.generate("The router", max_tokens=8, temperature=0.7, seed=3, stop="zzz")
    assert isinstance(next(generation), str)
    with pytest.raises(ConfigError, match="temprature"):
        loaded.generate("x", temprature=0)
    with pytest.raises(ConfigError, match="max_tokens"):
        loaded.generate("x", max_tokens=2.5)
    with pytest.raises(ConfigError, match="prompt"):
        loaded.generate(b"x")
