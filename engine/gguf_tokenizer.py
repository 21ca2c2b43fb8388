"""A tokenizer from the metadata of a GGUF file (tokenizer.ggml.*), built on the `tokenizers` library.

Owns what the keys mean; how words are cut is pretokenizers.py, what a tokenizer does is tokenizer.py.
Source of the keys: the GGUF specification and the converter of llama.cpp.
"""

from collections.abc import Mapping

from .errors import WeightsError
from .pretokenizers import PreTokenizer, pretokenizer

_PREFIX = "tokenizer.ggml."
MODELS = ("gpt2", "llama")  # byte-level BPE, and SentencePiece BPE with scores
_UNDERSCORE = "\u2581"  # what SentencePiece writes for a space
# Values of token_type.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
# Control tokens that end a turn or a text, whatever the file says of eos; files often name only one of several.
_ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<EOT>", "[EOT]", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|user|>",
    "<|observation|>",
)  # fmt: skip


class _Fields:
    """Typed reads of the metadata."""

    def __init__(self, metadata: Mapping, where: str):
        self._metadata, self.where = metadata, where

    def get(self, key: str, kind: type, default=None):
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise WeightsError(f"{self.where}: {_PREFIX}{key} = {value!r}, expected {kind.__name__}")
        return value

    def array(self, key: str, kind: type, length: int | None = None) -> list:
        """An array of `kind`, [] when absent; of `length` items when given."""
        value = self._metadata.get(_PREFIX + key)
        values = [] if value is None else value
        if not isinstance(values, list) or not all(type(item) is kind for item in values):
            raise WeightsError(f"{self.where}: {_PREFIX}{key} = {str(value)[:60]}, expected a list of {kind.__name__}")
        if value is not None and length is not None and len(values) != length:
            raise WeightsError(f"{self.where}: {_PREFIX}{key} has {len(values)} items, the vocabulary {length} tokens")
        return values

    def token_id(self, key: str, count: int) -> int | None:
        value = self.get(f"{key}_token_id", int)
        if value is not None and not 0 <= value < count:
            raise WeightsError(f"{self.where}: {_PREFIX}{key}_token_id = {value}, the vocabulary has {count} tokens")
        return value


def _vocabulary(tokens: list[str], where: str) -> dict[str, int]:
    vocab = {token: n for n, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for n, token in enumerate(tokens) if vocab[token] != n)
        raise WeightsError(f"{where}: {_PREFIX}tokens holds {twice!r} more than once")
    return vocab


def _byte_level(fields: _Fields, tokens: list[str], types: list[int], rules: PreTokenizer):
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = _vocabulary(tokens, fields.where)
    for n, kind in enumerate(types):
        if kind == UNUSED:  # padding up to the rows of the embedding
            del vocab[tokens[n]]
    merges = [tuple(merge.split(" ", 1)) for merge in fields.array("merges", str)]
    bad = next((m for m in merges if len(m) != 2 or m[0] not in vocab or m[1] not in vocab or m[0] + m[1] not in vocab),
               None)  # fmt: skip
    if bad or not merges:
        what = f"has {' '.join(bad)!r}, of which no token can be made" if bad else "is missing"
        raise WeightsError(f"{fields.where}: {_PREFIX}merges {what}")
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: _Fields, tokens: list[str], types: list[int]):
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = _vocabulary(tokens, fields.where)
    scores = fields.array("scores", float, len(tokens))
    if not scores:
        raise WeightsError(f"{fields.where}: {_PREFIX}scores is missing; a vocabulary of kind llama needs it")
    missing = next((n for n in range(256) if f"<0x{n:02X}>" not in vocab), None)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    if missing is not None and unknown is None:
        raise WeightsError(f"{fields.where}: the vocabulary has neither a token <0x{missing:02X}> nor an unknown token")
    merges = sentencepiece_merges(vocab, scores)
    model = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=missing is None)
    backend = Tokenizer(model)
    spaces = [normalizers.Replace(" ", _UNDERSCORE)]
    if fields.get("add_space_prefix", bool, True):
        spaces.insert(0, normalizers.Prepend(_UNDERSCORE))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence([decoders.Replace(_UNDERSCORE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def sentencepiece_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece makes them: the pair whose piece has the best score first."""
    found = []
    for piece, n in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[n], n, len(left), left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_tokens(backend, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    def of(*kinds: int, special: bool) -> list:
        found = (token for token, kind in zip(tokens, types, strict=True) if kind in kinds)
        return [AddedToken(token, normalized=False, special=special) for token in found]

    backend.add_special_tokens(of(UNKNOWN, CONTROL, special=True))
    backend.add_tokens(of(USER_DEFINED, special=False))


def read_tokenizer(metadata: Mapping, where: str = "GGUF", force: str | None = None):
    """Return (backend, config, generation_config) for tokenizer.Tokenizer.

    config and generation_config say what tokenizer_config.json and generation_config.json of a checkpoint would.
    force: name of the pre-tokenizer to use, whatever the file says.
    Raises: WeightsError for a kind of vocabulary or a pre-tokenizer that is not known, by name, and for arrays that do
    not fit each other.
    """
    fields = _Fields(metadata, where)
    model = fields.get("model", str)
    if model not in MODELS:
        found = "no tokenizer (tokenizer.ggml.model is missing)" if model is None else f"tokenizer model {model!r}"
        raise WeightsError(f"{where}: {found} is not supported; known: {', '.join(MODELS)}")
    tokens = fields.array("tokens", str)
    if not tokens:
        raise WeightsError(f"{where}: {_PREFIX}tokens is missing")
    types = fields.array("token_type", int, len(tokens)) or [1] * len(tokens)
    rules = None
    if model == "gpt2":
        rules = pretokenizer(force or fields.get("pre", str), where)
        backend = _byte_level(fields, tokens, types, rules)
    else:
        backend = _sentencepiece(fields, tokens, types)
    _add_tokens(backend, tokens, types)
    config = _config(fields, tokens, model == "llama" or rules.adds_bos)
    return backend, config, {"eos_token_id": _end_ids(fields, tokens, types)}


def _config(fields: _Fields, tokens: list[str], adds_bos: bool) -> dict:
    config = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.token_id(key, len(tokens))
        config[f"{name}_token"] = None if token_id is None else tokens[token_id]
    config["add_bos_token"] = fields.get("add_bos_token", bool, adds_bos and config["bos_token"] is not None)
    if config["add_bos_token"] and config["bos_token"] is None:
        raise WeightsError(f"{fields.where}: {_PREFIX}add_bos_token is true, but there is no bos_token_id")
    config["add_eos_token"] = fields.get("add_eos_token", bool, False)
    return config


def _end_ids(fields: _Fields, tokens: list[str], types: list[int]) -> list[int]:
    """Ids that end an answer: eos first, then eot and eom, then control tokens known to do so by their text."""
    named = (fields.token_id(key, len(tokens)) for key in ("eos", "eot", "eom"))
    by_text = (n for n, kind in enumerate(types) if kind == CONTROL and tokens[n] in _ENDS)
    return list(dict.fromkeys(n for n in (*named, *by_text) if n is not None))
