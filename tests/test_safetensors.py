"""The safetensors header: read as the library reads it, and refused where a field cannot be true."""

import json

import numpy as np
import pytest
import tiny_models
from safetensors import safe_open
from safetensors.numpy import load_file

from engine.weights import errors
from engine.weights.checkpoint import Checkpoint, read_rows
from engine.weights.safetensors import make_header, read_header


def write(path, header, data_bytes=64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def entry(**changes):
    return {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], **changes}


CASES = [
    ("no object", b"[1]", errors.HeaderSyntaxError, "no JSON object"),
    ("key twice", b'{"a": 1, "a": 2}', errors.DuplicateTensorError, "key a occurs twice"),
    ("deep nesting", b"[" * 100_000, errors.HeaderSyntaxError, "no JSON"),
    ("not utf-8", b'{"\xff\xfe": 1}', errors.HeaderSyntaxError, "no JSON"),
    ("metadata", {"__metadata__": [1], "a": entry()}, errors.HeaderSyntaxError, "__metadata__"),
    ("entry is no object", {"a": 3}, errors.HeaderSyntaxError, "tensor a: expected dtype, shape and data_offsets"),
    ("no offsets", {"a": {"dtype": "F32", "shape": [4]}}, errors.HeaderSyntaxError, "expected dtype, shape"),
    ("shape", {"a": entry(shape=[4, -4])}, errors.HeaderSyntaxError, "shape"),
    ("shape of booleans", {"a": entry(shape=[True, 16])}, errors.HeaderSyntaxError, "shape"),
    ("offsets", {"a": entry(data_offsets=[0])}, errors.HeaderSyntaxError, "data_offsets"),
    ("offsets of floats", {"a": entry(data_offsets=[0, 64.0])}, errors.HeaderSyntaxError, "data_offsets"),
    ("dtype", {"a": entry(dtype="F31")}, errors.DtypeError, "'F31' is unknown"),
    ("length", {"a": entry(shape=[4, 5])}, errors.LengthError, "got 64 bytes, F32 .* needs 80"),
    ("offsets reversed", {"a": entry(data_offsets=[64, 0])}, errors.LengthError, "got -64 bytes"),
    ("overlap", {"a": entry(), "b": entry(shape=[4], data_offsets=[48, 64])}, errors.OverlapError,
     "tensor b .* inside a"),
    ("past the end", {"a": entry(), "b": entry(data_offsets=[64, 128])}, errors.TruncatedFileError,
     "tensor b .* 64 bytes are missing"),
    ("absurd offset", {"a": entry(shape=[1 << 70], data_offsets=[0, 1 << 72])}, errors.TruncatedFileError, "missing"),
    ("bytes left over", {"a": entry(shape=[4], data_offsets=[0, 16])}, errors.FileLengthError, "48 bytes follow"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "kind", "match"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_impossible_header_is_refused(header, kind, match, tmp_path):
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(errors.WeightsError, match=match) as caught:
        read_header(path)
    assert type(caught.value) is kind
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_header_agrees_with_the_library(tmp_path):
    hf = tiny_models.make_hf_dir(tmp_path / "hf", "mha_base")
    mine = read_header(hf / "model.safetensors")
    arrays = load_file(hf / "model.safetensors")
    assert mine.tensors.keys() == arrays.keys()
    raw = (hf / "model.safetensors").read_bytes()
    for name, tensor in mine.tensors.items():
        assert tensor.shape == arrays[name].shape
        assert raw[tensor.offset : tensor.offset + tensor.nbytes] == arrays[name].tobytes()
    with safe_open(hf / "model.safetensors", "np") as library:
        assert mine.metadata == library.metadata()


@pytest.mark.parametrize("align_bytes", [8, 4096])
@pytest.mark.parametrize("count", [0, 1, 7, 200])
def test_made_header_is_aligned_and_read_by_the_library(count, align_bytes, tmp_path):
    sizes = [(f"t{i}", 64 * i) for i in range(count)]
    header = make_header(sizes, {"format": "x"}, align_bytes)
    assert len(header) % align_bytes == 0
    data = np.random.default_rng(1).integers(0, 256, sum(n for _, n in sizes), np.uint8).tobytes()
    (tmp_path / "x").write_bytes(header + data)
    arrays = load_file(tmp_path / "x")
    assert b"".join(arrays[name].tobytes() for name, _ in sizes) == data
    assert [(t.name, t.nbytes) for t in read_header(tmp_path / "x").tensors.values()] == sizes


def test_rows_of_a_shrunken_file_are_an_error(tmp_path):
    hf = tiny_models.make_hf_dir(tmp_path / "hf", "mha_base", dtype="BF16")
    tensor = Checkpoint.open(hf).tensors["model.embed_tokens.weight"]
    whole = read_rows(tensor, 0, 320)
    assert whole.nbytes == tensor.nbytes
    np.testing.assert_array_equal(read_rows(tensor, 10, 13), whole[10 * 128 : 13 * 128])
    with tensor.path.open("r+b") as file:
        file.truncate(tensor.offset + 1000)
    with pytest.raises(errors.TruncatedFileError, match="ended 280 bytes early"):
        read_rows(tensor, 0, 10)


def test_index_that_leaves_the_directory_is_refused(tmp_path):
    hf = tiny_models.make_hf_dir(tmp_path / "hf", "mha_base")
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(errors.HeaderSyntaxError, match="outside of the directory"):
        Checkpoint.open(hf)
