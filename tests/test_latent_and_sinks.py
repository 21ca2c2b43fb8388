"""gpt-oss, DeepSeek and GLM against transformers: logits and greedy tokens of committed golden files.

The oracle is transformers (scripts/make_family_golden.py); the negative controls break one rule of a loaded model and
must be noticed by the same comparison.
"""

from dataclasses import replace
from functools import cache

import latent_and_sink_models as models
import numpy as np
import pytest

import engine
from converters.hf import RoleFormats, convert
from engine import runtime
from engine.formats import FORMATS
from engine.kernels import Context, Matrix, aligned_empty, ffi, lib
from engine.layers import Buffer, Layers
from engine.rope import RopeTable, Scaling
from engine.sampler import SamplingParams
from engine.weights import open_model

MAX_ERROR = {"f32": 1e-4, "f16": 4e-3}
QUANTIZED_ERROR = 2e-2  # experts in MXFP4 see int8 activations
NAMES = list(models.CONFIGS)
golden = cache(models.golden)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """snapshot(name, decoded=False) -> a converted checkpoint with float32 weights, made once."""

    @cache
    def make(name, decoded=False):
        folder = tmp_path_factory.mktemp(name)
        models.checkpoint(folder / "hf", name, decoded=decoded)
        convert(folder / "hf", folder / "out", formats=RoleFormats(experts="f32", dense="f32"), threads=1)
        return folder / "out"

    return make


def relative_error(got, want):
    """sum |got - want| / sum |want|; NaN stays NaN, and a comparison with it is false."""
    return np.abs(got.astype(np.float64) - want).sum() / np.abs(want).sum()


def run(loaded, file, block=None):
    """Prefill the golden prompt, in blocks, and decode along the golden tokens; the golden file's rows of logits."""
    model, kv = loaded.model, loaded.new_kv(models.CONTEXT)
    prompt, greedy = file["prompt_ids"].astype(np.int32), file["greedy_ids"].astype(np.int32)
    ids, block = np.concatenate([prompt, greedy[:-1]]), block or len(prompt)
    starts = [*range(0, len(prompt), block), *range(len(prompt), len(ids))]
    ends = [*starts[1:], len(ids)]
    rows = [model.forward(ids[a:b], kv, a, logits="all").copy() for a, b in zip(starts, ends, strict=True)]
    return np.concatenate(rows)[file["positions"]]


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_match_transformers(snapshot, name, kv):
    file = golden(name)
    bound = QUANTIZED_ERROR if name.endswith("mxfp4") else MAX_ERROR[kv]
    assert relative_error(run(engine.load(snapshot(name), kv=kv), file), file["logits"]) <= bound


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_runs_in_place_with_the_same_bits(snapshot, tmp_path, name):
    want = run(engine.load(snapshot(name)), golden(name))
    loaded = engine.load(models.checkpoint(tmp_path / "hf", name))
    np.testing.assert_array_equal(run(loaded, golden(name)), want)


@pytest.mark.parametrize("name", NAMES)
def test_announced_bytes_of_keys_and_values_are_those_of_the_cache(snapshot, name):
    loaded = engine.load(snapshot(name))
    assert loaded.kv_bytes == loaded.new_kv().num_bytes


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_match_transformers(snapshot, name):
    file = golden(name)
    generation = engine.load(snapshot(name, decoded=name.endswith("mxfp4")), kv="f32").generate(
        file["prompt_ids"].tolist(), max_tokens=models.NUM_GREEDY, sampling=SamplingParams(temperature=0),
        ignore_eos=True,
    )  # fmt: skip
    "".join(generation)
    assert generation.token_ids == file["greedy_ids"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_prompt_splits_rings_tiers_and_threads_give_the_same_bits(snapshot, name, monkeypatch):
    want = run(engine.load(snapshot(name)), golden(name))
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)
    for options in ({"threads": 1, "isa": "scalar"}, {"threads": 3}):
        loaded = engine.load(snapshot(name), **options)
        windows = {shape.window for shape in loaded.new_kv().shapes}
        rings = [kv.capacity for kv in loaded.new_kv(models.CONTEXT).layers if kv.capacity < models.CONTEXT]
        assert bool(rings) == (windows != {0})  # a ring that wraps within the text
        np.testing.assert_array_equal(run(loaded, golden(name), block=7), want)


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "gpt_oss", "deepseek_v3"])
def test_streamed_experts_give_the_same_bits(snapshot, name):
    """Biases and activation survive the change of slots; layers without experts leave gaps among the keys."""
    want = run(engine.load(snapshot(name)), golden(name))
    loaded = engine.load(snapshot(name), expert_slots=loaded_slots(name))
    np.testing.assert_array_equal(run(loaded, golden(name), block=9), want)
    assert loaded.stream.stats()["evictions"] > 0


def loaded_slots(name):
    return golden(name)["config"]["num_experts_per_tok"] + 2


def test_decoded_mxfp4_gives_the_logits_of_transformers(snapshot):
    file = golden("gpt_oss_mxfp4")
    got = run(engine.load(snapshot("gpt_oss_mxfp4", decoded=True), kv="f32"), file)
    assert relative_error(got, file["logits"]) <= MAX_ERROR["f32"]


@pytest.mark.parametrize("layout", ["storage", "compute"])
def test_released_mxfp4_rows_are_rearranged_and_never_requantized(tmp_path, layout):
    """Values of every expert row, by gguf's decoder, against the checkpoint's blocks; whatever format was asked for."""
    name = "gpt_oss_mxfp4"
    models.checkpoint(tmp_path / "hf", name)
    report = convert(tmp_path / "hf", tmp_path / "out", formats=RoleFormats(experts="q4_0", dense="f32"), layout=layout)
    assert report.formats["gate_up"] == report.formats["down"] == "mxfp4"
    files, file = open_model(tmp_path / "out"), golden(name)
    stored, context = models.make_mxfp4(file["shapes"], file["seed"]), Context(num_threads=1)
    for n in range(file["config"]["num_hidden_layers"]):
        prefix = f"model.layers.{n}.mlp.experts"
        fused, down = (
            models.mxfp4_values(stored[f"{prefix}.{part}_blocks"], stored[f"{prefix}.{part}_scales"])
            for part in ("gate_up_proj", "down_proj")
        )
        for e in range(file["config"]["num_local_experts"]):
            wanted = {"gate_proj": fused[e, 0::2], "up_proj": fused[e, 1::2], "down_proj": down[e]}
            for part, want in wanted.items():
                record = files.tensors[f"layers.{n}.mlp.experts.{e}.{part}"]
                assert (record.format, record.layout) == ("mxfp4", None if layout == "storage" else "nib8_mxfp4")
                data = files.read(record.name)
                if layout == "storage":
                    got = FORMATS["mxfp4"].dequantize(data.reshape(record.rows, -1), record.cols)
                else:
                    got = rows_of(Matrix(context, record.layout, _aligned(data), *record.shape, "mxfp4"), context)
                np.testing.assert_array_equal(got, want)


def _aligned(data):
    copy = aligned_empty(data.nbytes)
    copy[:] = data
    return copy


def rows_of(matrix, context):
    """Every row of a matrix in its compute layout as float32."""
    out, ids = Buffer(matrix.rows, matrix.cols), Buffer(1, matrix.rows, np.int32)
    ids.array[0] = np.arange(matrix.rows)
    Layers(context).embed(out, matrix, ids, matrix.rows)
    return out.array


# ---- rules, each broken on purpose ----


def rules(model):
    return [block.mlp.routed.router.rule for block in model.blocks if hasattr(block.mlp, "routed")]


def attentions(model):
    return [block.attention for block in model.blocks]


def set_rules(**fields):
    def change(model):
        for rule in rules(model):
            for name, value in fields.items():
                setattr(rule, name, value)

    return change


def set_attention(**fields):
    def change(model):
        for attention in attentions(model):
            for name, value in fields.items():
                setattr(attention, name, value(attention) if callable(value) else value)

    return change


def set_experts(**fields):
    def change(model):
        for block in model.blocks:
            for e in range(model.config.num_experts):
                for name, value in fields.items():
                    setattr(block.mlp.routed.experts.table[e], name, value)

    return change


def without_expert_bias(part):
    def change(model):
        for block in model.blocks:
            for e in range(model.config.num_experts):
                getattr(block.mlp.routed.experts.table[e], part).bias = ffi.NULL

    return change


def without_bias(*linears):
    def change(model):
        for block in model.blocks:
            for name in linears:
                owner = block.attention if hasattr(block.attention, name) else block.mlp.routed
                for matrix in getattr(owner, name).matrices:
                    matrix.cdata.bias = ffi.NULL

    return change


def without_shared_experts(model):
    for block in model.blocks:
        if hasattr(block.mlp, "shared"):
            block.mlp.shared = None


def other_pairing(model):
    model.rope.interleaved = not model.rope.interleaved


def other_rope(change):
    """change(spec) -> the spec that the model then rotates with."""

    def apply(model):
        model.rope = RopeTable(change(model.config.rope), model.rope.num_positions)

    return apply


UNSCALED = other_rope(lambda spec: _with(spec, scaling=Scaling()))
NULL_CORRECTION = set_rules(correction=ffi.NULL)
LATENT_RULES = {
    "scale of the scores": set_attention(c=lambda a: _with(a.c, attention_scale=a.c.attention_scale * 1.3)),
    "latents not normalised": set_attention(kv_a_layernorm=lambda a: _ones(a.kv_a_layernorm)),
    "rope pairing": other_pairing,
    "no shared experts": without_shared_experts,
}
BROKEN = {
    "gpt_oss": {
        "no sinks": set_attention(sinks=None),
        "no window": set_attention(window=0),
        "window off by one": set_attention(window=lambda a: a.window and a.window - 1),
        "softmax before top-k": set_rules(score=lib.MOE_SOFTMAX_THEN_TOPK),
        "plain swiglu": set_experts(activation=lib.MOE_SWIGLU),
        "limit": set_experts(limit=7.0),
        "no YaRN": UNSCALED,
        "YaRN with whole borders": other_rope(lambda spec: _with(spec, scaling=_with(spec.scaling, truncate=True))),
        "no factor of cos and sin": other_rope(
            lambda spec: _with(spec, scaling=_with(spec.scaling, attention_scale=1.0))
        ),
        "no router bias": without_bias("router_linear"),
        "no q k v bias": without_bias("qkv_proj"),
        "no o bias": without_bias("o_proj"),
        "no gate bias": without_expert_bias("gate"),
        "no up bias": without_expert_bias("up"),
        "no down bias": without_expert_bias("down"),
    },
    "deepseek_v2_lite": {
        "renormalised": set_rules(norm_topk_prob=1),
        "sigmoid": set_rules(score=lib.MOE_SIGMOID_THEN_TOPK),
        "softmax after top-k": set_rules(score=lib.MOE_TOPK_THEN_SOFTMAX),
        **LATENT_RULES,
    },
    "deepseek_v2": {
        "no groups": set_rules(num_groups=0),
        "groups by the sum of two": set_rules(group_score=lib.MOE_GROUP_TOP2_SUM),
        "more groups": set_rules(top_groups=3),
        "routed scale": set_rules(scale=1.0),
        "renormalised": set_rules(norm_topk_prob=1),
        "no YaRN": UNSCALED,
        "q_a not normalised": set_attention(q_a_layernorm=lambda a: _ones(a.q_a_layernorm)),
        **LATENT_RULES,
    },
    "deepseek_v3": {
        "no groups": set_rules(num_groups=0),
        "groups by the largest": set_rules(group_score=lib.MOE_GROUP_MAX),
        "no correction": NULL_CORRECTION,
        "not renormalised": set_rules(norm_topk_prob=0),
        "routed scale": set_rules(scale=1.0),
        "softmax": set_rules(score=lib.MOE_SOFTMAX_THEN_TOPK),
        **LATENT_RULES,
    },
    "glm4_moe": {
        "no correction": NULL_CORRECTION,
        "not renormalised": set_rules(norm_topk_prob=0),
        "routed scale": set_rules(scale=1.0),
        "softmax": set_rules(score=lib.MOE_SOFTMAX_THEN_TOPK),
        "rope pairing": other_pairing,
        "the whole head rotated": other_rope(lambda spec: _with(spec, rotary_dim=2 * spec.rotary_dim)),
        "no shared experts": without_shared_experts,
        "no q/k norm": set_attention(q_norm=None),
        "no q k v bias": without_bias("qkv_proj"),
    },
    "glm4_moe_groups": {
        "no groups": set_rules(num_groups=0),
        "renormalised": set_rules(norm_topk_prob=1),
    },
}


def _with(config, **fields):
    return replace(config, **fields)


def _ones(vector):
    vector.array[:] = 1
    return vector


@pytest.mark.parametrize("name, rule", [(name, rule) for name, found in BROKEN.items() for rule in found])
def test_a_broken_rule_is_noticed(snapshot, name, rule):
    loaded, file = engine.load(snapshot(name), kv="f32"), golden(name)
    BROKEN[name][rule](loaded.model)
    assert relative_error(run(loaded, file), file["logits"]) > 10 * MAX_ERROR["f32"]
