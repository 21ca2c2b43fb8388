"""GGUF files to snapshots: every weight bit for bit, experts side by side, the tokenizer with them."""

import json

import gguf_models
import numpy as np
import pytest
import tiny_models
from gguf import GGMLQuantizationType as Type
from snapshot_tools import assert_refused_by_cli, run_cli

import engine
from converters.gguf import convert_gguf
from engine.formats import FORMATS
from engine.kernels import Context
from engine.weights import errors, open_model

FORMATS_USED = {"ffn_down": Type.Q8_0, "ffn": Type.Q4_0, "attn": Type.Q5_1, "token_embd": Type.F16}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    template = "{{ messages[0].content }}"
    gguf_models.write_gguf(path, "gqa_norm", FORMATS_USED, edit=lambda w: w.add_chat_template(template))
    return path


@pytest.mark.parametrize("layout", ["storage", "compute", "auto"])
def test_every_weight_bit_for_bit(source, tmp_path, layout):
    report = convert_gguf(source, tmp_path / "s", layout=layout)
    there, here, context = open_model(source), open_model(tmp_path / "s"), Context()
    assert report.formats["gate_up"] == "q4_0" and report.formats["down"] == "q8_0"
    assert here.config == there.config and here.tensors.keys() == there.tensors.keys()
    for name, want in there.tensors.items():
        got, stored = here.record(name), there.read(name)
        assert (got.format, got.shape, got.role) == (want.format, want.shape, want.role)
        if got.layout is not None:
            stored = context.encode(want.format, stored, want.rows, want.cols)
        np.testing.assert_array_equal(here.read(name), stored)
        if layout != "auto" and len(want.shape) == 2:
            assert (got.layout is None) == (layout == "storage")
    assert here.verify() > 0
    record = here.expert(1, 3)
    assert record.offset % 4096 == 0 and record.nbytes % 4096 == 0


def test_the_same_text_from_file_and_snapshot(source, tmp_path):
    convert_gguf(source, tmp_path / "s")
    texts, ids = [], []
    for path in (source, tmp_path / "s"):
        model = engine.load(path)
        ids.append(model.tokenizer.encode(tiny_models.PROMPT))
        generation = model.generate(tiny_models.PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
        texts.append(("".join(generation), generation.token_ids))
    assert ids[0] == ids[1] and texts[0] == texts[1] and len(texts[0][1]) == 24
    config = json.loads((tmp_path / "s" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages[0].content }}"


def test_split_sets_and_fingerprints(tmp_path):
    gguf_models.write_gguf(tmp_path / "one.gguf", "mha_base")
    gguf_models.write_gguf(tmp_path / "set.gguf", "mha_base", shard_tensors=7)
    gguf_models.write_gguf(tmp_path / "other.gguf", "mha_base", seed=99)
    found = {}
    shard = sorted(tmp_path.glob("set-*.gguf"))[1].name
    for name in ("one.gguf", shard, "other.gguf"):
        convert_gguf(tmp_path / name, tmp_path / "s", force=True)
        files = open_model(tmp_path / "s")
        found[name] = (files.header.source["sha256"], [r.checksum for r in files.tensors.values()])
    one, split, other = found.values()
    assert one[1] == split[1] != other[1]
    assert one[0] != other[0]


def test_bad_scales_stop_a_conversion_and_leave_nothing(source, tmp_path):
    files = open_model(source)
    record = files.record("layers.2.mlp.experts.6.up_proj")
    data = bytearray(source.read_bytes())
    at = record.offset + record.nbytes - FORMATS["q4_0"].block_bytes
    data[at : at + 2] = b"\x00\x7c"
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(errors.NonFiniteError, match=r"layers\.2\.mlp\.experts\.6\.up_proj: row 63 "):
        convert_gguf(bad, tmp_path / "s")
    with pytest.raises(errors.NonFiniteError, match=r"experts\.6\.up_proj: row 63 "):
        open_model(bad).verify()
    assert_refused_by_cli(["inspect", "--verify", bad], "experts.6.up_proj", "not finite")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.gguf"]


def test_the_command(source, tmp_path):
    code, out, err = run_cli("convert", source, tmp_path / "s", "--json")
    assert code == 0, err
    assert json.loads(out)["formats"]["gate_up"] == "q4_0"
    assert_refused_by_cli(
        ["convert", source, tmp_path / "t", "--dense-format", "f16"], "--dense-format", "requantizing"
    )
    assert_refused_by_cli(["convert", source, tmp_path / "s"], "exists")


def test_an_unknown_pretokenizer_is_refused_until_one_is_given(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "mha_base", pre="future-pre")
    assert_refused_by_cli(["convert", path, tmp_path / "s"], "future-pre")
    code, _, err = run_cli("convert", path, tmp_path / "s", "--force-tokenizer", "olmo")
    assert code == 0, err
    hf = tmp_path / "hf"
    tiny_models.make_hf_dir(hf, "mha_base")
    assert_refused_by_cli(["convert", hf, tmp_path / "t", "--force-tokenizer", "olmo"], "only for GGUF files")
