"""Every way in which a snapshot can be broken: its own exception class, one telling line, exit code 2.

Each case breaks a good snapshot on purpose and opens it through Python and through the real command line.
"""

import dataclasses
import json
import os
import random

import numpy as np
import pytest
import tiny_models
from snapshot_tools import (
    assert_refused_by_cli,
    copy_dir,
    edit_header,
    edit_safetensors_header,
    make_snapshot,
    read_json,
    run_cli,
    tensor,
    truncate,
    write_at,
)

from engine import kernels
from engine.errors import ConfigError, EngineError
from engine.formats import FORMATS
from engine.weights import errors, open_model
from engine.weights.checkpoint import Checkpoint
from engine.weights.checks import check_kernel, round_up
from engine.weights.header import HEADER_FILE
from engine.weights.snapshot import checksum_of
from engine.weights.writer import DENSE_FILE

EXPERTS = "experts-00001.safetensors"
Q_PROJ, UP, ROUTER = "layers.0.self_attn.q_proj", "layers.1.mlp.experts.2.up_proj", "layers.0.mlp.router"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A tiny snapshot: experts q4_0 in compute layout, the rest q8_0 in storage-sized layouts, some expert files."""
    folder = tmp_path_factory.mktemp("good")
    tiny_models.make_hf_dir(folder / "hf", "mha_base")
    make_snapshot(folder / "hf", folder / "s", experts="q4_0", dense="q8_0", expert_file_bytes=40_000)
    return folder / "s"


@pytest.fixture(scope="module")
def good_storage(tmp_path_factory):
    """The same in storage rows."""
    folder = tmp_path_factory.mktemp("good")
    tiny_models.make_hf_dir(folder / "hf", "mha_base")
    make_snapshot(folder / "hf", folder / "s", experts="q4_0", dense="q8_0", layout="storage")
    return folder / "s"


def test_the_unbroken_snapshot_opens_and_verifies(good, good_storage):
    for path in (good, good_storage):
        open_model(path).verify()
    code, out, _ = run_cli("inspect", good, "--verify")
    assert code == 0 and "olmoe" in out


# ---- breakers: each takes the snapshot's path ------------------------------------------------------------------------


def header(edit, **options):
    return lambda path: edit_header(path, edit, **options)


def set_field(name, key, value):
    return header(lambda content: tensor(content, name).update({key: value}))


def set_top(key, value):
    return header(lambda content: content.update({key: value}))


def drop_tensors(*names):
    def edit(content):
        content["tensors"] = [entry for entry in content["tensors"] if entry["name"] not in names]

    return header(edit)


def add_tensor(**changes):
    return header(lambda content: content["tensors"].append({**tensor(content, Q_PROJ), **changes}))


def remove(*names):
    return lambda path: [(path / name).unlink() for name in names]


def cut_header(path):
    raw = (path / HEADER_FILE).read_bytes()
    (path / HEADER_FILE).write_bytes(raw[: len(raw) // 2])


def config(key, value, **options):
    return header(lambda content: content["config"].update({key: value}), **options)


def shift(name, delta):
    def edit(content):
        tensor(content, name)["offset"] += delta

    return header(edit)


def swap_experts(content):
    a, b = tensor(content, UP), tensor(content, UP.replace("up_proj", "gate_proj"))
    a["offset"], b["offset"] = b["offset"], a["offset"]


def grow_file_entry(content):
    """A tensor past the end of a file whose size is as stated: only the tensor's end gives it away."""
    entry = tensor(content, "lm_head")
    entry["offset"] = next(file["bytes"] for file in content["files"] if file["name"] == DENSE_FILE) - 64


def append(path):
    with (path / DENSE_FILE).open("ab") as file:
        file.write(b"\0" * 64)


def swap_files(path):
    """Two expert files of equal size change names, as in a careless copy."""
    names = sorted(file.name for file in path.glob("experts-*"))
    first = next(a for a in names for b in names if a < b and (path / a).stat().st_size == (path / b).stat().st_size)
    second = next(b for b in names if b > first and (path / b).stat().st_size == (path / first).stat().st_size)
    (path / first).rename(path / "x")
    (path / second).rename(path / first)
    (path / "x").rename(path / second)


def container(edit):
    return lambda path: edit_safetensors_header(path / DENSE_FILE, edit)


def move_entry(head):
    """Two entries of the data file's own header change places; sizes and ends stay right."""
    a, b = head["layers.0.self_attn.k_proj"], head["layers.0.self_attn.v_proj"]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]


def garbage_container(path):
    write_at(path / DENSE_FILE, 8, b"garbage!")


# id, breaker, class, words of the message
CASES = [
    ("no header", remove(HEADER_FILE), errors.NotASnapshotError, ["no millstream.json", "millstream convert"]),
    ("magic", set_top("magic", "gguf"), errors.NotASnapshotError, ["magic", "'gguf'", "millstream-snapshot"]),
    ("newer header", header(lambda c: c.update(header_version=2, min_reader="0.9.0")), errors.HeaderVersionError,
     ["snapshot needs millstream >= 0.9.0", "header version 2"]),
    ("newer reader", set_top("min_reader", "0.10.0"), errors.ReaderVersionError,
     ["snapshot needs millstream >= 0.10.0", "0.1.0"]),
    ("bad version text", set_top("min_reader", "soon"), errors.HeaderSyntaxError, ["min_reader", "'soon'"]),
    ("half-written header", cut_header, errors.HeaderSyntaxError, [HEADER_FILE, "no valid JSON", "cut off"]),
    ("empty header", lambda p: (p / HEADER_FILE).write_bytes(b""), errors.HeaderSyntaxError, ["no valid JSON"]),
    ("header is a list", lambda p: (p / HEADER_FILE).write_text("[]"), errors.HeaderSyntaxError, ["no JSON object"]),
    ("field of wrong type", set_field(UP, "nbytes", "12"), errors.HeaderSyntaxError, [UP, "nbytes", "'12'", "a count"]),
    ("field missing", header(lambda c: tensor(c, UP).pop("checksum")), errors.HeaderSyntaxError,
     [UP, "checksum", "nothing"]),
    ("file name leaves the directory", header(lambda c: c["files"][0].update(name="../x")), errors.HeaderSyntaxError,
     ["'../x'", "no plain file name"]),
    ("file not listed", set_field(UP, "file", "other.safetensors"), errors.HeaderSyntaxError,
     [UP, "other.safetensors"]),
    ("role", set_field(UP, "role", "down"), errors.HeaderSyntaxError, [UP, "'down'", "'gate_up'"]),
    ("tied head", set_top("tied_head", True), errors.HeaderSyntaxError, ["tied_head is True"]),
    ("identity", config("rope_theta", 20000.0), errors.HeaderChangedError, [HEADER_FILE, "does not match its content"]),
    ("architecture", set_top("architecture", "llama9"), errors.UnknownArchitectureError, ["'llama9'", "olmoe"]),
    ("config value", config("hidden_act", "relu", sign=True), ConfigError, ["hidden_act", "'relu'", "silu"]),
    ("config size", config("num_experts", 1 << 40, sign=True), ConfigError, ["num_experts", "out of range"]),
    ("damaged config value", config("hidden_act", "relu"), errors.HeaderChangedError,
     [HEADER_FILE, "edited or damaged", "hidden_act"]),
    ("damaged config key", config("hidden_acu", "silu"), errors.HeaderChangedError,
     [HEADER_FILE, "edited or damaged", "hidden_acu"]),
    ("format name", set_field(UP, "format", "q9_z"), errors.UnknownFormatError, [UP, "'q9_z'", "q8_0", "q4_0"]),
    ("format version", set_field(UP, "format_version", 7), errors.FormatVersionError,
     [UP, "q4_0 has version 7", "reads version 1"]),
    ("layout name", set_field(UP, "layout", "nib9"), errors.UnknownLayoutError, [UP, "'nib9'", "nib8_q4_0"]),
    ("layout of another format", set_field(UP, "layout", "byte8_q8_0"), errors.UnknownLayoutError,
     [UP, "'byte8_q8_0'", "nib8_q4_0"]),
    ("block", header(lambda c: tensor(c, UP).update(format="iq4_xs", layout=None)), errors.BlockLengthError,
     [UP, "64", "256", "iq4_xs"]),
    ("shape against config", set_field(Q_PROJ, "shape", [32, 64]), errors.ShapeError,
     [Q_PROJ, "[32, 64]", "config needs [64, 64]"]),
    ("shape transposed", header(lambda c: tensor(c, ROUTER).update(shape=[64, 8])), errors.ShapeError,
     [ROUTER, "[64, 8]", "[8, 64]"]),
    ("length", header(lambda c: tensor(c, UP).update(nbytes=tensor(c, UP)["nbytes"] - 64)), errors.LengthError,
     [UP, "got 2240 bytes", "needs 2304", "q4_0"]),
    ("vector format", header(lambda c: tensor(c, "norm").update(format="f16", nbytes=128)), errors.LengthError,
     ["norm", "a vector must be f32", "f16"]),
    ("missing tensors", drop_tensors(UP, Q_PROJ, "norm"), errors.MissingTensorError,
     ["3 of ", UP, Q_PROJ, "norm"]),
    ("missing tensors abbreviated", header(lambda c: c["tensors"].__delitem__(slice(3, 13))),
     errors.MissingTensorError, ["10 of ", "and 6 more"]),
    ("unknown tensor", add_tensor(name="layers.0.mlp.bias"), errors.UnexpectedTensorError, ["layers.0.mlp.bias"]),
    ("duplicate tensor", add_tensor(), errors.DuplicateTensorError, [Q_PROJ, "listed twice"]),
    ("duplicate key", lambda p: (p / HEADER_FILE).write_text('{"magic": 1, "magic": 2}'), errors.DuplicateTensorError,
     ["magic", "twice"]),
    ("file listed twice", header(lambda c: c["files"].append(c["files"][0])), errors.DuplicateTensorError,
     [DENSE_FILE, "listed twice"]),
    ("missing file", remove(EXPERTS), errors.MissingFileError, [EXPERTS, "1 of "]),
    ("missing files", remove(EXPERTS, DENSE_FILE, "tokenizer.json"), errors.MissingFileError,
     [EXPERTS, DENSE_FILE, "tokenizer.json", "3 of "]),
    ("truncated file", lambda p: truncate(p / DENSE_FILE, 100), errors.TruncatedFileError,
     [DENSE_FILE, "100 bytes are missing"]),
    ("empty file", lambda p: (p / EXPERTS).write_bytes(b""), errors.TruncatedFileError, [EXPERTS, "0 bytes"]),
    ("tensor past the end", header(grow_file_entry), errors.TruncatedFileError, ["lm_head", "bytes are missing"]),
    ("longer file", append, errors.FileLengthError, [DENSE_FILE, "64 too many"]),
    ("overlap", shift("layers.0.self_attn.k_proj", -64), errors.OverlapError, ["layers.0.self_attn.k_proj", "inside"]),
    ("dense alignment", shift("layers.0.self_attn.k_proj", 8), errors.AlignmentError,
     ["layers.0.self_attn.k_proj", "multiple of 64"]),
    ("record alignment",
     header(lambda c: [tensor(c, f"layers.1.mlp.experts.2.{p}_proj").__setitem__(
         "offset", tensor(c, f"layers.1.mlp.experts.2.{p}_proj")["offset"] + 64) for p in ("gate", "up", "down")]),
     errors.AlignmentError, ["layers.1.experts.2", "multiple of 4096"]),
    ("record order", header(swap_experts), errors.AlignmentError, ["layers.1.experts.2"]),
    ("record with a gap", shift("layers.1.mlp.experts.2.down_proj", 64), errors.ExpertRecordError,
     ["layers.1.experts.2", "down_proj", "one record"]),
    ("files swapped", swap_files, errors.ForeignFileError, ["experts-", "its own header says"]),
    ("file of another snapshot", container(lambda h: h["__metadata__"].update(snapshot="0" * 64)),
     errors.ForeignFileError, [DENSE_FILE, "belongs to snapshot 000000000000"]),
    ("foreign container", container(lambda h: h["__metadata__"].update(format="pt")), errors.ForeignFileError,
     [DENSE_FILE, "format 'pt'", "expected 'millstream'"]),
    ("entries moved", container(move_entry), errors.ForeignFileError, ["layers.0.self_attn.", "its own header says"]),
    ("data file is garbage", garbage_container, errors.HeaderSyntaxError, [DENSE_FILE, "no JSON"]),
]  # fmt: skip


@pytest.mark.parametrize(("breaker", "kind", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_broken_snapshot_is_refused_at_open(breaker, kind, words, good, tmp_path):
    path = copy_dir(good, tmp_path / "broken")
    breaker(path)
    with pytest.raises(EngineError) as caught:
        open_model(path)
    assert type(caught.value) is kind, repr(caught.value)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    assert "\n" not in str(caught.value)
    assert_refused_by_cli(["inspect", path], *words)


def test_every_refusal_class_is_tested_here():
    """A class that no case names is a refusal nobody has seen work."""
    snapshot_side = {kind for _, _, kind, _ in CASES} | {
        errors.MissingKernelError, errors.NonFiniteError, errors.ChecksumError, errors.UnreadableFileError,
        errors.SourceChangedError,
    }  # fmt: skip
    converter_side = {
        errors.DtypeError, errors.NotAModelDirectoryError, errors.QuantizedSourceError, errors.ConversionIOError,
        errors.OutputExistsError, errors.OutputSpaceError,
    }  # fmt: skip
    defined = {
        value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert defined - snapshot_side - converter_side == set()


# ---- what needs more than a broken file ------------------------------------------------------------------------------


def test_missing_kernel_is_refused(good, monkeypatch):
    class NoNibbles(kernels.Context):
        def layout(self, name):
            if name == "nib8_q4_0":
                raise kernels.KernelError("not on this tier")
            return super().layout(name)

    with pytest.raises(
        errors.MissingKernelError, match=r"tensor layers.0.mlp.experts.0.gate_proj: no kernel for format q4_0"
    ):
        open_model(good, NoNibbles(num_threads=1))
    absent = dataclasses.replace(FORMATS["q4_0"], name="q4_x", layout="nib8_q4_x")
    monkeypatch.setitem(FORMATS, "q4_x", absent)
    with pytest.raises(errors.MissingKernelError, match="no kernel for format q4_x and layout nib8_q4_x"):
        check_kernel("here", "q4_x", "nib8_q4_x", kernels.Context(num_threads=1))


def test_unreadable_file_is_refused(good, tmp_path, monkeypatch):
    path = copy_dir(good, tmp_path / "broken")
    (path / HEADER_FILE).unlink()
    (path / HEADER_FILE).symlink_to("/proc/self/mem")  # opens, but cannot be read
    with pytest.raises(errors.UnreadableFileError, match="may be read"):
        open_model(path)
    assert_refused_by_cli(["inspect", path], str(path))


@pytest.mark.parametrize("what", ["missing", "file"])
def test_other_paths_are_refused_with_a_hint(what, good, tmp_path):
    path, word = {
        "missing": (tmp_path / "nowhere", "no such file or directory"),
        "file": (good / HEADER_FILE, f"give the directory {good}"),
    }[what]
    with pytest.raises(errors.NotASnapshotError, match=word):
        open_model(path)
    assert_refused_by_cli(["inspect", path], word)


def test_asking_for_an_absent_tensor_is_an_error(good):
    with pytest.raises(errors.MissingTensorError, match=r"the model has no tensor layers\.9\.mlp"):
        open_model(good).expert(9, 0)


def test_file_that_shrinks_while_open_is_an_error_not_a_signal(good, tmp_path):
    path = copy_dir(good, tmp_path / "s")
    files = open_model(path)
    files.close()
    truncate(path / DENSE_FILE, 5000)
    with pytest.raises(errors.TruncatedFileError, match="became shorter"):
        files.read("lm_head")
    with pytest.raises(errors.TruncatedFileError, match=r"ended \d+ bytes early"):
        files.read_into("lm_head", np.empty(files.tensors["lm_head"].nbytes, np.uint8))


@pytest.mark.parametrize("name", [UP, Q_PROJ, "norm", "layers.1.mlp.experts.7.down_proj"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_flipped_bit_fails_verify_and_names_the_tensor(name, where, good, tmp_path):
    path = copy_dir(good, tmp_path / "s")
    record = open_model(path).tensors[name]
    place = record.offset + {"first": 0, "middle": record.nbytes // 2, "last": record.nbytes - 1}[where]
    raw = (path / record.file).read_bytes()[place]
    write_at(path / record.file, place, bytes([raw ^ 1]))
    with pytest.raises(errors.ChecksumError, match=rf"{name} \({record.file} at {record.offset}\)"):
        open_model(path).verify()
    if where == "middle":
        code, _, err = run_cli("inspect", "--verify", path)
        assert code == 2 and name in err and "Traceback" not in err


def test_changed_tokenizer_and_stored_checksum_fail_verify(good, tmp_path):
    path = copy_dir(good, tmp_path / "s")
    (path / "tokenizer.json").write_text((path / "tokenizer.json").read_text().replace("a", "b", 1))
    edit_header(path, lambda content: tensor(content, "lm_head").update(checksum="sha256:00"))
    with pytest.raises(errors.ChecksumError, match=r"lm_head .*tokenizer.json"):
        open_model(path).verify()


NAN16 = b"\x00\x7e"


@pytest.mark.parametrize("layout", ["storage", "compute"])
def test_nonfinite_scale_is_refused_at_open_where_sampled(layout, good, good_storage, tmp_path):
    path = copy_dir(good if layout == "compute" else good_storage, tmp_path / "s")
    record = open_model(path).tensors["embed_tokens"]
    fill = NAN16 * (record.nbytes // 2)
    write_at(path / record.file, record.offset, fill)
    with pytest.raises(errors.NonFiniteError, match=r"tensor embed_tokens: row 0 .*not finite"):
        open_model(path)
    assert_refused_by_cli(["inspect", path], "embed_tokens", "not finite")


def test_nonfinite_scale_anywhere_is_refused_by_verify(good_storage, tmp_path):
    path = copy_dir(good_storage, tmp_path / "s")
    record = open_model(path).tensors["lm_head"]
    row_bytes = record.nbytes // record.rows
    write_at(path / record.file, record.offset + (record.rows - 1) * row_bytes, NAN16)

    def sign(content):
        data = (path / record.file).read_bytes()[record.offset : record.offset + record.nbytes]
        tensor(content, "lm_head")["checksum"] = checksum_of([data])

    edit_header(path, sign, sign=True)
    with pytest.raises(errors.NonFiniteError, match=f"tensor lm_head: row {record.rows - 1} "):
        open_model(path).verify()


def test_snapshot_of_another_source_of_the_same_size_is_refused(good, tmp_path):
    other = tiny_models.make_hf_dir(tmp_path / "hf", "mha_base", seed=99)
    assert [p.stat().st_size for p in sorted(other.iterdir())] == [
        p.stat().st_size for p in sorted((good.parent / "hf").iterdir())
    ]
    snapshot = open_model(good)
    snapshot.check_source(Checkpoint.open(good.parent / "hf"))
    with pytest.raises(errors.SourceChangedError, match="made from a checkpoint with fingerprint"):
        snapshot.check_source(Checkpoint.open(other))


# ---- nothing gets through with a traceback ---------------------------------------------------------------------------

WEIRD = [None, -1, 0, 1.5, True, "x", "", [], {}, [0], 1 << 31, 1 << 70, float("nan")]


def _paths(content):
    """Every (container, key) of a header worth breaking: top level, one file, one expert and one vector tensor."""
    for key in content:
        yield lambda c: c, key
    for pick in (
        lambda c: c["files"][0],
        lambda c: c["side_files"][0],
        lambda c: tensor(c, UP),
        lambda c: tensor(c, "norm"),
    ):
        for key in pick(content):
            yield pick, key


def test_any_weird_field_value_is_refused(good, tmp_path):
    path = copy_dir(good, tmp_path / "s")
    original = (path / HEADER_FILE).read_text()
    tried = 0
    for pick, key in _paths(json.loads(original)):
        for value in [*WEIRD, "drop"]:
            content = json.loads(original)
            if value == "drop":
                del pick(content)[key]
            elif pick(content)[key] == value and type(pick(content)[key]) is type(value):
                continue
            else:
                pick(content)[key] = value
            (path / HEADER_FILE).write_text(json.dumps(content))
            tried += 1
            with pytest.raises(EngineError) as caught:
                open_model(path).verify()
            assert "\n" not in str(caught.value)
    assert tried > 400


def test_any_flipped_header_bit_is_refused(good, tmp_path):
    path = copy_dir(good, tmp_path / "s")
    original = (path / HEADER_FILE).read_bytes()
    meaning = read_json(path / HEADER_FILE)
    rng = random.Random(5)
    for _ in range(150):
        raw = bytearray(original)
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        (path / HEADER_FILE).write_bytes(raw)
        try:
            if json.loads(raw) == meaning:
                continue  # white space
        except ValueError:
            pass
        with pytest.raises(EngineError):
            open_model(path).verify()


def test_any_broken_container_header_is_refused(good, tmp_path):
    path = copy_dir(good, tmp_path / "s")
    original = (path / DENSE_FILE).read_bytes()
    length = int.from_bytes(original[:8], "little")
    end = 8 + len(original[8 : 8 + length].rstrip())
    rng = random.Random(6)
    for _ in range(150):
        place = rng.randrange(8) if rng.random() < 0.2 else rng.randrange(8, end)
        with (path / DENSE_FILE).open("r+b") as file:
            os.pwrite(file.fileno(), bytes([original[place] ^ (1 << rng.randrange(8))]), place)
            with pytest.raises(EngineError):
                open_model(path)
            os.pwrite(file.fileno(), original[place : place + 1], place)
    assert round_up(8 + length, 4096) == 8 + length
    open_model(path)
