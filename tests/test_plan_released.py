"""Plans of released models from their config.json: formats that hold every matrix, few layers timed in place of all."""

import json

import pytest
from test_plan import Measured, report
from test_released_configs import CONFIGS

from engine import cut_model, machine_speed
from engine.formats import get_format
from engine.kernels import Context
from engine.planned_files import PlannedFiles
from engine.runtime import SHIPPED_MODEL
from engine.weights import open_model

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
RELEASED = CONFIGS | {name: CONFIGS[name] | {"quantization_config": FP8} for name in ("deepseek_v3", "kimi_k2")}


def planned(tmp_path, config, format_name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return PlannedFiles(str(path), format_name)


@pytest.mark.parametrize("format_name", ["q4_0", "q4_k", "iq4_xs", "mxfp4"])
@pytest.mark.parametrize("name", RELEASED)
def test_every_released_model_has_a_plan(tmp_path, monkeypatch, name, format_name):
    config = RELEASED[name]
    if format_name != "q4_k" and name != "gpt_oss":  # the others of its layers are the same, and take time
        config = config | {"num_hidden_layers": 5}
    files = planned(tmp_path, config, format_name)
    monkeypatch.chdir(tmp_path)
    measure = Measured()
    found = report(files, ctx=4096, ram=64, measure=measure)
    said = "\n".join(found["assumptions"])
    assert ("quantization_config" in said) == ("quantization_config" in RELEASED[name])
    for record in files.tensors.values():
        form = get_format(record.format)
        assert record.nbytes == record.rows * record.cols // form.block_len * form.block_bytes
        small = len(record.shape) == 1 or record.role == "router"
        experts = name == "gpt_oss" and record.role in ("gate_up", "down")
        wanted = get_format("f32" if small else "mxfp4" if experts else format_name)
        if record.cols % wanted.block_len == 0:
            assert record.format == wanted.name
        else:  # 32 weights in a block: as in all of these models
            assert record.format == "q8_0"
            assert f"{record.role} of {record.rows} x {record.cols} q8_0" in said
    assert found["prediction"]["decode_tok_s"] > 0


def test_rows_that_no_quantized_format_holds_are_f16(tmp_path):
    config = open_model(SHIPPED_MODEL).config | {"intermediate_size": 40}
    files = planned(tmp_path, config, "q4_k")
    assert files.record("layers.0.mlp.experts.0.down_proj").format == "f16"
    assert any("down of" in text and "x 40 f16" in text for text in files.assumptions)


def test_layers_of_a_kind_stand_for_each_other(tmp_path, monkeypatch):
    files = planned(tmp_path, RELEASED["deepseek_v3"], "q4_k")
    assert cut_model.layer_kinds(files) == [[0, 1, 2], list(range(3, 61))]
    chosen = cut_model.choose_layers(files, 128)
    assert len(chosen) <= 3 and set(chosen) >= {0, 3}
    assert sorted(layer for layers in chosen.values() for layer in layers) == list(range(61))
    oss = planned(tmp_path, RELEASED["gpt_oss"], "q4_0")
    assert cut_model.layer_kinds(oss) == [list(range(0, 24, 2)), list(range(1, 24, 2))]
    monkeypatch.setattr(cut_model, "MAX_WORK", 1e18)
    assert all(layers == [layer] for layer, layers in cut_model.choose_layers(oss, 128).items())


class Ticks:
    """A clock that only moves when it is told to."""

    now = 0.0

    def perf_counter(self):
        return self.now


def test_time_of_all_layers_from_some(monkeypatch):
    ticks = Ticks()
    monkeypatch.setattr(cut_model, "time", ticks)
    clock = cut_model.LayerClock({0: [0, 1, 2], 3: [3], 4: [4, 5]})
    for _ in range(2):  # parts of a long prompt
        for seconds in (1.0, 10.0, 100.0):
            clock.begin()
            ticks.now += seconds
            clock.end()
    assert clock.whole(2 * 111.0 + 7) == pytest.approx(2 * (3 * 1 + 10 + 2 * 100) + 7)
    clock = cut_model.LayerClock({0: [0, 1]}, 2.5)
    clock.begin()
    ticks.now += 4.0  # two fifths of the head
    clock.end_head()
    assert clock.whole(4.0) == pytest.approx(10.0)


def test_a_head_runs_in_part(tmp_path, monkeypatch):
    """Its first rows, as many as make HEAD_BYTES; all of one that is the embedding, too, or small."""
    short = RELEASED["deepseek_v3"] | {"num_hidden_layers": 4}
    files = planned(tmp_path, short, "q4_k")
    assert cut_model.head_part(files) == pytest.approx(129280 * cut_model.HEAD_BYTES / (129280 * 7168 * 4.5 / 8), abs=1)
    small = planned(tmp_path, short | {"vocab_size": 1000}, "q4_k")
    assert cut_model.head_part(small) == 1000
    tied = planned(tmp_path, open_model(SHIPPED_MODEL).config | {"tie_word_embeddings": True}, "q8_0")
    monkeypatch.setattr(cut_model, "HEAD_BYTES", 1)
    assert cut_model.head_part(tied) == tied.model_config.vocab_size


def test_some_layers_run_and_all_count(tmp_path, monkeypatch):
    """The model itself with one of its three alike layers: three times its work counts, and one layer's is made."""
    files = open_model(SHIPPED_MODEL)
    options = {"prompt": 5, "max_tokens": 8, "kv": "f16", "pool_bytes": 1 << 30, "mapped": True}
    pools, real = [], machine_speed.SyntheticLoader
    monkeypatch.setattr(
        machine_speed, "SyntheticLoader", lambda *a, **k: pools.append(k["pool_bytes"]) or real(*a, **k)
    )
    whole = machine_speed._Passes(files, Context(num_threads=1), False, 32, **options)
    monkeypatch.setattr(cut_model, "MAX_WORK", 1.0)
    one = machine_speed._Passes(files, Context(num_threads=1), False, 32, **options)
    assert (whole.layers_run, one.layers_run) == (3, 1) and len(one.model.blocks) == 1
    assert one.own_bytes < 0.6 * whole.own_bytes
    assert pools == [1 << 30, 1 << 29]  # few layers run in place of many
    monkeypatch.setattr(machine_speed, "time", ticks := Ticks())
    monkeypatch.setattr(cut_model, "time", ticks)

    family, mlp = type(one.model).__mro__[1], type(one.model).__mro__[1].mlp

    def slow(self, block, rows):
        ticks.now += 1.0
        return mlp(self, block, rows)

    monkeypatch.setattr(family, "mlp", slow)
    assert one.rows(1, 0) == pytest.approx(3.0)


def test_a_part_of_the_head_counts_for_all(tmp_path, monkeypatch):
    config = open_model(SHIPPED_MODEL).config | {"tie_word_embeddings": False}
    files = planned(tmp_path, config, "q8_0")
    head = next(record for record in files.tensors.values() if record.role == "head")
    monkeypatch.setattr(cut_model, "MAX_WORK", 1.0)
    monkeypatch.setattr(cut_model, "HEAD_BYTES", head.nbytes // 4)
    options = {"prompt": 5, "max_tokens": 8, "kv": "f16", "pool_bytes": 1 << 30, "mapped": True}
    passes = machine_speed._Passes(files, Context(num_threads=1), False, 32, **options)
    assert passes.model.lm_head.matrices[0].rows == head.rows // 4
    monkeypatch.setattr(machine_speed, "time", ticks := Ticks())
    monkeypatch.setattr(cut_model, "time", ticks)
    head_of = type(passes.model).__mro__[1].head

    def slow(self, *arguments):
        ticks.now += 1.0
        return head_of(self, *arguments)

    monkeypatch.setattr(type(passes.model).__mro__[1], "head", slow)
    assert passes.rows(1, 0) == pytest.approx(4.0)


class Passes:
    """A step takes `load`, a window twice that; the machine is five times as slow while the steps are timed."""

    prompt, own_bytes, layers_run, is_cut = 8, 0, 1, False

    def __init__(self, *_, **__):
        self.calls = 0

    def prefill(self):
        return 1.0

    def rows(self, count, at):
        self.calls += 1
        load = 5.0 if self.calls <= machine_speed.MAX_STEPS else 1.0
        return load * (2.0 if count > 1 else 1.0)


@pytest.mark.parametrize(("cost", "ratio"), [(2.0, 2.0), (0.5, 1.0)])
def test_a_window_is_timed_beside_its_step(monkeypatch, cost, ratio):
    class Costing(Passes):
        def rows(self, count, at):
            return super().rows(1, at) * (cost if count > 1 else 1.0)

    monkeypatch.setattr(machine_speed, "_Passes", Costing)
    options = {"prompt": 8, "max_tokens": 8, "kv": "f16", "window": 4, "pool_bytes": 1}
    assert machine_speed.model_speed(None, None, False, **options).window_ratio == ratio
