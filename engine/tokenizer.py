"""Text <-> token ids, and the two stream filters between ids and a terminal: whole characters, stop strings.

The `tokenizers` library does the splitting; this module owns the rules around it (beginning and end tokens, bytes of a
token, padding ids of a model whose vocabulary is larger). Knows nothing of weights or sampling.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .errors import ConfigError, WeightsError

# gpt-oss begins the parts of an answer with these; unseen, its thoughts and its answer would run into each other.
_MARKERS = frozenset({"<|start|>", "<|channel|>", "<|message|>"})
_UNDERSCORE = "\u2581"  # what SentencePiece vocabularies write for a space


def byte_level_alphabet() -> dict[str, int]:
    """Return {printable stand-in: byte} of the byte-level vocabularies.

    Source: GPT-2 bytes_to_unicode: printable Latin-1 stays, every other byte becomes chr(256 + running count).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b) if b in printable else chr(256 + others.index(b)): b for b in range(256)}


def _read_json(path: Path, required: bool) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise WeightsError(f"{path}: file is missing; the model directory needs its tokenizer.json") from None
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise WeightsError(f"{path}: got {type(content).__name__}, expected a JSON object")
    return content


def _as_ids(value, where: str) -> list[int]:
    """A token id of a config file: absent, one, or several."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    bad = next((n for n in values if not isinstance(n, int) or isinstance(n, bool) or n < 0), None)
    if bad is not None:
        raise WeightsError(f"{where} = {value!r}: {bad!r} is not a token id")
    return values


def _decoder_kind(spec: dict | None, where: str) -> str:
    """Return "byte_level" or "sentencepiece", or refuse a decoder that this module does not know byte for byte."""
    parts = [] if spec is None else spec["decoders"] if spec.get("type") == "Sequence" else [spec]
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return "sentencepiece"
    names = ", ".join(sorted(map(str, kinds))) or "none"
    raise WeightsError(f"{where}: decoder {names} is not supported (only ByteLevel, or Replace/ByteFallback/Metaspace)")


class Tokenizer:
    """A model's tokenizer.

    tokenizer: text of a tokenizer.json, or a tokenizers.Tokenizer. config: tokenizer_config.json (bos_token,
    add_bos_token, ...). generation_config, model_config: generation_config.json and config.json, for the ids that begin
    and end a text.
    """

    def __init__(
        self,
        tokenizer,
        config: dict | None = None,
        generation_config: dict | None = None,
        model_config: dict | None = None,
        where: str = "tokenizer.json",
    ):
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_str(tokenizer) if isinstance(tokenizer, str) else tokenizer
            decoder = self._backend.decoder
            spec = None if decoder is None else json.loads(decoder.__getstate__())
        except Exception as error:  # the library raises bare Exception
            raise WeightsError(f"{where}: not a valid tokenizer: {error}") from None
        self._where = where
        self._kind = _decoder_kind(spec, where)
        self._alphabet = byte_level_alphabet() if self._kind == "byte_level" else {}
        added = self._backend.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        shown = _MARKERS if {token.content for token in added.values()} >= _MARKERS else frozenset()
        self._special = frozenset(n for n, token in added.items() if token.special and token.content not in shown)
        # The highest id counts, not the number of tokens: a vocabulary may have holes.
        self.vocab_size: int = max(self._backend.get_vocab(True).values(), default=-1) + 1
        self.config = config or {}
        self._read_special_tokens(model_config or {}, generation_config or {})
        self.padded_vocab_size = self.vocab_size

    @classmethod
    def from_dir(
        cls,
        path: str | Path | None,
        generation_config: dict | None = None,
        model_config: dict | None = None,
        model_vocab_size: int | None = None,
    ) -> "Tokenizer":
        """Open tokenizer.json and tokenizer_config.json of a model directory.

        config.json and generation_config.json are read from the directory unless given. model_vocab_size: see
        check_vocabulary.
        Raises WeightsError when tokenizer.json is missing or invalid.
        """
        if path is None:
            raise WeightsError("the model has no tokenizer.json; text cannot be turned into tokens")
        path = Path(path)
        file = path / "tokenizer.json"
        if not path.is_dir():
            raise WeightsError(f"{path}: not a directory; expected a model directory with tokenizer.json")
        _read_json(file, required=True)
        if model_config is None:
            model_config = _read_json(path / "config.json", required=False)
        if generation_config is None:
            generation_config = _read_json(path / "generation_config.json", required=False)
        tokenizer = cls(
            file.read_text(encoding="utf-8"),
            _read_json(path / "tokenizer_config.json", required=False),
            generation_config=generation_config,
            model_config=model_config,
            where=str(file),
        )
        if model_vocab_size is not None:
            tokenizer.check_vocabulary(model_vocab_size)
        return tokenizer

    @classmethod
    def of_model(cls, files, force: str | None = None, model_vocab_size: int | None = None) -> "Tokenizer":
        """The tokenizer of an opened model (weights.base.ModelFiles). force: see from_gguf.

        Raises ConfigError when it is given for a model that has a tokenizer.json.
        """
        if files.gguf_metadata is not None:
            tokenizer = cls.from_gguf(files.gguf_metadata, str(files.path), force)
        elif force is not None:
            raise ConfigError(
                f"--force-tokenizer {force}: only for GGUF files; {files.path} has a tokenizer of its own"
            )
        else:
            tokenizer = cls.from_dir(files.tokenizer_dir, files.generation_config, files.config)
        if model_vocab_size is not None:
            tokenizer.check_vocabulary(model_vocab_size)
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping, where: str = "GGUF", force: str | None = None) -> "Tokenizer":
        """Build the tokenizer that the metadata of a GGUF file describes; see gguf_tokenizer.read_tokenizer."""
        from .gguf_tokenizer import read_tokenizer

        backend, config, generation_config = read_tokenizer(metadata, where, force)
        return cls(backend, config, generation_config, where=where)

    def _named_token(self, key: str) -> int | None:
        value = self.config.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        return self._backend.token_to_id(content) if isinstance(content, str) else None

    def _read_special_tokens(self, model_config: dict, generation_config: dict) -> None:
        def first_given(key, name):
            sources = {"generation_config.json": generation_config, "config.json": model_config}
            for file, source in sources.items():
                ids = _as_ids(source.get(key), f"{file}: {key}")
                if ids:
                    return ids
            named = self._named_token(name)
            return [] if named is None else [named]

        self.eos_ids: frozenset[int] = frozenset(first_given("eos_token_id", "eos_token"))
        self.eos_id: int | None = next(iter(first_given("eos_token_id", "eos_token")), None)
        # tokenizer_config.json decides here: a config.json often carries a default bos_token_id that nothing uses.
        bos = self._named_token("bos_token")
        if bos is None and "bos_token" not in self.config:
            bos = next(iter(first_given("bos_token_id", "bos_token")), None)
        self.bos_id: int | None = bos
        for name in ("add_bos_token", "add_eos_token"):
            if not isinstance(self.config.get(name), bool | None):
                raise WeightsError(f"tokenizer_config.json: {name} = {self.config[name]!r}, expected true or false")
        if self.config.get("add_bos_token") and self.bos_id is None:
            raise WeightsError("tokenizer_config.json: add_bos_token is true, but there is no bos_token")

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Refuse a model with fewer embedding rows than the tokenizer has ids; the ids of further rows are padding,
        which decodes to nothing. Raises WeightsError."""
        if model_vocab_size < self.vocab_size:
            raise WeightsError(
                f"{self._where}: the tokenizer has {self.vocab_size} ids, the model only {model_vocab_size} rows; "
                "this tokenizer belongs to another model"
            )
        self.padded_vocab_size = model_vocab_size

    # ---- text to ids ----

    @property
    def adds_bos(self) -> bool:
        """True when `encode` puts bos before a text."""
        return self.bos_id is not None and self.encode("a")[:1] == [self.bos_id]

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of `text`.

        add_special_tokens: put bos and eos where tokenizer_config.json says so or, when it does not say, where the
        tokenizer's own template does. parse_special: read "<|endoftext|>" and the like in the text as that token;
        false takes them as ordinary characters.
        """
        self._backend.encode_special_tokens = not parse_special
        rules = (self.config.get("add_bos_token"), self.config.get("add_eos_token"))
        if not add_special_tokens or rules == (None, None):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        ids = self._backend.encode(text, add_special_tokens=False).ids
        before = [self.bos_id] if rules[0] and ids[:1] != [self.bos_id] else []
        after = [self.eos_id] if rules[1] and self.eos_id is not None else []
        return before + ids + after

    # ---- ids to text ----

    def is_special(self, token_id: int) -> bool:
        """True for tokens such as end of text that are no part of the text."""
        return token_id in self._special

    def is_added(self, token_id: int) -> bool:
        """True for tokens that are found in a text before it is cut into words: special and user-defined ones."""
        return token_id in self._added

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, which may end inside a character; padding ids give b"".

        Raises ConfigError for an id outside of the vocabulary.
        """
        token_id = int(token_id)
        if not 0 <= token_id < self.padded_vocab_size:
            raise ConfigError(f"token id {token_id} is out of range, expected 0 to {self.padded_vocab_size - 1}")
        if token_id in self._added:
            return self._added[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._kind == "byte_level":
            try:
                return bytes(self._alphabet[character] for character in token)
            except KeyError as error:
                raise WeightsError(f"{self._where}: token {token_id} has {error} outside the byte alphabet") from None
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(_UNDERSCORE, " ").encode()

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """Return the bytes of several tokens, special ones left out unless asked for."""
        return b"".join(self.token_bytes(n) for n in ids if not (skip_special and self.is_special(n)))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that form no character become U+FFFD."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def stream_decoder(self, *, skip_special: bool = True) -> "StreamDecoder":
        """Return a fresh StreamDecoder of this vocabulary."""
        return StreamDecoder(self, skip_special=skip_special)


class StreamDecoder:
    """Token ids in, text out, complete characters only.

    A byte sequence that can no longer become a character gives U+FFFD at once; one that still can is held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes, possibly none."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    @property
    def pending(self) -> bool:
        """True inside of a character."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """End the text: a character that was cut in the middle is dropped, not shown as a replacement mark."""
        self._decoder.reset()
        return ""


class StopMatcher:
    """Text pieces in, text out up to the first stop string, which may lie across any number of pieces.

    Text that may still turn out to be the beginning of a stop string is held back. Raises ConfigError for an empty one.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if not all(self._stops):
            raise ConfigError("stop: a stop string is empty")
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Return the text that is now certain; after a match (`matched` is set) nothing more comes."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # The first to be complete wins, of two that end together the longer: so it never depends on the pieces.
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max((len(stop) for stop in self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._stops):
                return length
        return 0

    def flush(self) -> str:
        """End the text: what was held back is text after all."""
        held, self._held = self._held, ""
        return held
