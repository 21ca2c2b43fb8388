"""The AVX-512 sources on SIMDe against the scalar tables, bit for bit, on any x86-64 CPU with AVX2."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests/native/run-emulated.sh"
PROGRAM = ROOT / "build/native/emulated"


@pytest.fixture(scope="module")
def report():
    if platform.machine() != "x86_64":
        pytest.skip("the AVX-512 sources are compiled on x86_64 only")
    if not shutil.which(os.environ.get("CC", "cc").split()[0]):
        pytest.skip("no C compiler")
    done = subprocess.run([SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=900)
    if done.returncode == 77:
        pytest.skip(done.stdout.splitlines()[-1])
    return done


def test_emulated_avx512_equals_scalar(report):
    assert report.returncode == 0, report.stdout[-4000:] + report.stderr[-4000:]
    assert re.fullmatch(r"\d+ passed, 00 failed, 00 skipped", report.stdout.splitlines()[-1])


def test_emulated_tier_really_ran(report):
    hashes = dict(re.findall(r"^hash (\w+) full (\w{16})$", report.stdout, re.M))
    assert hashes.keys() == {"scalar", "avx512_emu"}
    assert hashes["scalar"] == hashes["avx512_emu"]


def test_tier_that_cannot_run_is_a_failure_when_named(report):
    done = subprocess.run([PROGRAM, "avx1024"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "FAILED, not built or not supported here" in done.stdout
