"""What scripts/crosscheck_llama_cpp.py calls a pass, and that its cases cover every family. llama.cpp is not run."""

import sys
from pathlib import Path

import numpy as np
import pytest

from engine.models import family, known

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import crosscheck_llama_cpp as crosscheck
from crosscheck_cases import FORMATS, UNSUPPORTED, VARIANTS, cases

PEER = np.random.default_rng(1).standard_normal((104, 50)).astype(np.float32)
RESULT = {"tensors": {"f32": 9}, "layers": 3, "tokens": 64, "equal_tokens": 64, "blocks_equal_steps": True}


def judged(ours, exact=PEER, peer=PEER, **changes) -> bool:
    return crosscheck.judge(ours, peer, exact, RESULT | changes)["ok"]


def off(by: float, rows=slice(None)) -> np.ndarray:
    """PEER with a logit of the rows off by a part of the largest logit."""
    found = PEER.copy()
    found[rows, 7] += np.float32(by * np.abs(PEER).max())
    return found


def test_float32_must_be_equal_to_rounding_at_every_position():
    assert judged(PEER)
    assert judged(off(1e-4))
    assert not judged(off(3e-4, 50))
    assert not judged(off(np.nan, 50))
    assert not judged(PEER, equal_tokens=63)
    assert not judged(PEER, blocks_equal_steps=False)


def test_quantized_must_not_be_further_from_the_exact_run_than_llama_cpp():
    kind = {"tensors": {"q8_0": 9}, "equal_tokens": 50}
    assert judged(off(0.012), peer=off(-0.01), **kind)
    assert not judged(off(0.013), peer=off(-0.01), **kind)
    assert not judged(off(np.nan), peer=off(-0.01), **kind)
    assert not judged(off(0.01), peer=off(-0.01), **kind, blocks_equal_steps=False)


def test_formats_with_scales_over_256_must_be_equal_somewhere():
    kind = {"tensors": {"q4_k": 9, "iq3_s": 1}}
    assert not judged(off(0.01), peer=off(-0.01), **kind)
    assert judged(off(0.01, slice(3, None)), peer=off(-0.01, slice(3, None)), **kind)


def test_every_family_has_a_case_in_many_formats():
    passed = [
        {"family": case.family, "format": "f32", "ok": True} for case in cases().values() if len(case.formats) > 3
    ]
    assert crosscheck.families_without_check(passed) == []
    lost = [r for r in passed if r["family"] != "glm4_moe"]
    assert crosscheck.families_without_check(lost) == ["glm4_moe"]
    assert {family(name).__name__ for name in known()} == {family(c.family).__name__ for c in cases().values()}


def test_cases_name_what_exists():
    import family_models
    import latent_and_sink_models

    assert UNSUPPORTED.keys() <= family_models.CONFIGS.keys() | latent_and_sink_models.CONFIGS.keys()
    assert all(kind in FORMATS for case in cases().values() for kind in case.formats)
    assert all(cases()[name].config != cases()[base].config or cases()[name].prompt != 40 or cases()[name].options
               for name, (base, _) in VARIANTS.items())  # fmt: skip


def test_facts_of_a_run_name_what_is_needed_to_repeat_it():
    from run_facts import facts_text, run_facts

    facts = run_facts() | {"llama-cpp-python": "9.9"}
    assert {"millstream", "revision", "command", "cpu", "cpus", "kernel", "time"} <= facts.keys()
    text = facts_text(facts)
    assert all(str(facts[key]) in text for key in ("millstream", "command", "cpu", "time"))
    assert "llama-cpp-python 9.9" in text


def test_json_is_written_whole_or_not_at_all(tmp_path):
    from run_facts import write_json

    write_json(tmp_path / "out.json", {"a": 1})
    assert (tmp_path / "out.json").read_text() == '{\n "a": 1\n}\n'
    with pytest.raises(TypeError):
        write_json(tmp_path / "out.json", {"a": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert (tmp_path / "out.json").read_text() == '{\n "a": 1\n}\n'


def test_a_result_that_could_not_be_written_ends_the_run_at_once(tmp_path):
    from run_facts import require_writable

    require_writable(tmp_path / "out.json")
    for bad in (tmp_path / "none" / "out.json", tmp_path):
        with pytest.raises(SystemExit, match="cannot be written"):
            require_writable(bad)
