"""GGUF files of softmax-routed and dense families give the logits that transformers computes for the same weights."""

import pytest
from gguf_families import ARCHITECTURES, write_gguf
from test_families import MAX_SINGLE_ERROR, NAMES, golden, largest_error, run

import engine
from engine.errors import EngineError
from engine.models import llama

# What files of an architecture cannot say: layers without experts, other renormalisation, windows, other scalings.
UNSAID = ("qwen2_moe_mixed", "qwen3_moe_plain", "mixtral_window", "mistral")
CASES = [name for name in NAMES if name not in UNSAID]


@pytest.mark.parametrize("name", CASES)
def test_gguf_gives_the_logits_of_transformers(tmp_path, name):
    write_gguf(tmp_path / "m.gguf", name)
    loaded, file = engine.load(tmp_path / "m.gguf", kv="f32"), golden(name)
    assert loaded.files.architecture == file["config"]["model_type"]
    assert largest_error(run(loaded, file), file["logits"]) <= MAX_SINGLE_ERROR


def test_one_tensor_per_expert_as_the_first_mixtral_files_had(tmp_path):
    write_gguf(tmp_path / "m.gguf", "mixtral", expert_tensors=True)
    loaded, file = engine.load(tmp_path / "m.gguf", kv="f32"), golden("mixtral")
    assert largest_error(run(loaded, file), file["logits"]) <= MAX_SINGLE_ERROR


def test_every_architecture_is_tested():
    assert {golden(name)["config"]["model_type"] for name in CASES} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["llama", "mixtral", "granitemoe"])
def test_permuted_rows_need_the_other_pairing(tmp_path, name):
    write_gguf(tmp_path / "m.gguf", name)
    loaded, file = engine.load(tmp_path / "m.gguf", kv="f32"), golden(name)
    loaded.model.rope.interleaved = False
    assert not largest_error(run(loaded, file), file["logits"]) <= 10 * MAX_SINGLE_ERROR


def test_llama3_factors_are_read(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", "llama")
    original = llama.config_from_gguf
    monkeypatch.setattr(llama, "config_from_gguf", lambda keys: original(keys) | {"rope_scaling": None})
    loaded, file = engine.load(tmp_path / "m.gguf", kv="f32"), golden("llama")
    assert not largest_error(run(loaded, file), file["logits"]) <= 10 * MAX_SINGLE_ERROR


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("granitemoe", lambda w: w.add_expert_shared_feed_forward_length(64), "expert_shared_feed_forward_length"),
        ("qwen3_moe", lambda w: w.add_expert_weights_scale(2.0), "expert_weights_scale"),
        ("mixtral", lambda w: w.add_rope_scaling_type(w_type("longrope")), "longrope"),
        ("llama", lambda w: w.add_sliding_window(64), "sliding_window"),
        ("qwen2", lambda w: w.add_value_length(8), "value_length"),
    ],
)
def test_keys_that_change_the_mathematics_are_refused_by_name(tmp_path, name, edit, message):
    write_gguf(tmp_path / "m.gguf", name, edit=edit)
    with pytest.raises(EngineError, match=message):
        engine.load(tmp_path / "m.gguf")


def w_type(name: str):
    import gguf

    return gguf.RopeScalingType(name)
