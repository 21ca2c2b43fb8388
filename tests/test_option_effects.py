"""Every option of `generate` changes something that is printed, times aside: none is accepted and then ignored."""

import re
import shutil

import click
import pytest
from cli_program import make_snapshot

from engine import cli
from engine.runtime import SHIPPED_MODEL

SLOTS = ("--expert-slots", "12")
TALK = ("--chat", "--chat-template", "{folder}/chat.jinja")
# Option -> (options of both runs, what one of them has besides). {folder}: a directory for files.
CASES = {
    "--model": ((), ("--model", "{folder}/other")),
    "--prompt-file": ((), ("--prompt-file", "{folder}/prompt")),
    "--threads": (("--threads", "1"), ("--threads", "2")),
    "--isa": ((), ("--isa", "scalar")),
    "--kv": ((), ("--kv", "f32")),
    "--expert-layout": ((), ("--expert-layout", "compact")),  # refused: the file holds strips
    "--arith": ((), ("--arith", "float")),
    "--force-tokenizer": ((), ("--force-tokenizer", "llama-bpe")),
    "--ram": (SLOTS, ("--ram", "1")),
    "--io": (SLOTS, ("--io", "mmap")),
    "--readers": (SLOTS, ("--readers", "2")),
    "--lookahead": (SLOTS, ("--lookahead", "off")),
    "--lock": (SLOTS, ("--lock",)),
    "--expert-slots": ((), SLOTS),
    "--cache-policy": (SLOTS, ("--cache-policy", "lru")),
    "--pin": ((*SLOTS, "--history", "off"), ("--pin", "{folder}/usage.json")),
    "--history": (SLOTS, ("--history", "off")),
    "--ctx": ((), ("--ctx", "64")),
    "--max-tokens": ((), ("--max-tokens", "4")),
    "--temperature": ((), ("--temperature", "0")),
    "--top-k": ((), ("--top-k", "3")),
    "--top-p": ((), ("--top-p", "0.5")),
    "--min-p": ((), ("--min-p", "0.3")),
    "--repeat-penalty": ((), ("--repeat-penalty", "1.5")),
    "--repeat-last-n": (("--repeat-penalty", "1.5"), ("--repeat-last-n", "1")),
    "--frequency-penalty": ((), ("--frequency-penalty", "1")),
    "--presence-penalty": ((), ("--presence-penalty", "1")),
    "--seed": (("--temperature", "1"), ("--seed", "5")),
    "--stop": ((), ("--stop", "e")),
    "--ignore-eos": (("--model", "{folder}/short/snapshot"), ("--ignore-eos",)),
    "--chat": ((), TALK),
    "--chat-template": (TALK, ("--chat-template", "{folder}/other.jinja")),
    "--system": (TALK, ("--system", "Count.")),
    "--prompt-cache": ((), ("--prompt-cache", "{folder}/cache")),
    "--route-trace": ((), ("--route-trace", "{folder}/routes")),
    "--spec": ((), ("--spec", "4")),
    "--draft": (("--spec", "4"), ("--draft", "model")),  # refused: it needs a model
    "--draft-model": (("--spec", "4"), ("--draft-model", "{folder}/model")),
    "--profile": ((), ("--profile",)),
    "--profile-layers": ((), ("--profile-layers",)),
    "--profile-json": ((), ("--profile-json", "{folder}/profile.json")),
    "--profile-html": ((), ("--profile-html", "{folder}/profile.html")),
    "--trace": ((), ("--trace", "{folder}/trace.json")),
    "--json": ((), ("--json",)),
}  # fmt: skip
# Times, and what depends on them or on the machine's state: numbers with a unit of time or rate, memory of the process,
# hits (look-ahead goes by the clock).
_NOISE = re.compile(r"[\d.]+ (?:s|ms|us|tok/s|MB/s|GB/s)\b|peak RSS [\d.]+ \w+|\([\d.]+ %\)|program \d+|into \d+ MiB|"
                    r"[\d.]+ GiB|\([\d.]+ tok/s\)|[\d.]+ %|prefetch\w*[^;]*|guess[^;]*|"
                    r"experts: \d+ hits.*")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import numpy as np

    from engine.experts.history import Usage

    path = tmp_path_factory.mktemp("options")
    for name in ("model", "other"):
        shutil.copytree(SHIPPED_MODEL, path / name)
    make_snapshot(path / "short", "mha_base", {"eos_token_id": list(range(200))})  # ends soon
    (path / "prompt").write_text("Once upon")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (path / "chat.jinja").write_text(template)
    (path / "other.jinja").write_text("! " + template)
    uses = np.zeros((3, 8))
    uses[:, :2] = 5
    Usage("", uses, 30).save(path / "usage.json")
    return path


def printed(capsys, folder, args) -> str:
    """Both streams of a run, without what differs from run to run."""
    for history in folder.glob("*.usage.json"):
        history.unlink()
    filled = [arg.format(folder=folder) for arg in args]
    if "--prompt-file" not in filled:
        filled.insert(0, "def add(a, b):")
    if "--model" not in args:
        filled += ["--model", str(folder / "model")]
    if "--max-tokens" not in filled:
        filled += ["--max-tokens", "12"]
    code = cli._run(["generate", *filled])
    out, err = capsys.readouterr()
    return f"exit code {code}\n{out}{_NOISE.sub('', err)}"


def test_every_option_has_a_case():
    options = {p.opts[0] for p in cli.cli.commands["generate"].params if isinstance(p, click.Option)}
    assert options == CASES.keys()


@pytest.mark.parametrize("option", CASES)
def test_option_changes_what_is_printed(option, capsys, folder):
    base, more = CASES[option]
    plain = printed(capsys, folder, base)
    assert plain.startswith("exit code 0"), plain
    assert printed(capsys, folder, base) == plain, "what is compared varies by itself"
    assert printed(capsys, folder, (*base, *more)) != plain


def test_an_unknown_option_is_an_error(capsys):
    assert cli._run(["generate", "x", "--expert-slot-count", "3"]) == 2
    assert "No such option" in capsys.readouterr().err
