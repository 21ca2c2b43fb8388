"""Chat templates: finding a model's, and rendering a conversation into the prompt that the model was trained on.

Templates are programs from a stranger: they run in jinja2's sandbox, with the helpers that transformers gives them and
nothing else. Source of those: transformers, utils/chat_template_utils.py.
"""

import json
import traceback
from datetime import datetime
from pathlib import Path

from .errors import ConfigError, WeightsError

DEFAULT = "default"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEMPLATE_FILE = "<template>"  # what jinja2 calls a template that came from a string


def templates(files) -> dict[str, str]:
    """Name -> source of every chat template of an opened model (weights.base.ModelFiles); the usual one is "default".

    Raises WeightsError for a file that should hold one and does not.
    """
    if files.gguf_metadata is not None:
        return _gguf_templates(files.gguf_metadata)
    return directory_templates(files.tokenizer_dir) if files.tokenizer_dir is not None else {}


def _gguf_templates(metadata) -> dict[str, str]:
    found = {
        key.removeprefix("tokenizer.chat_template."): metadata[key]
        for key in metadata
        if key.startswith("tokenizer.chat_template.")
    }
    if "tokenizer.chat_template" in metadata:
        found[DEFAULT] = metadata["tokenizer.chat_template"]
    return _checked(found, "tokenizer.chat_template")


def directory_templates(folder: Path) -> dict[str, str]:
    """tokenizer_config.json, then chat_template.json, then chat_template.jinja: the later one counts."""
    found = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = _read_json(folder / name).get("chat_template")
        if isinstance(value, list):
            value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        elif value is not None and not isinstance(value, dict):
            value = {DEFAULT: value}
        found |= _checked(value or {}, f"{folder / name}: chat_template")
    for path in [*sorted((folder / "additional_chat_templates").glob("*.jinja")), folder / "chat_template.jinja"]:
        if path.is_file():
            found[DEFAULT if path.name == "chat_template.jinja" else path.stem] = read_template(path)
    return found


def _checked(found: dict, where: str) -> dict[str, str]:
    bad = next((name for name, source in found.items() if not isinstance(name, str) or not isinstance(source, str)), "")
    if bad != "":
        raise WeightsError(f"{where}: template {bad!r} is not text")
    return {name: source for name, source in found.items() if source}  # an empty one is none


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path}: cannot be read as JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def read_template(path: str | Path) -> str:
    """Text of a template file. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid UTF-8 at byte {error.start}") from None


def choose_template(files, choice: str | None = None) -> "ChatTemplate":
    """The template to use: of the name `choice`, else of a file of that path; the model's default without a choice.

    Raises: ConfigError for a model without templates (never a guess in its place), or a choice that is neither.
    """
    found = templates(files)
    if choice is None and DEFAULT in found:
        return ChatTemplate(found[DEFAULT], "chat template")
    if choice is None and found:
        raise ConfigError(
            f"{files.path}: the model has no default chat template, only named ones ({', '.join(sorted(found))}); "
            "choose with --chat-template NAME"
        )
    if choice is None:
        raise ConfigError(
            f"{files.path}: the model has no chat template (it was not made for conversations, or the template was not "
            "kept); --chat-template FILE gives one"
        )
    if choice in found:
        return ChatTemplate(found[choice], f"chat template {choice}")
    if Path(choice).is_file():
        return ChatTemplate(read_template(choice), str(choice))
    listed = f"the model's are {', '.join(sorted(found))}" if found else "the model has none"
    raise ConfigError(f"--chat-template {choice}: neither a file nor a template of the model; {listed}")


def special_tokens(config: dict) -> dict[str, str]:
    """The variables bos_token, eos_token ... of a template, from tokenizer_config.json."""
    values = {name: config.get(name) for name in _SPECIAL}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _raise_exception(message):
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment():
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks what a model is trained to say; it renders as it stands."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template. where: what errors call it. Raises ConfigError with the line of a syntax error."""

    def __init__(self, source: str, where: str):
        from jinja2.exceptions import TemplateSyntaxError

        self.source, self.where = source, where
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{where}: line {error.lineno}: {error.message}") from None

    def render(self, messages: list[dict], *, add_generation_prompt: bool = True, **variables) -> str:
        """The prompt for [{"role": ..., "content": ...}, ...]. variables: special_tokens() and what a template of a
        family understands (enable_thinking, reasoning_effort ...).

        Raises: ConfigError with the template's own message or the error, and its line.
        """
        variables = {"tools": None, "documents": None, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == _TEMPLATE_FILE]
            place = f"line {lines[-1]}: " if lines else ""
            text = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{self.where}: {place}{text}") from None
