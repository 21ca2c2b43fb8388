"""The program from outside: usage, errors, every command but generate (test_cli_generate.py), and the documents."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from cli_program import ENVIRONMENT, ROOT, assert_error, make_snapshot, run

COMMANDS = ["generate", "chat", "perplexity", "convert", "inspect", "doctor", "kernels", "plan"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_snapshot(tmp_path_factory.mktemp("cli"), "mha_base")


# ---- the program as a whole ------------------------------------------------------------------------------------------


def test_version_and_help():
    assert re.fullmatch(r"millstream, version \d+\.\d+\.\d+\n", run("--version").stdout)
    menu = run("--help").stdout
    for command in COMMANDS:
        assert command in menu
    assert "Usage: millstream generate" in run("generate", "--help").stdout


def test_help_is_quick():
    """Processor time, which does not depend on what else runs here."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3


def test_help_imports_nothing_heavy():
    heavy = ("numpy", "gguf", "rich", "tokenizers", "jinja2")
    code = f"import sys, engine.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_installed_script_is_the_same_program():
    script = Path(sys.executable).with_name("millstream")
    if not script.exists():
        pytest.skip("the package is not installed into this environment")
    done = subprocess.run([script, "kernels"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == run("kernels").stdout


@pytest.mark.parametrize("args", [["--bogus"], ["bogus"], ["generate", "x", "--bogus"], ["convert", "only-one"],
                                  ["generate", "x", "--threads", "0"], ["generate", "x", "--kv", "f8"],
                                  ["generate", "x", "-n", "-1"], ["generate", "x", "--seed", "-1"],
                                  ["perplexity"], ["perplexity", "--text", "x", "--score", "some"]])  # fmt: skip
def test_wrong_usage_is_exit_code_2(args):
    assert_error(run(*args), "--help`")


@pytest.mark.parametrize("command", ["generate", "perplexity", "inspect"])
def test_missing_model_is_one_line(command, tmp_path):
    where = tmp_path / "nowhere"
    text = tmp_path / "text"
    text.write_text("x" * 100)
    args = {"generate": ["x", "-m", where], "perplexity": ["-m", where, "--text", text], "inspect": [where]}[command]
    assert_error(run(command, *args), str(where), "no such file or directory")


def test_directory_without_a_snapshot_is_refused(tmp_path):
    assert_error(run("generate", "x", "-m", tmp_path), str(tmp_path))


def test_unexpected_exceptions_keep_their_traceback():
    code = """
import engine.cli, engine.runtime, engine.weights
engine.weights.open_model = engine.runtime.open_model = lambda path: 1 / 0
engine.cli.main(["generate", "x"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


# ---- the other commands ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("The router picks experts; then 7 more say: no, wait. \u4f60\u597d\n" * 12)
    return path


def test_perplexity_prints_both_figures(model, text_file):
    done = run("perplexity", "-m", model, "--text", text_file, "--ctx", 64)
    assert done.returncode == 0
    assert re.match(r"perplexity \d+\.\d{4} \+/- \d+\.\d{4}\nbits per byte \d+\.\d{4} \(", done.stdout)
    assert "100 %" in done.stderr
    assert "tokens/s" in done.stderr
    assert "\x1b" not in done.stderr


def test_perplexity_options_change_the_figures(model, text_file):
    def measure(*options):
        done = run("perplexity", "-m", model, "--text", text_file, "--json", *options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    half = measure("--ctx", 64)
    everything = measure("--ctx", 64, "--score", "all")
    assert everything["scored_bytes"] == everything["text_bytes"] == text_file.stat().st_size
    assert half["scored_tokens"] == half["windows"] * 31
    assert measure("--ctx", 32)["scored_tokens"] != half["scored_tokens"]
    strided = measure("--ctx", 64, "--stride", 8)
    assert strided["scored_tokens"] == 8 * strided["windows"]
    assert measure("--ctx", 64, "--threads", 1, "--isa", "scalar")["bits"] == half["bits"]
    assert half["bits_per_byte"] == pytest.approx(half["bits"] / half["scored_bytes"])


def test_figures_that_do_not_exist_are_null(model, tmp_path):
    (tmp_path / "text").write_text("xyz")
    done = run("perplexity", "-m", model, "--text", tmp_path / "text", "--ctx", 3, "--json")
    found = json.loads(done.stdout)
    assert (found["scored_tokens"], found["perplexity_error"]) == (1, None)


def test_perplexity_of_unusable_texts(model, tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").write_text("too short")
    assert_error(run("perplexity", "-m", model, "--text", tmp_path / "empty"), "the text is empty")
    assert_error(run("perplexity", "-m", model, "--text", tmp_path / "short"), "one window needs 256")
    assert_error(run("perplexity", "-m", model, "--text", tmp_path / "none"), "No such file")
    assert_error(run("perplexity", "-m", model, "--text", tmp_path / "short", "--ctx", 1000), "1000", "256")


def test_perplexity_says_when_the_tokenizer_changes_the_text(model, tmp_path):
    (tmp_path / "text").write_text("a\u0301" * 100)  # composed by the tokenizer
    done = run("perplexity", "-m", model, "--text", tmp_path / "text", "--score", "all", "--json")
    assert "300 bytes became 200" in done.stderr
    assert json.loads(done.stdout)["scored_bytes"] == 200


def test_inspect_adds_up(model):
    done = run("inspect", model, "--json")
    found = json.loads(done.stdout)
    roles = found["roles"].values()
    assert sum(role["parameters"] for role in roles) == found["parameters"]
    assert sum(role["nbytes"] for role in roles) == found["tensor_bytes"] <= found["file_bytes"]
    expected = sum(a.size for a in tiny_models.make_weights(tiny_models.hf_config("mha_base"), 0).values())
    assert found["parameters"] == expected
    experts = sum(found["roles"][role]["memory_bytes"] for role in ("gate_up", "down"))
    assert found["bytes_per_token"]["active_experts"] == experts * 2 // 8
    assert found["roles"]["down"]["formats"] == ["q8_0"]
    assert found["roles"]["down"]["bits_per_weight"] == 8.5
    assert set(found["layers"]) == {"0", "1"}
    assert found["tokenizer"]["eos_ids"] == [tiny_models.EOS_TOKEN_ID]
    assert found["verified_bytes"] is None


def test_inspect_for_people(model):
    text = run("inspect", model).stdout
    for part in ("num_experts 8", "q8_0", "bits per weight", "read per token", "layers 0-1: ", "eos 290"):
        assert part in text


def test_inspect_verify_finds_a_changed_byte(tmp_path):
    snapshot = make_snapshot(tmp_path, "mha_base")
    done = run("inspect", snapshot, "--verify", "--json")
    assert json.loads(done.stdout)["verified_bytes"] > 0
    data = max(snapshot.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert run("inspect", snapshot).returncode == 0
    assert_error(run("inspect", snapshot, "--verify"), "changed")


def test_convert_options_choose_formats(tmp_path):
    tiny_models.make_hf_dir(tmp_path / "hf", "mha_base")
    out = tmp_path / "out"
    options = ["--format", "q4_0", "--down-format", "q8_0", "--dense-format", "bf16", "--embed-format", "f32"]
    done = run("convert", tmp_path / "hf", out, *options, "--head-format", "f16", "--threads", 1, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["path"] == str(out)
    assert "100 %" in done.stderr and "/s" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    found = json.loads(run("inspect", out, "--json").stdout)
    formats = {role: group["formats"] for role, group in found["roles"].items()}
    assert formats == {"gate_up": ["q4_0"], "down": ["q8_0"], "attention": ["bf16"], "embed": ["f32"], "head": ["f16"],
                       "norm": ["f32"], "router": ["f32"]}  # fmt: skip
    assert report["snapshot_bytes"] == sum(file.stat().st_size for file in out.glob("*.safetensors"))


def test_convert_layout_and_gate_up(tmp_path):
    tiny_models.make_hf_dir(tmp_path / "hf", "mha_base")
    layouts = {}
    for layout in ("storage", "compute"):
        out = tmp_path / layout
        options = ["--layout", layout, "--gate-up-format", "q4_0"]
        assert run("convert", tmp_path / "hf", out, *options).returncode == 0
        roles = json.loads(run("inspect", out, "--json").stdout)["roles"]
        layouts[layout] = roles["down"]["layouts"]
        assert roles["gate_up"]["formats"] == ["q4_0"]
    assert layouts["storage"] == ["storage"] != layouts["compute"]


def test_convert_replaces_only_when_forced(tmp_path):
    tiny_models.make_hf_dir(tmp_path / "hf", "mha_base")
    out = tmp_path / "out"
    assert run("convert", tmp_path / "hf", out).returncode == 0
    assert_error(run("convert", tmp_path / "hf", out, "--format", "f32"), str(out), "--force")
    assert run("convert", tmp_path / "hf", out, "--format", "f32", "--force").returncode == 0
    assert json.loads(run("inspect", out, "--json").stdout)["roles"]["down"]["formats"] == ["f32"]


def test_convert_refuses_what_it_cannot_do(tmp_path):
    tiny_models.make_hf_dir(tmp_path / "hf", "mha_base")
    assert_error(run("convert", tmp_path / "hf", tmp_path / "out", "--format", "q9"), "q9", "q8_0")
    assert_error(run("convert", tmp_path / "nowhere", tmp_path / "out"), "nowhere")
    assert not (tmp_path / "out").exists()


def test_kernels_lists_every_tier():
    found = json.loads(run("kernels", "--json").stdout)
    tiers = [tier["tier"] for tier in found["tiers"]]
    assert tiers[0] == "scalar"
    assert {"q8_0", "f32"} <= {entry["name"] for entry in found["kernels"] if entry["kind"] == "format"}
    layouts = {entry["name"] for entry in found["kernels"] if entry["kind"] == "layout"}
    for entry in found["kernels"]:
        assert (entry["same_as"] is None) == (entry["why"] is None)
        assert entry["kind"] == "layout" or entry["layout"] in layouts
    text = run("kernels").stdout
    for entry in found["kernels"]:
        assert entry["name"] in text


def test_doctor_reports_this_machine():
    from engine import hardware
    from engine.runtime import SHIPPED_MODEL

    done = run("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0)
    assert SHIPPED_MODEL.exists() == (found["problems"] == [])
    assert found["threads"]["count"] == hardware.usable_cpus().count
    assert {entry["parity"] for entry in found["formats"]} == {"equal"}
    assert all(entry["gb_per_s"] > 0 and entry["compact_gb_per_s"] > 0 for entry in found["formats"])
    text = run("doctor").stdout
    for part in ("tiers:", "<- in use", "threads:", "memory:", "against scalar", "shipped model:"):
        assert part in text


def test_doctor_says_why_a_tier_is_not_used(monkeypatch):
    """A CPU with AVX-512 and no VNNI, which the emulated Skylake-X of tests/native/bochs is: named, with a reason."""
    from engine import doctor, kernels
    from engine.commands.doctor import as_text

    monkeypatch.setattr(kernels, "tiers", lambda: [("scalar", True, None), ("avx512", False, "AVX512_VNNI")])
    monkeypatch.setattr(doctor, "check_formats", lambda tier, problems: ("scalar", []))
    text = as_text(doctor.examine())
    assert "avx512: not used: this CPU has no AVX512_VNNI (AVX-512 alone is not enough" in text
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    assert "no NEON tier yet" in as_text(doctor.examine())


def test_doctor_notices_a_wrong_float_or_compact_product(monkeypatch):
    from engine import doctor, kernels

    right = doctor._Product.__call__
    contexts = kernels.Context(None, 1), kernels.Context("scalar", 1)
    floats = kernels.Context(None, 1, "float"), kernels.Context("scalar", 1, "float")
    assert doctor.check_format("iq3_s", *contexts, floats).parity == "equal"
    for which in ("compact", "float"):

        def wrong(self, num_tokens, which=which):
            y = right(self, num_tokens)
            if (which == "compact" and self.matrix.compact) or (which == "float" and self.context is floats[0]):
                y[0, 0] += 1
            return y

        monkeypatch.setattr(doctor._Product, "__call__", wrong)
        assert doctor.check_format("iq3_s", *contexts, floats).parity.startswith(which)


def test_doctor_with_a_forced_tier():
    found = json.loads(run("doctor", "--json", MILLSTREAM_ISA="scalar").stdout)
    assert (found["tier"], found["tier_forced_by"]) == ("scalar", "MILLSTREAM_ISA")
    assert {entry["kernel"] for entry in found["formats"]} == {"scalar"}
    done = run("doctor", "--json", MILLSTREAM_ISA="mmx")
    assert done.returncode == 1
    assert "mmx" in json.loads(done.stdout)["problems"][0]


def test_doctor_notices_a_wrong_kernel():
    import numpy as np

    from engine.doctor import compare

    good = np.ones(4, np.float32)
    assert compare(good, good.copy()) == "equal"
    assert compare(np.nextafter(good, 2), good) == "4 of 4 values differ"
    assert compare(np.array([np.nan] * 4, np.float32), np.array([np.nan] * 4, np.float32)) == "not finite"
    assert compare(np.array([-0.0], np.float32), np.array([0.0], np.float32)) == "1 of 1 values differ"


# ---- documents -------------------------------------------------------------------------------------------------------


def test_every_option_is_documented():
    import click

    from engine.cli import cli

    text = (ROOT / "docs" / "command-line.md").read_text()
    for name, command in cli.commands.items():
        section = (
            text.split(f"\n## {name}")[1].split("\n## ")[0] + text.split("\n## Options of several")[1].split("\n## ")[0]
        )
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.opts[0] in section, f"{name} {parameter.opts[0]}"


def readme_commands():
    return re.findall(r"```\w*\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_readme_has_exactly_two_commands():
    setup, test = readme_commands()
    assert "millstream generate" in setup
    assert test.endswith("&& make test\n")


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    line = next(line for line in script.splitlines() if line.startswith("test_command="))
    done = subprocess.run(
        ["bash", "-c", f'{line}\nprintf "%s\\n" "$test_command"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == readme_commands()[1]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# ---- convert ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source")
    tiny_models.make_hf_dir(path / "hf", "mha_base")
    return path / "hf"


def test_format_names_are_understood_in_capitals(source, tmp_path):
    done = run("convert", source, tmp_path / "s", "--format", "Q8_0", "--dense-format", "BF16", "--json")
    assert done.returncode == 0, done.stderr
    formats = json.loads(done.stdout)["formats"]
    assert (formats["gate_up"], formats["down"], formats["head"]) == ("q8_0", "q8_0", "bf16")
    assert_error(run("convert", source, tmp_path / "t", "--format", "Q9_9"), "q9_9", "unknown")


def test_a_format_that_nothing_would_use_is_refused(source, tmp_path):
    others = ("--gate-up-format", "q4_0", "--down-format", "q8_0")
    assert_error(run("convert", source, tmp_path / "s", "--format", "iq4_nl", *others), "--format iq4_nl does nothing")
    assert run("convert", source, tmp_path / "s", *others).returncode == 0


def test_sigterm_leaves_nothing_behind(tmp_path):
    """A conversion that is ended by a signal removes what it had written."""
    program = f"""
import os, signal, sys
import converters.quantize
encode = converters.quantize.Quantizer.chunks
def chunks(self, record, source, *rest):
    for chunk in encode(self, record, source, *rest):
        if len(os.listdir({str(tmp_path)!r})) > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        yield chunk
converters.quantize.Quantizer.chunks = chunks
from engine.cli import main
main(["convert", {str(tmp_path / "hf")!r}, {str(tmp_path / "out")!r}])
"""
    tiny_models.make_hf_dir(tmp_path / "hf", "mha_base")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr == "terminated\n"
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
