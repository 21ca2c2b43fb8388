"""hqq5-ax0-g32 in a model: conversion by explicit choice, refusals, generation, and the gated perplexity ratio."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from snapshot_tools import directory_bytes, edit_header, make_snapshot, read_json, run_cli, tensor

import engine
from converters import hf
from converters.quantize import Quantizer
from engine import kernels
from engine.errors import ConfigError
from engine.formats import FORMATS
from engine.weights import open_model
from engine.weights.architectures import Expected
from engine.weights.errors import BlockLengthError, UnknownFormatError
from engine.weights.header import HEADER_FILE

ROOT = Path(__file__).parent.parent
NAME = "hqq5-ax0-g32"
SHIPPED_HF = ROOT / "engine" / "data" / "tiny-moe" / "hf"
HELDOUT = sorted(p for p in (ROOT / "tests" / "data" / "heldout").glob("*.txt") if "copyright" not in p.name)
RECORDED = ROOT / "tests" / "data" / "hqq5_perplexity.json"


@pytest.fixture(scope="module")
def wide_hf(tmp_path_factory):
    return tiny_models.make_hf_dir(tmp_path_factory.mktemp("wide"), "wide", dtype="BF16")


@pytest.fixture(scope="module", params=["auto", "storage"])
def snapshot(request, wide_hf, tmp_path_factory):
    out = tmp_path_factory.mktemp("hqq") / "s"
    make_snapshot(wide_hf, out, experts=NAME, dense="bf16", layout=request.param)
    return out


def test_records_name_axis_and_group(snapshot):
    entry = tensor(read_json(snapshot / HEADER_FILE), "layers.1.mlp.experts.0.up_proj")
    assert (entry["format"], entry["format_version"], entry["params"]) == (NAME, 1, {"axis": 0, "group": 32})
    assert entry["nbytes"] == 256 * 256 * 6 // 8
    other = tensor(read_json(snapshot / HEADER_FILE), "layers.1.self_attn.q_proj")
    assert "params" not in other


def test_generate_prints_one_line_with_format_axis_and_group(snapshot):
    code, _, err = run_cli("generate", "-m", snapshot, "-n", "2", "--temperature", "0", "more experts")
    assert code == 0, err
    lines = [line for line in err.splitlines() if line.startswith("format: ")]
    assert lines == [f"format: {NAME}, axis 0, group 32"]


def test_both_layouts_all_tiers_and_threads_generate_the_same(wide_hf, tmp_path):
    found = set()
    for layout in ("auto", "storage"):
        make_snapshot(wide_hf, tmp_path / layout, experts=NAME, dense="bf16", layout=layout)
        for tier in [name for name, supported, _ in kernels.tiers() if supported]:
            loaded = engine.load(tmp_path / layout, isa=tier, threads=1 + len(found) % 3)
            generation = loaded.generate(tiny_models.PROMPT, max_tokens=24, ignore_eos=True)
            found.add("".join(generation))
    assert len(found) == 1


def test_never_a_default():
    formats = hf.RoleFormats()
    assert NAME not in {formats.of(r) for r in ("gate_up", "down", "attention", "embed", "head", "router", "norm")}


def test_reader_without_the_format_refuses_by_name_and_version(snapshot, monkeypatch):
    monkeypatch.delitem(FORMATS, NAME)
    with pytest.raises(UnknownFormatError, match=rf"'{NAME}' \(version 1\) is unknown .*update millstream to 0\.1\.0"):
        open_model(snapshot)


@pytest.mark.parametrize("params", [{"axis": 1, "group": 32}, {"axis": 0, "group": 64}, None])
def test_other_parameters_are_refused(snapshot, tmp_path, params):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(snapshot, copy)

    def edit(content):
        entry = tensor(content, "layers.1.mlp.experts.0.up_proj")
        entry.pop("params")
        if params:
            entry["params"] = params

    edit_header(copy, edit, sign=True)
    with pytest.raises(UnknownFormatError, match=f"format {NAME} with"):
        open_model(copy)


def test_other_formats_are_written_as_if_this_one_were_not_there(wide_hf, tmp_path, monkeypatch):
    for experts in ("q8_0", "iq4_xs"):
        with_it, without = tmp_path / f"{experts}-with", tmp_path / f"{experts}-without"
        make_snapshot(wide_hf, with_it, experts=experts, dense="f16")
        with monkeypatch.context() as patch:
            patch.delitem(FORMATS, NAME)
            make_snapshot(wide_hf, without, experts=experts, dense="f16")
        assert directory_bytes(with_it) == directory_bytes(without)


def test_converter_asserts_the_output_axis(wide_hf, tmp_path, monkeypatch):
    from engine.models import olmoe

    for axis in (1, None):
        monkeypatch.setattr(olmoe, "OUTPUT_AXIS", axis)
        with pytest.raises(ConfigError, match=f"axis 0, but the output dimension of olmoe weights is axis {axis}"):
            make_snapshot(wide_hf, tmp_path / "s", experts=NAME)
        make_snapshot(wide_hf, tmp_path / f"q-{axis}", experts="q8_0")


def test_rows_that_are_no_whole_groups_are_refused_in_planning():
    quantizer = Quantizer(kernels.Context(num_threads=1), FORMATS)
    for rows in (16, 40):
        with pytest.raises(BlockLengthError, match=f"its {rows} rows are not a multiple of the 32 that share a scale"):
            quantizer.plan("x", Expected("gate_up", (rows, 64), "x"), NAME)
    with pytest.raises(BlockLengthError, match="row length 40"):
        quantizer.plan("x", Expected("gate_up", (64, 40), "x"), NAME)


def test_damaged_scale_is_found_by_verify_of_storage_rows(wide_hf, tmp_path):
    """Also in the last row group, which no first rows show."""
    out = tmp_path / "s"
    make_snapshot(wide_hf, out, experts=NAME, layout="storage")
    record = open_model(out).tensors["layers.0.mlp.experts.0.gate_proj"]
    stored = np.array(open_model(out).read(record.name))
    stored[-1] = 0x7C
    from engine.weights.scales import first_nonfinite_row

    context = kernels.Context(None, 1)
    assert first_nonfinite_row(context, record, stored, 8) == record.rows // 32 - 1


@pytest.mark.skipif(not SHIPPED_HF.is_dir(), reason="the shipped model's checkpoint is not in this tree")
def test_perplexity_ratio_on_the_shipped_model_is_the_recorded_one():
    """The recorded ratio of scripts/compare_hqq.py may not get worse by more than its margin."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import compare_hqq

    recorded = json.loads(RECORDED.read_text())
    assert recorded["reference"] == compare_hqq.REFERENCE
    texts = compare_hqq.read_texts(HELDOUT, recorded["limit_bytes"])
    found = compare_hqq.compare(
        SHIPPED_HF, texts, ctx=recorded["ctx"], runs=0, length=0, only=(compare_hqq.REFERENCE, NAME)
    )
    arms = found["arms"]
    ratio = arms[NAME]["perplexity"] / arms[compare_hqq.REFERENCE]["perplexity"]
    assert ratio <= recorded["ratio"] + recorded["margin"], (ratio, recorded)
