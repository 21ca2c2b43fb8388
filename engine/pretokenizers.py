"""How text is cut into words before byte-pair merges, by the name that a GGUF file gives in tokenizer.ggml.pre.

Each entry is a sequence of regular expressions: the first cuts the text, the next cuts every piece that came out, and
so on; what lies between two matches is a piece too. Sources: the tokenizer.json of the models that the names come
from (syntax: Oniguruma, as in the `tokenizers` library).
"""

from dataclasses import dataclass

from .errors import WeightsError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


def _llama3(digits: str, letters: str = r"\p{L}") -> str:
    """Contractions, words with one leading character, runs of digits, punctuation with its line ends, blanks."""
    mark = r"\p{M}" if "M" in letters else ""
    word = letters if not mark else f"[{letters}]"
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{word}+|{digits}| ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _cased(digits: str, suffix: str) -> str:
    """Words cut where a lower-case letter is followed by an upper-case one."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


def _char_class(ranges: str) -> str:
    """ "41-5A B5" -> a character class of these code points."""
    points = (part.split("-") for part in ranges.split())
    return "[" + "".join("-".join(chr(int(point, 16)) for point in pair) for pair in points) + "]"


# Letters of the scripts that have upper and lower case, as DeepSeek's first tokenizer lists them.
_CASED_LETTERS = _char_class(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_PUNCTUATION = _char_class("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_DEEPSEEK_CJK = _char_class("4E00-9FA5 800-4E00 AC00-D7FF")
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """patterns: see above. ignore_merges: a word that is a token is that token, whatever the merges say. nfc: text is
    composed first. adds_bos: what a file means that does not say whether texts begin with bos."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False


_GPT2_WORDS = PreTokenizer((_GPT2,))
_GPT2_COMPOSED = PreTokenizer((_GPT2,), nfc=True)
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_llama3(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_LLAMA3_MERGED = PreTokenizer((_llama3(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_llama3(r"\p{N}"),), nfc=True)
_QWEN2_AS_IS = PreTokenizer((_llama3(r"\p{N}"),))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3_WORDS))
_GPT4O = PreTokenizer((_cased(r"\p{N}{1,3}", f"{_CONTRACTION}?"),))

_TABLE = {
    "gpt-2": _GPT2_WORDS,
    "phi-2": _GPT2_WORDS,
    "olmo": _GPT2_COMPOSED,
    "dolma": _GPT2_COMPOSED,
    "mpt": _GPT2_COMPOSED,
    "refact": _SINGLE_DIGITS,  # Granite
    "starcoder": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _LLAMA3_MERGED,
    "smaug-bpe": _LLAMA3_MERGED,
    "chatglm-bpe": _LLAMA3_MERGED,
    "glm4": PreTokenizer((_llama3(r"\p{N}{1,3}"),), ignore_merges=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer((_llama3(r"\p{N}", r"\p{L}\p{M}"),)),
    "stablelm2": _QWEN2_AS_IS,
    "hunyuan": _QWEN2_AS_IS,
    "grok-2": _QWEN2_AS_IS,
    "hunyuan-dense": _DEEPSEEK3,
    "deepseek-v3": _DEEPSEEK3,
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?{_CASED_LETTERS}+", rf"\s?{_DEEPSEEK_PUNCTUATION}+", r"\s+$", f"{_DEEPSEEK_CJK}+", r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"{_DEEPSEEK_CJK}+", r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "gpt-4o": _GPT4O,  # gpt-oss
    "llama4": _GPT4O,
    "minimax-m2": _GPT4O,
    "tekken": PreTokenizer((_cased(r"\p{N}", ""),), ignore_merges=True, adds_bos=True),
    "bailingmoe": PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
_TABLE["bailingmoe2"] = _TABLE["llada-moe"] = _TABLE["bailingmoe"]


def known() -> list[str]:
    """Names that `pretokenizer` takes."""
    return sorted(_TABLE)


def pretokenizer(name: str | None, where: str) -> PreTokenizer:
    """The rules of a name. Raises WeightsError with the list of names for one that is not known, or for none."""
    if name in _TABLE:
        return _TABLE[name]
    found = "tokenizer.ggml.pre is missing" if name is None else f"pre-tokenizer {name!r} is not known"
    raise WeightsError(
        f"{where}: {found}, and a wrong one gives wrong tokens; known: {', '.join(known())}; "
        "--force-tokenizer NAME takes one of them all the same"
    )
