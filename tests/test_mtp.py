"""The layer for multi-token prediction against a float64 reference, from every kind of file; each rule broken once."""

from functools import cache

import mtp_models
import numpy as np
import pytest
from gguf_latent_and_sinks import write_gguf
from latent_and_sink_models import golden
from reference_mtp import Reference
from test_latent_and_sinks import MAX_ERROR, relative_error

import engine
from converters.gguf import convert_gguf
from converters.hf import RoleFormats, convert
from engine import runtime
from engine.errors import ConfigError
from engine.experts.history import model_fingerprint
from engine.inspect import inspect_model
from engine.kernels import Context
from engine.layers import Layers
from engine.weights import open_model

NAMES, LAYER = mtp_models.NAMES, mtp_models.LAYER
PROMPT, LENGTH, DRAFTS = 21, 40, 4
F32_ERROR = 5e-5  # of a row; the engine sums in float32
FLOATS = RoleFormats(experts="f32", dense="f32")


@cache
def reference(name):
    return Reference(golden(name)["config"], mtp_models.weights(name))


@cache
def text(name):
    return np.random.default_rng(7).integers(0, golden(name)["config"]["vocab_size"], LENGTH + 1).astype(np.int32)


@cache
def wanted(name):
    """Logits behind text[: n + 1] for n = PROMPT .. LENGTH, then those of chained drafts behind all of it."""
    ids, ref = text(name), reference(name)
    rows = ref.head(ref.predicted(ref.hidden(ids[:-1]), ids[1:]))[PROMPT - 1 :]
    return np.concatenate([rows[:-1], ref.chained(ids, drafts(name))])


def drafts(name):
    return text(name)[:DRAFTS]


def write_mtp_gguf(path, name):
    """As llama.cpp's converter writes the layer: among the blocks, with a prefix of its own for what others lack."""
    p = f"model.layers.{LAYER}."
    layer = {k: v for k, v in mtp_models.weights(name).items() if k.startswith(p)}
    own = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "shared_head_norm",
           "embed_tokens": "embed_tokens", "shared_head.head": "shared_head_head"}  # fmt: skip
    nextn = {f"blk.{LAYER}.nextn.{theirs}.weight": layer.pop(f"{p}{ours}.weight") for ours, theirs in own.items()}

    write_gguf(path, name, edit=count_the_layer, more=layer | nextn)
    return path


def count_the_layer(writer):
    writer.add_block_count(LAYER + 1)
    writer.add_nextn_predict_layers(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """model_path(name, kind): "hf", "snapshot", "gguf", or "from gguf", made once."""

    @cache
    def make(name, kind):
        folder = tmp_path_factory.mktemp(name)
        if kind == "hf":
            return mtp_models.checkpoint(folder / "hf", name)
        if kind == "gguf":
            return write_mtp_gguf(folder / "m.gguf", name)
        if kind == "snapshot":
            convert(make(name, "hf"), folder / "out", formats=FLOATS, threads=1)
        else:
            convert_gguf(make(name, "gguf"), folder / "out", threads=1)
        return folder / "out"

    return make


def found(loaded, name, block=PROMPT, window=1):
    """As `wanted`, from the engine: a prompt in blocks, steps along the text (the last of them as rows of one window
    whose other rows are refused drafts), chained drafts."""
    model, kv, ids, rows = loaded.model, loaded.new_kv(LENGTH + DRAFTS + 8), text(name), []
    state = kv.follower
    for start in range(0, PROMPT, block):
        model.forward(ids[start : min(start + block, PROMPT)], kv, start)
    rows.append(state.run(ids[PROMPT])[1][0].copy())
    for n in range(PROMPT, LENGTH):
        refused = ids[:window][::-1] if window > 1 else ids[:0]
        if window > 1:
            state.chain(np.ones((1, model.config.hidden_size), np.float32), 3, 0)
        model.forward(np.concatenate([ids[n : n + 1], refused[1:]]), kv, n, logits="all")
        kv.truncate(n + 1)
        state.align(n + 1)
        hidden, logits = state.run(ids[n + 1])
        rows.append(logits[0].copy())
    for step, token in enumerate(drafts(name)):
        hidden, logits = state.chain(hidden, token, step)
        rows.append(logits[0].copy())
    return np.stack(rows)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_computes_the_models_that_transformers_does(name):
    file, ref = golden(name), reference(name)
    ids = np.concatenate([file["prompt_ids"], file["greedy_ids"][:-1]])
    assert relative_error(ref.head(ref.hidden(ids))[file["positions"]], file["logits"]) < 1e-5


@pytest.mark.parametrize("way", [{}, {"block": 8}, {"window": 4}], ids=str)
@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("name", NAMES)
def test_prefill_steps_and_chained_drafts_match_the_reference(model_path, name, kv, way):
    loaded = engine.load(model_path(name, "snapshot"), kv=kv, mtp=True, threads=1)
    got = found(loaded, name, **way)
    if kv == "f32":
        assert max(map(relative_error, got, wanted(name))) <= F32_ERROR
    else:  # what is rounded adds up along a chain
        assert relative_error(got[:-DRAFTS], wanted(name)[:-DRAFTS]) <= MAX_ERROR[kv]
        assert relative_error(got[-DRAFTS:], wanted(name)[-DRAFTS:]) <= 10 * MAX_ERROR[kv]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_streamed_or_not_gives_the_same_bits(model_path, name, monkeypatch):
    want = found(engine.load(model_path(name, "snapshot"), mtp=True), name)
    monkeypatch.setattr(runtime, "PREFILL_TOKENS", 8)  # hidden states are run before the room for them is used up
    for kind in ("hf", "gguf", "from gguf", "snapshot"):
        options = {"expert_slots": 6, "threads": 1} if kind == "snapshot" else {}
        got = found(engine.load(model_path(name, kind), mtp=True, **options), name, block=8, window=3)
        np.testing.assert_array_equal(got, want, err_msg=kind)


# ---- rules, each broken on purpose ----


def edit(**changes):
    """Tensors of the layer replaced: our name -> function of all tensors."""
    p = f"model.layers.{LAYER}."

    def change(weights):
        return weights | {f"{p}{name}.weight": make(weights, p) for name, make in changes.items()}

    return change


BROKEN_WEIGHTS = {
    "concatenated the other way": edit(eh_proj=lambda w, p: np.roll(w[f"{p}eh_proj.weight"], 64, axis=1)),
    "norms swapped": edit(
        enorm=lambda w, p: w[f"{p}hnorm.weight"].copy(), hnorm=lambda w, p: w[f"{p}enorm.weight"].copy()
    ),
    "the model's own norm before the head": edit(**{"shared_head.norm": lambda w, p: w["model.norm.weight"].copy()}),
}


def without_norm(which):
    def change(loaded, monkeypatch):
        skipped, plain = which(loaded.model), Layers.rmsnorm

        def rmsnorm(self, out, x, weight, num_rows, width, eps):
            if weight is skipped:
                out.array[:num_rows] = x.array[:num_rows]
            else:
                plain(self, out, x, weight, num_rows, width, eps)

        monkeypatch.setattr(Layers, "rmsnorm", rmsnorm)

    return change


def steps_turned_further(loaded, monkeypatch):
    """Rotary positions are relative: all of them off by one would be no other layer. Those of single steps are."""
    plain, active = Layers.rope, loaded.model.mtp
    forward = active.forward

    def rope(self, x, table, num_tokens, heads, dim, position, start=0):
        plain(self, x, table, num_tokens, heads, dim, position + (num_tokens == 1 and active.running), start)

    def run(*args):
        active.running = True
        try:
            return forward(*args)
        finally:
            active.running = False

    active.running, active.forward = False, run
    monkeypatch.setattr(Layers, "rope", rope)


def chained_before_the_norm(loaded, monkeypatch):
    layer, forward = loaded.model.mtp, loaded.model.mtp.forward

    def run(*args):
        _, logits = forward(*args)
        return layer.x.array[:1].copy(), logits

    layer.forward = run


def own_token(loaded, monkeypatch):
    """Pairs with the token at the position in place of the one that follows it."""
    from engine.spec.mtp import MtpState

    plain = MtpState.run

    def run(self, following):
        self._ids[1 : self.count + 1] = self._ids[: self.count].copy()
        return plain(self, int(self._ids[self.count]))

    monkeypatch.setattr(MtpState, "run", run)


def no_context(loaded, monkeypatch):
    layer, forward = loaded.model.mtp, loaded.model.mtp.forward
    layer.forward = lambda hidden, ids, kv, place: forward(hidden, ids, kv, 0)


BROKEN_CODE = {
    "no shared_head.norm": without_norm(lambda model: model.mtp.norm),
    "hidden state before the final norm": without_norm(lambda model: model.norm),
    "no enorm": without_norm(lambda model: model.mtp.enorm),
    "no hnorm": without_norm(lambda model: model.mtp.hnorm),
    "rope position of steps off by one": steps_turned_further,
    "chained before shared_head.norm": chained_before_the_norm,
    "the token itself in place of the next": own_token,
    "no look back at the text": no_context,
}


def assert_noticed(loaded, name):
    assert max(map(relative_error, found(loaded, name), wanted(name))) > 100 * F32_ERROR


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", BROKEN_WEIGHTS)
def test_a_broken_tensor_is_noticed(tmp_path, name, rule):
    path = mtp_models.checkpoint(tmp_path / "hf", name, BROKEN_WEIGHTS[rule](mtp_models.weights(name)))
    assert_noticed(engine.load(path, kv="f32", mtp=True), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", BROKEN_CODE)
def test_a_broken_rule_is_noticed(model_path, name, rule, monkeypatch):
    loaded = engine.load(model_path(name, "snapshot"), kv="f32", mtp=True)
    BROKEN_CODE[rule](loaded, monkeypatch)
    assert_noticed(loaded, name)


# ---- files ----


@pytest.mark.parametrize("kind", ["hf", "snapshot", "gguf"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_counted_and_cost_nothing_until_asked_for(model_path, name, kind):
    files, context = open_model(model_path(name, kind)), Context(num_threads=1)
    layer = sum(record.nbytes for record in files.tensors.values() if record.name in files.mtp_names)
    assert layer == 4 * sum(int(np.prod(shape)) for shape in mtp_models.shapes(name).values())
    report = inspect_model(files, context)
    assert report["roles"]["mtp"]["nbytes"] == layer
    with_it = engine.load(model_path(name, kind), mtp=True)
    plain = engine.load(model_path(name, kind))
    assert not plain.files.mtp_names & set(plain.files.tensors)
    assert report["tensor_bytes"] - sum(r.nbytes for r in plain.files.tensors.values()) == layer
    bare = inspect_model(plain.files, context)
    assert bare["bytes_per_token"] == report["bytes_per_token"]  # only drafts read it
    assert bare["active_parameters"] == report["active_parameters"]
    assert plain.model.mtp is plain.new_kv().follower is None
    assert model_fingerprint(plain.files) == model_fingerprint(with_it.files)  # one usage history for both
    assert with_it.kv_bytes - plain.kv_bytes == with_it.new_kv().follower.kv.num_bytes


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_a_model_without_a_whole_layer_is_refused_by_name(tmp_path, kind):
    """One tensor short, as in files made without the layer; the model itself still runs."""
    name, path = "deepseek_v3", tmp_path / "m.gguf"
    if kind == "hf":
        weights = mtp_models.weights(name)
        del weights[f"model.layers.{LAYER}.hnorm.weight"]
        path = mtp_models.checkpoint(tmp_path / "hf", name, weights)
    else:
        write_gguf(path, name, edit=count_the_layer)
    engine.load(path)
    with pytest.raises(ConfigError, match=r"--draft mtp: \S+ \(deepseek_v3\) .*files do not hold a whole one"):
        engine.load(path, mtp=True)


def test_a_family_without_such_a_layer_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"--draft mtp: \S+ \(\w+\) cannot draft .*it has none"):
        engine.load(mtp=True)
    with pytest.raises(ConfigError, match="--draft mtp: the engine was loaded without"):
        engine.load().generate("a", spec=4, draft=["mtp"])
