"""Every way in which a GGUF file can be broken: its own exception class, one telling line, no memory spent on it.

Files are written byte by byte here, so that every field can be wrong; the same reader serves load, inspect and convert.
"""

import random
import resource
import struct
import subprocess
import sys

import gguf_models
import pytest
from gguf import GGMLQuantizationType as Type
from snapshot_tools import ROOT, assert_refused_by_cli

from engine.errors import EngineError
from engine.weights import errors, open_model
from engine.weights.gguf_header import read_header

STRING, UINT32, FLOAT32, ARRAY = 8, 4, 6, 9


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, raw: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + raw


def tensor(name, shape, kind, offset) -> bytes:
    """shape: as GGUF writes it, the row length first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def build(keys=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, num_keys=None, num_tensors=None) -> bytes:
    counts = struct.pack("<QQ", *(len(x) if n is None else n for n, x in ((num_tensors, tensors), (num_keys, keys))))
    head = magic + struct.pack("<I", version) + counts + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


ARCHITECTURE = key("general.architecture", STRING, text("olmoe"))
ONE = tensor("a", (64, 2), 0, 0)
SIZE_OF_ONE = 64 * 2 * 4


def types_refused():
    named = {
        4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 28: "F64", 31: "Q4_0_4_4", 33: "Q4_0_8_8",
        36: "IQ4_NL_4_4", 41: "Q1_0", 97: "Q8_0_X4", 133: "Q6_0", 137: "IQ2_K", 144: "IQ4_KS", 151: "Q8_KV",
        158: "IQ1_KT", 202: "row-interleaved", 399: "row-interleaved", 42: "unknown", 1000: "unknown",
    }  # fmt: skip
    for number, word in named.items():
        words = [f"tensor a: GGUF type {number}", word, "q4_0 (2)", "mxfp4 (39)"]
        yield f"type {number}", build([ARCHITECTURE], [tensor("a", (256, 2), number, 0)]), "UnknownFormatError", words


def u32(n):
    return struct.pack("<I", n)


def u64(n):
    return struct.pack("<Q", n)


GOOD = build([ARCHITECTURE], [ONE], bytes(SIZE_OF_ONE))
CASES = [
    ("empty", b"", "NotASnapshotError", ["no GGUF file"]),
    ("magic", build(magic=b"GGML"), "NotASnapshotError", ["b'GGML'", "b'GGUF'"]),
    ("short", b"GGUF\3", "TruncatedFileError", ["19 bytes"]),
    ("version 1", build(version=1), "HeaderVersionError", ["version 1", "2 and 3"]),
    ("version 4", build(version=4), "HeaderVersionError", ["version 4", "update millstream"]),
    ("big endian", build(version=3 << 24), "HeaderVersionError", ["big-endian"]),
    ("no counts", GOOD[:12], "TruncatedFileError", ["4 bytes are missing"]),
    ("cut key", GOOD[:50], "TruncatedFileError", ["header is cut off", "metadata key 1 of 1"]),
    ("cut directory", GOOD[:90], "TruncatedFileError", ["header is cut off", "missing"]),
    ("cut data", GOOD[:-7], "TruncatedFileError", ["tensor a", "7 bytes are missing"]),
    ("no data", GOOD[:-SIZE_OF_ONE], "TruncatedFileError", [f"{SIZE_OF_ONE} bytes are missing"]),
    ("many tensors", build([], num_tensors=1 << 60), "HeaderSyntaxError", ["number of tensors", str(1 << 60)]),
    ("many keys", build([], num_keys=1 << 50), "HeaderSyntaxError", ["number of metadata keys"]),
    ("tensors past the end", build([], num_tensors=1 << 19), "TruncatedFileError", ["tensor directory"]),
    ("long key", build([u64(1 << 40)], num_keys=1), "HeaderSyntaxError", ["length of metadata key 1", str(1 << 40)]),
    ("key past the end", build([u64(60000) + b"abc"], num_keys=1), "TruncatedFileError", ["metadata key 1"]),
    ("long text", build([key("a", STRING, u64(1 << 62))]), "HeaderSyntaxError", ["metadata key a", str(1 << 62)]),
    ("long array", build([key("a", ARRAY, u32(UINT32) + u64(1 << 63))]), "HeaderSyntaxError", [str(1 << 63)]),
    ("array past the end", build([key("a", ARRAY, u32(UINT32) + u64(1 << 20))]), "TruncatedFileError", ["key a"]),
    ("texts past the end", build([key("a", ARRAY, u32(STRING) + u64(1 << 20))]), "TruncatedFileError", ["key a"]),
    ("text in array", build([key("a", ARRAY, u32(STRING) + u64(2) + u64(0) + u64(1 << 60))]), "TruncatedFileError",
     ["key a"]),
    ("nested arrays", build([key("a", ARRAY, (u32(ARRAY) + u64(1)) * 9)]), "HeaderSyntaxError", ["nested too deep"]),
    ("value type", build([key("a", 13, b"")]), "HeaderSyntaxError", ["value type 13"]),
    ("same key", build([ARCHITECTURE, ARCHITECTURE]), "DuplicateTensorError", ["general.architecture occurs twice"]),
    ("key bytes", build([key(b"\xff\xfe", UINT32, u32(1))]), "HeaderSyntaxError", ["UTF-8"]),
    ("alignment 0", build([key("general.alignment", UINT32, u32(0))]), "AlignmentError", ["general.alignment = 0"]),
    ("alignment 48", build([key("general.alignment", UINT32, u32(48))]), "AlignmentError", ["= 48", "power of two"]),
    ("alignment text", build([key("general.alignment", STRING, text("x"))]), "AlignmentError", ["'x'"]),
    ("dimensions 0", build([], [tensor("a", (), 0, 0)]), "ShapeError", ["tensor a", "0 dimensions"]),
    ("dimensions 5", build([], [tensor("a", (1,) * 5, 0, 0)]), "ShapeError", ["5 dimensions"]),
    ("count 0", build([], [tensor("a", (64, 0), 0, 0)]), "ShapeError", ["tensor a", "[0, 64]"]),
    ("count 2^63", build([], [tensor("a", (64, 1 << 63), 0, 0)]), "ShapeError", ["tensor a"]),
    ("huge product", build([], [tensor("a", (1 << 30,) * 4, 0, 0)]), "TruncatedFileError", ["tensor a", "missing"]),
    ("row length", build([], [tensor("a", (33, 2), 2, 0)]), "BlockLengthError", ["tensor a", "33", "32", "q4_0"]),
    ("offset", build([], [tensor("a", (64, 2), 0, 8)], bytes(2048)), "AlignmentError", ["tensor a", "offset 8"]),
    ("offset 2^63", build([], [tensor("a", (64, 2), 0, 1 << 63)]), "TruncatedFileError", ["tensor a"]),
    ("same tensor", build([], [ONE, tensor("a", (64, 2), 0, 512)], bytes(2048)), "DuplicateTensorError",
     ["tensor a is listed twice"]),
    ("overlap", build([], [ONE, tensor("b", (64, 2), 0, 256)], bytes(2048)), "OverlapError", ["tensor b", "inside a"]),
    ("name bytes", build([], [tensor(b"\xff", (64, 2), 0, 0)]), "HeaderSyntaxError", ["tensor 1 of 1", "UTF-8"]),
    ("long name", build([], [u64(1 << 30)], num_tensors=1), "TruncatedFileError", ["tensor directory"]),
    ("no architecture", build([], [ONE], bytes(SIZE_OF_ONE)), "HeaderSyntaxError", ["general.architecture"]),
    ("other architecture", build([key("general.architecture", STRING, text("mamba"))]), "UnknownArchitectureError",
     ["'mamba'", "olmoe"]),
    ("adapter", build([key("general.type", STRING, text("adapter")), ARCHITECTURE]), "NotASnapshotError", ["adapter"]),
    ("no config", GOOD, "ConfigError", ["olmoe.embedding_length"]),
    *types_refused(),
]  # fmt: skip


@pytest.mark.parametrize("raw, kind, words", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_broken_files_are_refused(tmp_path, raw, kind, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(EngineError) as caught:
        open_model(path)
    assert type(caught.value).__name__ == kind, caught.value
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    for word in words:
        assert word in message, (word, message)


@pytest.mark.parametrize("command", ["inspect", "convert", "generate"])
def test_all_commands_share_the_reader(tmp_path, command):
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD[:-7])
    args = {"inspect": [path], "convert": [path, tmp_path / "out"], "generate": ["--model", path, "x"]}[command]
    assert_refused_by_cli([command, *args], "tensor a", "7 bytes are missing")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    gguf_models.write_gguf(path, "mha_base", {"ffn": Type.Q4_0, "attn": Type.Q8_0})
    return path


def with_tensor(path, edit) -> bytes:
    """The file with its directory written anew: edit(entries) changes [name, shape, type, offset] of every tensor."""
    raw, header = path.read_bytes(), read_header(path)
    first = min(t.offset for t in header.tensors.values())
    entries = [[t.name, t.shape[::-1], t.ggml_type, t.offset - first] for t in header.tensors.values()]
    edit(entries)
    start = raw.index(text(next(iter(header.tensors))))  # where the directory begins
    directory = b"".join(tensor(*entry) for entry in entries)
    head = raw[:8] + u64(len(entries)) + raw[16:start] + directory
    return head + bytes(-len(head) % 32) + raw[first:]


def test_missing_and_unknown_tensors_and_shapes(good, tmp_path):
    path = tmp_path / "m.gguf"

    def refused(kind, edit, *words):
        path.write_bytes(with_tensor(good, edit))
        with pytest.raises(kind) as caught:
            open_model(path)
        assert all(word in str(caught.value) for word in words), caught.value

    def rename(old, new):
        def edit(entries):
            next(e for e in entries if e[0] == old)[0] = new

        return edit

    path.write_bytes(with_tensor(good, lambda entries: None))
    assert open_model(path).tensors.keys() == open_model(good).tensors.keys()
    refused(errors.MissingTensorError, rename("blk.1.ffn_up_exps.weight", "x"), "blk.1.ffn_up_exps.weight")
    refused(errors.MissingTensorError, lambda entries: entries.pop(), "1 tensors")
    extra = ["blk.0.attn_q.bias", (64,), 0, 0]
    refused(errors.OverlapError, lambda entries: entries.append(extra))
    size = good.stat().st_size

    def add(entries):
        entries.append(["blk.0.attn_q.bias", (0 + 64,), 0, -(-size // 32) * 32])

    raw = with_tensor(good, add)
    path.write_bytes(raw + bytes(size))
    with pytest.raises(errors.UnexpectedTensorError, match=r"blk\.0\.attn_q\.bias"):
        open_model(path)

    def reshape(name, shape):
        def edit(entries):
            next(e for e in entries if e[0] == name)[1] = shape

        return edit

    refused(errors.ShapeError, reshape("blk.0.attn_q.weight", (128, 32)), "blk.0.attn_q.weight", "[32, 128]")
    refused(
        errors.ShapeError, reshape("blk.0.ffn_down_exps.weight", (64, 32, 8)), "ffn_down_exps", "slices of [64, 64]"
    )
    refused(errors.ShapeError, reshape("blk.0.ffn_down_exps.weight", (64, 64, 4)), "ffn_down_exps", "at least 5")


def test_scales_that_are_not_finite_are_found_in_the_sample(good, tmp_path):
    record = open_model(good).record("embed_tokens")
    raw = bytearray(good.read_bytes())
    raw[record.offset : record.offset + 4] = struct.pack("<f", float("nan"))
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(errors.NonFiniteError, match="embed_tokens: row 0"):
        open_model(path)


def test_every_truncation_is_an_error(good, tmp_path):
    """Cut anywhere: always one of our errors, and past the header the exact number of missing bytes."""
    raw, path = good.read_bytes(), tmp_path / "m.gguf"
    header = read_header(good)
    first = min(t.offset for t in header.tensors.values())
    end = max(t.offset + t.nbytes for t in header.tensors.values())
    rng = random.Random(1)
    for cut in [*range(4, 40), *rng.sample(range(40, end), 150), first - 1, first, end - 1]:
        path.write_bytes(raw[:cut])
        with pytest.raises(errors.TruncatedFileError) as caught:
            open_model(path)
        assert "missing" in str(caught.value)
        if cut >= first:
            assert f" {end - cut} bytes are missing" in str(caught.value)


def test_random_damage_is_an_error_or_opens(good, tmp_path):
    """Bytes of the header replaced at random: never another exception than ours, and a file that opens is whole."""
    raw, path = good.read_bytes(), tmp_path / "m.gguf"
    first = min(t.offset for t in read_header(good).tensors.values())
    rng, refused = random.Random(2), 0
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(first)
            damaged[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            files = open_model(path)
        except EngineError:
            refused += 1
        else:
            assert len(files.tensors) == 69
    assert refused > 60


BOMBS = {
    "keys": build([], num_keys=(1 << 16)),
    "tensors": build([], num_tensors=(1 << 20)),
    "texts": build([key("a", ARRAY, u32(STRING) + u64(1 << 22))]),
    "arrays": build([key("a", ARRAY, u32(ARRAY) + u64(1 << 16))]),
    "numbers": build([key("a", ARRAY, u32(10) + u64(1 << 24))]),
    "text": build([key("a", STRING, u64(64 << 20))]),
}


@pytest.mark.parametrize("name", BOMBS)
def test_counts_in_a_sparse_file_do_not_fill_memory(tmp_path, name):
    """The same counts, and a file that has room for all of it (a hole on the disk): an error in bounded memory."""
    path = tmp_path / "m.gguf"
    path.write_bytes(BOMBS[name])
    with path.open("r+b") as file:
        file.truncate(1 << 33)
    code = "import sys; from engine.weights import open_model; open_model(sys.argv[1])"

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))  # the mapped file itself does not count

    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=60, preexec_fn=limit
    )
    assert done.returncode == 1
    assert "MemoryError" not in done.stderr and "engine.weights.errors." in done.stderr.splitlines()[-1], done.stderr
