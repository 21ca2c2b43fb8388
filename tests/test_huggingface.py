"""Hugging Face directories without a conversion: same logits as transformers, same bits as a snapshot of their floats;
FP8 checkpoints with block scales are converted, other quantized ones refused by name."""

import json

import latent_and_sink_models as latent
import numpy as np
import pytest
import tiny_models
from snapshot_tools import make_snapshot, run_cli
from test_gguf import golden_logits, load_model
from test_models import GOLDEN_DIR, largest_error

from converters.hf import RoleFormats, convert
from engine.weights import errors, open_model
from engine.weights.checkpoint import Checkpoint
from engine.weights.quantization import _E4M3, fp8_source


@pytest.mark.parametrize("name", ["odd", "gqa_norm", "tied"])
def test_logits_match_transformers(tmp_path, name):
    tiny_models.make_hf_dir(tmp_path / "hf", name, shards=2)
    files = open_model(tmp_path / "hf")
    assert files.kind == "huggingface" and {r.format for r in files.tensors.values()} == {"f32"}
    with np.load(GOLDEN_DIR / f"{name}.npz") as file:
        want = np.concatenate([file["prefill_logits"], file["decode_logits"]])
        got = golden_logits(load_model(files), file)
    assert largest_error(got, want) <= 1e-4


@pytest.mark.parametrize("dtype, name", [("BF16", "bf16"), ("F16", "f16")])
def test_the_same_bits_as_a_snapshot_in_that_format(tmp_path, dtype, name):
    tiny_models.make_hf_dir(tmp_path / "hf", "mha_base", dtype=dtype)
    make_snapshot(tmp_path / "hf", tmp_path / "s", experts=name, dense=name)
    here, there = open_model(tmp_path / "hf"), open_model(tmp_path / "s")
    matrices = [record for record in here.tensors.values() if len(record.shape) == 2]
    assert {record.format for record in matrices} == {name}
    ids = np.arange(20, dtype=np.int32)
    models = [load_model(files) for files in (here, there)]
    a, b = (model.forward(ids, model.new_kv(32), 0, logits="all").copy() for model in models)
    np.testing.assert_array_equal(a, b)


def test_generate_runs_a_checkpoint_and_prints_its_format(tmp_path):
    tiny_models.make_hf_dir(tmp_path / "hf", "mha_base", dtype="BF16")
    args = ["generate", "--model", tmp_path / "hf", "-n", "4", "--temperature", "0", "--json", "The router"]
    code, out, err = run_cli(*args)
    assert code == 0, err
    assert "olmoe; bf16" in err
    assert len(json.loads(out)["token_ids"]) == 4
    code, out, err = run_cli("inspect", "--verify", "--json", tmp_path / "hf")
    assert code == 0, err
    found = json.loads(out)
    assert found["kind"] == "huggingface" and found["verified_bytes"] > 0


def test_a_value_that_is_not_finite_is_found(tmp_path):
    weights = tiny_models.make_weights(tiny_models.hf_config("mha_base"), 1)
    tiny_models.make_hf_dir(tmp_path / "hf", "mha_base", seed=1)
    data = (tmp_path / "hf" / "model.safetensors").read_bytes()
    last = np.ascontiguousarray(weights["model.layers.1.mlp.experts.5.up_proj.weight"], np.float32)[-1].tobytes()
    assert data.count(last) == 1
    at = data.index(last)
    bad = data[:at] + np.float32(np.nan).tobytes() + data[at + 4 :]
    (tmp_path / "hf" / "model.safetensors").write_bytes(bad)
    with pytest.raises(errors.NonFiniteError, match=r"experts\.5\.up_proj: row 63"):
        open_model(tmp_path / "hf").verify()


# ---- FP8 -------------------------------------------------------------------------------------------------------------


def test_e4m3_codes():
    """Every code against its definition, and the borders that the format's description gives."""
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
        want = sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))
        if code & 127 == 127:
            assert np.isnan(_E4M3[code])
        else:
            assert _E4M3[code] == want
    assert (_E4M3[0x7E], _E4M3[1], _E4M3[0x38]) == (448.0, 2.0**-9, 1.0)


def make_fp8_dir(path, block=(32, 48), **changes):
    """A tiny checkpoint whose layer matrices are FP8 with a scale per block; returns their float64 values by name."""
    rng = np.random.default_rng(3)
    config = tiny_models.hf_config("mha_base")
    weights = tiny_models.make_weights(config, 3)
    tiny_models.make_hf_dir(path, "mha_base", seed=3)
    header, data, values = {}, b"", {}

    def add(name, dtype, array):
        nonlocal data
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw

    for name, array in weights.items():
        if array.ndim == 1 or "layers" not in name or name.endswith("mlp.gate.weight"):
            add(name, "F32", np.asarray(array, np.float32))
            continue
        codes = rng.integers(0, 256, array.shape).astype(np.uint8)
        codes[codes & 127 == 127] = 5
        scales = rng.uniform(1e-4, 2e-4, [-(-n // b) for n, b in zip(array.shape, block, strict=True)])
        scales = scales.astype(np.float32)
        add(name, "F8_E4M3", codes)
        add(f"{name}_scale_inv", "F32", scales)
        full = np.kron(scales.astype(np.float64), np.ones(block))[: array.shape[0], : array.shape[1]]
        values[name] = _E4M3[codes] * full
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), **changes}
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))
    return values


def test_fp8_is_dequantized_on_conversion(tmp_path):
    values = make_fp8_dir(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "s", formats=RoleFormats(experts="f32", dense="f32"))
    files = open_model(tmp_path / "s")
    assert "quantization_config" not in files.config
    for ours, theirs in (("self_attn.k_proj", "self_attn.k_proj"), ("mlp.experts.3.down_proj",) * 2):
        got = files.read(f"layers.1.{ours}").view("<f4")
        want = values[f"model.layers.1.{theirs}.weight"]
        np.testing.assert_array_equal(got, want.astype(np.float32).reshape(-1))


def test_fp8_rows_may_come_in_any_parts(tmp_path):
    values = make_fp8_dir(tmp_path / "hf")
    checkpoint, name = Checkpoint.open(tmp_path / "hf"), "model.layers.0.mlp.experts.1.gate_proj.weight"
    source = fp8_source(checkpoint.tensors[name], checkpoint.tensors, checkpoint.config)
    parts = [source.rows(first, last) for first, last in ((0, 5), (5, 40), (40, 64))]
    got = np.concatenate(parts).view("<f4").reshape(64, 64)
    np.testing.assert_array_equal(got, values[name].astype(np.float32))


def test_fp8_is_not_run_in_place(tmp_path):
    make_fp8_dir(tmp_path / "hf")
    with pytest.raises(errors.QuantizedSourceError, match="millstream convert"):
        open_model(tmp_path / "hf")


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"fmt": "e5m2"}, "'e5m2'"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"new_rule": 1}, "new_rule"),
    ],
)
def test_other_quantized_checkpoints_are_refused_by_name(tmp_path, changes, word):
    make_fp8_dir(tmp_path / "hf", **changes)
    for call in (lambda: convert(tmp_path / "hf", tmp_path / "s"), lambda: open_model(tmp_path / "hf")):
        with pytest.raises(errors.QuantizedSourceError, match=word):
            call()


@pytest.mark.parametrize("value", ["fp8", ["fp8"], 8])
def test_quantization_that_is_no_object_is_refused(tmp_path, value):
    make_fp8_dir(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": value}))
    with pytest.raises(errors.QuantizedSourceError, match="quantization_config"):
        open_model(tmp_path / "hf")


def test_fp8_without_its_scales_is_refused(tmp_path):
    make_fp8_dir(tmp_path / "hf", block=(32, 48), weight_block_size=[16, 48])
    with pytest.raises(errors.ShapeError, match="_scale_inv"):
        convert(tmp_path / "hf", tmp_path / "s")


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "gpt_oss"])
def test_tensors_that_a_checkpoint_arranges_otherwise(tmp_path, name):
    """gpt-oss: fused, transposed, interleaved experts, in MXFP4 blocks or floats; in place as from a snapshot."""
    names = {path.stem for path in latent.GOLDEN_DIR.glob("*.npz")}
    name = next(
        found for found in sorted(names) if found.startswith("gpt_oss") and found.endswith("mxfp4") == ("mxfp4" in name)
    )
    latent.checkpoint(tmp_path / "hf", name)
    convert(tmp_path / "hf", tmp_path / "s", formats=RoleFormats(experts="f32", dense="f32"))
    here, there = open_model(tmp_path / "hf"), open_model(tmp_path / "s")
    assert here.made and not there.made
    assert {r.format for r in here.tensors.values()} == {r.format for r in there.tensors.values()}
    ids = np.arange(20, dtype=np.int32)
    models = [load_model(files) for files in (here, there)]
    a, b = (model.forward(ids, model.new_kv(32), 0, logits="all").copy() for model in models)
    np.testing.assert_array_equal(a, b)
