"""`millstream bench`: arms do equal work in turns, results say what was measured, comparisons fail on a real drop."""

import csv
import importlib.util
import json
import os
import sys

import pytest
import tiny_models
from cli_program import assert_error, run
from click.testing import CliRunner
from gguf_models import write_gguf

from engine import bench, bench_arms
from engine.cli import cli
from engine.errors import ConfigError
from engine.peers import llama_cpp_arm


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


def test_ratios_are_those_of_rounds():
    """A machine that is half as fast in the second round, and a third in the third, changes both arms alike."""
    arms = [FakeArm(name, []) for name in "ab"]
    results = [bench.Result("t", "a", [12.0, 6.0, 4.0, 3.0]), bench.Result("t", "b", [18.0, 9.0, 6.0, 9.0])]
    assert [row["ratio"] for row in bench.report(results, arms, "x")["results"]] == [1.0, 1.5]


def test_arms_are_named_options_of_the_right_kind():
    assert bench_arms.parse_arm("spec=auto, threads=2,ram=1.5,lock=on,isa=avx2") == {
        "spec": "auto", "threads": 2, "ram": 1.5, "lock": True, "isa": "avx2"
    }  # fmt: skip
    assert bench_arms.parse_arm("spec=4") == {"spec": 4} and bench_arms.parse_arm("") == {}
    assert bench_arms.parse_arm("spec=4, draft=lookup+model, draft-model=x,ctx=64") == {
        "spec": 4, "draft": ["lookup", "model"], "draft_model": "x", "ctx": 64
    }  # fmt: skip
    assert bench_arms.parse_arm("temperature=0.5, top-k=3, seed=1") == {"temperature": 0.5, "top_k": 3, "seed": 1}
    for wrong in ("speed=9", "threads", "threads=two", "lock=maybe"):
        with pytest.raises(ConfigError, match="--arm"):
            bench_arms.parse_arm(wrong)


@pytest.mark.parametrize(
    ("arm", "why"),
    [
        ("draft=lookup", "without spec"),
        ("cut_drafts=off,spec=0", "without spec"),
        ("spec=4,draft=guess", "guess"),
        ("spec=4,draft=model", "draft_model=DIR"),
        ("spec=4,draft=lookup,draft_model=x", "draft_model does nothing"),
        ("temperature=-1", "temperature"),
        ("seed=1,seed=2", "twice"),
        ("prompt-cache=x", "computed every time"),
    ],
)
def test_arms_that_make_no_sense_are_refused_with_the_reason(arm, why):
    with pytest.raises(ConfigError, match=why):
        bench_arms.parse_arm(arm)


def test_every_option_of_generate_is_one_of_an_arm_or_refused_by_name():
    from engine.commands.generate import generate

    for name in (param.name for param in generate.params):
        if name not in bench_arms.KINDS:
            with pytest.raises(ConfigError, match="is no option of an arm"):
                bench_arms.parse_arm(f"{name.removeprefix('as_')}=1")


def test_results_keep_what_arms_ran_with_and_comparisons_name_what_differs():
    """Draws, arithmetic and keys change the tokens of an arm, which is no error; the settings are those of the run."""
    tests = [bench.Test("decode", 4)]
    texts = ("", "temperature=2,seed=7", "arith=float", "kv=f32,ctx=64", "spec=3,draft=lookup,threads=1",
             "expert-slots=12,io=buffered,readers=2,cache-policy=lru,lookahead=off")  # fmt: skip
    arms = [bench.EngineArm(text or "default", None, bench_arms.parse_arm(text), 16) for text in texts]
    content = json.loads(json.dumps(bench.report(bench.measure(arms, tests, 1), arms, "x")))
    greedy, draws = (arm.decode(bench.fixed_ids(4, arm.vocab_size), 8)[1] for arm in arms[:2])
    assert greedy != draws
    default, drawn, exact, wide, drafted, streamed = content["arms"].values()
    assert drawn["sampling"] | {"temperature": 2.0, "seed": 7} == drawn["sampling"]
    assert default["sampling"]["temperature"] == 0 and default["slots"] is None and default["arith"] == "canonical"
    assert (exact["arith"], wide["kv"], wide["ctx"]) == ("float", "f32", 64)
    assert (drafted["spec"], drafted["draft"], drafted["threads"]) == (3, ["lookup"], 1)
    streaming = ("slots", "experts", "io", "readers", "cache_policy", "lookahead")
    assert [streamed[name] for name in streaming] == [12, 24, "buffered", 2, "lru", "off"]
    changed = json.loads(json.dumps(content))
    changed["arms"]["default"]["threads"] = 99
    changed["cpu"] = "another"
    found = {(d["arm"], d["setting"]): d["after"] for d in bench_arms.differences(content, changed)}
    assert found == {("default", "threads"): 99, (None, "cpu"): "another"}
    assert bench_arms.differences(content, content) == []


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


@pytest.mark.parametrize(
    "row", [{"median": "fast"}, {"median": 0}, {"median": float("nan")}, {"spread": None}, {"samples": 3}, {"test": 7}]
)
def test_damaged_results_are_refused(row):
    content = result(100)
    bench.check_result(content, "good")
    content["results"].append(content["results"][0] | row)
    with pytest.raises(ConfigError, match="bad: not a result"):
        bench.check_result(content, "bad")
    for content in ([], 7, None, {"results": []}, {"results": [{"arm": "a"}]}, result(1) | {"arms": {"a": 1}}):
        with pytest.raises(ConfigError, match="bad: not a result"):
            bench.check_result(content, "bad")


def test_what_one_result_lacks_is_said(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps({"results": result(1)["results"] + result(1, test="prefill 8")["results"]}))
    new.write_text(json.dumps({"results": result(1)["results"] + result(1, arm="spec=4")["results"]}))
    done = run("bench", "--compare", old, new, "--json")
    assert done.returncode == 0
    assert f"not compared: prefill 8, arm default, which {old} has and {new} has not" in done.stderr
    assert f"not compared: decode 64, arm spec=4, which {new} has and {old} has not" in done.stderr
    found = json.loads(done.stdout)
    assert found["only_before"] == [{"test": "prefill 8", "arm": "default"}] and len(found["only_after"]) == 1
    for text in ("{", '{"results": [1]}'):
        new.write_text(text)
        assert_error(run("bench", "--compare", old, new), f"{new}: not a result")


def test_what_would_be_lost_is_refused(tmp_path):
    file = str(tmp_path / "x")
    cases = [(("--prefill", "8,8"), "prefill 8 is given twice"), (("--depth", "4,4"), "decode 64 @ 4 is given twice")]
    pairs = (("--save", "--csv"), ("--markdown", "--profile-json"), ("--profile-html", "--trace"))
    cases += [((one, file, other, file), f"{one} and {other} both name") for one, other in pairs]
    for args, message in cases:
        found = CliRunner().invoke(cli, ["bench", *args], standalone_mode=False)
        assert isinstance(found.exception, ConfigError) and message in str(found.exception)


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
    assert dropped.returncode == 1 and "slower" in dropped.stdout and "not alike" not in dropped.stderr
    slower["arms"]["default"]["threads"] = 99
    (tmp_path / "b.json").write_text(json.dumps(slower))
    assert "not alike: arm default: threads" in run("bench", "--compare", saved, tmp_path / "b.json").stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--arm", "x=1"), "--arm"),
        (("--arm", "spec=4", "--arm", "spec=4"), "two arms are the same"),
        (("--prefill", "0", "--decode", "0"), "nothing to measure"),
        (("--prefill", "100000"), "context holds"),
        (("--against", "llama.cpp"), ".gguf file"),
        (("--peer-python", sys.executable), "without --against"),
        (("--compare", "/nowhere/a", "/nowhere/b"), "cannot be read"),
        (("--save", "/nowhere/a.json"), "cannot be written"),
        (("--profile-json", "/nowhere/a.json"), "cannot be written"),
    ],
)
def test_refusals(options, text):
    done = run("bench", *options)
    assert done.returncode == 2 and "error: " in done.stderr and text in done.stderr and done.stdout == ""


STEPS = ("load", "tokenize", "prefill", "embed", "attention", "router", "expert_gate_up", "quantize", "expert_down",
         "read_wait", "head", "sample", "draft", "verify", "python", "other")  # fmt: skip


def test_profiles_are_of_runs_that_do_not_count(tmp_path):
    """One run per test and arm; the file's own phases are their sum, and add up."""
    paths = {name: tmp_path / name for name in ("p.json", "p.html", "t.json")}
    done = run(
        "bench", "--prefill", "16", "--decode", "4", "--depth", "8", "--repeat", 2, "--arm", "", "--arm", "threads=1",
        "--json", "--profile", "--profile-json", paths["p.json"], "--profile-html", paths["p.html"], "--trace",
        paths["t.json"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(len(row["samples"]) == 2 for row in json.loads(done.stdout)["results"])
    found = json.loads(paths["p.json"].read_text())
    expected = [(t, a) for t in ("prefill 16", "decode 4 @ 8") for a in ("default", "threads=1")]
    assert [(r["test"], r["arm"]) for r in found["runs"]] == expected
    for run_ in (found, *found["runs"]):
        assert list(run_["phases"]) == list(STEPS)
        for stage in ("prefill", "decode"):
            assert list(run_[stage]["phases"]) == [name for name in STEPS if name != "prefill"]
    for part in (found, *found["runs"], found["prefill"], found["decode"]):
        assert sum(part["phases"].values()) == pytest.approx(part["wall_s"], rel=0.03)
    assert found["wall_s"] == pytest.approx(sum(r["wall_s"] for r in found["runs"]))
    assert [r["prefill"]["tokens"] for r in found["runs"]] == [16, 16, 1, 1]  # a context is there before the run
    assert found["prefill"]["tokens"] == 34 and found["decode"]["tokens"] == 8
    wide, narrow = found["runs"][0]["threads"]["busy_s"], found["runs"][1]["threads"]["busy_s"]
    assert len(narrow) == 1 and len(found["threads"]["busy_s"]) == len(wide)
    page, events = paths["p.html"].read_text(), json.loads(paths["t.json"].read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"{t}, {a}" for t, a in expected]
    assert {e["pid"] for e in events if e["ph"] == "X"} == {1, 2, 3, 4}
    assert "nothing was decoded" not in page and page.count("Weights read in the prefill") == 2
    for name in names:
        assert name in page and f"\n{name}:\n" in done.stderr
    assert done.stderr.count("prefill of 16 tokens") == 2 == done.stderr.count("decode of 4 tokens")


def peer_python():
    """A Python that has llama-cpp-python, or None."""
    if importlib.util.find_spec("llama_cpp"):
        return sys.executable
    return os.environ.get("MILLSTREAM_PEER_PYTHON")


@pytest.mark.skipif(peer_python() is None, reason="no llama-cpp-python; MILLSTREAM_PEER_PYTHON names a Python with it")
def test_llama_cpp_runs_the_same_file(tmp_path):
    """Both arms are measured, and llama.cpp decodes the tokens that it decodes without a pipe."""
    path = tmp_path / "tiny.gguf"
    # llama.cpp wants as many rows as there are tokens.
    write_gguf(path, tiny_models.hf_config("mha_base") | {"vocab_size": 291}, seed=1)
    done = run(
        "bench", "-m", path, "--prefill", "8", "--decode", "4", "--depth", "8", "--repeat", 1, "--arm", "threads=1",
        "--against", "llama.cpp", "--peer-python", peer_python(), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [r["arm"] for r in found["results"]] == ["threads=1", "llama.cpp"] * 2
    assert all(min(r["samples"]) > 0 for r in found["results"])
    facts = found["arms"]["llama.cpp"]
    assert facts["threads"] == found["arms"]["threads=1"]["threads"] and facts["version"]
    arm = llama_cpp_arm.LlamaCppArm("llama.cpp", path, 1, 16, peer_python())
    ids, (_, tokens) = bench.fixed_ids(8, arm.vocab_size), arm.decode(bench.fixed_ids(8, arm.vocab_size), 4)
    arm.close()
    assert tokens[:4] == bench.EngineArm("ours", path, {"threads": 1, "arith": "float"}, 16).decode(ids, 4)[1][:4]


def test_a_peer_that_crashes_is_tried_without_repacking(tmp_path, monkeypatch):
    """The worker is replaced by one that dies of a signal while weights are re-packed."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "if json.loads(sys.argv[1])['repack']: os.abort()\n"
        "print(json.dumps({'vocab_size': 9}), flush=True)\n"
        "for line in sys.stdin: print(json.dumps({'prefill_s': 0.5}), flush=True)\n"
    )
    monkeypatch.setattr(llama_cpp_arm, "WORKER", worker)
    monkeypatch.setattr(llama_cpp_arm, "_PROBE", "")
    arm = llama_cpp_arm.LlamaCppArm("llama.cpp", "x.gguf", 1, 16)
    assert "crashed with signal 6" in arm.note and "without re-packed weights" in arm.note
    assert arm.describe()["repacked"] is False and arm.prefill(bench.fixed_ids(2, 9)) == 0.5
    arm.close()


@pytest.mark.parametrize("python", ["/nowhere/python", sys.executable])
def test_a_peer_that_is_not_there_is_named(python, tmp_path):
    if python == sys.executable and importlib.util.find_spec("llama_cpp"):
        pytest.skip("llama-cpp-python is here")
    with pytest.raises(ConfigError, match=r"--peer-python") as error:
        llama_cpp_arm.LlamaCppArm("llama.cpp", tmp_path / "x.gguf", 1, 16, python)
    assert python in str(error.value)
