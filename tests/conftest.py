"""Fixtures shared by the tests: tiny snapshots made by the real converter, and the tiers this machine can run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny_models


@pytest.fixture(scope="session")
def tiny_snapshot(tmp_path_factory):
    """tiny_snapshot(name, experts="f32", dense="f32", ...) -> path of a converted tiny model, made once a session."""
    from converters.hf import RoleFormats, convert

    made = {}

    def make(name, **formats):
        formats = {"experts": "f32", "dense": "f32", **formats}
        key = (name, *sorted(formats.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            tiny_models.make_hf_dir(folder / "hf", name, seed=tiny_models.golden_seed(name))
            convert(folder / "hf", folder / "snapshot", formats=RoleFormats(**formats), threads=1)
            made[key] = folder / "snapshot"
        return made[key]

    return make


def supported_tiers():
    """Names of the tiers that this CPU runs, worst first."""
    from engine import kernels

    return [name for name, supported, _ in kernels.tiers() if supported]
