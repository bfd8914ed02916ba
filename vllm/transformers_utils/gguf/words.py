"""List the rules by which byte-level tokenizers split a text into words, by their names in GGUF
files.

The patterns are published in the tokenizers of the models. Each word is then split into bytes,
which BPE merges to tokens.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """A rule for splitting a text into words, and other properties of tokenizers that use it."""

    patterns: tuple[str, ...]
    """Regular expressions of words. Each one splits the pieces of the one before."""
    keeps_whole_words: bool = False
    """A word that is a token is not split into smaller ones."""
    normalizes: bool = False
    """Whether texts are converted to Unicode form NFC."""
    adds_bos: bool = False
    """Whether texts begin with the BOS token, if the metadata does not contain this."""


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_PUNCTUATION = r"[\p{P}$+<=>^`|~]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LINE_END = r"[\r\n]"
_ASIAN = "[一-龥\u0800-一가-\ud7ff]+"
_KANA = "[一-龥\u3040-ゟ\u30a0-ヿ]+"
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f "
    "386 388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd "
    "1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 "
    "1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 "
    "2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 "
    "2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 "
    "a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
"""Ranges of code points that DeepSeek LLM reads as letters of words."""
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


def _class(ranges: str) -> str:
    """Return a character class for ranges of code points, which are given in hexadecimal."""
    codes = (each.partition("-") for each in ranges.split())
    return "".join(
        chr(int(first, 16)) + (f"-{chr(int(last, 16))}" if last else "") for first, _, last in codes
    )


def _cl100k(digits: str, marks: str = "", line_ends: str = r"[\r\n]*") -> str:
    """Return the pattern of words for GPT-4, or for tokenizers that differ from it in a part.

    Args:
        digits: pattern of a word of digits.
        marks: elements of a class: characters that also count as letters.
        line_ends: pattern of what may follow signs.
    """
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+"
    signs = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+{line_ends}"
    return f"{_ENDINGS}|{word}|{digits}|{signs}|{_SPACES}"


def _by_case(digits: str, endings: str = "", without: str = "", line_signs: str = "/") -> str:
    """Return the pattern of words as in GPT-4o, where a capital after a small letter begins a word.

    Args:
        digits: pattern of a word of digits.
        endings: pattern of what may follow the letters of a word.
        without: appended to a class: excludes letters that are separate words.
        line_signs: characters that may follow signs, in addition to line ends.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{endings}|{before}{upper}+{lower}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{line_signs}]*|{_SPACES}"


_UP_TO_THREE = r"\p{N}{1,3}"
_LLAMA3 = _cl100k(_UP_TO_THREE)
_DEEPSEEK_SIGNS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_RULES = {
    "default": Words((_PUNCTUATION.replace("`", ""), _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "gpt-2 gpt2 phi-2 jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 roberta-bpe "
    "jina-v1-en jina-v2-code jina-es jina-de jina-v2-es jina-v2-de": Words((_GPT2,)),
    "mpt olmo": Words((_GPT2,), normalizes=True),
    "smollm starcoder refact command-r codeshell minerva-7b exaone": Words((_DIGIT, _GPT2)),
    "falcon": Words((_PUNCTUATION, _GPT2, _THREE_DIGITS)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Words(
        (_LLAMA3,), keeps_whole_words=True, adds_bos=True
    ),
    "glm4": Words((_LLAMA3,), keeps_whole_words=True),
    "smaug-bpe dbrx chatglm-bpe": Words((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen megrez kormo": Words((_cl100k(_DIGIT),), normalizes=True),
    "qwen35": Words((_cl100k(_DIGIT, r"\p{M}"),)),
    "stablelm2 hunyuan grok-2 bailingmoe bailingmoe2 llada-moe": Words((_cl100k(_DIGIT),)),
    "seed-coder": Words((_cl100k(_DIGIT, line_ends=""),)),
    "tekken": Words((_by_case(_DIGIT),), keeps_whole_words=True, adds_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": Words((_by_case(_UP_TO_THREE, f"{_ENDINGS}?"),)),
    "kimi-k2": Words(
        (r"\p{Han}+", _by_case(_UP_TO_THREE, f"{_ENDINGS}?", r"&&[^\p{Han}]", line_signs=""))
    ),
    "deepseek-llm": Words(
        (_LINE_END, rf"\s?[{_class(_CASED)}]+", _DEEPSEEK_SIGNS, r"\s+$", _ASIAN, _DIGIT)
    ),
    "deepseek-coder": Words((_LINE_END, r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm": Words((_UP_TO_THREE, _KANA, _DEEPSEEK3)),
    "bloom poro-chat gpt3-finnish": Words((_BLOOM,)),
    "viking": Words((_BLOOM, _DIGIT)),
    "superbpe": Words((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}
WORDS = {name: words for names, words in _RULES.items() for name in names.split()}
"""`tokenizer.ggml.pre` -> how words are split."""
