"""Absurd sizes in a file are refused before anything of that size is made: within 1 GiB of addresses, at once.

Each case breaks a good model on purpose and opens it in a process of its own whose address space is limited, so that a
table of 10^9 names or a buffer of 100 GB fails instead of filling the machine.
"""

import json
import subprocess
import sys

import pytest
import tiny_models
from snapshot_tools import (
    ROOT,
    copy_dir,
    edit_header,
    edit_safetensors_header,
    make_snapshot,
    read_json,
    tensor,
    write_at,
)

from engine.weights.header import HEADER_FILE
from engine.weights.writer import DENSE_FILE

LIMIT_BYTES = 1 << 30
MAX_GROWTH_MIB = 150  # of the peak, over what the imports need
HUGE = 1_000_000_000
Q_PROJ = "layers.0.self_attn.q_proj"
OPEN = (
    "import json, resource, sys\n"
    "import converters.hf, engine\n"
    "from engine.errors import EngineError\n"
    f"resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_BYTES}, {LIMIT_BYTES}))\n"
    "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
    "path, out, before = sys.argv[1], sys.argv[2], peak()\n"
    "try:\n"
    "    converters.hf.convert(path, out, threads=1) if out else engine.load(path, threads=1)\n"
    "    kind, message = None, 'accepted'\n"
    "except EngineError as error:\n"
    "    kind, message = type(error).__name__, str(error)\n"
    "cpu = resource.getrusage(resource.RUSAGE_SELF)\n"
    "print(json.dumps([kind, message, peak() - before, cpu.ru_utime + cpu.ru_stime]))\n"
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    tiny_models.make_hf_dir(folder / "hf", "mha_base")
    make_snapshot(folder / "hf", folder / "s", experts="q8_0", dense="f16")
    return folder


def config(**changes):
    """The header as a forger would sign it: what is wrong is found by its size, not by the identity."""
    return lambda path: edit_header(path, lambda content: content["config"].update(changes), sign=True)


def positions(path):
    """No tensor contradicts this number. The data files are signed again too, so that it reaches the engine."""
    config(max_position_embeddings=(1 << 31) - 1)(path)
    identity = read_json(path / HEADER_FILE)["identity"]
    for file in path.glob("*.safetensors"):
        edit_safetensors_header(file, lambda header: header["__metadata__"].update(snapshot=identity))


def shape(*sizes):
    return lambda path: edit_header(path, lambda c: tensor(c, Q_PROJ).update(shape=list(sizes)), sign=True)


def nbytes(path):
    edit_header(path, lambda content: tensor(content, Q_PROJ).update(nbytes=HUGE * HUGE), sign=True)


def sparse(path, name):
    """A file of 100 GB that takes no room on the disk."""
    with (path / name).open("r+b") as file:
        file.truncate(100 * HUGE)


def hf_config(**changes):
    def breaker(path):
        (path / "config.json").write_text(json.dumps(read_json(path / "config.json") | changes))

    return breaker


def hf_shape(*sizes):
    def edit(header):
        header["model.norm.weight"]["shape"] = list(sizes)

    return lambda path: edit_safetensors_header(path / "model.safetensors", edit)


def many_shards(path):
    (path / "model.safetensors").rename(path / f"model-00001-of-{HUGE}.safetensors")


# id, breaker, class, words of the message
SNAPSHOTS = [
    ("layers", config(num_hidden_layers=250_000, num_experts=1, num_experts_per_tok=1), "MissingTensorError",
     ["num_hidden_layers 250000", "need 3000003 tensors"]),
    ("layers and experts", config(num_hidden_layers=HUGE, num_experts=HUGE), "ConfigError", ["out of range"]),
    ("more than an int", config(max_position_embeddings=1 << 70), "ConfigError",
     ["max_position_embeddings", "out of range"]),
    ("vocabulary", config(vocab_size=HUGE), "ShapeError", ["embed_tokens", str(HUGE)]),
    ("hidden", config(hidden_size=HUGE), "ShapeError", [str(HUGE)]),
    ("expert width", config(intermediate_size=HUGE), "ShapeError", [str(HUGE)]),
    ("positions", positions, "ConfigError",
     ["2147483647 positions", "smaller --ctx"]),
    ("shape", shape(HUGE, HUGE), "ShapeError", [Q_PROJ, str(HUGE)]),
    ("long shape", shape(*[HUGE] * 100_000), "HeaderSyntaxError", [Q_PROJ, "one or two counts"]),
    ("bytes", nbytes, "LengthError", [Q_PROJ, str(HUGE * HUGE)]),
    ("header file", lambda path: sparse(path, HEADER_FILE), "HeaderSyntaxError", [HEADER_FILE, "bytes, expected"]),
    ("data file", lambda path: sparse(path, DENSE_FILE), "FileLengthError", [DENSE_FILE, "too many"]),
    ("version", lambda path: edit_header(path, lambda c: c.update(min_reader="9" * 10_000)), "HeaderSyntaxError",
     ["min_reader"]),
]  # fmt: skip
SOURCES = [
    ("layers", hf_config(num_hidden_layers=250_000, num_experts=1, num_experts_per_tok=1), "MissingTensorError",
     ["need 3000003 tensors"]),
    ("vocabulary", hf_config(vocab_size=HUGE), "ShapeError", [str(HUGE)]),
    ("shards", many_shards, "HeaderSyntaxError", [f"a set of {HUGE} files is out of range"]),
    ("shape", hf_shape(HUGE, HUGE), "LengthError", ["model.norm.weight", str(HUGE)]),
    ("long shape", hf_shape(*[HUGE] * 100_000), "HeaderSyntaxError", ["model.norm.weight", "at most 8 counts"]),
    ("container header", lambda path: write_at(path / "model.safetensors", 0, (99_000_000).to_bytes(8, "little")),
     "TruncatedFileError", ["header is cut off"]),
    ("config file", lambda path: sparse(path, "config.json"), "HeaderSyntaxError", ["config.json", "bytes, expected"]),
]  # fmt: skip


def refused(path, out, kind, words):
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(path), str(out)], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    got, message, growth, cpu_seconds = json.loads(done.stdout)
    assert got == kind, message[:300]
    assert all(word in message for word in words) and len(message) < 1000, message[:1000]
    assert growth < MAX_GROWTH_MIB, f"{growth} MiB"
    assert cpu_seconds < 5, f"{cpu_seconds} s"


@pytest.mark.parametrize(
    ("breaker", "kind", "words"), [case[1:] for case in SNAPSHOTS], ids=[case[0] for case in SNAPSHOTS]
)
def test_absurd_size_in_a_snapshot_is_refused_within_1_gib(breaker, kind, words, good, tmp_path):
    path = copy_dir(good / "s", tmp_path / "s")
    breaker(path)
    refused(path, "", kind, words)


@pytest.mark.parametrize(
    ("breaker", "kind", "words"), [case[1:] for case in SOURCES], ids=[case[0] for case in SOURCES]
)
def test_absurd_size_in_a_source_is_refused_within_1_gib(breaker, kind, words, good, tmp_path):
    path = copy_dir(good / "hf", tmp_path / "hf")
    breaker(path)
    refused(path, tmp_path / "out", kind, words)


def test_the_unbroken_model_opens_within_the_limit(good, tmp_path):
    """Else every refusal above might be one for want of memory."""
    for path, out in ((good / "s", ""), (good / "hf", tmp_path / "out")):
        done = subprocess.run(
            [sys.executable, "-c", OPEN, str(path), str(out)], capture_output=True, text=True, cwd=ROOT, timeout=120
        )
        assert json.loads(done.stdout)[1] == "accepted", (done.stdout, done.stderr)
