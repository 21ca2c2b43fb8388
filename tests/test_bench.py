"""`millstream bench`: arms do equal work in turns, results say what was measured, comparisons fail on a real drop."""

import csv
import json

import pytest
from cli_program import run

from engine import bench
from engine.errors import ConfigError


class FakeArm:
    """Takes the seconds it is told to, and notes the order of calls."""

    vocab_size = 100

    def __init__(self, name, order, seconds=1.0):
        self.name, self._order, self._seconds = name, order, seconds

    def describe(self):
        return {}

    def prefill(self, ids):
        self._order.append((self.name, len(ids)))
        return self._seconds


def test_arms_take_turns_and_the_first_round_does_not_count():
    order = []
    arms = [FakeArm("a", order), FakeArm("b", order, 2.0), FakeArm("c", order)]
    results = bench.measure(arms, [bench.Test("prefill", 10)], 3)
    assert [name for name, _ in order] == list("abcbcacababc") and {n for _, n in order} == {10}
    assert [(r.arm, r.samples) for r in results] == [("a", [10.0] * 3), ("b", [5.0] * 3), ("c", [10.0] * 3)]
    content = bench.report(results, arms, "x")
    assert [row["ratio"] for row in content["results"]] == [1.0, 0.5, 1.0]


def test_arms_are_named_options_of_the_right_kind():
    assert bench.parse_arm("spec=auto, threads=2,ram=1.5,lock=on,isa=avx2") == {
        "spec": "auto", "threads": 2, "ram": 1.5, "lock": True, "isa": "avx2"
    }  # fmt: skip
    assert bench.parse_arm("spec=4") == {"spec": 4} and bench.parse_arm("") == {}
    for wrong in ("speed=9", "threads", "threads=two", "lock=maybe"):
        with pytest.raises(ConfigError, match="--arm"):
            bench.parse_arm(wrong)


def result(median, spread=0.0, test="decode 64", arm="default"):
    samples = [median * (1 - spread), median, median * (1 + spread)]
    return {"results": [{"test": test, "arm": arm, "samples": samples, "median": median, "spread": spread}]}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (result(100), result(98), "same"),
        (result(100), result(96), "slower"),
        (result(100), result(104), "faster"),
        (result(100, 0.1), result(92), "same"),
        (result(100, 0.1), result(88), "slower"),
        (result(100), result(92, 0.1), "same"),
    ],
)
def test_a_drop_beyond_the_noise_is_a_drop(before, after, verdict):
    rows, worse = bench.compare(before, after)
    assert rows[0]["verdict"] == verdict and worse == (verdict == "slower")


def test_results_without_anything_in_common_are_refused():
    with pytest.raises(ConfigError, match="in common"):
        bench.compare(result(1), result(1, test="prefill 1"))


def test_command_line(tmp_path):
    saved, table, document = tmp_path / "a.json", tmp_path / "a.csv", tmp_path / "a.md"
    done = run(
        "bench", "--prefill", "16", "--decode", "8", "--depth", "0,32", "--repeat", 2, "--arm", "", "--arm", "spec=4",
        "--save", saved, "--csv", table, "--markdown", document,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(saved.read_text())
    tests = ["prefill 16", "decode 8", "decode 8 @ 32"]
    assert [(r["test"], r["arm"]) for r in content["results"]] == [(t, a) for t in tests for a in ("default", "spec=4")]
    assert all(len(r["samples"]) == 2 and min(r["samples"]) > 0 for r in content["results"])
    assert set(content["arms"]) == {"default", "spec=4"} and "bench" in content["command"]
    assert len(list(csv.reader(table.open()))) == 7 and document.read_text().count("\n") == 8
    assert "decode 8 @ 32" in done.stdout
    slower = json.loads(saved.read_text())
    for row in slower["results"]:
        row["median"] /= 10
    (tmp_path / "b.json").write_text(json.dumps(slower))
    assert run("bench", "--compare", saved, saved).returncode == 0
    dropped = run("bench", "--compare", saved, tmp_path / "b.json")
    assert dropped.returncode == 1 and "slower" in dropped.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--arm", "x=1"), "--arm"),
        (("--arm", "spec=4", "--arm", "spec=4"), "two arms are the same"),
        (("--prefill", "0", "--decode", "0"), "nothing to measure"),
        (("--prefill", "100000"), "context holds"),
        (("--against", "llama.cpp"), "FILE.gguf"),
        (("--compare", "/nowhere/a", "/nowhere/b"), "cannot be read"),
    ],
)
def test_refusals(options, text):
    done = run("bench", *options)
    assert done.returncode == 2 and "error: " in done.stderr and text in done.stderr and done.stdout == ""
