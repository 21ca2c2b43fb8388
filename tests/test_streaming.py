"""Streamed experts: the bits of a run are those of a model that fits, whatever the cache, the way of reading and the
number of readers; each expert is read once per call; trouble with reads is an error that leaves the cache in order.
"""

import dataclasses
import errno
import gc
import os
import shutil
from pathlib import Path

import gguf_models
import latent_and_sink_models as family_models
import numpy as np
import pytest
import tiny_models
from gguf import GGMLQuantizationType as Type

import engine
from converters.hf import RoleFormats, convert
from engine import memory_lock
from engine.errors import ConfigError, ExpertReadError
from engine.experts import files, fitting, lookahead
from engine.hardware import status_bytes
from engine.kernels import ffi, lib
from engine.weights import stream_loader

FORMATS = {
    "as stored": {"experts": "q8_0", "dense": "q8_0"},
    "re-coded": {"experts": "q5_0", "down": "q6_k", "dense": "q8_0"},
    "mixed": {"experts": "q4_0", "down": "q5_k", "dense": "q8_0"},
}
TOP, NUM_EXPERTS, LAYERS = 2, 8, 2
CACHES = {"minimum": TOP, "tiny": TOP + 1, "half": NUM_EXPERTS, "all": NUM_EXPERTS * LAYERS}
NUM_TOKENS = 60


@pytest.fixture(params=FORMATS)
def snapshot(request, tiny_snapshot):
    return tiny_snapshot("wide", **FORMATS[request.param])


@pytest.fixture
def small(tiny_snapshot):
    return tiny_snapshot("wide", **FORMATS["as stored"])


def ids():
    return np.random.default_rng(7).integers(0, 320, NUM_TOKENS).astype(np.int32)


def logits(loaded, parts=(40, *[1] * (NUM_TOKENS - 40))):
    model, kv, done, rows = loaded.model, loaded.new_kv(), 0, []
    for size in parts:
        rows.append(model.forward(ids()[done : done + size], kv, done, logits="all").copy())
        done += size
    return np.concatenate(rows)


def assert_same(got, want):
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def expert_bytes(path):
    """Bytes of one expert of the small model as the file holds it, without padding behind it."""
    loaded = engine.load(path, expert_slots=TOP)
    return loaded.stream.places.expert_bytes


def raw_stats(loaded):
    raw = ffi.new("struct moe_stream_stats *")
    lib.moe_streamer_stats(loaded.stream.cache.handle, raw)
    return raw


def fault(loaded, **settings):
    lib.moe_streamer_set_fault(loaded.stream.cache.handle, ffi.new("struct moe_stream_fault *", settings))


@pytest.mark.parametrize("cache", CACHES)
def test_cache_size_changes_no_bit(snapshot, cache):
    want = logits(engine.load(snapshot))
    loaded = engine.load(snapshot, expert_slots=CACHES[cache], lookahead="off")
    assert_same(logits(loaded), want)
    stats = loaded.stream.stats()
    assert stats["misses"] == stats["reads"] and (stats["hits"] > 0) == (cache != "minimum")
    assert (stats["evictions"] == 0) == (cache == "all")


@pytest.mark.parametrize("io", ["direct", "buffered", "mmap"])
@pytest.mark.parametrize("readers", [1, 5])
def test_way_of_reading_changes_no_bit(snapshot, io, readers):
    want = logits(engine.load(snapshot))
    loaded = engine.load(snapshot, expert_slots=TOP + 1, io=io, readers=readers)
    assert loaded.stream.expert_files.mode == io, loaded.stream.notes()
    assert_same(logits(loaded), want)


@pytest.mark.parametrize("slots", [TOP, 6, NUM_EXPERTS])
def test_look_ahead_changes_no_bit_and_is_counted(snapshot, slots):
    want = logits(engine.load(snapshot))
    loaded = engine.load(snapshot, expert_slots=slots, lookahead="on")
    fault(loaded, max_sleep_us=100, seed=2)
    assert_same(logits(loaded), want)
    assert_same(logits(loaded), want)  # guesses of the first pass are still around
    stats, guesses = loaded.stream.stats(), loaded.stream.cache.lookahead
    raw = raw_stats(loaded)
    assert stats["lookahead"] == "on"
    if slots == TOP:  # no room for guesses
        assert stats["lookahead_used_bytes"] == stats["lookahead_wasted_bytes"] == raw.speculative_bytes == 0
        return
    assert 0.2 < stats["lookahead_recall"] <= 1 and stats["lookahead_used_bytes"] > 0
    kept = guesses.used + guesses.wasted + len(guesses.unused) + len(guesses.coming)
    assert kept * loaded.stream.places.expert_bytes >= raw.speculative_bytes > 0
    resident = sum(slot >= 0 for slot in loaded.stream.cache.slot_of)
    assert raw.used_slots == 0 and raw.free_slots + resident + len(guesses.coming) >= slots


def test_look_ahead_that_does_not_pay_is_switched_off():
    trial = lookahead.Trial("auto")
    clock = iter(np.cumsum([0.0] + [0.010 if step // lookahead.STRETCH % 2 else 0.009 for step in range(200)]))
    for now in clock:
        trial.tick(now)
    assert not trial.on and "auto: off, 10.0 ms/step with, 9.0 without" in trial.verdict
    trial = lookahead.Trial("auto")
    for now in np.cumsum([0.0] + [0.007 if step // lookahead.STRETCH % 2 else 0.009 for step in range(200)]):
        trial.tick(now)
    assert trial.on and "auto: on" in trial.verdict
    for now in 10 + np.arange(300) * 0.009:  # measured again after a while
        trial.tick(now)
    assert trial.verdict


def test_guesses_leave_room_for_a_layer_beside_pinned_experts(small):
    loaded = engine.load(small, expert_slots=8, lookahead="on")
    cache, blocks = loaded.stream.cache, loaded.stream.cache.lookahead.blocks
    for pinned, guesses in ((0, TOP), (4, 1), (6, 0)):
        cache.pinned = frozenset(range(pinned))
        assert lookahead.LookAhead(cache, blocks, "on").max_guesses == guesses


def test_only_sure_guesses_are_read_in_auto_mode(small):
    loaded = engine.load(small, expert_slots=NUM_EXPERTS, lookahead="auto")
    guesses = loaded.stream.cache.lookahead
    guesses.trial.on = True
    guesses.trial.tick = lambda now: None
    guesses._right[:] = 0  # never right: nothing is read, however often it is predicted
    logits(loaded)
    assert guesses.wanted > 0 and raw_stats(loaded).speculative_bytes == 0
    guesses._seen[:], guesses._right[:] = 1000, 1000
    logits(loaded)
    assert raw_stats(loaded).speculative_bytes > 0


def test_text_is_the_same(small):
    texts = set()
    for slots in (None, *CACHES.values()):
        generation = engine.load(small, expert_slots=slots).generate(
            ids()[:20].tolist(), max_tokens=30, temperature=0.8, seed=3, ignore_eos=True
        )
        "".join(generation)
        texts.add(tuple(generation.token_ids))
    assert len(texts) == 1


@pytest.mark.parametrize("slots", [TOP, TOP + 3])
def test_each_expert_is_read_once_per_block_of_tokens(small, slots):
    """Also when the block needs more experts than the cache holds."""
    loaded = engine.load(small, expert_slots=slots)
    kv = loaded.new_kv()
    loaded.model.forward(ids(), kv, 0, logits="none")
    stats = loaded.stream.stats()
    assert stats["hits"] == 0
    assert stats["reads"] == NUM_EXPERTS * LAYERS  # 60 tokens want all of them
    assert stats["bytes"] == NUM_EXPERTS * LAYERS * expert_bytes(small)


def test_bytes_read_are_those_of_the_misses(small):
    loaded = engine.load(small, expert_slots=CACHES["half"], lookahead="off")
    logits(loaded)
    stats = loaded.stream.stats()
    assert stats["bytes"] == stats["misses"] * expert_bytes(small)
    assert stats["service_s"] > 0 and stats["busy_s"] <= stats["service_s"] * 1.001


def test_every_slot_is_free_or_resident_afterwards(small):
    loaded = engine.load(small, expert_slots=5, lookahead="off")
    logits(loaded)
    raw = raw_stats(loaded)
    resident = sum(slot >= 0 for slot in loaded.stream.cache.slot_of)
    assert (raw.used_slots, raw.unfinished, raw.free_slots + resident) == (0, 0, 5)


@pytest.mark.parametrize("error", ["EIO", "short"])
def test_ten_percent_of_trouble_changes_no_bit(snapshot, error):
    want = logits(engine.load(snapshot))
    loaded = engine.load(snapshot, expert_slots=3)
    percent = {"fail_percent": 10, "error": 5} if error == "EIO" else {"short_percent": 40}
    fault(loaded, seed=1, max_sleep_us=200, **percent)
    assert_same(logits(loaded), want)
    stats = loaded.stream.stats()
    assert (stats["retries"] > 0) == (error == "EIO") and stats["failures"] == 0


def test_einval_falls_back_to_buffered_reads(small):
    want = logits(engine.load(small))
    loaded = engine.load(small, expert_slots=3, io="direct")
    fault(loaded, fail_percent=50, error=22, seed=4)
    with pytest.raises(ExpertReadError, match="Invalid argument"):  # the fault hits buffered reads as well
        logits(loaded)
    assert loaded.stream.stats()["direct_refused"] == 1
    fault(loaded)
    assert_same(logits(loaded), want)


def test_read_error_is_one_clear_line_and_leaves_the_cache_in_order(small):
    want = logits(engine.load(small))
    loaded = engine.load(small, expert_slots=4)
    fault(loaded, fail_percent=100, error=5, seed=1)
    for _ in range(3):
        with pytest.raises(ExpertReadError, match=r"experts-00001.*layer 0 expert \d: read at \d+: Input/output error"):
            logits(loaded)
    raw = raw_stats(loaded)
    assert (raw.used_slots, raw.unfinished, raw.free_slots) == (0, 0, 4)
    fault(loaded)
    assert_same(logits(loaded), want)


def test_reads_that_worked_beside_one_that_failed_are_not_kept_in_use(small):
    want = logits(engine.load(small))
    loaded = engine.load(small, expert_slots=6)
    fault(loaded, fail_percent=50, error=errno.ENXIO, seed=3)
    for _ in range(8):
        with pytest.raises(ExpertReadError, match="No such device"):
            logits(loaded)
        raw = raw_stats(loaded)
        assert (raw.used_slots, raw.unfinished) == (0, 0)
    assert loaded.stream.stats()["failures"] < loaded.stream.stats()["reads"]
    fault(loaded)
    assert_same(logits(loaded), want)


@pytest.mark.parametrize("io", ["direct", "buffered", "mmap"])
def test_file_that_becomes_shorter_is_an_error(small, tmp_path, io):
    path = tmp_path / "model"
    shutil.copytree(small, path)
    loaded = engine.load(path, expert_slots=TOP, io=io)
    file = next(path.glob("experts-*"))
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size // 3)
    with pytest.raises(ExpertReadError, match="the file ended early"):
        logits(loaded)


def test_file_system_without_direct_reads_gets_buffered_ones(small, monkeypatch):
    system_open = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return system_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    loaded = engine.load(small, expert_slots=3)
    assert loaded.stream.expert_files.mode == "buffered"
    assert any("refuses O_DIRECT" in line for line in loaded.stream.notes())
    monkeypatch.undo()
    assert_same(logits(loaded), logits(engine.load(small)))


def test_direct_reads_that_return_other_bytes_are_not_used(small, monkeypatch):
    system_read = os.preadv

    def lie(descriptor, buffers, *args):
        got = system_read(descriptor, buffers, *args)
        buffers[0][got // 2] ^= 1
        return got

    monkeypatch.setattr(files.os, "preadv", lie)
    opened = files.ExpertFiles(engine.load(small, expert_slots=3, io="buffered").stream.places, "auto")
    assert opened.mode == "buffered" and "they return other bytes" in opened.note


def test_too_few_slots_are_refused_with_the_minimum(small):
    with pytest.raises(ConfigError, match="got 1, expected 2"):
        engine.load(small, expert_slots=TOP - 1)
    with pytest.raises(ConfigError, match="not enough memory"):
        engine.load(small, ram=0.01)


def test_cache_below_one_tokens_demand_is_warned_about(small):
    notes = engine.load(small, expert_slots=TOP).stream.notes()
    assert any("one token uses 2 layers x 2 = 4" in line for line in notes)
    assert not any("warning" in line for line in engine.load(small, expert_slots=4).stream.notes())


def test_dense_weights_are_recoded_in_parts(tiny_snapshot, monkeypatch):
    """With a part so small that every matrix takes several."""
    path = tiny_snapshot("wide", experts="q8_0", dense="q5_0")
    monkeypatch.setattr(stream_loader, "LOAD_CHUNK_BYTES", 3000)
    assert any(r.layout is None and r.role == "attention" for r in engine.load(path).files.tensors.values())
    assert_same(logits(engine.load(path, expert_slots=4)), logits(engine.load(path)))


def test_expert_that_left_cannot_be_used_by_mistake(small):
    loaded = engine.load(small, expert_slots=3)
    logits(loaded)
    cache = loaded.stream.cache
    for key in cache.places.keys:
        gone = cache.slot_of[key] < 0
        assert (cache.structs[key].gate.data == ffi.NULL) == (cache.structs[key].down.data == ffi.NULL) == gone


@pytest.mark.parametrize("io", ["direct", "mmap"])
def test_files_are_closed_with_the_engine(small, io):
    def open_files():
        return sum(
            "experts-0" in str(Path(entry.path).readlink())
            for entry in os.scandir("/proc/self/fd")
            if entry.is_symlink()
        )

    gc.collect()
    before = open_files()
    loaded = engine.load(small, expert_slots=6, io=io, lookahead="on")
    fault(loaded, max_sleep_us=500, seed=1)
    loaded.model.forward(ids()[:5], loaded.new_kv(), 0)
    assert open_files() > before
    del loaded
    gc.collect()
    assert open_files() == before


def test_model_that_fits_is_not_streamed(small):
    assert engine.load(small).stream is None


def test_storage_rows_of_every_kind_are_recoded_on_arrival(tmp_path):
    """Group formats as well, whose matrices are stored as a whole."""
    tiny_models.make_hf_dir(tmp_path / "hf", "wide", seed=tiny_models.golden_seed("wide"))
    formats = RoleFormats(experts="hqq5-ax0-g32", dense="f16")
    convert(tmp_path / "hf", tmp_path / "out", formats=formats, layout="storage", threads=1)
    loaded = engine.load(tmp_path / "out", expert_slots=3)
    assert loaded.stream.places.staging_bytes
    assert_same(logits(loaded), logits(engine.load(tmp_path / "out")))


def test_plan_adds_up(small):
    plan = engine.load(small, expert_slots=5).stream.plan
    assert dataclasses.asdict(plan)["roles"]["experts"] == 5 * plan.slot_bytes
    assert plan.planned_bytes == sum(plan.roles.values()) <= plan.budget.total_bytes


@pytest.mark.parametrize("form", ["fast", "compact"])
@pytest.mark.parametrize("io", ["direct", "buffered", "mmap"])
def test_gguf_three_reads_per_expert_and_the_same_bits(tmp_path, form, io):
    """Slabs that begin anywhere in a page."""
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, "gqa_norm", {"ffn_(gate|up)_exps": Type.Q4_0, "ffn_down_exps": Type.Q5_1})
    want = logits(engine.load(path))
    loaded = engine.load(path, expert_slots=3, io=io, expert_layout=form, lookahead="off")
    assert (
        loaded.stream.compact == (form == "compact")
        and bool(loaded.stream.places.staging_bytes) != loaded.stream.compact
    )
    assert any(loaded.stream.places.table[0].pieces[i].offset % 4096 for i in range(3))
    assert_same(logits(loaded), want)
    stats = loaded.stream.stats()
    assert stats["reads"] == 3 * stats["misses"]
    assert stats["bytes"] == stats["misses"] * loaded.stream.places.expert_bytes


def test_direct_reads_of_a_model_that_fits_fill_memory_at_load(snapshot):
    calls = []
    loaded = engine.load(snapshot, io="direct", progress=lambda done, total: calls.append((done, total)))
    stats = loaded.stream.stats()
    assert stats["slots"] == stats["experts"] == stats["reads"] == NUM_EXPERTS * LAYERS
    assert calls[-1][0] == calls[-1][1] == NUM_EXPERTS * LAYERS * loaded.stream.places.expert_bytes
    assert_same(logits(loaded), logits(engine.load(snapshot)))
    after = loaded.stream.stats()
    assert (after["hits"], after["misses"], after["reads"]) == (0, 0, stats["reads"])  # decoding asks nobody


def test_cold_file_is_read_in_at_load(snapshot, monkeypatch):
    monkeypatch.setattr(fitting, "SMALL_BYTES", 0)
    monkeypatch.setattr(fitting, "BLOCK_BYTES", 100_000)
    monkeypatch.setattr(fitting, "is_cached", lambda *_: False)
    calls = []
    loaded = engine.load(snapshot, progress=lambda done, total: calls.append((done, total)))
    assert_same(logits(loaded), logits(engine.load(snapshot, io="mmap")))
    want = sum(r.nbytes for r in loaded.files.tensors.values() if r.role in ("gate_up", "down"))
    if loaded.expert_layout.name == "fast":  # re-coded: past the page cache, into slots
        assert loaded.stream.stats()["reads"] == loaded.stream.stats()["slots"] == NUM_EXPERTS * LAYERS
        assert want <= calls[-1][0] == calls[-1][1] <= want + 4096 * NUM_EXPERTS * LAYERS
        return
    assert want <= loaded.read_bytes <= want + 4096 * NUM_EXPERTS * LAYERS
    assert calls[-1] == (loaded.read_bytes, loaded.read_bytes)
    assert engine.load(snapshot, io="mmap").read_bytes == 0


@pytest.mark.parametrize("slots", [None, 5])
def test_lock_locks_what_it_says(snapshot, slots):
    gc.collect()  # what another test locked
    before = status_bytes("VmLck")
    if before is None:
        pytest.skip("this system does not say how much is locked")
    loaded = engine.load(snapshot, lock=True, expert_slots=slots)
    locked = loaded.stream.locked_bytes if loaded.stream else loaded.locked_bytes
    experts = slots * loaded.stream.places.slot_bytes if slots else loaded.expert_layout.num_bytes
    assert locked > experts
    assert status_bytes("VmLck") - before >= 0.9 * experts


def test_lock_beyond_the_limit_is_refused_before_loading(small, monkeypatch):
    monkeypatch.setattr(memory_lock, "may_lock_anything", lambda: False)
    monkeypatch.setattr(memory_lock.resource, "getrlimit", lambda _: (65536, 65536))
    for slots in (None, 5):
        with pytest.raises(ConfigError, match=r"this process may lock 0 MiB .*memlock \d+' into .*limits.conf"):
            engine.load(small, lock=True, expert_slots=slots)


# A shared expert in some layers only, biases of experts, dense first layers, groups of experts.
FAMILIES = ("qwen2_moe_mixed", "granitemoe", "mixtral", "gpt_oss", "deepseek_v2", "glm4_moe")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_family_can_be_streamed(tmp_path, name):
    family_models.checkpoint(tmp_path / "hf", name)
    convert(tmp_path / "hf", tmp_path / "out", formats=RoleFormats(experts="f32", dense="f32"), threads=1)
    whole = engine.load(tmp_path / "out")
    top = whole.model.config.num_experts_per_tok
    tokens = ids() % min(whole.model.config.vocab_size, 300)

    def run(loaded):
        kv, rows = loaded.new_kv(), []
        for first, last in ((0, 20), (20, 21), (21, 22), (22, 30)):
            rows.append(loaded.model.forward(tokens[first:last], kv, first, logits="all").copy())
        return np.concatenate(rows)

    want = run(whole)
    for slots in (top, top + 3):
        loaded = engine.load(tmp_path / "out", expert_slots=slots, lookahead="on")
        assert_same(run(loaded), want)
        assert loaded.stream.stats()["evictions"] > 0


@pytest.mark.parametrize("io", ["auto", "direct"])
def test_model_without_experts_runs_whatever_is_asked_of_the_streamer(tmp_path, io):
    family_models.checkpoint(tmp_path / "hf", "llama")
    convert(tmp_path / "hf", tmp_path / "out", formats=RoleFormats(experts="f32", dense="f32"), threads=1)
    loaded = engine.load(tmp_path / "out", io=io, ram=1.0, lock=True)
    assert loaded.stream is None and loaded.locked_bytes > 0
    for options in ({"expert_slots": 4}, {"pin": "any.json"}):
        with pytest.raises(ConfigError, match="no routed experts"):
            engine.load(tmp_path / "out", **options)
