"""What generate and chat share: options of chat templates and of the prompt cache."""

import click

from ..errors import ConfigError
from ._output import note


def chat_options(command):
    """--chat-template, --system."""
    template = click.option(
        "--chat-template", metavar="NAME|FILE", help="A named template of the model, or a jinja file."
    )
    system = click.option("--system", metavar="TEXT", help="System message of the conversation.")
    return template(system(command))


def prompt_cache_option(command):
    return click.option(
        "--prompt-cache", metavar="FILE", help="Keep what was computed in FILE, and start from what it holds."
    )(command)


def open_session(loaded, path: str | None):
    """(session, cache): a session filled from the file at `path`, and the file; (None, None) without a path."""
    if path is None:
        return None, None
    from ..prompt_cache import PromptCache
    from ..session import Session

    session = Session(loaded)
    cache = PromptCache(path, session, loaded)
    note(cache.restore())
    return session, cache


def open_conversation(loaded, chat_template: str | None, system: str | None, **options):
    """A Conversation on the model's own template, or the chosen one. options: truncate, session."""
    from ..chat import Conversation
    from ..chat_template import choose_template

    conversation = Conversation(loaded, choose_template(loaded.files, chat_template), system, **options)
    ends = sorted(loaded.tokenizer.eos_ids)
    names = [loaded.tokenizer.decode([token], skip_special=False) for token in ends]
    listed = ", ".join(f"{name!r} ({token})" for name, token in zip(names, ends, strict=True)) or "none"
    note(f"chat: {conversation.template.where}; stop tokens: {listed}")
    return conversation


def check_chat_options(chat: bool, chat_template: str | None, system: str | None) -> None:
    """Refuse what would do nothing. Raises ConfigError."""
    if not chat and (chat_template is not None or system is not None):
        name = "--chat-template" if chat_template is not None else "--system"
        raise ConfigError(f"{name} does nothing without --chat")
