"""Recorded routing: what a file holds is what the router chose; damage is refused; nothing half-written stays."""

import json

import numpy as np
import pytest
from cli_program import assert_error, make_snapshot, run

import engine
from engine.errors import ConfigError
from engine.experts.history import model_fingerprint
from engine.experts.route_trace import HEADER_BYTES, RecordedTrace, RouteTrace, moe_blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_snapshot(tmp_path_factory.mktemp("trace"), "mha_base")


@pytest.fixture(scope="module")
def recorded(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "routes"
    done = run("generate", "The router picks", "-m", model, "-n", "6", "--ignore-eos", "--route-trace", path)
    assert done.returncode == 0, done.stderr
    return path, done


def test_a_trace_has_every_token_of_every_layer(model, recorded):
    path, done = recorded
    trace = RecordedTrace(path)
    config = json.loads((model.parent / "hf" / "config.json").read_text())
    shape = (trace.header.num_layers, trace.header.num_experts, trace.header.num_experts_per_tok)
    assert shape == (config["num_hidden_layers"], config["num_experts"], config["num_experts_per_tok"])
    assert trace.header.architecture == "olmoe"
    records = list(trace)
    tokens = {layer: [len(r.ids) for r in records if r.layer == layer] for layer in range(shape[0])}
    assert len(set(map(tuple, tokens.values()))) == 1
    assert tokens[0][1:] == [1] * 5 and tokens[0][0] > 1
    assert [r.layer for r in records] == [*range(shape[0])] * 6
    assert trace.header.num_tokens == sum(tokens[0])
    assert f"{sum(tokens[0])} tokens of {shape[0]} layers" in done.stderr
    assert path.stat().st_size == HEADER_BYTES + sum(8 + 4 * r.ids.size for r in records)


def test_a_trace_is_the_softmax_of_the_router_logits(model, tmp_path):
    """Recomputed in float64 from the router's own logits, which the block leaves in its buffer."""
    loaded = engine.load(model)
    block = moe_blocks(loaded.model)[1]
    config, seen = loaded.model.config, []
    buffers = loaded.model.buffers.moe(config.hidden_size, config.num_experts, config.num_experts_per_tok)
    with RouteTrace(tmp_path / "t", loaded.model, "olmoe", model_fingerprint(loaded.files)):
        block.observers.append(lambda ids, weights: seen.append(buffers.logits.array[: len(ids)].copy()))
        loaded.generate("The router picks", max_tokens=4, temperature=0, ignore_eos=True).tokens().__next__()
        block.observers.pop()
    assert all(not b.observers for b in moe_blocks(loaded.model))
    records = [r for r in RecordedTrace(tmp_path / "t") if r.layer == 1]
    assert len(records) == len(seen) >= 1
    for record, logits in zip(records, seen, strict=True):
        p = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        best = np.argsort(-p, axis=1, kind="stable")[:, : record.ids.shape[1]]
        assert np.array_equal(record.ids, best)
        kept = np.take_along_axis(p, best, 1)
        if loaded.model.config.norm_topk_prob:
            kept /= kept.sum(1, keepdims=True)
        assert np.allclose(record.weights, kept, rtol=2e-3)


def test_perplexity_records_too(model, tmp_path):
    text = tmp_path / "text"
    text.write_text("The router picks experts; " * 8)
    done = run("perplexity", "-m", model, "--text", text, "--ctx", "16", "--route-trace", tmp_path / "t")
    assert done.returncode == 0, done.stderr
    assert RecordedTrace(tmp_path / "t").header.num_tokens > 16


def test_a_trace_that_cannot_be_written_is_one_line(model, tmp_path):
    done = run("generate", "x", "-m", model, "-n", "1", "--route-trace", tmp_path / "no" / "t")
    assert_error(done, "--route-trace", "cannot be written: No such file or directory")


def test_an_error_leaves_no_file_and_an_interruption_a_whole_one(model, tmp_path):
    loaded = engine.load(model)
    with pytest.raises(ZeroDivisionError), RouteTrace(tmp_path / "t", loaded.model, "olmoe"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), RouteTrace(tmp_path / "t", loaded.model, "olmoe"):
        next(loaded.generate("x", max_tokens=2, ignore_eos=True).tokens())
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert RecordedTrace(tmp_path / "t").header.num_records > 0


@pytest.mark.parametrize(("damage", "message"), [
    (lambda d: d[:500], "is no route trace"),
    (lambda d: b"X" + d[1:], "is no route trace"),
    (lambda d: d[:8] + b"\2\0\0\0" + d[12:], "route trace version 2, this millstream reads version 1"),
    (lambda d: d.replace(b'"num_experts"', b'"num_expertz"'), "header of this route trace is broken"),
    (lambda d: d[:-1], "is cut off or broken"),
    (lambda d: d[:-3 * (8 + 8)], "records, its header says"),
    (lambda d: d[:HEADER_BYTES] + b"\xff" + d[HEADER_BYTES + 1 :], "is cut off or broken"),
    (lambda d: d[: HEADER_BYTES + 8] + b"\xff\xff" + d[HEADER_BYTES + 10 :], "expert 65535"),
])  # fmt: skip
def test_damage_is_refused(recorded, tmp_path, damage, message):
    bad = tmp_path / "bad"
    bad.write_bytes(damage(recorded[0].read_bytes()))
    with pytest.raises(ConfigError, match=message):
        RecordedTrace(bad)
