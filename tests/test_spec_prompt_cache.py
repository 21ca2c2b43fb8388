"""--prompt-cache with --spec: the file a speculative run leaves is, byte for byte, that of plain decode, and a run goes
on from either as from the other."""

import json

import latent_and_sink_models as models
import pytest
import spec_tools
from cli_program import run

import engine
from converters.hf import RoleFormats, convert
from engine import runtime
from engine.generate import Generation
from engine.prompt_cache import PromptCache
from engine.session import Session
from engine.spec import PLAIN, FixedPolicy, Speculator


@pytest.fixture(scope="module", params=["shipped", "gpt_oss", "deepseek_v2"])
def loaded(request, tmp_path_factory):
    """The shipped model; rings of 64 slots that wrap; a latent cache."""
    if request.param == "shipped":
        return engine.load(threads=1)
    path = tmp_path_factory.mktemp(request.param)
    models.checkpoint(path / "hf", request.param)
    convert(path / "hf", path / "out", formats=RoleFormats(experts="f32", dense="f32"), threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "PREFILL_TOKENS", 8)
        return engine.load(path / "out", threads=1)


class Turns:
    """Two turns on one file: a new session each, restored from what the one before left."""

    def __init__(self, loaded, path, source, rows):
        self.loaded, self.path, self.source, self.rows = loaded, path, source, rows
        self.files, self.reused = [], []

    def turn(self, ids, plain, leave=None, **options):
        """Token ids of a run behind `ids`. plain: the same without drafts; leave: tokens that are taken, None all."""
        session = Session(self.loaded)
        cache = PromptCache(self.path, session, self.loaded)
        cache.restore()
        speculator = PLAIN
        if self.rows:
            source = spec_tools.source(self.source, plain, self.loaded.model.config.vocab_size)
            speculator = Speculator([source], FixedPolicy(self.rows))
        generation = Generation(
            self.loaded, ids, session=session, speculator=speculator, sampling=spec_tools.GREEDY,
            **{"ignore_eos": True} | options,
        )  # fmt: skip
        if leave is None:
            "".join(generation)
        else:
            pieces = generation.tokens()
            for _ in range(leave):
                next(pieces)
            pieces.close()
        assert "stored" in cache.save()
        self.files.append(self.path.read_bytes())
        self.reused.append(generation.stats.reused_tokens)
        return generation.token_ids


@pytest.mark.parametrize("leave", [None, 33])
def test_the_file_is_that_of_plain_decode(loaded, tmp_path, leave):
    first, options = list(range(40, 60)), {"max_tokens": 100}
    whole = spec_tools.run(loaded, first, ignore_eos=True, **options)[4]
    plain = Turns(loaded, tmp_path / "plain", None, 0)
    tokens = plain.turn(first, None, leave, **options)
    second = [*first, *tokens, 7, 8, 9]
    follow = spec_tools.run(loaded, second, ignore_eos=True, **options)[4]
    assert plain.turn(second, None, **options) == follow.token_ids
    for source, rows in (("oracle", 8), ("spoiled", 5), ("random", 3)):
        turns = Turns(loaded, tmp_path / f"{source}{rows}", source, rows)
        assert turns.turn(first, whole, leave, **options) == tokens
        assert turns.turn(second, follow, **options) == follow.token_ids
        assert turns.files == plain.files and turns.reused == plain.reused == [0, len(first) + len(tokens) - 1]


def test_a_stop_text_within_a_window(tmp_path):
    loaded = engine.load(threads=1)
    ids = loaded.tokenizer.encode("In the beginning")
    whole = spec_tools.run(loaded, ids, max_tokens=40, ignore_eos=True)[4]
    files = []
    for rows in (0, 4, 8):
        turns = Turns(loaded, tmp_path / str(rows), "oracle", rows)
        turns.turn(ids, whole, max_tokens=40, stop=loaded.tokenizer.decode(whole.token_ids[10:11]))
        files += turns.files
    assert files[1:] == files[:1] * 2 and len(files[0]) > 1000


def test_an_end_of_text_token_within_a_window(tmp_path, monkeypatch):
    loaded = engine.load(threads=1)
    ids = loaded.tokenizer.encode("In the beginning")
    whole = spec_tools.run(loaded, ids, max_tokens=40, ignore_eos=True)[4]
    end = next(i for i in range(9, 40) if whole.token_ids[i] not in whole.token_ids[:i])
    monkeypatch.setattr(loaded.tokenizer, "eos_ids", {whole.token_ids[end]})
    files = []
    for source, rows in (("oracle", 0), ("oracle", 8), ("oracle", 7), ("oracle", 6), ("spoiled", 5)):
        turns = Turns(loaded, tmp_path / f"{source}{rows}", source, rows)
        assert turns.turn(ids, whole, max_tokens=40, ignore_eos=False) == whole.token_ids[:end]
        files += turns.files
    assert files[1:] == files[:1] * 4


def test_a_run_that_is_left_late_does_not_cut_the_next_one_short(tmp_path):
    """An abandoned generation is closed after another has begun on its session: that one's cache is left alone."""
    loaded = engine.load(threads=1)
    session, options = Session(loaded), {"temperature": 0, "ignore_eos": True}
    left = loaded.generate("In the beginning", max_tokens=30, spec=4, session=session, **options)
    tokens = left.tokens()
    next(tokens)
    "".join(loaded.generate("And the", max_tokens=30, spec=4, session=session, **options))
    length = session.length
    tokens.close()
    assert session.length == session.kv.length == length > 20


def test_command_line(tmp_path):
    """The program, twice with each file: drafts, reuse, the same text, the same bytes."""
    texts, files = [], []
    for spec in ("0", "4"):
        path = tmp_path / f"cache{spec}"
        for prompt in ("He said, He said,", "He said, He said, and"):
            done = run(
                "generate", prompt, "-n", 40, "--temperature", 0, "--json", "--spec", spec, "--prompt-cache", path
            )
            found = json.loads(done.stdout)
            texts.append((found["text"], found["stats"]["reused_tokens"]))
            files.append(path.read_bytes())
            assert (found["stats"]["spec"] is None) == (spec == "0")
    assert texts[:2] == texts[2:] and files[:2] == files[2:] and texts[1][1] > 0
