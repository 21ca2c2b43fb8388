"""--expert-layout: which form experts take in memory, that it is said, and that it changes no bit."""

import json

import numpy as np
import pytest
import tiny_models
from cli_program import assert_error, run
from snapshot_tools import make_snapshot

import engine
from engine.errors import ConfigError
from engine.experts.layout import choose_expert_layout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("layouts")
    tiny_models.make_hf_dir(path / "hf", "mha_base")
    return path


@pytest.fixture(scope="module")
def storage_model(folder):
    """Experts as five-bit storage rows, which strips would make half as large again."""
    make_snapshot(folder / "hf", folder / "rows", experts="q5_0", down="q5_1", layout="storage")
    return folder / "rows"


@pytest.fixture(scope="module")
def strips_model(folder):
    make_snapshot(folder / "hf", folder / "strips", experts="q5_0", down="q5_1", layout="compute")
    return folder / "strips"


def logits(path, **options):
    model = engine.load(path, **options)
    sampled = model.generate(tiny_models.PROMPT, max_tokens=20, ignore_eos=True)
    "".join(sampled)
    return model, sampled.token_ids


def test_every_form_gives_the_same_tokens(storage_model, strips_model):
    fast, want = logits(storage_model, expert_layout="fast")
    compact, got = logits(storage_model, expert_layout="compact")
    stored, also = logits(strips_model)
    assert [m.expert_layout.name for m in (fast, compact, stored)] == ["fast", "compact", "stored"]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(also, want)
    assert logits(storage_model)[0].expert_layout.name == "fast"  # auto, and this model is tiny


def test_compact_experts_take_the_bytes_of_the_file(storage_model):
    compact = engine.load(storage_model, expert_layout="compact")
    fast = engine.load(storage_model, expert_layout="fast")
    experts = [r for r in compact.files.tensors.values() if r.role in ("gate_up", "down")]
    assert compact.expert_layout.num_bytes == sum(record.nbytes for record in experts)
    assert fast.expert_layout.num_bytes > 1.4 * compact.expert_layout.num_bytes


def test_auto_takes_compact_when_strips_do_not_fit(storage_model, strips_model):
    model = engine.load(storage_model)
    need = choose_expert_layout("fast", model.files, model.context, 0).num_bytes

    def choose(available, wanted="auto"):
        return choose_expert_layout(wanted, model.files, model.context, available)

    assert (choose(need).name, choose(need - 1).name) == ("fast", "compact")
    assert "do not fit" in choose(need - 1).reason
    assert choose(0, "fast").name == "fast"  # an explicit choice is the user's
    assert choose(1 << 40, "compact").name == "compact"
    stored = engine.load(strips_model)
    assert choose_expert_layout("auto", stored.files, stored.context, 0).name == "stored"


def test_compact_of_strips_is_refused_with_what_to_do(strips_model):
    with pytest.raises(ConfigError, match=r"compute layout already.*--layout storage"):
        engine.load(strips_model, expert_layout="compact")
    with pytest.raises(ConfigError, match="expected auto, fast or compact"):
        engine.load(strips_model, expert_layout="small")


def test_the_choice_is_printed(storage_model, strips_model):
    done = run("generate", "x", "-m", storage_model, "-n", 2, "--expert-layout", "compact", "--json")
    assert json.loads(done.stdout)["expert_layout"] == "compact"
    assert "experts compact (as asked)" in done.stderr
    text = storage_model.parent / "text.txt"
    text.write_text("The router picks experts; " * 8)
    done = run("perplexity", "-m", storage_model, "--text", text, "--ctx", 16, "--expert-layout", "fast", "--json")
    assert json.loads(done.stdout)["expert_layout"] == "fast"
    assert "experts fast (as asked)" in done.stderr
    assert_error(run("generate", "x", "-m", strips_model, "--expert-layout", "compact"), "--layout storage")
