"""GGUF files of gpt-oss, DeepSeek and GLM give the logits that transformers computes for the checkpoint they hold."""

import numpy as np
import pytest
from gguf_latent_and_sinks import write_gguf
from test_latent_and_sinks import MAX_ERROR, NAMES, golden, relative_error, run, set_experts, snapshot  # noqa: F401

import engine
from engine.errors import ConfigError, EngineError
from engine.weights import open_model

# The rows of MXFP4 are compared below: a file records no order of the windows, and that model has another one.
CASES = [(name, way) for name in NAMES if "mxfp4" not in name for way in ({}, {"fused_experts": True})]
CASES += [(name, {"fused_kv_b": True}) for name in NAMES if "deepseek" in name]


@pytest.mark.parametrize("name, way", CASES, ids=["-".join([name, *way]) for name, way in CASES])
def test_gguf_gives_the_logits_of_transformers(tmp_path, name, way):
    path = tmp_path / "m.gguf"
    write_gguf(path, name, **way)
    file = golden(name)
    loaded = engine.load(path, kv="f32")
    if name == "gpt_oss":  # the file records no limit, it is always 7
        set_experts(limit=file["config"]["swiglu_limit"])(loaded.model)
    assert relative_error(run(loaded, file), file["logits"]) <= MAX_ERROR["f32"]


def test_layers_for_prediction_are_left_out(tmp_path):
    """They count among the blocks of the file and are not computed."""

    def edit(writer):
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.3.attn_norm.weight", np.ones(64, np.float32))
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.ones((64, 128), np.float32))

    write_gguf(tmp_path / "m.gguf", "deepseek_v3", edit=edit)
    file = golden("deepseek_v3")
    assert relative_error(run(engine.load(tmp_path / "m.gguf", kv="f32"), file), file["logits"]) <= MAX_ERROR["f32"]


def test_gguf_mxfp4_rows_are_those_of_the_converted_checkpoint(tmp_path, snapshot):  # noqa: F811
    write_gguf(tmp_path / "m.gguf", "gpt_oss_mxfp4")
    found, want = open_model(tmp_path / "m.gguf"), open_model(snapshot("gpt_oss_mxfp4"))
    names = [name for name, record in want.tensors.items() if record.format == "mxfp4" and record.layout is None]
    assert names
    for name in names:
        assert found.tensors[name].format == "mxfp4"
        np.testing.assert_array_equal(found.read(name), want.read(name))


@pytest.mark.parametrize(
    "name, edit, message",
    [
        ("deepseek_v3", lambda w: w.add_uint32("deepseek2.expert_gating_func", 3), "deepseek2"),
        ("glm4_moe", lambda w: w.add_uint32("glm4moe.expert_gating_func", 1), "only 2, sigmoid"),
        ("deepseek_v2", lambda w: w.add_uint32("deepseek2.attention.value_length", 99), "do not fit kv_lora_rank"),
        ("gpt_oss", lambda w: w.add_float32("gpt-oss.attention.scale", 2.0), "gpt-oss.attention.scale"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, name, edit, message):
    write_gguf(tmp_path / "m.gguf", name, edit=edit)
    with pytest.raises((ConfigError, EngineError), match=message):
        open_model(tmp_path / "m.gguf")
