"""Families that route by softmax, and dense ones, against transformers: logits and greedy tokens of golden files.

The oracle is transformers (scripts/make_family_golden.py); the negative controls break one rule of a loaded model, or
one entry of its configuration, and must be noticed by the same comparison.
"""

from functools import cache

import family_models
import latent_and_sink_models as models
import numpy as np
import pytest
from test_latent_and_sinks import (
    other_pairing,
    relative_error,
    run,
    set_attention,
    set_rules,
    without_bias,
    without_shared_experts,
)

import engine
from converters.hf import RoleFormats, convert
from engine import runtime
from engine.errors import ConfigError, NumericsError
from engine.generate import prefill
from engine.kernels import lib
from engine.models import ALIASES, family, known
from engine.rope import RopeTable, Scaling
from engine.sampler import SamplingParams

MAX_SINGLE_ERROR = 1e-4  # largest |a - b| / largest |b|, float32 everywhere
MAX_F16_ERROR = 4e-3  # sum |a - b| / sum |b|; the f16 cache rounds keys and values
NAMES = list(family_models.CONFIGS)
golden = cache(models.golden)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """snapshot(name) -> a converted checkpoint with float32 weights, made once."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        models.checkpoint(folder / "hf", name)
        convert(folder / "hf", folder / "out", formats=RoleFormats(experts="f32", dense="f32"), threads=1)
        return folder / "out"

    return make


def largest_error(got, want):
    """max |got - want| / max |want|; NaN stays NaN, and a comparison with it is false."""
    return np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_transformers(snapshot, name):
    file = golden(name)
    assert largest_error(run(engine.load(snapshot(name), kv="f32"), file), file["logits"]) <= MAX_SINGLE_ERROR
    assert relative_error(run(engine.load(snapshot(name), kv="f16"), file), file["logits"]) <= MAX_F16_ERROR


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_match_transformers(snapshot, name):
    file = golden(name)
    want = file["greedy_ids"].tolist()
    assert len(want) >= 64
    generation = engine.load(snapshot(name), kv="f32").generate(
        file["prompt_ids"].tolist(), max_tokens=len(want), sampling=SamplingParams(temperature=0), ignore_eos=True
    )
    "".join(generation)
    assert generation.token_ids == want


@pytest.mark.parametrize("name", NAMES)
def test_prompt_splits_rings_tiers_and_threads_give_the_same_bits(snapshot, name, monkeypatch):
    want = run(engine.load(snapshot(name)), golden(name))
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    for options in ({"threads": 1, "isa": "scalar"}, {"threads": 3}):
        np.testing.assert_array_equal(run(engine.load(snapshot(name), **options), golden(name), block=7), want)


# ---- rules, each broken on purpose ----


def unscaled_rope(model):
    spec = model.config.rope
    assert spec.scaling != Scaling()
    model.rope = RopeTable(type(spec)(spec.theta, spec.rotary_dim, spec.interleaved), model.rope.num_positions)


def without_shared_gate(model):
    for block in model.blocks:
        if getattr(block.mlp, "shared", None):
            block.mlp.shared.gate_linear = None


def norm_after_rope(model):
    """q and k are normalised once more in place of before: the rotated vectors."""
    ops, pending = model.layers, []
    norm, rope = ops.rmsnorm, ops.rope
    moved = {id(w) for block in model.blocks for w in (block.attention.q_norm, block.attention.k_norm)}
    ops.rmsnorm = lambda out, x, w, *rest: (
        pending.append((out, x, w, *rest)) if id(w) in moved else norm(out, x, w, *rest)
    )

    def rope_then_norm(x, *rest):
        rope(x, *rest)
        for call in [call for call in pending if call[0] is x]:
            norm(*call)
            pending.remove(call)

    ops.rope = rope_then_norm


def scale_of(name, value):
    """Another value of a property of the model's class."""

    def change(model):
        model.__class__ = type("Changed", (type(model),), {name: value})

    return change


def eps(model):
    model.config = type(model.config)(**{**vars(model.config), "rms_norm_eps": 1e-5})
    for block in model.blocks:
        block.attention.eps = 1e-5


RENORMALISED, NOT_RENORMALISED = set_rules(norm_topk_prob=1), set_rules(norm_topk_prob=0)
TOPK_FIRST = set_rules(score=lib.MOE_TOPK_THEN_SOFTMAX)
BROKEN = {
    "qwen2_moe": {
        "renormalised": RENORMALISED,
        "softmax after top-k": TOPK_FIRST,
        "sigmoid": set_rules(score=lib.MOE_SIGMOID_THEN_TOPK),
        "no shared expert": without_shared_experts,
        "shared expert without its gate": without_shared_gate,
        "no q k v bias": without_bias("qkv_proj"),
        "rope pairing": other_pairing,
    },
    "qwen2_moe_mixed": {"not renormalised": NOT_RENORMALISED, "shared expert without its gate": without_shared_gate},
    "qwen3_moe": {
        "not renormalised": NOT_RENORMALISED,
        "sigmoid": set_rules(score=lib.MOE_SIGMOID_THEN_TOPK),
        "no q/k norm": set_attention(q_norm=None),
        "q/k norm after rope": norm_after_rope,
        "scale of the scores": set_attention(scale=16**-0.5),  # hidden_size / heads instead of head_dim
        "rope pairing": other_pairing,
    },
    "qwen3_moe_plain": {
        "renormalised": RENORMALISED,
        "softmax after top-k": TOPK_FIRST,
        "no q k v bias": without_bias("qkv_proj"),
        "no o bias": without_bias("o_proj"),
        "rope scaling": unscaled_rope,
    },
    "mixtral": {
        "not renormalised": NOT_RENORMALISED,
        "rope pairing": other_pairing,
        "eps": eps,
    },
    "mixtral_window": {
        "no window": set_attention(window=0),
        "window off by one": set_attention(window=20),
        "rope scaling": unscaled_rope,
    },
    "granitemoe": {
        "softmax before top-k": set_rules(score=lib.MOE_SOFTMAX_THEN_TOPK),
        "experts not scaled": set_rules(scale=1.0),
        "attention not scaled": set_attention(output_scale=1.0),
        "scale of the scores": set_attention(scale=16**-0.5),
        "embedding": scale_of("embedding_scale", 1.0),
        "logits": scale_of("logits_scale", 1.0),
        "logits multiplied": scale_of("logits_scale", 4.0),
        "rope pairing": other_pairing,
    },
    "granitemoe_bias": {
        "no q k v bias": without_bias("qkv_proj"),
        "no o bias": without_bias("o_proj"),
        "logits": scale_of("logits_scale", 1.0),
    },
    "llama": {"rope scaling": unscaled_rope, "rope pairing": other_pairing, "scale": set_attention(scale=16**-0.5)},
    "llama_bias": {"no q k v bias": without_bias("qkv_proj"), "no o bias": without_bias("o_proj")},
    "mistral": {"no window": set_attention(window=0), "window off by one": set_attention(window=22)},
    "qwen2": {"no q k v bias": without_bias("qkv_proj"), "rope pairing": other_pairing},
    "qwen3": {"no q/k norm": set_attention(q_norm=None), "q/k norm after rope": norm_after_rope},
}


@pytest.mark.parametrize("name, rule", [(name, rule) for name, found in BROKEN.items() for rule in found])
def test_a_broken_rule_is_noticed(snapshot, name, rule):
    loaded, file = engine.load(snapshot(name), kv="f32"), golden(name)
    BROKEN[name][rule](loaded.model)
    assert not largest_error(run(loaded, file), file["logits"]) <= 10 * MAX_SINGLE_ERROR


def test_every_family_has_a_golden_file():
    proven = {golden(name)["config"]["model_type"] for name in (*NAMES, *models.CONFIGS)}
    assert set(known()) == proven | {"olmoe"} | set(ALIASES)


# ---- configurations ----


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("qwen2_moe", {"head_dim": 24}, "head_dim"),
        ("qwen2_moe", {"attention_multiplier": 2.0}, "attention_multiplier"),
        ("qwen2_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
        ("qwen3_moe", {"head_dim": 20}, "multiples of 8"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "exceeds num_local_experts"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts"),
        ("mixtral", {"sliding_window": -1}, "sliding_window"),
        ("mixtral", {"attention_bias": True}, "attention_bias"),
        ("granitemoe", {"logits_scaling": 0}, "logits_scaling"),
        ("granitemoe", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("granitemoe", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"sliding_window": 64}, "sliding_window"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_config_that_changes_the_mathematics_is_refused_by_name(name, change, message):
    config = {**golden(name)["config"], **change}
    with pytest.raises(ConfigError, match=message):
        family(config["model_type"]).Config.from_dict(config)


def test_released_qwen_windows_that_are_switched_off_do_not_matter():
    config = golden("qwen2_moe")["config"] | {
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 21,
    }
    assert family("qwen2_moe").Config.from_dict(config)


@pytest.mark.parametrize("name", ["llama", "qwen2_moe_mixed"])
def test_a_value_that_is_not_finite_stops_a_dense_layer_by_its_name(snapshot, name):
    loaded = engine.load(snapshot(name))
    loaded.model.blocks[0].post_attention_layernorm.array[3] = np.nan
    with pytest.raises(NumericsError, match=r"layers\.0\.mlp"):
        prefill(loaded.model, loaded.new_kv(), np.array([1, 2, 3], np.int32))
