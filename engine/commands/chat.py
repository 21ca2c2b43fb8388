"""`millstream chat`: a conversation on a terminal, or line by line from a pipe."""

import sys
from collections.abc import Iterator

import click

from ..errors import ConfigError, EngineError
from . import _conversation, _options, _recoding, _sampling, _speculation, _streaming
from ._output import decode_utf8, note, write, write_file
from .generate import describe_spec, describe_stats

HELP = """\
/reset           forget the conversation, keep the system message
/system TEXT     begin again with this system message; without TEXT, with none
/save FILE       write the conversation as JSON
/quit            leave (so does Ctrl-D)
/help            this list
A line that ends with \\ goes on in the next one; lines between two lines of \"\"\" are one message.
Ctrl-C stops an answer, and clears what you are typing."""
FENCE = '"""'


class Input:
    """Lines of the user, from a terminal (with editing and history where readline is there) or a pipe."""

    def __init__(self):
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        # input() edits lines only when both ends are terminals; otherwise its prompt would land in the product.
        self._editing = self.interactive and sys.stdout is not None and sys.stdout.isatty()
        if self._editing:
            try:
                import readline  # noqa: F401 - importing it gives input() its editing and history
            except ImportError:
                note("note: this Python has no readline, so lines cannot be edited")

    def line(self, prompt: str) -> str:
        """One line without its end. Raises EOFError at the end of the input."""
        if self._editing:
            return input(prompt)
        if self.interactive and sys.stderr is not None:
            print(prompt, end="", file=sys.stderr, flush=True)
        if sys.stdin is None:
            raise EOFError
        data = sys.stdin.buffer.readline()
        if not data:
            raise EOFError
        return decode_utf8(data, "stdin").removesuffix("\n").removesuffix("\r")

    def messages(self) -> Iterator[str]:
        """What the user sends: a line, lines joined by a final backslash, or the lines between two fences."""
        while True:
            try:
                yield self._message()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                note("\n(/quit or Ctrl-D leaves)")
            except EOFError:
                if self.interactive:
                    note("")
                return

    def _message(self) -> str:
        line = self.line("> ")
        if line.strip() == FENCE:
            lines = []
            while (line := self._next(FENCE)).strip() != FENCE:
                lines.append(line)
            return "\n".join(lines)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._next("a line after the final \\"))
        return "\n".join(lines)

    def _next(self, expected: str) -> str:
        """A further line of a message. Raises ConfigError where a pipe ends before `expected`: half a message is not
        sent, and not dropped without a word."""
        try:
            return self.line(". ")
        except EOFError:
            if self.interactive:
                raise
            raise ConfigError(f"stdin: ends inside of a message, expected {expected}") from None


class Chat:
    """One run of the command. options: max_tokens, sampling, stop ... of every answer."""

    def __init__(self, conversation, interactive: bool, options: dict):
        self.conversation, self.interactive, self.options = conversation, interactive, options

    def command(self, line: str) -> bool:
        """Run a line that begins with a slash; false when it ends the chat."""
        name, _, text = line.partition(" ")
        text = text.strip()
        if name == "/quit":
            return False
        if name == "/reset":
            self.conversation.reset(self.conversation.system)
            note("the conversation is empty")
        elif name == "/system":
            self.conversation.reset(text or None)
            note(f"the conversation is empty, system message: {text or 'none'}")
        elif name == "/save" and text:
            save(text, self.conversation.messages)
            note(f"{text}: {len(self.conversation.messages)} messages")
        elif name == "/help":
            note(HELP)
        else:
            what = "/save needs a file name" if name == "/save" else f"{name} is no command"
            raise ConfigError(f"{what}; /help lists them")
        return True

    def answer(self, message: str) -> None:
        """One turn; Ctrl-C stops the answer and keeps what there is of it."""
        conversation = self.conversation
        try:
            generation = conversation.ask(message, **self.options)
        finally:
            if conversation.num_forgotten:
                note(f"note: the context is full; the {conversation.num_forgotten} oldest messages were forgotten")
        reason = None
        try:
            for piece in generation:
                write(piece)
        except KeyboardInterrupt:
            reason = "interrupted"
        if not generation.text.endswith("\n"):
            write("\n")
        conversation.keep(generation)
        reason = reason or generation.finish_reason
        used = len(generation.prompt_token_ids) + len(generation.token_ids)
        note(f"[{describe_stats(generation, reason)}; context {used} of {conversation.engine.max_context}]")
        if generation.stats.spec is not None:
            note(f"[{describe_spec(generation.stats.spec)}]")
        if reason == "context":
            note("note: the answer was cut, the context is full; /reset starts again")

    def run(self, messages: Iterator[str]) -> None:
        for message in messages:
            try:
                if message.startswith("/") and "\n" not in message:
                    if not self.command(message):
                        return
                elif message.strip():
                    self.answer(message)
            except (ConfigError, OSError) as error:
                if not self.interactive:
                    raise error if isinstance(error, EngineError) else ConfigError(str(error)) from None
                note(f"error: {error}")
            except KeyboardInterrupt:  # before an answer began, or after it ended
                if not self.interactive:
                    raise
                note("")


def save(path: str, messages: list[dict]) -> None:
    """Write {"messages": [...]} as JSON, complete or not at all. Raises ConfigError."""
    import json

    write_file("/save", path, json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n")


@click.command()
@_options.runtime_options
@_streaming.options
@click.option("--ctx", type=click.IntRange(min=1), metavar="N", help="Context in tokens (default: the model's).")
@click.option("--max-tokens", "-n", type=click.IntRange(min=1), metavar="N",
              help="Tokens of an answer at most (default: what the context holds).")  # fmt: skip
@_conversation.chat_options
@_conversation.prompt_cache_option
@click.option("--truncate", is_flag=True, help="Forget the oldest turns when the context is full.")
@_sampling.options
@click.option("--stop", multiple=True, metavar="TEXT", help="End an answer before this text; repeatable.")
@_speculation.spec_options
def chat(max_tokens, chat_template, system, prompt_cache, truncate, stop, spec, draft, **options):
    """Talk to a model. Each line is a message; /help lists the commands.

    What was said stays in the KV cache: a follow-up only computes what is new. Answers go to stdout, everything else
    to stderr; from a pipe, every line of stdin is a message.
    """
    import engine

    runtime = {"model": options.pop("model")} | _options.take_runtime(options)
    choices = _speculation.spec_choices(spec, draft, runtime["draft_model"], runtime["cut_drafts"])
    runtime["mtp"] = "mtp" in choices["draft"]
    _sampling.check_flags(options)
    loaded = engine.load(runtime.pop("model"), **runtime)
    note(_options.describe(loaded))
    for line in _options.format_notes(loaded):
        note(line)
    _streaming.print_plan(loaded)
    _recoding.watch(loaded)
    sampling, sources = _sampling.choose_sampling(loaded, options)
    note(_sampling.describe_sampling(sampling, sources))
    session, cache = _conversation.open_session(loaded, prompt_cache)
    conversation = _conversation.open_conversation(loaded, chat_template, system, truncate=truncate, session=session)
    lines = Input()
    if lines.interactive:
        note("/help lists the commands")
    answers = {"max_tokens": max_tokens, "sampling": sampling, "stop": list(stop), **choices}
    try:
        with _streaming.usage_history(loaded):
            Chat(conversation, lines.interactive, answers).run(lines.messages())
    finally:
        if cache is not None:
            note(cache.save())
    _streaming.print_summary(loaded)
