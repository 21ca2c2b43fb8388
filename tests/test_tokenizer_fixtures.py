"""Ids of whole published vocabularies: the fixtures that the sdist of llama-cpp-python carries. Optional.

MILLSTREAM_LLAMA_CPP_SDIST names the archive (llama_cpp_python-*.tar.gz); "download" fetches it with pip (75 MB).
"""

import os
import subprocess
import sys
import tarfile

import pytest

from engine.errors import WeightsError
from engine.tokenizer import Tokenizer
from engine.weights.gguf_header import read_header

VARIABLE = "MILLSTREAM_LLAMA_CPP_SDIST"
SUPPORTED = ["command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3",
             "qwen2", "qwen35", "refact", "starcoder"]  # fmt: skip
REFUSED = {"bert-bge": "tokenizer model 'bert'", "gemma-4": "tokenizer model 'gemma4'"}
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where, path = os.environ.get(VARIABLE), tmp_path_factory.mktemp("sdist")
    if not where:
        pytest.skip(f"{VARIABLE} is not set")
    if where == "download":
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", path]
        subprocess.run([*command, "llama-cpp-python"], check=True)
        where = next(path.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(where) as archive:
        for member in archive:
            if "/models/ggml-vocab-" in member.name:
                member.name = member.name.rsplit("/", 1)[1]
                archive.extract(member, path, filter="data")
    return path


@pytest.mark.parametrize("name", SUPPORTED)
def test_ids_of_published_vocabularies(folder, name):
    tokenizer = Tokenizer.from_gguf(read_header(folder / f"ggml-vocab-{name}.gguf").metadata, name)
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    assert len(lines) >= 46
    found = [tokenizer.encode(text, add_special_tokens=False) for text, _ in zip(texts, lines, strict=False)]
    assert found == [[int(n) for n in line.split()] for line in lines]


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_name(folder, name):
    with pytest.raises(WeightsError, match=REFUSED[name]):
        Tokenizer.from_gguf(read_header(folder / f"ggml-vocab-{name}.gguf").metadata, name)
