"""Scaling rules of rotary embedding against values that transformers computed (scripts/make_rope_golden.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.config import ConfigReader
from engine.errors import ConfigError
from engine.rope import RopeTable, read_rope, yarn_mscale

CASES = json.loads((Path(__file__).parent / "data" / "golden" / "rope.json").read_text())
LLAMA3 = next(case for case in CASES if case["name"] == "llama3")


def spec_of(case, **changes):
    config = {"max_position_embeddings": case["max_position_embeddings"], "rope_parameters": case["rope_parameters"]}
    return read_rope(ConfigReader({**config, **changes}), case["head_dim"], 10000.0)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_frequencies_match_transformers(case):
    spec = spec_of(case)
    np.testing.assert_allclose(spec.inv_freq(), case["inv_freq"], rtol=3e-6)
    assert spec.scaling.attention_factor == pytest.approx(case["attention_factor"], rel=1e-12)


def test_every_case_differs_from_the_others():
    """Rules, not their names: what two cases share would be proven by neither."""
    seen = {(tuple(case["inv_freq"]), case["attention_factor"]) for case in CASES}
    assert len(seen) >= len(CASES) - 1  # a single mscale counts for nothing, as without it


def test_old_and_new_spelling_are_one():
    case = CASES[0]
    rule = dict(case["rope_parameters"])
    old = {"type": rule.pop("rope_type"), **{key: value for key, value in rule.items() if key != "rope_theta"}}
    assert spec_of(case, rope_parameters=None, rope_scaling=old, rope_theta=rule["rope_theta"]) == spec_of(case)


def test_frequency_factors_of_a_file_are_the_llama3_rule():
    plain = {"rope_theta": 10000.0}
    factors = (spec_of(LLAMA3, rope_parameters=plain).inv_freq() / np.array(LLAMA3["inv_freq"])).tolist()
    rule = {"rope_type": "frequency_factors", "factors": factors, **plain}
    np.testing.assert_allclose(spec_of(LLAMA3, rope_parameters=rule).inv_freq(), LLAMA3["inv_freq"], rtol=3e-6)
    with pytest.raises(ConfigError, match="got 3, expected 32"):
        spec_of(LLAMA3, rope_parameters=rule | {"factors": [1.0, 2.0, 4.0]}).inv_freq()


def test_attention_factor_scales_the_tables():
    plain, scaled = (
        RopeTable(spec_of(next(c for c in CASES if c["name"] == name)), 40)
        for name in ("yarn", "yarn, attention factor")
    )
    np.testing.assert_allclose(plain.cosines.array / yarn_mscale(8.0) * 0.75, scaled.cosines.array, rtol=1e-6)
    assert scaled.cosines.array[0, 0] == np.float32(0.75)


def test_yarn_mscale_is_one_without_extension():
    assert yarn_mscale(0.5) == yarn_mscale(1.0) == 1.0
    assert yarn_mscale(40.0, 0.707) == pytest.approx(0.1 * 0.707 * np.log(40.0) + 1.0, rel=1e-15)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "low_freq_factor"),
        ({"rope_type": "yarn", "factor": -1.0}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "short_factor": [1.0]}, "short_factor"),
        ({"rope_type": "frequency_factors", "factors": [0.0]}, "factors"),
        ({"rope_type": ["yarn"]}, "rope_type"),
        ({"rope_type": "default", "factor": 2.0}, "factor"),
    ],
)
def test_rules_that_make_no_sense_are_refused_by_name(rule, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(LLAMA3, rope_parameters=rule)
