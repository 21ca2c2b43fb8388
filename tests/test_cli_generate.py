"""`millstream generate` from outside: output, prompts, options, and every way to end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models
from cli_program import ENVIRONMENT, LONG_CONTEXT, PROGRAM, ROOT, assert_error, make_snapshot, run, start_long, wait_for

PROMPT = tiny_models.PROMPT


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_snapshot(tmp_path_factory.mktemp("cli"), "mha_base")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """A context long enough that a generation can be interrupted."""
    return make_snapshot(tmp_path_factory.mktemp("long"), {"max_position_embeddings": LONG_CONTEXT})


@pytest.fixture(scope="module")
def generate(model):
    """generate(options ...) -> the --json object of a short continuation, one process per distinct call."""
    made = {}

    def call(*options, prompt=PROMPT):
        key = (prompt, *map(str, options))
        if key not in made:
            done = run("generate", prompt, "-m", model, "-n", 24, "--ignore-eos", "--json", *options)
            assert done.returncode == 0, done.stderr
            made[key] = json.loads(done.stdout) | {"stderr": done.stderr}
        return made[key]

    return call


# ---- output ------------------------------------------------------------------------------------------------


def test_stdout_is_the_text_and_stderr_the_figures(model, generate):
    done = run("generate", PROMPT, "-m", model, "-n", 24, "--ignore-eos")
    assert done.returncode == 0
    assert done.stdout == generate()["text"].rstrip("\n") + "\n"
    for text in ("sampling:", "greedy", "prefill", "decode", "tok/s", "finish: length", "peak RSS", "tier "):
        assert text in done.stderr
    assert "\x1b" not in done.stderr


def test_json_object_has_every_field(generate, model):
    found = generate()
    assert found["finish_reason"] == "length"
    assert len(found["token_ids"]) == 24 == found["stats"]["generated_tokens"]
    assert len(found["prompt_token_ids"]) == found["stats"]["prompt_tokens"] > 0
    assert (found["prompt"], found["model"], found["architecture"]) == (PROMPT, str(model), "olmoe")
    assert set(found["sampling"]) == set(found["sampling_sources"])
    for key in ("load_s", "tokenize_s", "prefill_s", "decode_s", "prefill_tok_s", "decode_tok_s", "peak_rss_bytes"):
        assert found["stats"][key] > 0


def test_text_is_the_decoded_tokens(generate, model):
    from engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(model)
    tokenizer.check_vocabulary(1 << 20)
    assert tokenizer.decode(generate()["token_ids"]).rstrip("\ufffd") == generate()["text"].rstrip("\ufffd")


def test_text_comes_while_it_is_made(long_model):
    """The text fits the buffers of a program that does not flush: its first byte would follow the closing figures."""
    process = start_long(long_model, "-n", "2000")
    try:
        assert process.stdout.read(1)
        os.set_blocking(process.stderr.fileno(), False)
        assert b"finish:" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1"])
def test_output_is_utf8_in_any_locale(model, generate, locale):
    done = run("generate", PROMPT, "-m", model, "-n", 24, "--ignore-eos", LC_ALL=locale, PYTHONIOENCODING="ascii")
    assert done.stdout == generate()["text"].rstrip("\n") + "\n"


# ---- prompt ------------------------------------------------------------------------------------------------


def test_prompt_sources_are_equal(model, generate, tmp_path):
    file = tmp_path / "prompt"
    file.write_text(PROMPT + "\n")
    options = ["-m", model, "-n", 24, "--ignore-eos", "--json"]
    for args, text_in in ((["-f", file], None), ([], PROMPT + "\n"), (["-"], PROMPT), (["-f", "-"], PROMPT + "\n")):
        done = run("generate", *args, *options, text_in=text_in)
        assert json.loads(done.stdout)["token_ids"] == generate()["token_ids"]


def test_only_one_final_newline_of_a_file_is_dropped(model, tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(b"x\r\n\r\n")
    done = run("generate", "-f", file, "-m", model, "-n", 1, "--json")
    assert json.loads(done.stdout)["prompt"] == "x\r\n"


def test_bad_prompts_are_refused(model, tmp_path):
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    assert_error(run("generate", "-f", tmp_path / "latin1", "-m", model), "latin1", "not valid UTF-8 at byte 3")
    assert_error(run("generate", "-f", tmp_path / "none", "-m", model), "none", "No such file")
    assert_error(run("generate", os.fsdecode(b"caf\xe9"), "-m", model), "not valid UTF-8")
    both = run("generate", "x", "-f", tmp_path / "latin1", "-m", model)
    assert (both.returncode, both.stdout) == (2, "")
    assert "exclude each other" in both.stderr


def test_empty_prompt_without_bos_is_refused(model):
    assert_error(run("generate", "", "-m", model), "prompt is empty")


def test_prompt_longer_than_the_context_is_refused_with_both_numbers(model):
    done = run("generate", "x" * 40, "-m", model, "--ctx", 16)
    assert_error(done, "40 tokens", "16")
    assert run("generate", "x" * 40, "-m", model, "--ctx", 41, "-n", 4).returncode == 0


def test_context_beyond_the_model_is_refused(model):
    assert_error(run("generate", "x", "-m", model, "--ctx", 100_000), "100000", "256")


def test_running_into_the_context_is_reported(model):
    done = run("generate", "xyz", "-m", model, "--ctx", 10, "--ignore-eos", "--json", "-n", 100)
    found = json.loads(done.stdout)
    assert (found["finish_reason"], len(found["token_ids"]), found["context"]) == ("context", 7, 10)


# ---- options -----------------------------------------------------------------------------------------------


def test_max_tokens(generate):
    assert len(generate("-n", 5)["token_ids"]) == 5
    assert generate("-n", 5)["token_ids"] == generate()["token_ids"][:5]
    assert generate("-n", 0)["text"] == ""


def test_seeds_reproduce_and_differ(generate):
    texts = [generate("--temperature", 1, "--seed", seed)["token_ids"] for seed in (1, 2)]
    assert texts[0] != texts[1] != generate()["token_ids"]
    assert generate("--temperature", "1.0", "--seed", 1)["token_ids"] == texts[0]


def test_temperature(generate):
    hot = generate("--temperature", 3, "--seed", 1)
    assert hot["token_ids"] != generate("--temperature", 1, "--seed", 1)["token_ids"]
    assert hot["sampling"]["temperature"] == 3
    assert generate("--temperature", 0)["token_ids"] == generate()["token_ids"]


@pytest.mark.parametrize(("option", "value"), [("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 0.999999)])
def test_options_that_keep_only_the_best_token_are_greedy(generate, option, value):
    found = generate("--temperature", 1, "--seed", 1, option, value)
    assert found["token_ids"] == generate()["token_ids"]
    name = option.strip("-").replace("-", "_")
    assert (found["sampling"][name], found["sampling_sources"][name]) == (value, "flag")


@pytest.mark.parametrize("option", ["--repeat-penalty", "--frequency-penalty", "--presence-penalty"])
def test_penalties_change_the_text_and_look_back_repeat_last_n(generate, option):
    prompt = "aaaa"
    plain = generate(prompt=prompt)["token_ids"]
    assert generate(option, 100, prompt=prompt)["token_ids"] != plain
    assert generate(option, 100, "--repeat-last-n", 0, prompt=prompt)["token_ids"] == plain


def test_strong_penalty_prevents_repetition(generate):
    ids = generate("--presence-penalty", 1000, "--repeat-last-n", 64)["token_ids"]
    assert len(set(ids)) == len(ids)


def test_stop_ends_before_the_text(generate):
    text = generate()["text"]
    stop = next(text[i : i + 2] for i in range(2, len(text) - 2) if text.find(text[i : i + 2]) >= 2)
    for options in (["--stop", stop], ["--stop", "never seen", "--stop", stop]):
        found = generate(*options)
        assert (found["finish_reason"], found["text"]) == ("stop", text[: text.find(stop)])
    assert generate("--stop", "never seen")["text"] == text


def test_eos_ends_unless_ignored(tmp_path, generate):
    third = generate()["token_ids"][3]
    snapshot = make_snapshot(tmp_path, "mha_base", {"eos_token_id": [tiny_models.EOS_TOKEN_ID, third]})
    options = ["generate", PROMPT, "-m", snapshot, "-n", 24, "--json"]
    found = json.loads(run(*options).stdout)
    assert (found["finish_reason"], found["token_ids"]) == ("eos", generate()["token_ids"][:3])
    assert json.loads(run(*options, "--ignore-eos").stdout)["token_ids"] == generate()["token_ids"]


def test_threads_isa_and_kv_are_used_and_change_no_bit(generate):
    for threads in (1, 3):
        assert generate("--threads", threads)["threads"] == threads
        assert generate("--threads", threads)["token_ids"] == generate()["token_ids"]
    assert generate("--isa", "scalar")["isa"] == "scalar"
    assert generate("--isa", "scalar")["token_ids"] == generate()["token_ids"]
    assert (generate("--kv", "f32")["kv"], generate()["kv"]) == ("f32", "f16")


def test_unknown_tier_is_refused(model):
    assert_error(run("generate", "x", "-m", model, "--isa", "mmx"), "mmx", "scalar")
    assert_error(run("generate", "x", "-m", model, MILLSTREAM_ISA="mmx"), "mmx")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", -1), ("--temperature", "nan"), ("--top-p", 0), ("--top-p", 1.5), ("--top-k", -1), ("--min-p", 1),
     ("--repeat-penalty", 0), ("--repeat-last-n", -2), ("--stop", "")],
)  # fmt: skip
def test_values_out_of_range_are_refused(model, option, value):
    done = run("generate", "x", "-m", model, option, value)
    assert_error(done, option.strip("-").replace("-", "_"))


def test_sampler_defaults_come_from_the_model_and_flags_override(tmp_path):
    configured = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1}
    snapshot = make_snapshot(tmp_path, "mha_base", configured)
    done = run("generate", "x", "-m", snapshot, "-n", 4, "--json", "--top-k", 3)
    found = json.loads(done.stdout)
    expected = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "repeat_penalty": 1.1, "min_p": 0}
    assert {name: found["sampling"][name] for name in expected} == expected
    sources = {name: found["sampling_sources"][name] for name in expected}
    assert sources == dict.fromkeys(expected, "generation_config") | {"top_k": "flag", "min_p": "default"}
    assert "temperature 0.7 (generation_config)" in done.stderr
    assert "top_k 3 (flag)" in done.stderr


def test_options_without_effect_are_pointed_out(generate):
    assert "temperature is 0 (greedy), so top_k, seed changes nothing" in generate("--seed", 3, "--top-k", 2)["stderr"]


# ---- ends --------------------------------------------------------------------------------------------------


def test_interrupt_keeps_the_text_so_far(long_model):
    process = start_long(long_model)
    begun = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert (begun + rest).decode("utf-8").endswith("\n")
    assert b"finish: interrupted" in errors
    assert b"Traceback" not in errors


def test_interrupt_gives_valid_json(long_model):
    process = start_long(long_model, "--json")
    wait_for(process.stderr, b"sampling:")
    time.sleep(1.5)  # some tokens, also on a busy machine
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    found = json.loads(output)
    assert (process.returncode, found["finish_reason"]) == (130, "interrupted")
    assert found["text"] and found["token_ids"]
    assert b"Traceback" not in errors


def test_interrupt_of_other_commands_is_quiet(long_model, tmp_path):
    (tmp_path / "text").write_text("The router picks experts. " * 40000)
    args = ["perplexity", "-m", str(long_model), "--text", str(tmp_path / "text")]
    process = subprocess.Popen(
        [*PROGRAM, *args], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(process.stderr, b"windows of")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (130, b"")
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


def test_reader_that_goes_away_ends_the_program_quietly(long_model):
    process = start_long(long_model)
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=20) == 141
    assert b"Traceback" not in errors
    assert b"Exception ignored" not in errors


def test_full_disk_is_an_error(model):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, "generate", "x", "-m", str(model), "-n", "4"],
            cwd=ROOT, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert "error: stdout: cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("args", ["generate x -n 4", "--version", "--help", "kernels --json"])
def test_closed_stdout_is_an_error(model, args):
    """What was asked for has nowhere to go; exit code 0 would say that somebody got it."""
    for redirect, said in ((">&-", True), (">&- 2>&-", False)):
        command = f"{sys.executable} -m engine {args} {redirect}"
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, check=False)
        assert done.returncode == 1
        assert (b"error: stdout: it is closed" in done.stderr) == said


def test_closed_stderr_is_no_error(model):
    command = f"{sys.executable} -m engine generate x -m {model} -n 4 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 0 and done.stdout


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["generate", "--help"]])
def test_full_disk_is_no_traceback_for_clicks_own_output(args):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, *args], cwd=ROOT, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "error: stdout: cannot be written: No space left on device\n")


def test_sampler_options_are_checked_before_the_model_is_opened():
    assert_error(run("generate", "x", "-m", "/nonexistent", "--top-p", "7"), "top_p")
