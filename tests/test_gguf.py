"""GGUF files in place: the same logits as transformers, records that point at the right bytes, split sets, metadata.

Files are written by the gguf package, logits come from the golden files of transformers, values from gguf's decoders.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import gguf
import gguf_models
import numpy as np
import pytest
import tiny_models
from cli_program import run
from gguf import GGMLQuantizationType as Type
from snapshot_tools import run_cli
from test_models import GOLDEN_DIR, largest_error

from engine.errors import ConfigError
from engine.experts.fitting import lock_everything
from engine.formats import FORMATS
from engine.generate import decode_step
from engine.kernels import Context
from engine.models import family
from engine.weights import errors, open_model
from engine.weights.gguf_header import read_header
from engine.weights.loader import WeightLoader

# Every golden config whose rules a GGUF file can express (rope parameters are read by the family's Config).
NAMES = [name for name in tiny_models.CONFIGS if name != "tied"]


def load_model(files):
    """The family's Model over opened files, without a tokenizer."""
    context = Context()
    size = min(256, files.config["max_position_embeddings"])
    return family(files.architecture).Model(files.config, WeightLoader(files, context), context, size, size)


def golden_logits(model, file):
    kv, prompt = model.new_kv(len(file["prompt_ids"]) + len(file["greedy_ids"]), "f32"), file["prompt_ids"]
    rows = [model.forward(prompt.astype(np.int32), kv, 0, logits="all").copy()]
    for i, token in enumerate(file["greedy_ids"][:-1]):
        rows.append(decode_step(model, kv, np.array([token], np.int32), len(prompt) + i).copy())
    return np.concatenate(rows)


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_logits_match_transformers(tmp_path, name):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, name, fused=name in ("odd", "wide"))
    files = open_model(path)
    assert files.kind == "gguf" and files.tied_head == tiny_models.hf_config(name)["tie_word_embeddings"]
    with np.load(GOLDEN_DIR / f"{name}.npz") as file:
        want = np.concatenate([file["prefill_logits"], file["decode_logits"]])
        got = golden_logits(load_model(files), file)
    assert largest_error(got, want) <= 1e-4


@pytest.mark.parametrize("fused", [False, True])
def test_records_hold_the_values_of_the_file(tmp_path, fused):
    path = tmp_path / "m.gguf"
    formats = {"ffn_down": Type.Q8_0, "ffn": Type.Q4_0, "attn": Type.Q5_1, "token_embd": Type.F16}
    stored = gguf_models.write_gguf(path, "mha_base", formats, fused=fused)
    files = open_model(path)

    def values(name):
        record = files.record(name)
        rows = files.read(name).reshape(record.rows, -1)
        return record, FORMATS[record.format].dequantize(rows, record.cols)

    for part, expert in (("gate", 0), ("up", 5), ("down", 7)):
        record, got = values(f"layers.1.mlp.experts.{expert}.{part}_proj")
        assert record.format == ("q8_0" if part == "down" else "q4_0")
        if fused and part != "down":
            both = stored["blk.1.ffn_gate_up_exps.weight"][expert]
            want = np.split(both, 2)[part == "up"]
        else:
            want = stored[f"blk.1.ffn_{part}_exps.weight"][expert]
        np.testing.assert_array_equal(got, want)
    record, got = values("layers.0.self_attn.o_proj")
    assert record.format == "q5_1"
    np.testing.assert_array_equal(got, stored["blk.0.attn_output.weight"])
    np.testing.assert_array_equal(files.vector("layers.1.self_attn.k_norm"), stored["blk.1.attn_k_norm.weight"])


def test_any_shard_of_a_split_set_opens_the_whole(tmp_path):
    gguf_models.write_gguf(tmp_path / "one.gguf", "gqa_norm")
    gguf_models.write_gguf(tmp_path / "set.gguf", "gqa_norm", shard_tensors=9)
    shards = sorted(tmp_path.glob("set-*.gguf"))
    assert len(shards) > 3
    one = open_model(tmp_path / "one.gguf")
    for shard in (shards[0], shards[2], shards[-1]):
        files = open_model(shard)
        assert files.config == one.config and len(files.files) == len(shards)
        assert files.tensors.keys() == one.tensors.keys()
        for name in one.tensors:
            np.testing.assert_array_equal(files.read(name), one.read(name))


def test_missing_shards_are_listed_by_name(tmp_path):
    gguf_models.write_gguf(tmp_path / "set.gguf", "mha_base", shard_tensors=5)
    shards = sorted(tmp_path.glob("set-*.gguf"))
    shards[1].unlink()
    shards[3].unlink()
    with pytest.raises(errors.MissingFileError) as caught:
        open_model(shards[0])
    assert shards[1].name in str(caught.value) and shards[3].name in str(caught.value)
    assert "2 of the 6" in str(caught.value)


def test_shards_that_do_not_belong_together(tmp_path):
    gguf_models.write_gguf(tmp_path / "set.gguf", "mha_base", shard_tensors=10)
    shards = sorted(tmp_path.glob("set-*.gguf"))
    shutil.copy(shards[0], shards[1])
    with pytest.raises(errors.ForeignFileError, match="part 0 of 3"):
        open_model(shards[0])
    shards[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(errors.ForeignFileError, match="not named like one"):
        open_model(tmp_path / "renamed.gguf")


def test_metadata_is_what_the_gguf_package_reads(tmp_path):
    path = tmp_path / "m.gguf"

    def edit(writer):
        writer.add_array("x.numbers", [3, -4, 5])
        writer.add_array("x.scores", [0.5, -1.25])
        writer.add_array("x.words", ["a", "b\u00e9", ""])
        writer.add_array("x.none", [True, False])
        writer.add_uint64("x.long", 2**63 + 1)
        writer.add_float64("x.double", 0.1)

    gguf_models.write_gguf(path, "mha_base", edit=edit)
    metadata = open_model(path).gguf_metadata
    reader = gguf.GGUFReader(path)
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert list(metadata) == keys
    for key in keys:
        assert metadata[key] == reader.fields[key].contents(), key
    assert metadata.length("tokenizer.ggml.tokens") == tiny_models.TOKENIZER_SIZE


def test_the_directory_is_what_the_gguf_package_reads(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "wide", {"ffn": Type.Q4_1}, edit=lambda w: w.add_custom_alignment(256))
    tensors = read_header(path).tensors
    for want in gguf.GGUFReader(path).tensors:
        got = tensors.pop(want.name)
        assert got.shape == tuple(int(n) for n in want.shape)[::-1]
        assert (got.ggml_type, got.offset, got.nbytes) == (want.tensor_type, want.data_offset, want.n_bytes)
        assert got.offset % 256 == 0
    assert not tensors


def test_a_key_that_may_change_the_mathematics_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "mha_base", edit=lambda w: w.add_float32("olmoe.attention.new_rule", 2.0))
    with pytest.raises(ConfigError, match=r"olmoe\.attention\.new_rule"):
        open_model(path)


def test_impossible_keys_are_named_with_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    for key, message in (
        ("olmoe.attention.head_count", r"olmoe\.attention\.head_count = 0, expected >= 1"),
        ("olmoe.expert_count", "the metadata, read as config.json: num_experts = 0"),
    ):

        def edit(writer, key=key):
            for keys in writer.kv_data:
                keys.pop(key, None)
            writer.add_uint32(key, 0)

        gguf_models.write_gguf(path, "mha_base", edit=edit)
        with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: .*{message}"):
            open_model(path)


def test_a_directory_names_the_files_in_it(tmp_path):
    gguf_models.write_gguf(tmp_path / "m.gguf", "mha_base")
    with pytest.raises(errors.NotASnapshotError, match=r"give a GGUF file in it \(m\.gguf\)"):
        open_model(tmp_path)


def test_a_file_name_that_is_no_text(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.gguf")
    gguf_models.write_gguf(tmp_path / "m.gguf", "mha_base")
    (tmp_path / "m.gguf").rename(path)
    assert "\\udcff.gguf: gguf, architecture olmoe" in run("inspect", path).stdout
    assert json.loads(run("inspect", "--json", path).stdout)["path"] == str(path)


def first_logits(files, compact, tokens=5):
    context = Context()
    loader = WeightLoader(files, context, compact_experts=compact)
    model = family(files.architecture).Model(files.config, loader, context, 64, 64)
    kv = model.new_kv(64)
    rows = [model.forward(np.arange(tokens, dtype=np.int32), kv, 0, logits="all").copy()]
    rows += [model.forward(np.array([9], np.int32), kv, tokens + i).copy() for i in range(3)]
    return loader, np.concatenate(rows)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0, Type.Q5_1, Type.F16])
def test_fast_and_compact_experts_give_the_same_bits(tmp_path, kind):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "gqa_norm", {"ffn": kind})
    fast, want = first_logits(open_model(path), False)
    compact, got = first_logits(open_model(path), True)
    np.testing.assert_array_equal(got, want)
    assert compact.recoder is None
    assert (fast.recoder is None) == (kind == Type.F16)  # float rows are what kernels read: nothing to re-code


@pytest.mark.parametrize("name", ["mha_base", "tied"])
def test_an_embedding_that_is_no_head_stays_in_the_file(tmp_path, name):
    path = tmp_path / "m.gguf"
    stored = gguf_models.write_gguf(path, name, {"token_embd": Type.Q5_1})
    files, context = open_model(path), Context()
    model = family("olmoe").Model(files.config, WeightLoader(files, context), context, 8, 8)
    in_place = np.shares_memory(model.embed_tokens.strips, files.read("embed_tokens"))
    assert in_place == model.embed_tokens.compact == (name != "tied")
    model.ids.array[0, :3] = ids = [7, 0, 8]
    model.embed(3)
    np.testing.assert_array_equal(model.x.array[:3], stored["token_embd.weight"][ids])


def test_experts_are_recoded_when_they_are_used_again(tmp_path):
    """The first use re-codes strips on the way, the second for good; lock_everything does not wait for either."""
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "mha_base", {"ffn": Type.Q4_0})
    files, context = open_model(path), Context()
    loader = WeightLoader(files, context)
    calls = []
    model = family("olmoe").Model(files.config, loader, context, 64, 64)
    loader.recoder.progress = lambda *now: calls.append(now)
    expert_bytes = sum(files.record(f"layers.0.mlp.experts.0.{p}_proj").nbytes for p in ("gate", "up", "down"))
    assert loader.recoder.done_bytes == 0 and loader.recoder.total_bytes == 16 * expert_bytes
    once = model.forward(np.array([3], np.int32), model.new_kv(8), 0).copy()
    assert loader.recoder.done_bytes == 0
    twice = model.forward(np.array([3], np.int32), model.new_kv(8), 0).copy()
    assert loader.recoder.done_bytes == 2 * 2 * expert_bytes  # two of eight experts in each of two layers
    assert [done for done, _, _ in calls] == [expert_bytes * i for i in range(1, 5)]
    np.testing.assert_array_equal(once, twice)
    for _ in range(2):
        model.forward(np.arange(64, dtype=np.int32), model.new_kv(64), 0)
    assert loader.recoder.done_bytes <= loader.recoder.total_bytes
    before = loader.recoder.done_bytes
    model.forward(np.arange(64, dtype=np.int32), model.new_kv(64), 0)
    assert loader.recoder.done_bytes == before
    np.testing.assert_array_equal(model.forward(np.array([3], np.int32), model.new_kv(8), 0), once)
    lock_everything(model)
    assert loader.recoder.done_bytes == loader.recoder.total_bytes


def test_generate_tells_what_was_recoded(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "mha_base", {"ffn": Type.Q4_0})
    args = ["generate", "--model", path, "-n", "3", "--temperature", "0", "The router"]
    code, _, err = run_cli(*args)
    assert code == 0, err
    assert "were used and re-coded" in err and "experts fast" in err
    code, out, _ = run_cli(*args, "--json")
    recoded = json.loads(out)["stats"]["recoded"]
    assert code == 0 and 0 < recoded["bytes"] <= recoded["total_bytes"] == 16 * 3 * 64 * 64 // 32 * 18
    code, out, err = run_cli(*args, "--json", "--expert-layout", "compact")
    assert code == 0 and json.loads(out)["stats"]["recoded"] is None and "experts compact" in err


def test_inspect_shows_formats_by_role_and_the_metadata(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "mha_base", {"ffn_down": Type.Q8_0, "ffn": Type.Q4_0, "attn": Type.Q5_1})
    code, out, err = run_cli("inspect", "--json", "--verify", path)
    assert code == 0, err
    found = json.loads(out)
    assert {role: group["formats"] for role, group in found["roles"].items()} == {
        "embed": ["f32"], "norm": ["f32"], "attention": ["q5_1"], "router": ["f32"], "gate_up": ["q4_0"],
        "down": ["q8_0"], "head": ["f32"],
    }  # fmt: skip
    assert found["kind"] == "gguf" and found["gguf"]["version"] == 3 and found["file_bytes"] == path.stat().st_size
    metadata = found["gguf"]["metadata"]
    assert metadata["olmoe.expert_count"] == 8
    assert metadata["tokenizer.ggml.tokens"] == {"items": tiny_models.TOKENIZER_SIZE}
    assert found["verified_bytes"] == sum(group["nbytes"] for group in found["roles"].values())
    code, out, err = run_cli("inspect", "--verify", path)
    assert code == 0 and "olmoe.expert_count = 8" in out and "all values and scales are finite" in err


def mapped_bytes(path) -> int:
    """Resident bytes of a file's mapping in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_the_file_are_given_back(tmp_path):
    """After an expert is re-coded, what stays of its pages is what a fault maps around its neighbours."""
    path = tmp_path / "m.gguf"
    config = tiny_models.hf_config("mha_base") | {"intermediate_size": 2048, "num_hidden_layers": 1}
    gguf_models.write_gguf(path, config, {"ffn": Type.Q8_0}, seed=1)
    files = open_model(path)
    context = Context()
    loader = WeightLoader(files, context)
    model = family(files.architecture).Model(files.config, loader, context, 64, 64)
    for _ in range(2):
        model.forward(np.arange(32, dtype=np.int32), model.new_kv(64), 0)
    assert loader.recoder.done_bytes == loader.recoder.total_bytes > 3 << 20
    assert mapped_bytes(path) < loader.recoder.total_bytes // 4
    files.read("layers.0.mlp.experts.1.up_proj").sum()
    before = mapped_bytes(path)
    files.release("layers.0.mlp.experts.1.up_proj")
    assert mapped_bytes(path) < before
