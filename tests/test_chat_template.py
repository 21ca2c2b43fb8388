"""Chat templates: texts of transformers (tests/data/chat), where a model's templates are found, and how they fail."""

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import chat_template
from engine.chat_template import ChatTemplate, choose_template, special_tokens, templates
from engine.errors import ConfigError, WeightsError

DATA = Path(__file__).parent / "data" / "chat"
INPUTS = json.loads((DATA / "conversations.json").read_text())
GOLDEN = json.loads((DATA / "golden.json").read_text())


class FixedDay(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2031, 7, 26)


# ---- rendering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.jinja")))
def test_text_is_that_of_transformers(name, monkeypatch):
    monkeypatch.setattr(chat_template, "datetime", FixedDay)
    template = ChatTemplate((DATA / f"{name}.jinja").read_text(), name)
    for conversation, messages in INPUTS["conversations"].items():
        for kind, variables in INPUTS["variables"].items():
            expected = GOLDEN[f"{name}/{conversation}/{kind}"]
            call = {**INPUTS["special_tokens"], **variables}
            if isinstance(expected, str):
                assert template.render(messages, **call) == expected
            else:
                with pytest.raises(ConfigError) as error:
                    template.render(messages, **call)
                assert str(error.value).endswith(expected["error"])


def test_goldens_cover_what_templates_do():
    """Dates, tools, documents, raised errors, loop controls and generation blocks all show."""
    sources = {path.stem: path.read_text() for path in DATA.glob("*.jinja")}
    assert len(GOLDEN) == len(sources) * len(INPUTS["conversations"]) * len(INPUTS["variables"]) == 144
    assert sum("2031" in text for text in GOLDEN.values() if isinstance(text, str)) > 20
    assert sum(isinstance(text, dict) for text in GOLDEN.values()) == 6
    for feature in ("{%- generation", "continue", "tojson", "raise_exception", "strftime_now", "macro", "namespace"):
        assert any(feature in source for source in sources.values())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for m in messages %}\n{{ m.x", "line 3: unexpected end of template"),
        ("a\n{% bogus %}", "line 2: Encountered unknown tag 'bogus'"),
        ("a\n\n{{ raise_exception('no\nsuch role') }}", "line 3: no such role"),
        ("a\n{{ messages[0].content + 1 }}", "line 2: can only concatenate str"),
        ("{{ nothing.at.all }}", "line 1: 'nothing' is undefined"),
        ("\n{{ messages.append(1) }}", "line 2: access to attribute 'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "line 1: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ range(999999999) | list }}", "line 1: Range too big"),
        ("{% include 'x' %}", "line 1: no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", "maximum recursion depth exceeded"),
    ],
)
def test_a_failing_template_is_one_line_with_its_place(source, message):
    with pytest.raises(ConfigError) as error:
        ChatTemplate(source, "the template").render([{"role": "user", "content": "x"}])
    assert str(error.value).startswith("the template: line ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_special_tokens_from_the_tokenizer_config():
    config = {"bos_token": None, "eos_token": {"content": "</s>"}, "pad_token": "<p>", "extra": "x"}
    assert special_tokens(config) == {"eos_token": "</s>", "pad_token": "<p>"}


# ---- where templates are ---------------------------------------------------------------------------------------------


def directory(tmp_path, **files):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return SimpleNamespace(path=tmp_path, tokenizer_dir=tmp_path, gguf_metadata=None)


def gguf(**keys):
    return SimpleNamespace(path="m.gguf", gguf_metadata={f"tokenizer.{key}": value for key, value in keys.items()})


def test_templates_of_a_directory(tmp_path):
    config = {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}
    files = directory(tmp_path, **{"tokenizer_config.json": config})
    assert templates(files) == {"default": "A", "tool_use": "B"}
    files = directory(tmp_path, **{"chat_template.json": {"chat_template": "C"}})
    assert templates(files)["default"] == "C"
    files = directory(tmp_path, **{"chat_template.jinja": "D", "additional_chat_templates/rag.jinja": "E"})
    assert templates(files) == {"default": "D", "tool_use": "B", "rag": "E"}
    files = directory(tmp_path, **{"tokenizer_config.json": {"chat_template": 5}})
    with pytest.raises(WeightsError, match=r"tokenizer_config\.json: chat_template: template 'default' is not text"):
        templates(files)


def test_templates_of_a_gguf():
    files = gguf(**{"chat_template": "A", "chat_template.rag": "B", "chat_templates": ["rag"]})
    assert templates(files) == {"default": "A", "rag": "B"}
    assert templates(gguf(chat_template="")) == {}  # says that it has none, not that a prompt is empty


def test_choice(tmp_path):
    files = gguf(**{"chat_template": "A", "chat_template.rag": "B"})
    (tmp_path / "own.jinja").write_text("C")
    assert choose_template(files).source == "A"
    assert choose_template(files, "rag").source == "B"
    assert choose_template(files, str(tmp_path / "own.jinja")).source == "C"
    with pytest.raises(ConfigError, match="neither a file nor a template of the model; the model's are default, rag"):
        choose_template(files, "other")
    with pytest.raises(ConfigError, match=r"only named ones \(rag\); choose with --chat-template NAME"):
        choose_template(gguf(**{"chat_template.rag": "B"}))


def test_a_model_without_a_template_says_so(tmp_path):
    for files in (gguf(), directory(tmp_path, **{"tokenizer_config.json": {}})):
        with pytest.raises(ConfigError, match=r"the model has no chat template.*--chat-template FILE gives one"):
            choose_template(files)
    with pytest.raises(ConfigError, match=r"--chat-template x: neither a file.*the model has none"):
        choose_template(gguf(), "x")
