"""No key of a GGUF file that could change the mathematics is overlooked: it changes the config or refuses the file.

Keys are all that the gguf package knows, set one at a time in the metadata of a tiny file of every family.
"""

import math

import gguf
import gguf_families
import gguf_latent_and_sinks
import gguf_models
import pytest

from engine.errors import EngineError
from engine.models import family, known
from engine.weights import open_model
from engine.weights.gguf import _family_of
from engine.weights.gguf_keys import GgufKeys

FILES = {
    "olmoe": lambda path: gguf_models.write_gguf(path, "mha_base"),
    **{
        name: lambda path, name=name: gguf_families.write_gguf(path, name)
        for name in ("qwen2_moe", "qwen3_moe", "mixtral", "granitemoe", "llama", "qwen2", "qwen3")
    },
    **{
        name: lambda path, name=name: gguf_latent_and_sinks.write_gguf(path, name)
        for name in ("gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe")
    },
}
KEYS = sorted(
    value.removeprefix("{arch}.")
    for group in vars(gguf.Keys).values() if isinstance(group, type)
    for value in vars(group).values() if isinstance(value, str) and value.startswith("{arch}.") and "{" not in value[6:]
)  # fmt: skip
VALUES = (7, 0.37, True, False, "longrope")
# Keys that change nothing that is computed, in every family.
HARMLESS = {
    "vocab_size": "the embedding has that many rows",
    "rope.scaling.original_context_length": "read for YaRN only",
    "rope.scaling.finetuned": "a note on training; granitemoe refuses false",
}
HARMLESS_IN = {
    ("deepseek_v2", "attention.head_count_kv"): "latents have one; the number of heads counts",
    ("deepseek_v3", "attention.head_count_kv"): "the same",
    ("gpt_oss", "feed_forward_length"): "expert_feed_forward_length comes first",
}


@pytest.fixture(scope="module", params=FILES)
def model(request, tmp_path_factory):
    """(family, metadata, tensors, reader of a tensor's bytes)."""
    path = tmp_path_factory.mktemp("keys") / "m.gguf"
    FILES[request.param](path)
    opened = open_model(path)
    metadata = {key: opened.gguf_metadata[key] for key in opened.gguf_metadata if not key.startswith("tokenizer.")}
    return request.param, metadata, opened.gguf_tensors, opened._read_raw


def read(name: str, metadata: dict, tensors: dict, reader):
    """The checked Config that these keys mean, or the family that they are of now. Raises: EngineError."""
    keys = GgufKeys("m.gguf", metadata, tensors, reader)
    module = _family_of(keys)
    if module is not family(name):
        return module.__name__
    config = module.config_from_gguf(keys)
    keys.finish(getattr(module, "GGUF_HARMLESS", set()))
    return module.Config.from_dict({"model_type": name, **config})


def test_every_family_has_a_file():
    assert {family(name) for name in known()} == {family(name) for name in FILES}


def test_every_key_is_computed_or_refused(model):
    name, metadata, tensors, reader = model
    before, overlooked = read(*model), []
    for key in KEYS:
        full = f"{metadata['general.architecture']}.{key}"
        found = {outcome(name, metadata | {full: value}, tensors, reader, key, before) for value in VALUES}
        # A value may mean what the file means without it, when another one makes a difference.
        if not found & {"changed", "refused"} and key not in HARMLESS and (name, key) not in HARMLESS_IN:
            overlooked.append((key, found))
    assert overlooked == []


def outcome(name, metadata, tensors, reader, key, before) -> str:
    try:
        return "same" if read(name, metadata, tensors, reader) == before else "changed"
    except EngineError as error:
        text = str(error)
        if text.startswith("config.json: ") or "variant" in text or "rope.scaling.type are both" in text:
            return "refused"  # for what comes of the key
        if ", expected " in text:
            return "wrong type"
        return "refused" if key.rsplit(".", 1)[-1] in text else f"refused without a name: {text}"


# What YaRN's own keys do, on a file that has them: (name, value, ...) -> the factor of cos and sin, or the refusal.
YARN = "qwen3moe.rope.scaling"


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attn_factor": 1.0}, 0.1 * math.log(4) + 1),
        ({"attn_factor": 1.5}, (0.1 * math.log(4) + 1) * 1.5),  # llama.cpp: a factor of the usual one
        ({"yarn_attn_factor": 0.1 * math.log(4) + 1, "yarn_ext_factor": 1.0}, 0.1 * math.log(4) + 1),
        ({"yarn_attn_factor": 1.0}, "yarn_attn_factor = 1.0 is not supported"),
        ({"yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5 is not supported"),
    ],
)
def test_factors_of_yarn(tmp_path, keys, want):
    def edit(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        for key, value in keys.items():
            writer.add_float32(f"{YARN}.{key}", value)

    gguf_families.write_gguf(tmp_path / "m.gguf", "qwen3_moe", edit=edit)
    if isinstance(want, str):
        with pytest.raises(EngineError, match=want):
            open_model(tmp_path / "m.gguf")
    else:
        factor = open_model(tmp_path / "m.gguf").model_config.rope.scaling.attention_factor
        assert factor == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_deepseek_takes_its_temperature_from_mscale_only(tmp_path, key):
    def edit(writer):
        writer.add_float32(f"deepseek2.rope.scaling.{key}", 1.25)

    gguf_latent_and_sinks.write_gguf(tmp_path / "m.gguf", "deepseek_v3", edit=edit)
    with pytest.raises(EngineError, match=f"{key} = 1.25 is not supported"):
        open_model(tmp_path / "m.gguf")


def test_granite_without_rotary_positions_is_refused(tmp_path):
    gguf_families.write_gguf(tmp_path / "m.gguf", "granitemoe", edit=lambda w: w.add_rope_scaling_finetuned(False))
    with pytest.raises(EngineError, match="finetuned"):
        open_model(tmp_path / "m.gguf")
