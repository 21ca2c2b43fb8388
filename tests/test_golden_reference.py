"""The float64 reference against transformers' golden files, and proof that those files notice broken rules.

No torch: scripts/make_golden.py made the files, the weights are generated again from the seed.
"""

import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))

import reference_olmoe as reference
import tiny_models

GOLDEN_DIR = Path(__file__).parent / "data" / "golden"
NAMES = list(tiny_models.CONFIGS)
# transformers computes in float32 (RoPE angles included); the measured error is 1e-6 to 4e-6
MAX_ERROR = 1e-5
MIN_MISTAKE_ERROR = 1e-2
MISTAKES = [(name, rule) for name in NAMES for rule in reference.mistakes_that_bite(tiny_models.hf_config(name))]


@cache
def golden(name):
    with np.load(GOLDEN_DIR / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


@cache
def model(name):
    """Return (float64 weights, config) of a golden file."""
    config = tiny_models.hf_config(name)
    weights = tiny_models.make_weights(config, tiny_models.golden_seed(name))
    return reference.float64_weights(weights), config


@cache
def teacher_forced(name):
    """Return (reference logits, golden logits, trace) over the prompt and all greedy tokens but the last."""
    file, trace = golden(name), []
    ids = [*file["prompt_ids"], *file["greedy_ids"][:-1]]
    logits = reference.forward(*model(name), ids, trace=trace)
    return logits, np.concatenate([file["prefill_logits"], file["decode_logits"]]), trace


def test_every_config_has_a_golden_file_and_no_other_exists():
    assert sorted(path.stem for path in GOLDEN_DIR.glob("*.npz")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_golden_file_belongs_to_this_config_and_these_weights(name):
    file, config = golden(name), tiny_models.hf_config(name)
    weights = tiny_models.make_weights(config, tiny_models.golden_seed(name))
    assert int(file["seed"]) == tiny_models.golden_seed(name)
    assert json.loads(str(file["config_json"])) == config
    assert str(file["weights_sha256"]) == tiny_models.weights_sha256(weights)


@pytest.mark.parametrize("name", NAMES)
def test_reference_logits_equal_transformers(name):
    ours, theirs, _ = teacher_forced(name)
    assert ours.shape == theirs.shape
    assert reference.relative_error(ours, theirs) <= MAX_ERROR


@pytest.mark.parametrize("name", NAMES)
def test_reference_routes_as_transformers(name):
    file, (_, _, trace) = golden(name), teacher_forced(name)
    num_prompt = len(file["prompt_ids"])
    assert len(trace) == len(file["router_ids"])
    for layer, (ids, weights, _) in enumerate(trace):
        assert np.array_equal(ids[:num_prompt], file["router_ids"][layer])
        assert reference.relative_error(weights[:num_prompt], file["router_weights"][layer]) <= MAX_ERROR


@pytest.mark.parametrize("name", NAMES)
def test_unnormalised_router_weights_keep_their_mass(name):
    mass = golden(name)["router_weights"].astype(np.float64).sum(axis=-1)
    if tiny_models.hf_config(name)["norm_topk_prob"]:
        assert np.allclose(mass, 1.0, atol=1e-6)
    else:
        assert mass.max() < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_reference_picks_the_same_greedy_tokens(name):
    file, (ours, _, _) = golden(name), teacher_forced(name)
    # all 80 given the golden history, and 16 on its own feet
    assert np.argmax(ours[len(file["prompt_ids"]) - 1 :], axis=-1).tolist() == file["greedy_ids"].tolist()
    assert reference.greedy(*model(name), file["prompt_ids"], 16) == file["greedy_ids"][:16].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_have_a_margin_and_variety(name):
    file, (_, theirs, _) = golden(name), teacher_forced(name)
    top = np.sort(theirs[len(file["prompt_ids"]) - 1 :], axis=-1)[:, -2:]
    margin = np.min(top[:, 1] - top[:, 0]) / np.max(np.abs(theirs))
    assert margin == pytest.approx(float(file["min_margin"]), rel=1e-3)
    assert margin > 1e-3
    assert len(set(file["greedy_ids"].tolist())) >= 30
    assert tiny_models.EOS_TOKEN_ID not in file["greedy_ids"]


@pytest.mark.parametrize(("name", "rule"), MISTAKES)
def test_broken_rule_changes_the_logits(name, rule):
    file = golden(name)
    broken = reference.forward(*model(name), file["prompt_ids"], **{rule: True})
    assert reference.relative_error(broken, file["prefill_logits"]) > MIN_MISTAKE_ERROR


@pytest.mark.parametrize("name", [name for name in NAMES if tiny_models.hf_config(name)["rms_norm_eps"] == 1e-6])
def test_float_tolerance_tells_eps_1e_6_from_1e_5(name):
    broken = reference.forward(*model(name), golden(name)["prompt_ids"], default_eps=True)
    assert reference.relative_error(broken, golden(name)["prefill_logits"]) > 3 * MAX_ERROR


def test_every_rule_is_broken_by_some_config():
    no_mistake = {"f16_kv"}  # rounding
    assert {rule for _, rule in MISTAKES} == set(reference.Rules.__dataclass_fields__) - no_mistake


def test_nan_never_passes_for_a_small_error():
    assert not reference.relative_error(np.array([1.0, np.nan]), np.ones(2)) <= MAX_ERROR


def test_router_ties_go_to_the_lowest_id():
    ids, weights, _ = reference.route(np.ones((1, 4)), np.zeros((6, 4)), 3, renormalise=False)
    assert ids.tolist() == [[0, 1, 2]]
    assert np.allclose(weights, 1 / 6)


@pytest.mark.parametrize("name", NAMES)
def test_prompt_ids_are_the_encoded_prompt(name, tmp_path):
    path = tiny_models.make_hf_dir(tmp_path, name)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    assert tokenizer.encode(tiny_models.PROMPT).ids == golden(name)["prompt_ids"].tolist()
    assert tokenizer.decode(golden(name)["prompt_ids"].tolist()) == tiny_models.PROMPT
    assert tokenizer.get_vocab_size() == tiny_models.TOKENIZER_SIZE <= config["vocab_size"]
    assert tokenizer.token_to_id("<|endoftext|>") == config["eos_token_id"] == tiny_models.EOS_TOKEN_ID


def test_shards_hold_the_tensors_of_the_single_file(tmp_path):
    whole = load_file(tiny_models.make_hf_dir(tmp_path / "one", "odd") / "model.safetensors")
    path = tiny_models.make_hf_dir(tmp_path / "three", "odd", shards=3)
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {file: load_file(path / file) for file in sorted(set(weight_map.values()))}
    assert list(shards) == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert weight_map.keys() == whole.keys()
    assert sum(len(shard) for shard in shards.values()) == len(whole)
    assert all(np.array_equal(shards[weight_map[name]][name], array) for name, array in whole.items())


@pytest.mark.parametrize(("dtype", "mantissa_bits"), [("BF16", 7), ("F16", 10)])
def test_half_width_files_hold_the_generated_values(tmp_path, dtype, mantissa_bits):
    config = tiny_models.hf_config("mha_base")
    exact, rounded = (tiny_models.make_weights(config, 3, kind) for kind in ("F32", dtype))
    path = tiny_models.make_hf_dir(tmp_path, "mha_base", seed=3, dtype=dtype)
    stored = dict(safetensors.deserialize((path / "model.safetensors").read_bytes()))
    assert stored.keys() == rounded.keys()
    for name, array in rounded.items():
        # half a unit in the last place; 2^-25 is that of float16 subnormals
        bound = np.abs(exact[name]) * 2.0 ** -(mantissa_bits + 1) + (2.0**-25 if dtype == "F16" else 0.0)
        assert np.all(np.abs(array - exact[name]) <= bound)
        assert stored[name]["dtype"] == dtype
        assert np.array_equal(_widen(bytes(stored[name]["data"]), dtype).reshape(array.shape), array)


def _widen(blob, dtype):
    if dtype == "F16":
        return np.frombuffer(blob, "<f2").astype(np.float32)
    return (np.frombuffer(blob, "<u2").astype(np.uint32) << 16).view(np.float32)
