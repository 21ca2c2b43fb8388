"""A conversation: messages, the prompt they render to, and the session whose cache holds what was said so far.

Owns what is reused between turns and what happens when the context is full; knows no terminal.
"""

import re

from .chat_template import ChatTemplate, special_tokens
from .errors import ConfigError
from .session import Session

# A part of gpt-oss's answers: its channel, perhaps a recipient, and its text up to the next part.
_CHANNEL = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|start\|>|<\|channel\|>|\Z)", re.S)


def assistant_message(text: str) -> dict:
    """The message of an answer. gpt-oss's channels become the fields that its template wants; other text is content."""
    if "<|channel|>" not in text:
        return {"role": "assistant", "content": text}
    parts = _CHANNEL.findall(text)
    thoughts = [part for channel, part in parts if channel == "analysis"]
    said = [part for channel, part in parts if channel != "analysis"]
    return {"role": "assistant", "content": "\n".join(said)} | ({"thinking": "\n".join(thoughts)} if thoughts else {})


class Conversation:
    """Turns of one chat on one engine.

    template: see chat_template.choose_template. system: text of a system message. truncate: forget the oldest turns
    when the context is full, instead of refusing. session: its cache; None = a new one of the whole context.
    messages: what was said. num_forgotten: messages that truncate dropped in the last turn.
    """

    def __init__(
        self,
        engine,
        template: ChatTemplate,
        system: str | None = None,
        truncate: bool = False,
        session: Session | None = None,
    ):
        self.engine, self.template, self.truncate = engine, template, truncate
        self.session = session or Session(engine)
        self.num_forgotten = 0
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Start again with nothing but a system message."""
        self.messages: list[dict] = [{"role": "system", "content": system}] if system else []
        self._text, self._ids = "", []  # the rendered conversation that _ids stand for, the last answer included

    @property
    def system(self) -> str | None:
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    def render(self, messages: list[dict]) -> str:
        return self.template.render(messages, **special_tokens(self.engine.tokenizer.config))

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered conversation. What the model said itself keeps the tokens that it said it with, so that
        they are found in the cache, as long as a token of the template follows (a border that no merge crosses)."""
        tokenizer = self.engine.tokenizer
        if self._text and text.startswith(self._text):
            rest = tokenizer.encode(text[len(self._text) :], add_special_tokens=False)
            if rest and tokenizer.is_added(rest[0]):
                return self._ids + rest
        return tokenizer.encode(text, add_special_tokens=False)

    def ask(self, content: str, **options):
        """The Generation of the answer to a user's message. options: those of Engine.generate. Both become part of the
        conversation with `keep`.

        Raises ConfigError when the template refuses the message, or it does not fit the context with room for at least
        one token.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        text = self.render(messages)
        ids = self.encode(text)
        self.num_forgotten = 0
        while len(ids) >= self.engine.max_context:
            if not self.truncate or not self._forget(messages):
                raise ConfigError(self._too_long(len(ids)))
            text = self.render(messages)
            ids = self.encode(text)
        generation = self.engine.generate(ids, session=self.session, **options)
        self._asked = messages, text, ids
        return generation

    def _forget(self, messages: list[dict]) -> bool:
        """Drop the oldest question and its answer; false when only the last question is left."""
        first = 1 if messages[0]["role"] == "system" else 0
        end = next((n for n in range(first + 1, len(messages)) if messages[n]["role"] == "user"), None)
        if end is None:
            return False
        self.num_forgotten += end - first
        del messages[first:end]
        return True

    def _too_long(self, count: int) -> str:
        context = self.engine.max_context
        hint = "shorten it" if self.truncate else "start again with /reset, or forget the oldest turns with --truncate"
        return (
            f"the conversation has {count} tokens, the context holds {context} and needs room for at least one more; "
            f"{hint}{self.engine.larger_context_hint()}"
        )

    def keep(self, generation) -> None:
        """Add the last question and its answer, also one that was interrupted."""
        messages, text, ids = self._asked
        self.messages = [*messages, assistant_message(generation.text)]
        said = self._said(generation)
        self._text, self._ids = ("", []) if said is None else (text + generation.text, ids + said)

    def _said(self, generation) -> list[int] | None:
        """The tokens that an answer's text consists of, without those of half a character at its end; None when it ends
        inside of one (before a stop text)."""
        decoder, text = self.engine.tokenizer.stream_decoder(), ""
        for n, token in enumerate([*generation.token_ids, None]):
            if text == generation.text and not decoder.pending:
                return generation.token_ids[:n]
            text += decoder.push(token) if token is not None else ""
        return None
