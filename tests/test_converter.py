"""Hugging Face directories to snapshots: lossless where promised, the same from any sharding, refused when broken."""

import collections
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import tiny_models
from snapshot_tools import (
    ROOT,
    assert_refused_by_cli,
    copy_dir,
    directory_bytes,
    edit_safetensors_header,
    make_snapshot,
    read_json,
    run_cli,
    truncate,
    write_at,
)

from converters.hf import RoleFormats
from engine.chat_template import templates
from engine.errors import ConfigError, EngineError, FormatError
from engine.formats import FORMATS
from engine.weights import errors, open_model
from engine.weights.architectures import expected_tensors
from engine.weights.checkpoint import Checkpoint
from engine.weights.header import HEADER_FILE
from engine.weights.safetensors import read_header

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def hf_dir(tmp_path, name="mha_base", **options):
    return tiny_models.make_hf_dir(tmp_path / "hf", name, **options)


def weights_of(name, dtype="F32"):
    return tiny_models.make_weights(tiny_models.hf_config(name), tiny_models.golden_seed(name), dtype)


def edit_config(path, **changes):
    content = {**read_json(path / "config.json"), **changes}
    (path / "config.json").write_text(json.dumps(content))


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "fmt"), [("F32", "f32"), ("BF16", "bf16"), ("BF16", "f32"), ("F16", "f16"), ("F16", "f32")]
)
def test_float_formats_keep_every_bit(dtype, fmt, tmp_path):
    hf = hf_dir(tmp_path, dtype=dtype)
    # Values that a careless path loses: negative zero, subnormals of the type, its largest number.
    hard = {"F32": "<u4", "BF16": "<u2", "F16": "<u2"}[dtype]
    bits = {"F32": [0x80000000, 1, 0x7F7FFFFF], "BF16": [0x8000, 1, 0x7F7F], "F16": [0x8000, 1, 0x7BFF]}[dtype]
    source = read_header(hf / "model.safetensors").tensors[Q_PROJ]
    write_at(source.path, source.offset, np.array(bits, hard).tobytes())
    make_snapshot(hf, tmp_path / "s", experts=fmt, dense=fmt)
    files = open_model(tmp_path / "s")
    source_bytes = source.path.read_bytes()
    for name, want in expected_tensors("olmoe", files.config).items():
        tensor = read_header(source.path).tensors[want.checkpoint_name]
        raw = np.frombuffer(source_bytes, hard, tensor.nbytes // np.dtype(hard).itemsize, tensor.offset)
        if files.tensors[name].format == "f32" and dtype != "F32":
            wide = raw.astype(np.uint32) << 16 if dtype == "BF16" else raw.view("<f2").astype("<f4").view("<u4")
            np.testing.assert_array_equal(files.read(name).view("<u4"), wide)
        else:
            assert files.tensors[name].format == fmt
            np.testing.assert_array_equal(files.read(name).view(hard), raw)


@pytest.mark.parametrize("name", sorted(tiny_models.CONFIGS))
def test_every_tiny_config_round_trips_in_f32(name, tmp_path):
    make_snapshot(hf_dir(tmp_path, name), tmp_path / "s")
    files, weights = open_model(tmp_path / "s"), weights_of(name)
    expected = expected_tensors("olmoe", files.config)
    assert list(files.tensors) == list(expected) or set(files.tensors) == set(expected)
    assert {want.checkpoint_name for want in expected.values()} == set(weights)
    for ours, want in expected.items():
        got = files.read(ours).view("<f4").reshape(want.shape)
        np.testing.assert_array_equal(got, weights[want.checkpoint_name])


def test_tied_head_is_one_tensor(tmp_path):
    hf = hf_dir(tmp_path, "tied")
    report = make_snapshot(hf, tmp_path / "s", embed="q8_0")
    files = open_model(tmp_path / "s")
    assert files.tied_head and "lm_head" not in files.tensors
    assert report.formats["head"] == report.formats["embed"] == "q8_0"
    with pytest.raises(ConfigError, match="head format f16: this model ties its head to the embedding"):
        make_snapshot(hf, tmp_path / "other", embed="q8_0", head="f16")
    make_snapshot(hf, tmp_path / "same", embed="q8_0", head="q8_0")


def test_role_formats_follow_each_other():
    formats = RoleFormats(experts="q4_0", down="q8_0", dense="bf16", head="f32")
    found = {role: formats.of(role) for role in ("gate_up", "down", "attention", "embed", "head", "router", "norm")}
    assert found == {
        "gate_up": "q4_0", "down": "q8_0", "attention": "bf16", "embed": "bf16", "head": "f32", "router": "f32",
        "norm": "f32",
    }  # fmt: skip
    assert {RoleFormats().of(role) for role in ("attention", "embed", "head")} == {"f16"}


def test_each_format_option_of_the_command_line_changes_its_role_only(tmp_path):
    hf = hf_dir(tmp_path)
    options = {
        "--gate-up-format": "gate_up",
        "--down-format": "down",
        "--embed-format": "embed",
        "--head-format": "head",
    }
    args = [word for option in options for word in (option, "f32")]
    code, _, err = run_cli("convert", hf, tmp_path / "s", *args, "--dense-format", "bf16")
    assert code == 0, err
    formats = open_model(tmp_path / "s").header.formats
    assert formats == {role: "f32" for role in formats} | {"attention": "bf16"}
    code, _, err = run_cli("convert", hf, tmp_path / "t", "--format", "q4_0", "--layout", "storage", "--threads", "1")
    assert code == 0, err
    files = open_model(tmp_path / "t")
    assert files.header.formats["down"] == files.header.formats["gate_up"] == "q4_0"
    assert {record.layout for record in files.tensors.values()} == {None}


# ---- shards ----------------------------------------------------------------------------------------------------------


def test_shards_with_and_without_index_hold_the_same_tensors_as_one_file(tmp_path):
    sources = {"one": {}, "index": {"shards": 3}, "bare": {"shards": 3, "index": False}}
    for name, options in sources.items():
        tiny_models.make_hf_dir(tmp_path / name, "mha_base", **options)
        make_snapshot(tmp_path / name, tmp_path / f"s-{name}", experts="q4_0")
    one = open_model(tmp_path / "s-one")
    for name in ("index", "bare"):
        other = open_model(tmp_path / f"s-{name}")
        assert other.tensors.keys() == one.tensors.keys()
        for tensor, record in one.tensors.items():
            assert other.tensors[tensor].checksum == record.checksum
            np.testing.assert_array_equal(other.read(tensor), one.read(tensor))
    # The index names no weights, so it leaves no trace; the file names do, through the fingerprint.
    assert directory_bytes(tmp_path / "s-index") == directory_bytes(tmp_path / "s-bare")
    assert one.header.source["sha256"] != other.header.source["sha256"]


def test_fingerprint_sees_one_changed_tensor_and_config(tmp_path):
    first = make_snapshot(hf_dir(tmp_path), tmp_path / "a")
    tensor = read_header(tmp_path / "hf" / "model.safetensors").tensors[Q_PROJ]
    write_at(tensor.path, tensor.offset + tensor.nbytes // 2, b"\1\2")
    make_snapshot(tmp_path / "hf", tmp_path / "b")
    edit_config(tmp_path / "hf", rms_norm_eps=1e-4)
    make_snapshot(tmp_path / "hf", tmp_path / "c")
    prints = {open_model(tmp_path / name).header.source["sha256"] for name in "abc"}

    def swap_names(header):
        k_proj, v_proj = (Q_PROJ.replace("q_proj", part) for part in ("k_proj", "v_proj"))
        header[k_proj], header[v_proj] = header[v_proj], header[k_proj]

    edit_safetensors_header(tmp_path / "hf" / "model.safetensors", swap_names)
    prints.add(Checkpoint.open(tmp_path / "hf").fingerprint()["sha256"])
    assert len(prints) == 4
    source = open_model(first.path).header.source
    assert source["files"] == [{"name": "model.safetensors", "bytes": tensor.path.stat().st_size}]
    assert "4096 bytes of every tensor" in source["method"]


def test_known_harmless_extra_tensors_are_skipped(tmp_path):
    hf = hf_dir(tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    tiny_models.write_safetensors(hf / "model.safetensors", weights_of("mha_base") | extra)
    make_snapshot(hf, tmp_path / "s")
    assert not any("inv_freq" in name for name in open_model(tmp_path / "s").tensors)


def test_stored_copy_of_a_tied_head_is_skipped_and_another_head_refused(tmp_path):
    hf, weights = hf_dir(tmp_path, "tied"), weights_of("tied")
    head = weights["model.embed_tokens.weight"].copy()
    tiny_models.write_safetensors(hf / "model.safetensors", weights | {"lm_head.weight": head})
    make_snapshot(hf, tmp_path / "s")
    head[-1, -1] += 1
    tiny_models.write_safetensors(hf / "model.safetensors", weights | {"lm_head.weight": head})
    with pytest.raises(errors.UnexpectedTensorError, match="ties the head to the embedding, but"):
        make_snapshot(hf, tmp_path / "t")


def test_progress_counts_source_bytes(tmp_path):
    seen = []
    report = make_snapshot(hf_dir(tmp_path), tmp_path / "s", progress=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.source_bytes
    assert len({p.name for p in seen}) == report.num_tensors
    assert all(a.done_bytes < b.done_bytes for a, b in itertools.pairwise(seen))


def test_one_large_tensor_moves_the_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("converters.quantize._CHUNK_VALUES", 256)
    seen = []
    report = make_snapshot(hf_dir(tmp_path), tmp_path / "s", progress=seen.append)
    assert len(seen) > 3 * report.num_tensors
    assert seen[-1].done_bytes == report.source_bytes
    assert all(a.done_bytes <= b.done_bytes for a, b in itertools.pairwise(seen))


def test_a_tensor_whose_rows_share_data_moves_the_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("converters.quantize._CHUNK_VALUES", 256)
    seen, hf = [], hf_dir(tmp_path)
    make_snapshot(hf, tmp_path / "s", dense="hqq5-ax0-g32", embed="f32", head="f32", progress=seen.append)
    steps = collections.Counter(p.name for p in seen)
    rows = len(weights_of("mha_base")["model.layers.0.self_attn.q_proj.weight"])
    assert steps["layers.0.self_attn.q_proj"] == rows // 32 > 1
    assert all(a.done_bytes < b.done_bytes for a, b in itertools.pairwise(seen))


# ---- refusals --------------------------------------------------------------------------------------------------------


def rewrite(**changes):
    """Breaker: the weights with tensors replaced, or removed where None."""

    def breaker(hf):
        weights = weights_of("mha_base")
        for name, value in changes.items():
            weights[name] = value
        tiny_models.write_safetensors(
            hf / "model.safetensors", {name: value for name, value in weights.items() if value is not None}
        )

    return breaker


def config(**changes):
    return lambda hf: edit_config(hf, **changes)


def poke(value):
    """Breaker: one weight of q_proj, in row 1, column 3, becomes `value`."""

    def breaker(hf):
        tensor = read_header(hf / "model.safetensors").tensors[Q_PROJ]
        write_at(tensor.path, tensor.offset + (64 + 3) * 4, np.float32(value).tobytes())

    return breaker


def retype(hf):
    def edit(header):
        header[Q_PROJ].update(dtype="I32")

    edit_safetensors_header(hf / "model.safetensors", edit)


def pickle_only(hf):
    (hf / "model.safetensors").rename(hf / "pytorch_model.bin")


def renumber(hf):
    """A lone shard of a set of three, as left by a broken download without an index."""
    (hf / "model.safetensors").rename(hf / "model-00002-of-00003.safetensors")


def two_sets(hf):
    (hf / "model.safetensors").rename(hf / "model-00001-of-00001.safetensors")
    copy_dir(hf, hf.parent / "x")
    (hf.parent / "x" / "model-00001-of-00001.safetensors").rename(hf / "model-00001-of-00002.safetensors")


def bad_index(content):
    def breaker(hf):
        (hf / INDEX).write_text(json.dumps(content))

    return breaker


def duplicate(hf):
    (hf / "model.safetensors").rename(hf / "a.safetensors")
    (hf / "b.safetensors").write_bytes((hf / "a.safetensors").read_bytes())


ONES = np.ones((64, 64), np.float32)
Q = "model.safetensors"
# id, breaker, options of the command line, class, words
CASES = [
    ("no such directory", lambda hf: hf.rename(hf.parent / "gone"), [], errors.NotAModelDirectoryError,
     ["no such directory"]),
    ("no config", lambda hf: (hf / "config.json").unlink(), [], errors.NotAModelDirectoryError, ["no config.json"]),
    ("no weights", lambda hf: (hf / Q).unlink(), [], errors.NotAModelDirectoryError, ["no *.safetensors"]),
    ("pickled weights", pickle_only, [], errors.NotAModelDirectoryError, ["pytorch_model.bin", "safetensors"]),
    ("broken config", lambda hf: (hf / "config.json").write_text('{"model_type": '), [], errors.HeaderSyntaxError,
     ["config.json", "no valid JSON"]),
    ("index names absent shards", bad_index({"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": Q}}),
     [], errors.MissingFileError, ["2 of 3", "x-1.safetensors", "x-2.safetensors"]),
    ("index promises absent tensors", bad_index({"weight_map": {"ghost.weight": Q, Q_PROJ: Q}}), [],
     errors.MissingTensorError, [INDEX, "1 tensors", "ghost.weight"]),
    ("index without map", bad_index({"metadata": {}}), [], errors.HeaderSyntaxError, [INDEX, "no weight_map"]),
    ("numbered shards missing", renumber, [], errors.MissingFileError,
     ["2 of 3", "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]),
    ("two sets of shards", two_sets, [], errors.DuplicateTensorError, ["side by side", "of-00001", "of-00002"]),
    ("duplicate tensor", duplicate, [], errors.DuplicateTensorError, ["a.safetensors", "b.safetensors"]),
    ("truncated shard", lambda hf: truncate(hf / Q, 1000), [], errors.TruncatedFileError,
     [Q, "1000 bytes are missing"]),
    ("cut in its header", lambda hf: (hf / Q).write_bytes((hf / Q).read_bytes()[:500]), [], errors.TruncatedFileError,
     [Q, "header is cut off"]),
    ("empty shard", lambda hf: (hf / Q).write_bytes(b""), [], errors.TruncatedFileError, [Q, "too short"]),
    ("trailing bytes", lambda hf: (hf / Q).write_bytes((hf / Q).read_bytes() + b"\0" * 9), [], errors.FileLengthError,
     [Q, "9 bytes follow"]),
    ("not safetensors", lambda hf: write_at(hf / Q, 0, b"\xff" * 8), [], errors.HeaderSyntaxError,
     [Q, "no safetensors file"]),
    ("missing tensors", rewrite(**{Q_PROJ: None, "model.norm.weight": None}), [], errors.MissingTensorError,
     ["2 of ", Q_PROJ, "model.norm.weight"]),
    ("extra tensor", rewrite(**{"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}), [],
     errors.UnexpectedTensorError, ["1 tensors", "model.layers.0.self_attn.q_proj.bias"]),
    ("wrong shape", rewrite(**{Q_PROJ: np.ones((32, 64), np.float32)}), [], errors.ShapeError,
     [Q_PROJ, "[32, 64]", "[64, 64]"]),
    ("transposed", rewrite(**{"model.layers.0.mlp.gate.weight": np.ones((64, 8), np.float32)}), [], errors.ShapeError,
     ["model.layers.0.mlp.gate.weight", "[64, 8]", "[8, 64]"]),
    ("dtype", retype, [], errors.DtypeError, [Q_PROJ, "I32", "BF16, F16, F32"]),
    ("architecture", config(model_type="llama9"), [], errors.UnknownArchitectureError, ["'llama9'", "olmoe"]),
    ("no architecture", config(model_type=None), [], errors.UnknownArchitectureError, ["model_type is None"]),
    ("quantized source", config(quantization_config={"quant_method": "gptq"}), [], errors.QuantizedSourceError,
     ["quantization_config", "'gptq'"]),
    ("attention bias", config(attention_bias=True), [], ConfigError, ["attention_bias", "True"]),
    ("activation", config(hidden_act="gelu"), [], ConfigError, ["hidden_act", "'gelu'", "'silu'"]),
    ("rope scaling", config(rope_scaling={"type": "dynamic", "factor": 2.0}), [], ConfigError,
     ["rope_scaling", "dynamic"]),
    ("unknown key", config(attention_gadget=3), [], ConfigError, ["attention_gadget"]),
    ("missing key", config(num_experts=None), [], ConfigError, ["num_experts", "missing"]),
    ("block length", lambda hf: None, ["--format", "iq4_xs"], errors.BlockLengthError,
     ["layers.0.mlp.experts.0.gate_proj", "row length 64", "256", "iq4_xs", "q8_0"]),
    ("unknown format", lambda hf: None, ["--format", "q9_z"], errors.UnknownFormatError, ["'q9_z'", "q8_0"]),
    ("unknown role format", lambda hf: None, ["--head-format", "q9_z"], errors.UnknownFormatError, ["'q9_z'"]),
    ("nan", poke(np.nan), [], errors.NonFiniteError, [Q_PROJ, "nan", "[1, 3]"]),
    ("infinity", poke(-np.inf), [], errors.NonFiniteError, [Q_PROJ, "-inf", "[1, 3]"]),
    ("too large for f16", poke(1e6), [], errors.NonFiniteError, [Q_PROJ, "f16", "1e+06", "bf16"]),
    ("too large for an f16 scale", poke(1e9), ["--dense-format", "q8_0"], errors.NonFiniteError, [Q_PROJ, "q8_0"]),
]  # fmt: skip


def formats_of(options):
    """The RoleFormats that the command line makes of these options."""
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    names = {"--format": "experts", "--dense-format": "dense", "--head-format": "head"}
    return RoleFormats(**{names[option]: value for option, value in pairs.items()})


@pytest.mark.parametrize(
    ("breaker", "options", "kind", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_broken_source_is_refused_and_leaves_nothing(breaker, options, kind, words, tmp_path):
    from converters.hf import convert

    hf = hf_dir(tmp_path)
    breaker(hf)
    with pytest.raises(EngineError) as caught:
        convert(hf, tmp_path / "s", formats=formats_of(options))
    assert type(caught.value) is kind, repr(caught.value)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    code, out, err = run_cli("convert", hf, tmp_path / "s", *options)
    assert code == 2 and out == "" and "Traceback" not in err
    last = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
    assert len(last) == 1 and all(word in last[0] for word in words), err
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("s")]


def test_existing_target_is_refused_by_the_command_line(tmp_path):
    hf = hf_dir(tmp_path)
    make_snapshot(hf, tmp_path / "s")
    assert_refused_by_cli(["convert", hf, tmp_path / "s"], "exists", "--force")
    assert run_cli("convert", hf, tmp_path / "s", "--force")[0] == 0


def test_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="layout 'fast': expected one of auto, storage, compute"):
        make_snapshot(hf_dir(tmp_path), tmp_path / "s", layout="fast")


def test_format_that_cannot_be_made_here_is_refused_before_writing(tmp_path, monkeypatch):
    from converters.quantize import Quantizer

    monkeypatch.setattr(Quantizer, "_can_quantize", lambda self, name: name != "q4_0")
    with pytest.raises(FormatError, match="format q4_0 can be read but not made here"):
        make_snapshot(hf_dir(tmp_path), tmp_path / "s", experts="q4_0")


MADE_HERE = {
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
    "int8-row", "int4-g32", "int4-g64", "int4-g128", "int3-g64", "hqq5-ax0-g32", "e8-iq3",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(FORMATS) - MADE_HERE))
def test_format_without_a_quantizer_is_refused_with_those_that_have_one(name, tmp_path):
    hf = hf_dir(tmp_path)
    with pytest.raises(errors.UnknownFormatError, match="can be read but not made here") as caught:
        make_snapshot(hf, tmp_path / "s", experts=name)
    listed = str(caught.value).partition("(can be made: ")[2].rstrip(")").split(", ")
    assert set(listed) == MADE_HERE and str(caught.value).startswith(f"format {name} can be read")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_format_without_a_quantizer_is_refused_by_the_command_line(tmp_path):
    code, out, err = run_cli("convert", hf_dir(tmp_path), tmp_path / "s", "--format", "q2_k")
    assert code == 2 and out == "" and "Traceback" not in err
    assert "error: format q2_k can be read but not made here (can be made: bf16, " in err and "q6_k" in err


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("generation_config.json", '{"do_sample": true, "temperature": "hot"}', "temperature"),
        ("generation_config.json", '{"eos_token_id": -3}', "eos_token_id"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", None, "tokenizer.json"),
    ],
)
def test_side_files_that_generate_would_refuse_are_refused_before_converting(tmp_path, file, content, words):
    hf = hf_dir(tmp_path)
    (hf / file).unlink() if content is None else (hf / file).write_text(content)
    code, _, err = run_cli("convert", hf, tmp_path / "s")
    assert code == 2 and words in err and "Traceback" not in err
    assert not (tmp_path / "s").exists()


def test_named_chat_templates_go_along(tmp_path):
    hf = hf_dir(tmp_path)
    (hf / "chat_template.jinja").write_text("A")
    (hf / "additional_chat_templates").mkdir()
    (hf / "additional_chat_templates" / "tool.jinja").write_text("B")
    make_snapshot(hf, tmp_path / "s")
    found = templates(open_model(tmp_path / "s"))
    assert found == templates(open_model(hf)) == {"default": "A", "tool": "B"}


def test_formats_that_fit_a_row_are_ones_that_can_be_made(tmp_path):
    with pytest.raises(errors.BlockLengthError, match="formats that fit: ") as caught:
        make_snapshot(hf_dir(tmp_path), tmp_path / "s", experts="q6_k")
    fits = str(caught.value).partition("formats that fit: ")[2].split(", ")
    assert set(fits) == {name for name in MADE_HERE if 64 % FORMATS[name].block_len == 0}


def test_documents_list_the_formats_that_can_be_made():
    text = (ROOT / "docs" / "command-line.md").read_text()
    made, _, rest = text.partition("Formats that can be made here:")[2].partition("The other GGML formats (")
    rows = [line.split("|")[2] for line in made.splitlines() if line.startswith("| ")][2:]
    assert {name for row in rows for name in row.strip().split(", ")} == MADE_HERE
    assert set(rest.partition(")")[0].replace("\n", " ").split(", ")) == set(FORMATS) - MADE_HERE


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_stays_at_a_few_chunks(tmp_path):
    """One tensor of 100 MB (205 MB as float32): the peak grows by chunks, not by tensors."""
    hf, vocab = hf_dir(tmp_path, {"hidden_size": 512, "tie_word_embeddings": True}, dtype="BF16"), 100_000

    def grow(header):
        # The embedding moves behind everything else, into a hole of the file that reads as zeros.
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        offsets = [end, end + vocab * 512 * 2]
        header["model.embed_tokens.weight"].update(shape=[vocab, 512], data_offsets=offsets)
        header["model.embed_tokens.weight"]["dtype"] = "BF16"

    edit_safetensors_header(hf / Q, grow)
    with (hf / Q).open("r+b") as file:
        file.truncate((hf / Q).stat().st_size + vocab * 512 * 2)
    edit_config(hf, vocab_size=vocab)
    code = (
        "import resource, sys\n"
        "from converters.hf import RoleFormats, convert\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = peak()\n"
        "convert(sys.argv[1], sys.argv[2], formats=RoleFormats(embed='q8_0'))\n"
        "print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(hf), str(tmp_path / "s")], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert int(done.stdout) < 100, f"{done.stdout} MiB"


def test_every_format_is_listed_when_one_is_unknown(tmp_path):
    with pytest.raises(errors.UnknownFormatError) as caught:
        make_snapshot(hf_dir(tmp_path), tmp_path / "s", dense="nothing")
    assert all(name in str(caught.value) for name in FORMATS)
    assert not (tmp_path / "s" / HEADER_FILE).exists()
