"""The plan: figures from headers, the decision of a real run, arithmetic on given speeds, refusals."""

import json
from pathlib import Path
from types import SimpleNamespace

import family_models
import latent_and_sink_models
import numpy as np
import pytest
from cli_program import assert_error, run
from click.testing import CliRunner

from engine import machine_speed, plan, plan_disk
from engine.cli import cli
from engine.config import RuntimeConfig
from engine.disk_bandwidth import TEMPORARY_BYTES
from engine.kernels import Context
from engine.models import family
from engine.planned_files import PlannedFiles
from engine.runtime import SHIPPED_MODEL, load
from engine.sampler import SamplingParams
from engine.synthetic import EMBEDDED_IDS, SyntheticLoader
from engine.weights import open_model

FIGURES = {"loop_s": 0.001, "layers": 4, "expert_share": 0.5, "demand": 8, "expert_bytes": 1e6,
           "prompt": 100, "prompt_misses": 20}  # fmt: skip
SPEED = SimpleNamespace(step_s=0.010, prefill_s=0.5)


class Measured:
    """Speeds that a test gives."""

    def __init__(self):
        self.asked = []

    def model_speed(self, files, context, compact, **options):
        self.asked.append((compact, options))
        return machine_speed.ModelSpeed(0.02, 2.5, 0.4, options["prompt"], 1 << 20, 3)

    def loop_seconds(self, options):
        return 0.0

    def recode_gb_s(self, context, record):
        return 2.0

    def memory_bandwidth(self, context):
        return 10.0

    def stream_call_seconds(self, options):
        return 0.0, 0.0

    def disk_speed(self, path, bursts, depth):
        self.asked.append((path, bursts, depth))
        return "direct", machine_speed.DiskSpeed(4096, depth, 0.1)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(machine_speed, "MAX_STEPS", 3)
    monkeypatch.setattr(machine_speed, "MAX_PROMPTS", 2)


def report(files, window=0, prompt=16, disk_mb_s=None, measure=None, **options):
    context = Context(num_threads=1)
    chosen = RuntimeConfig(threads=1, **options)
    return plan.make_report(
        files, context, chosen, prompt=prompt, window=window, disk_mb_s=disk_mb_s, measure=measure or Measured()
    )


def test_arithmetic_of_a_resident_and_of_a_streamed_step():
    resident = plan.predict(SPEED, miss_share=0.0, disk_mb_s=None, recode_gb_s=None, **FIGURES)
    assert resident["decode_tok_s"] == pytest.approx(1 / 0.011)
    assert resident["prefill_tok_s"] == pytest.approx(200)
    # 4 of 8 experts missed, 4 MB at 100 MB/s: 40 ms, longer than 5 ms of products, after 5 ms of the rest.
    slow = plan.predict(SPEED, miss_share=0.5, disk_mb_s=100.0, recode_gb_s=None, **FIGURES)
    assert slow["step_ms"] == pytest.approx(5 + 40 + 1)
    assert (slow["bound"], slow["missed_bytes_per_token"]) == ("disk", 4e6)
    # 20 MB in 0.2 s, less than the experts' half of 0.5 s.
    assert slow["prefill_tok_s"] == pytest.approx(100 / 0.5)
    very_slow = plan.predict(SPEED, miss_share=0.5, disk_mb_s=10.0, recode_gb_s=None, **FIGURES)
    assert very_slow["prefill_tok_s"] == pytest.approx(100 / (0.25 + 2.0))
    # Every layer call costs 1 ms more; 3 of 4 wait (a miss among 2 experts), each for the 4 ms of a last arrival.
    called = plan.predict(SPEED, miss_share=0.5, disk_mb_s=100.0, recode_gb_s=None, calls_s=(0.001, 0.004), **FIGURES)
    assert called["step_ms"] == pytest.approx(5 + 40 + 1 + 4 * 1 + 3 * 4)
    # Where the disk is fast, all 4 arrivals count.
    called = plan.predict(SPEED, miss_share=0.5, disk_mb_s=1e4, recode_gb_s=None, calls_s=(0.001, 0.004), **FIGURES)
    assert called["step_ms"] == pytest.approx(5 + 5 + 1 + 4 * 1 + 4 * 4)
    # A fast disk hides behind the products; re-coding at 1 GB/s does not: 4 ms.
    fast = plan.predict(SPEED, miss_share=0.5, disk_mb_s=1e4, recode_gb_s=1.0, **FIGURES)
    assert fast["step_ms"] == pytest.approx(5 + 5 + 4 + 1)
    assert fast["bound"] == "kernels"
    # 40 ms of re-coding at 0.1 GB/s, longer than the reads beside it and than 10 ms of products.
    recoding = plan.predict(SPEED, miss_share=0.5, disk_mb_s=1e3, recode_gb_s=0.1, **FIGURES)
    assert recoding["step_ms"] == pytest.approx(5 + 5 + 40 + 1)
    assert recoding["bound"] == "re-coding"
    assert plan.predict(SPEED, miss_share=0.5, disk_mb_s=50.0, recode_gb_s=0.1, **FIGURES)["bound"] == "disk"


def test_hit_rate_from_history_or_stated(tmp_path, monkeypatch):
    files = open_model(SHIPPED_MODEL)
    assert plan.expected_hits(None, 24, 24, 6)[0] == 1.0
    assert plan.expected_hits(None, 5, 24, 6)[0] == 0.0
    monkeypatch.setattr(plan, "history_path", lambda files: tmp_path / "usage.json")
    assert plan.recorded_usage(files) is None
    assert plan.expected_hits(None, 12, 24, 6)[0] == 0.5
    assert "assumed" in plan.expected_hits(None, 12, 24, 6)[1]
    uses = np.ones((3, 8))
    uses[0, :4] = 11
    plan.Usage("another model", uses, 60.0).save(tmp_path / "usage.json")
    assert plan.recorded_usage(files) is None
    plan.Usage("", uses, 60.0).save(tmp_path / "usage.json")
    share, source = plan.expected_hits(plan.recorded_usage(files), 12, 24, 6)
    assert share == pytest.approx((4 * 11 + 8) / (4 * 11 + 20))
    assert "history of 60 tokens" in source


def test_a_prompt_reads_what_it_uses_and_slots_do_not_hold():
    assert plan.prompt_misses(None, 12, 24, 6, 1) == pytest.approx(12 * 0.25)
    assert plan.prompt_misses(None, 12, 24, 6, 2) == pytest.approx(12 * (1 - 0.75**2))
    assert plan.prompt_misses(None, 24, 24, 6, 512) == 0
    # 2 experts a token, of 4 in one layer.
    usage = plan.Usage("", np.array([[97.0, 97.0, 2.0, 2.0]]), 99.0)
    assert plan.prompt_misses(usage, 2, 4, 2, 1) == pytest.approx(2 * 2 / 99)
    assert plan.prompt_misses(usage, 2, 4, 2, 512) == pytest.approx(2 * (1 - (97 / 99) ** 512))
    # What was never seen is as likely as what was seen once has been: 1 use of 10, for two experts.
    usage = plan.Usage("", np.array([[6.0, 3.0, 1.0, 0.0, 0.0]]), 10.0)
    assert plan.prompt_misses(usage, 3, 5, 1, 1) == pytest.approx(0.1)
    # One token proves nothing.
    usage = plan.Usage("", np.array([[1.0, 1.0, 0.0, 0.0]]), 1.0)
    assert plan.expected_hits(usage, 2, 4, 2)[0] == pytest.approx(0.5)


def expert_ranges(files):
    """(offset, bytes) of every expert's record in the snapshot."""
    found = {}
    for record in files.tensors.values():
        if record.role in ("gate_up", "down"):
            found.setdefault(record.name.rsplit(".", 1)[0], []).append((record.offset, record.offset + record.nbytes))
    return [(min(a for a, _ in some), max(b for _, b in some) - min(a for a, _ in some)) for some in found.values()]


def test_slots_and_bytes_are_those_of_a_run():
    """The plan of a streamed run, and its dense bytes, from a real engine."""
    files = open_model(SHIPPED_MODEL)
    measure = Measured()
    found = report(files, expert_slots=12, measure=measure)
    engine = load(threads=1, expert_slots=12)
    real = engine.stream.plan
    assert (found["slots"], found["experts"]) == (12, real.num_experts)
    assert found["plan"]["slot_bytes"] == real.slot_bytes
    for role in ("dense weights", "kv cache", "read buffers", "experts"):
        assert found["plan"]["roles"][role] == real.roles[role]
    assert found["streams"]
    assert found["demand"]["experts"] == 6
    path, bursts, depth = measure.asked[0]
    assert {len(burst) for burst in bursts} == {1}  # of two experts of a layer call, one is missing
    assert {piece for burst in bursts for piece in burst} <= set(expert_ranges(files))
    assert path.exists()
    assert depth == 4
    assert found["verdict"].startswith("will stream at about")
    cliff = report(files, expert_slots=3)
    assert "warning: the cache holds 3 experts" in cliff["warning"]
    assert cliff["warning"].endswith("raise --expert-slots")
    assert cliff["hit_rate"] == 0.0


def test_a_model_that_is_not_here_counts_like_the_one_that_is(tmp_path, monkeypatch):
    """Bytes of the config with a format, against the snapshot made with it."""
    there = open_model(SHIPPED_MODEL)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(there.config))
    files = PlannedFiles(str(path), "q8_0")
    found, real = report(files), report(there)
    for role in ("gate_up", "down", "router", "norm"):
        assert found["roles"][role]["nbytes"] == real["roles"][role]["nbytes"]
    assert {name: r.shape for name, r in files.tensors.items()} == {n: r.shape for n, r in there.tensors.items()}
    assert any("not here" in text for text in found["assumptions"])
    streamed = report(files, expert_slots=12, disk_mb_s=50.0)
    assert streamed["disk"] == {"mb_s": 50.0, "measured": False}
    measure = Measured()
    monkeypatch.chdir(tmp_path)
    here = report(files, expert_slots=12, measure=measure)
    assert here["disk"]["measured"] and any(str(tmp_path) in text for text in here["assumptions"])
    read, bursts, _ = measure.asked[0]
    assert read.parent == tmp_path and not read.exists()
    assert all(at >= 0 and at + n <= TEMPORARY_BYTES for burst in bursts for at, n in burst)
    monkeypatch.setattr(plan_disk, "temporary_file", lambda _: Path("/nowhere/file").open())  # noqa: SIM115
    with pytest.raises(plan.ConfigError, match="give --disk"):
        report(files, expert_slots=12)


@pytest.mark.parametrize("name", [*family_models.CONFIGS, *latent_and_sink_models.CONFIGS])
def test_measuring_runs_every_family(tmp_path, name):
    """The real measurement on a model that is not here: every family's forward pass takes the random weights."""
    path = tmp_path / "config.json"
    config = dict((family_models.CONFIGS | latent_and_sink_models.CONFIGS)[name])
    if "rope_parameters" in config:
        config.pop("rope_theta", None)  # said there
    path.write_text(json.dumps(config))
    files = PlannedFiles(str(path), "f16")
    options = {"prompt": 5, "max_tokens": 4, "kv": "f16", "window": 3, "pool_bytes": 1 << 12}
    speed = machine_speed.model_speed(files, Context(num_threads=1), False, **options)
    assert min(speed.step_s, speed.window_ratio, speed.prefill_s) > 0


@pytest.mark.parametrize("format_name", ["q4_0", "iq3_s", "hqq5-ax0-g32"])
@pytest.mark.parametrize("compact", [False, True])
def test_measuring_runs_formats(tmp_path, format_name, compact):
    config = open_model(SHIPPED_MODEL).config | {"hidden_size": 512, "intermediate_size": 256}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"num_hidden_layers": 1, "vocab_size": 512}))
    files = PlannedFiles(str(path), format_name)
    options = {"prompt": 5, "max_tokens": 4, "kv": "f16", "window": 0, "pool_bytes": 1 << 30}
    assert machine_speed.model_speed(files, Context(num_threads=1), compact, **options).window_ratio is None


def synthetic(files, pool_bytes):
    """(loader, model) of random weights."""
    context = Context(num_threads=1)
    loader = SyntheticLoader(files, context, compact_experts=False, pool_bytes=pool_bytes)
    return loader, family(files.architecture).Model(files.config, loader, context, 64, 64)


def addresses(model, part):
    """Where the experts' matrices of each layer lie."""
    blocks = [block.mlp.routed.experts for block in model.blocks]
    return [[getattr(experts._structs[e], part).data for e in range(len(experts._structs))] for experts in blocks]


def test_weights_share_memory_only_beyond_the_pool():
    files = open_model(SHIPPED_MODEL)
    loader, model = synthetic(files, 1 << 30)
    found = {address for layer in addresses(model, "gate") for address in layer}
    assert len(found) == 3 * 8
    total = sum(g["memory_bytes"] for g in plan.describe_bytes(files, loader.context)["roles"].values())
    assert 0.9 * total < loader.own_bytes < 1.1 * total
    small, shared = synthetic(files, 1)
    found = addresses(shared, "gate")
    assert len({address for layer in found for address in layer}) == 8
    assert all(len(set(layer)) == 8 for layer in found)
    assert found[0] != found[1]  # layers that share experts draw them in another order
    assert small.own_bytes < loader.own_bytes / 2
    first, second = (block.attention.o_proj.matrices[0].strips.ctypes.data for block in shared.blocks[:2])
    assert first == second
    routers = [block.mlp.routed.router_linear.matrices[0].strips for block in shared.blocks]
    assert not np.array_equal(routers[0], routers[1])


@pytest.mark.parametrize("format_name", ["q8_0", "q4_0", "iq3_s"])
def test_tokens_choose_different_experts_in_every_layer(tmp_path, format_name):
    """A run on random weights must read what a real one reads: routing that always chose the same would not."""
    config = open_model(SHIPPED_MODEL).config | {"hidden_size": 256, "intermediate_size": 256, "num_experts": 32,
                                                 "num_hidden_layers": 6, "vocab_size": 512}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    _, model = synthetic(PlannedFiles(str(path), format_name), 1 << 30)
    ids, seen = machine_speed.fixed_ids(64, EMBEDDED_IDS), []
    for block in model.blocks:
        block.mlp.routed.observers.append(lambda chosen, weights: seen.append(chosen.copy()))
    model.forward(ids, model.new_kv(64, "f16"), 0)
    # 128 draws of 32 experts: 31.5 different ones if they are independent. Random blocks, of formats that are only
    # read, have large scales: 22 to 32.
    assert min(len(np.unique(chosen)) for chosen in seen) >= 20
    assert all(not np.array_equal(seen[0], chosen) for chosen in seen[1:])


def test_command_prints_and_refuses(tmp_path):
    done = run("plan", "--threads", 1, "--prompt", 8, "--spec", 3)
    assert done.returncode == 0, done.stderr
    for part in ("gate_up", "budget:", "hit rate: 100.0 %", "assumption:", "speculation: a window of 3 rows"):
        assert part in done.stdout
    assert done.stdout.splitlines()[-1].startswith("fits in memory: about ")
    found = json.loads(run("plan", "--threads", 1, "--prompt", 8, "--expert-slots", 12, "--json").stdout)
    assert found["disk"]["measured"]
    assert found["prediction"]["missed_bytes_per_token"] > 0
    assert_error(run("plan", "--format", "q8_0"), "--config")
    assert_error(run("plan", "--config", tmp_path / "no"), "--format")
    assert_error(run("plan", "--config", tmp_path / "no", "--format", "q8_0"), "cannot be read")
    assert_error(run("plan", "--disk", 100, "--prompt", 8), "--disk")
    assert_error(run("plan", "--ram", 0.001), "not enough memory")


def test_refusals_name_what_was_given(tmp_path):
    config = open_model(SHIPPED_MODEL).config
    short = tmp_path / "short.json"
    short.write_text(json.dumps({name: value for name, value in config.items() if name != "hidden_size"}))
    cases = [(("--spec", rows), f"--spec {rows}: a plan weighs") for rows in ("auto", "0", "1")]
    cases += [(("--expert-slots", "12", "--disk", rate), "--disk: got") for rate in ("nan", "inf")]
    cases += [(("--config", str(short), "--format", "q8_0"), f"{short}: key 'hidden_size' is missing")]
    for args, message in cases:
        found = CliRunner().invoke(cli, ["plan", *args], standalone_mode=False)
        assert isinstance(found.exception, plan.ConfigError) and message in str(found.exception)


def test_steps_that_miss_are_told_from_others(monkeypatch):
    ids = machine_speed.fixed_ids(16, 256)
    plain, half = (machine_speed._steps(load(threads=1, **o), ids)[4:] for o in ({}, {"expert_slots": 12}))
    assert len(plain) == len(half) == 12 and not any(misses for _, misses in plain)
    assert 0 < sum(misses for _, misses in half) <= 12 * 6
    assert min(seconds for seconds, _ in plain) > 0
    monkeypatch.setattr(machine_speed, "CALL_STEPS", 16)
    assert min(machine_speed.stream_call_seconds(RuntimeConfig(threads=1))) >= 0


def test_the_loop_is_what_steps_alone_do_not_take(monkeypatch):
    """The same tokens at the same positions with and without the loop; medians of turns."""
    compared, real = [], machine_speed._steps

    def steps(engine, ids):
        compared.append(list(ids))
        return [(1e-9, misses) for _, misses in real(engine, ids)]

    monkeypatch.setattr(machine_speed, "_steps", steps)
    monkeypatch.setattr(machine_speed, "LOOP_STEPS", 6)
    whole = machine_speed.loop_seconds(RuntimeConfig(threads=1))
    generation = load(threads=1).generate("The", max_tokens=7, sampling=SamplingParams(), ignore_eos=True)
    "".join(generation)
    assert len(compared) == machine_speed.LOOP_TURNS
    assert all(ids[-7:] == generation.token_ids for ids in compared)
    monkeypatch.setattr(machine_speed, "_steps", lambda engine, ids: [(1.0, 0)] * len(ids))
    assert whole > 0 and machine_speed.loop_seconds(RuntimeConfig(threads=1)) == 0.0
