"""The plan: figures from headers, the decision of a real run, arithmetic on given speeds, refusals."""

import json
from types import SimpleNamespace

import family_models
import latent_and_sink_models
import numpy as np
import pytest
from cli_program import assert_error, run

from engine import machine_speed, plan
from engine.config import RuntimeConfig
from engine.kernels import Context
from engine.runtime import SHIPPED_MODEL, load
from engine.synthetic import PlannedFiles
from engine.weights import open_model

FIGURES = {"loop_s": 0.001, "layers": 4, "expert_share": 0.5, "demand": 8, "expert_bytes": 1e6,
           "experts_per_layer": 10, "prompt": 100}  # fmt: skip
SPEED = SimpleNamespace(step_s=0.010, prefill_s=0.5)


class Measured:
    """Speeds that a test gives."""

    def __init__(self):
        self.asked = []

    def model_speed(self, files, context, compact, **options):
        self.asked.append((compact, options))
        return machine_speed.ModelSpeed(0.02, 0.05, 0.4, options["prompt"], 3)

    def loop_seconds(self, options):
        return 0.0

    def recode_gb_s(self, context, record):
        return 2.0

    def memory_bandwidth(self, context):
        return 10.0

    def disk_speed(self, path, ranges, depth):
        self.asked.append((path, ranges, depth))
        return machine_speed.DiskSpeed(100.0, 4096, depth, True)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(machine_speed, "MAX_STEPS", 3)


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
    # All 10 experts of 4 layers are wanted by 100 tokens, half of them missed: 20 MB.
    assert slow["prefill_tok_s"] == pytest.approx(100 / 0.5, rel=1e-3)
    very_slow = plan.predict(SPEED, miss_share=0.5, disk_mb_s=10.0, recode_gb_s=None, **FIGURES)
    assert very_slow["prefill_tok_s"] == pytest.approx(100 / 2.0, rel=1e-3)
    # A fast disk hides behind the products; re-coding at 1 GB/s does not: 4 ms.
    fast = plan.predict(SPEED, miss_share=0.5, disk_mb_s=1e4, recode_gb_s=1.0, **FIGURES)
    assert fast["step_ms"] == pytest.approx(5 + 5 + 4 + 1)
    assert fast["bound"] == "kernels"


def test_hit_rate_from_history_or_stated(tmp_path, monkeypatch):
    files = open_model(SHIPPED_MODEL)
    assert plan.expected_hits(files, 24, 24, 6)[0] == 1.0
    assert plan.expected_hits(files, 5, 24, 6)[0] == 0.0
    monkeypatch.setattr(plan, "history_path", lambda files: tmp_path / "usage.json")
    assert plan.expected_hits(files, 12, 24, 6) == (0.5, plan.expected_hits(files, 12, 24, 6)[1])
    assert "assumed" in plan.expected_hits(files, 12, 24, 6)[1]
    uses = np.ones((3, 8))
    uses[0, :4] = 11
    plan.Usage("", uses, 60.0).save(tmp_path / "usage.json")
    share, source = plan.expected_hits(files, 12, 24, 6)
    assert share == pytest.approx((4 * 12 + 8 * 2) / (4 * 12 + 20 * 2))
    assert "history of 60 tokens" in source


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
    path, ranges, depth = measure.asked[0]
    assert len(ranges) == found["experts"]
    assert path.exists()
    assert depth == 4
    assert found["verdict"].startswith("will stream at about")
    cliff = report(files, expert_slots=3)
    assert "warning: the cache holds 3 experts" in cliff["warning"]
    assert cliff["hit_rate"] == 0.0


def test_a_model_that_is_not_here_counts_like_the_one_that_is(tmp_path):
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
    assert min(speed.step_s, speed.window_s, speed.prefill_s) > 0


@pytest.mark.parametrize("format_name", ["q4_0", "iq3_s", "hqq5-ax0-g32"])
@pytest.mark.parametrize("compact", [False, True])
def test_measuring_runs_formats(tmp_path, format_name, compact):
    config = open_model(SHIPPED_MODEL).config | {"hidden_size": 256, "intermediate_size": 256}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"num_hidden_layers": 1, "vocab_size": 64}))
    files = PlannedFiles(str(path), format_name)
    options = {"prompt": 5, "max_tokens": 4, "kv": "f16", "window": 0, "pool_bytes": 1 << 30}
    assert machine_speed.model_speed(files, Context(num_threads=1), compact, **options).window_s is None


def test_distinct_layers_stay_within_the_pool():
    from engine.synthetic import SyntheticLoader

    files = open_model(SHIPPED_MODEL)
    context = Context(num_threads=1)
    assert SyntheticLoader(files, context, compact_experts=False, pool_bytes=1 << 30).distinct == 3
    loader = SyntheticLoader(files, context, compact_experts=False, pool_bytes=1)
    assert loader.distinct == 1
    shapes = [(w.rows, w.cols) for w in (files.record(f"layers.{n}.self_attn.q_proj") for n in (0, 1))]
    first, second = (loader.matrix(f"layers.{n}.self_attn.q_proj", *s) for n, s in enumerate(shapes))
    assert first.strips.ctypes.data == second.strips.ctypes.data


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
    assert_error(run("plan", "--spec", "auto"), "--spec auto")
    assert_error(run("plan", "--ram", 0.001), "not enough memory")
