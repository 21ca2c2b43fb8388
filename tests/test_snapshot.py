"""The snapshot container: what is written can be read back, by us and by the safetensors library, bit for bit."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from safetensors.numpy import load_file
from snapshot_tools import ROOT, copy_dir, directory_bytes, make_snapshot, read_json

from converters import hf as converter
from converters import quantize
from engine import kernels
from engine.formats import FORMATS
from engine.weights import open_model
from engine.weights.architectures import EXPERT_PARTS, expected_tensors, expert_matrix_name
from engine.weights.checkpoint import Checkpoint
from engine.weights.errors import OutputExistsError, OutputSpaceError
from engine.weights.header import HEADER_FILE
from engine.weights.writer import SnapshotWriter

QUANTIZED = sorted(
    name for name, fmt in FORMATS.items() if fmt.max_relative_error is not None and 256 % fmt.block_len == 0
)


@pytest.fixture(scope="module")
def wide_hf(tmp_path_factory):
    return tiny_models.make_hf_dir(tmp_path_factory.mktemp("wide"), "wide", dtype="BF16")


@pytest.fixture(scope="module")
def context():
    return kernels.Context(num_threads=2)


def source_floats(path, name):
    config = read_json(path / "config.json")
    weights = tiny_models.make_weights(config, tiny_models.golden_seed("wide"), "BF16")
    return weights[expected_tensors("olmoe", config)[name].checkpoint_name]


def source_tensor(path, name):
    checkpoint = Checkpoint.open(path)
    want = expected_tensors("olmoe", checkpoint.config)[name]
    return want, checkpoint.tensors[want.checkpoint_name]


@pytest.mark.parametrize("layout", ["storage", "compute", "auto"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_chunked_bytes_equal_direct_quantization(name, layout, wide_hf, context, monkeypatch):
    monkeypatch.setattr(quantize, "_CHUNK_VALUES", 5000)
    tensor = "layers.1.self_attn.k_proj"
    want, source = source_tensor(wide_hf, tensor)
    quantizer = quantize.Quantizer(context, FORMATS, layout)
    record = quantizer.plan(tensor, want, name)
    storage = context.quantize(name, source_floats(wide_hf, tensor))
    expected = storage if record.layout is None else context.encode(name, storage, *want.shape)
    chunks = list(quantizer.chunks(record, source))
    assert len(chunks) > 5 or (FORMATS[name].group_rows and len(chunks) == 1)  # rows that share data stay together
    np.testing.assert_array_equal(np.concatenate(chunks), expected.reshape(-1))
    decoded = FORMATS[name].dequantize(storage, want.shape[1])
    x = source_floats(wide_hf, tensor)
    if FORMATS[name].rotate is not None:  # its rows are stored rotated
        x = FORMATS[name].rotate(x)
    assert np.sqrt(np.mean((decoded - x) ** 2) / np.mean(x**2)) <= FORMATS[name].max_relative_error


@pytest.mark.parametrize(("name", "layout"), [("q4_0", "storage"), ("iq4_xs", "compute"), ("q8_0", "auto")])
def test_a_snapshot_holds_the_directly_quantized_bytes(name, layout, wide_hf, tmp_path, context):
    make_snapshot(wide_hf, tmp_path / "s", experts=name, dense=name, layout=layout)
    files = open_model(tmp_path / "s")
    for tensor in ("layers.1.mlp.experts.3.down_proj", "layers.0.self_attn.k_proj", "embed_tokens"):
        record, x = files.tensors[tensor], source_floats(wide_hf, tensor)
        storage = context.quantize(name, x)
        assert record.layout == (None if layout == "storage" else FORMATS[name].layout)
        if record.layout is not None:
            storage = context.encode(name, storage, *x.shape)
        np.testing.assert_array_equal(files.read(tensor), storage.reshape(-1))


def test_auto_layout_is_the_compute_layout_where_it_costs_at_most_5_percent(wide_hf, tmp_path, context):
    for name in QUANTIZED:
        storage = 256 * FORMATS[name].row_bytes(256)
        growth = context.matrix_bytes(FORMATS[name].layout, 256, 256) / storage
        plan = quantize.Quantizer(context, FORMATS, "auto").plan(
            "x", expected_tensors("olmoe", read_json(wide_hf / "config.json"))["layers.0.mlp.experts.0.up_proj"], name
        )
        assert (plan.layout is not None) == (growth <= 1.05), (name, growth)


def test_norms_and_router_are_f32_bit_for_bit(wide_hf, tmp_path):
    make_snapshot(wide_hf, tmp_path / "s", experts="q8_0", dense="q8_0")
    files = open_model(tmp_path / "s")
    for name in ("norm", "layers.1.self_attn.q_norm", "layers.0.mlp.router"):
        assert files.tensors[name].format == "f32"
        np.testing.assert_array_equal(files.read(name).view("<f4"), source_floats(wide_hf, name).reshape(-1))
    np.testing.assert_array_equal(files.vector("norm"), source_floats(wide_hf, "norm"))


def test_data_files_are_safetensors_and_hold_the_same_bytes(wide_hf, tmp_path):
    make_snapshot(wide_hf, tmp_path / "s", experts="q4_0")
    files = open_model(tmp_path / "s")
    entries = {}
    for file in files.files:
        raw = (tmp_path / "s" / file).read_bytes()
        assert (8 + int.from_bytes(raw[:8], "little")) % 4096 == 0
        entries |= load_file(tmp_path / "s" / file)
    assert entries["layers.1.experts.2"].dtype == np.uint8
    for part in EXPERT_PARTS:
        start, nbytes = files.expert(1, 2).parts[part]
        got = entries["layers.1.experts.2"][start : start + nbytes]
        np.testing.assert_array_equal(got, files.read(expert_matrix_name(1, 2, part)))
    np.testing.assert_array_equal(entries["norm"].view("<f4"), files.vector("norm"))


def test_an_expert_is_one_aligned_read(wide_hf, tmp_path):
    make_snapshot(wide_hf, tmp_path / "s", experts="q4_0", gate_up="q8_0")
    files = open_model(tmp_path / "s")
    spans = {}
    for layer in range(2):
        for expert in range(8):
            record = files.expert(layer, expert)
            assert record.offset % 4096 == 0 and record.nbytes % 4096 == 0
            assert all(start % 64 == 0 for start, _ in record.parts.values())
            assert list(record.parts) == ["gate_proj", "up_proj", "down_proj"]
            assert record.parts["gate_proj"][0] == 0 < record.parts["up_proj"][0] < record.parts["down_proj"][0]
            with files.path_of(record.file).open("rb") as handle:
                handle.seek(record.offset)
                data = handle.read(record.nbytes)
            for part, (start, nbytes) in record.parts.items():
                assert data[start : start + nbytes] == bytes(files.read(expert_matrix_name(layer, expert, part)))
            spans[record.offset] = record.nbytes
    starts = sorted(spans)
    assert all(a + spans[a] == b for a, b in itertools.pairwise(starts))


def test_read_is_a_readonly_view_and_read_into_a_copy(wide_hf, tmp_path):
    make_snapshot(wide_hf, tmp_path / "s")
    files = open_model(tmp_path / "s")
    view = files.read("lm_head")
    assert not view.flags.writeable and view.ctypes.data % 64 == 0
    out = np.zeros(files.tensors["lm_head"].nbytes, np.uint8)
    files.read_into("lm_head", out)
    np.testing.assert_array_equal(out, view)


@pytest.mark.parametrize("expert_file_bytes", [1, 300_000, 4 << 30])
def test_expert_files_split_without_changing_a_tensor(expert_file_bytes, wide_hf, tmp_path):
    make_snapshot(wide_hf, tmp_path / "one")
    make_snapshot(wide_hf, tmp_path / "s", expert_file_bytes=expert_file_bytes)
    one, files = open_model(tmp_path / "one"), open_model(tmp_path / "s")
    assert (len(files.files) > 2) == (expert_file_bytes < 1 << 30)
    for name in files.tensors:
        np.testing.assert_array_equal(files.read(name), one.read(name))


def test_same_input_gives_same_bytes_for_any_thread_count_and_chunk(wide_hf, tmp_path, monkeypatch):
    reference = None
    for threads, chunk_values in ((1, 8 << 20), (2, 8 << 20), (3, 2048), (1, 1)):
        monkeypatch.setattr(quantize, "_CHUNK_VALUES", chunk_values)
        out = tmp_path / f"t{threads}-{chunk_values}"
        make_snapshot(wide_hf, out, experts="q4_0", dense="q8_0", threads=threads)
        content = directory_bytes(out)
        reference = reference or content
        assert content == reference


def test_header_holds_what_a_reader_needs(wide_hf, tmp_path):
    report = make_snapshot(wide_hf, tmp_path / "s", experts="q4_0", down="q8_0", embed="bf16", dense="f16")
    header = read_json(tmp_path / "s" / HEADER_FILE)
    assert header["magic"] == "millstream-snapshot" and header["header_version"] == 1
    assert header["architecture"] == "olmoe" and header["config"] == read_json(wide_hf / "config.json")
    assert header["generation_config"] == read_json(wide_hf / "generation_config.json")
    assert header["formats"] == report.formats == {
        "embed": "bf16", "norm": "f32", "attention": "f16", "router": "f32", "gate_up": "q4_0", "down": "q8_0",
        "head": "f16",
    }  # fmt: skip
    assert sum(entry["bytes"] for entry in header["files"]) == report.snapshot_bytes
    keys = {"name", "format", "format_version", "layout", "shape", "role", "file", "offset", "nbytes", "checksum"}
    assert all(set(entry) == keys for entry in header["tensors"])
    text = (tmp_path / "s" / HEADER_FILE).read_text()
    assert str(tmp_path) not in text  # same bytes wherever it is made
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "s" / name).read_bytes() == (wide_hf / name).read_bytes()
    assert open_model(tmp_path / "s").tokenizer_dir == tmp_path / "s"


def test_verify_reports_progress_and_bytes(wide_hf, tmp_path):
    make_snapshot(wide_hf, tmp_path / "s", experts="q4_0")
    seen, files = [], open_model(tmp_path / "s")
    total = files.verify(progress=seen.append)
    assert total == seen[-1].done_bytes == seen[-1].total_bytes == sum(r.nbytes for r in files.tensors.values())
    assert len(seen) == len(files.tensors) and seen[-1].bytes_per_second > 0 and seen[-1].eta_seconds == 0


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_a_failed_conversion_leaves_nothing(wide_hf, tmp_path):
    def fail(progress):
        if progress.done_bytes > progress.total_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_snapshot(wide_hf, tmp_path / "s", progress=fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_conversion_leaves_no_snapshot_and_the_next_one_succeeds(number, wide_hf, tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, 'tests')\n"
        "from converters.hf import convert\n"
        "def slow(p): print(p.name, flush=True); time.sleep(0.05)\n"
        "convert(sys.argv[1], sys.argv[2], progress=slow)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(wide_hf), str(tmp_path / "s")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    child.stdout.readline()
    left = [path.name for path in tmp_path.iterdir()]
    assert left == [f"s.tmp-{child.pid}"] and not (tmp_path / left[0] / HEADER_FILE).exists()
    os.kill(child.pid, number)
    assert child.wait(20) != 0
    child.stdout.close()
    assert not (tmp_path / "s").exists()
    if number == signal.SIGINT:
        assert list(tmp_path.iterdir()) == []
    make_snapshot(wide_hf, tmp_path / "s")
    open_model(tmp_path / "s").verify()


def test_header_is_written_last_and_every_file_is_synced(wide_hf, tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(handle):
        synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    make_snapshot(wide_hf, tmp_path / "s")
    names = [path.rsplit("/", 1)[-1] for path in synced]
    assert names[-3] == HEADER_FILE and synced[-2].startswith(f"{tmp_path}/s.tmp-") and synced[-1] == str(tmp_path)
    assert set(names[:-2]) == {path.name for path in (tmp_path / "s").iterdir()}


def test_existing_target_is_refused_and_force_replaces_snapshots_only(wide_hf, tmp_path):
    make_snapshot(wide_hf, tmp_path / "s")
    before = directory_bytes(tmp_path / "s")
    with pytest.raises(OutputExistsError, match=r"exists; choose another name, or --force"):
        make_snapshot(wide_hf, tmp_path / "s", experts="q8_0")
    assert directory_bytes(tmp_path / "s") == before
    make_snapshot(wide_hf, tmp_path / "s", experts="q8_0", force=True)
    assert open_model(tmp_path / "s").header.formats["down"] == "q8_0"
    copy_dir(wide_hf, tmp_path / "precious")
    with pytest.raises(OutputExistsError, match="is no snapshot"):
        make_snapshot(wide_hf, tmp_path / "precious", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "s"]


def test_target_that_appears_meanwhile_is_not_replaced(wide_hf, tmp_path):
    def appear(progress):
        (tmp_path / "s").mkdir(exist_ok=True)

    with pytest.raises(OutputExistsError):
        make_snapshot(wide_hf, tmp_path / "s", progress=appear)
    assert [path.name for path in tmp_path.iterdir()] == ["s"] and not list((tmp_path / "s").iterdir())


def test_too_little_room_is_refused_before_writing(wide_hf, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("engine.weights.writer.shutil.disk_usage", lambda path: usage)
    with pytest.raises(OutputSpaceError, match=r"1000 bytes free, the snapshot needs \d{7}"):
        make_snapshot(wide_hf, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_write_errors_are_one_line(wide_hf, tmp_path, monkeypatch):
    def full(handle, digest, chunk):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.weights.writer._write_chunk", full)
    with pytest.raises(converter.ConversionIOError, match="No space left on device"):
        make_snapshot(wide_hf, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_plan_that_does_not_match_the_bytes_is_an_internal_error(wide_hf, tmp_path, monkeypatch):
    monkeypatch.setattr(quantize.Quantizer, "chunks", lambda *_: iter([np.zeros(1, np.uint8)]))
    with pytest.raises(AssertionError, match="1 bytes made"):
        make_snapshot(wide_hf, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_writer_clears_a_leftover_of_its_own_number(tmp_path):
    leftover = tmp_path / f"s.tmp-{os.getpid()}"
    leftover.mkdir()
    (leftover / "junk").write_text("x")
    with SnapshotWriter(tmp_path / "s") as writer:
        assert not (leftover / "junk").exists()
        assert writer.out == tmp_path / "s"
    assert list(tmp_path.iterdir()) == []


def test_opening_is_quick(wide_hf, tmp_path):
    make_snapshot(wide_hf, tmp_path / "s", experts="q4_0")
    start = time.perf_counter()
    open_model(tmp_path / "s")
    assert time.perf_counter() - start < 1.0
