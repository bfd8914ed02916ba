"""Convert the tokenizer in the metadata of a GGUF model to files of the library tokenizers.

There are four kinds: byte-level BPE (`gpt2`), whose metadata names the rule by which a text is
split into words; SentencePiece BPE (`llama`), whose metadata has a score for each token; the same
with merges instead of scores (`gemma4`); and WordPiece (`bert`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.transformers_utils.gguf.config import ENDS_OF_TURN
from vllm.transformers_utils.gguf.model import GGUFModel
from vllm.transformers_utils.gguf.words import WORDS, Words
from vllm.utils.text.bpe_merges import merges_in_order

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

logger = init_logger(__name__)

_Item = TypeVar("_Item")

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type`."""
_FOUND_FIRST = (_UNKNOWN, _CONTROL, _USER_DEFINED)
"""Kinds of tokens that are found in a text before it is split into words."""
_SPACE = "\u2581"
_INSIDE_WORD = "##"
"""Text before a piece of WordPiece that does not begin a word."""
_KINDS = ("gpt2", "llama", "gemma4", "bert")
"""Values of `tokenizer.ggml.model`."""
_SPECIAL: Mapping[str, Sequence[str]] = {
    "bos": ("bos",),
    "eos": ("eos",),
    "unk": ("unknown",),
    "pad": ("padding",),
    "mask": ("mask",),
}
"""Special token -> its names in the metadata, the first one that is there counts."""
_SPECIAL_OF_BERT = {"cls": ("cls", "bos"), "sep": ("seperator", "separator", "eos")}
_PRE = "tokenizer.ggml.pre"
_TEMPLATE = "tokenizer.chat_template"
"""The chat template. Others are named after it, such as `tokenizer.chat_template.tool_use`."""
_PHI3 = "<|placeholder1|>"
"""A token that only the vocabulary of Phi-3 has. Its special tokens take the white space after
them, which the metadata does not say."""
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class _Ends:
    """The special tokens before and after a text."""

    before: str
    after: str
    adds_before: bool
    """Whether to add the token before a text, if the metadata does not say it."""
    adds_after: bool = False


def tokenizer_files(model: GGUFModel) -> dict[str, str]:
    """Return the content of tokenizer.json and tokenizer_config.json, by name.

    Raises:
        ConfigError: the metadata has no tokenizer, or an unsupported one.
    """
    kind = model.metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise ConfigError(
            f"the metadata 'tokenizer.ggml.model' is {str(kind)[:40]!r}; supported: "
            f"{', '.join(_KINDS)}"
        )
    tokens, kinds = _list(model, "tokens", str), None
    if "tokenizer.ggml.token_type" in model.metadata:
        kinds = _list(model, "token_type", int, len(tokens))
        kinds = [
            _CONTROL if token in ENDS_OF_TURN else kind
            for token, kind in zip(tokens, kinds, strict=True)
        ]
    tokens = _with_one_id_each(tokens, kinds)
    names, ends = _SPECIAL, _Ends("bos", "eos", adds_before=True)
    if kind == "bert":
        made = _word_pieces(model, tokens, kinds)
        names, ends = {**_SPECIAL, **_SPECIAL_OF_BERT}, _Ends("cls", "sep", True, True)
    elif kind == "gpt2":
        words = _words_of(model)
        made = _bytes(model, tokens, words)
        ends = _Ends("bos", "eos", words.adds_bos)
    elif kind == "gemma4":
        made = _pieces(model, tokens, _merges(model), adds_space=False)
    else:
        scores = _list(model, "scores", float, len(tokens))
        best = sorted(range(len(tokens)), key=lambda i: (-scores[i], i))
        ranks = {token: i for i, token in enumerate(tokens)}
        merges = list(merges_in_order([tokens[i] for i in best], ranks))
        made = _pieces(model, tokens, merges, adds_space=True)
    if kinds is not None:
        _add_tokens(made, tokens, kinds, is_phi3=kind == "llama" and _PHI3 in tokens)
    settings = _special_tokens(model, tokens, names)
    _add_ends(made, model, tokens, settings, ends)
    if templates := _chat_templates(model):
        settings["chat_template"] = templates
    if kind == "bert":
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps(config)}


def _chat_templates(model: GGUFModel) -> str | list[dict[str, str]] | None:
    """Return the chat template, or a list as in tokenizer_config.json if there are several, which
    have names; None if there is none.
    """
    first = model.metadata.get(_TEMPLATE)
    named = {
        key.removeprefix(f"{_TEMPLATE}."): value
        for key, value in model.metadata.items()
        if key.startswith(f"{_TEMPLATE}.") and isinstance(value, str)
    }
    if not named:
        return first if isinstance(first, str) else None
    if isinstance(first, str):
        named = {"default": first} | named
    return [{"name": name, "template": template} for name, template in named.items()]


def _with_one_id_each(tokens: list[str], kinds: list[int] | None) -> list[str]:
    """Return the vocabulary with other names for special tokens whose text an earlier token has.

    Files of Gemma 4 have two ids for '<|image>': the first one is the id of the text.

    Raises:
        ConfigError: an ordinary token has more than one id.
    """
    if len(set(tokens)) == len(tokens):
        return tokens
    made: dict[str, None] = {}
    for i, token in enumerate(tokens):
        if token in made:
            if kinds is None or kinds[i] not in _FOUND_FIRST:
                raise ConfigError(
                    f"the metadata 'tokenizer.ggml.tokens' has {token[:40]!r} more than once; "
                    "each token must have one id: convert the model again, or give --tokenizer"
                )
            token = f"{token}#{i}"
        made[token] = None
    return list(made)


def _words_of(model: GGUFModel) -> Words:
    name = model.metadata.get(_PRE, "default")
    if name not in WORDS:
        raise ConfigError(
            f"the metadata {_PRE!r} is {str(name)[:40]!r}, which is not a known rule to split "
            "text into words. Give the tokenizer of the original model with --tokenizer"
        )
    return WORDS[name]


def warn_of_missing_rule(model: GGUFModel) -> None:
    """Log a warning if the metadata should name the rule for splitting a text into words and does
    not.
    """
    if model.metadata.get("tokenizer.ggml.model") == "gpt2" and _PRE not in model.metadata:
        logger.warning(
            "%s has no metadata %r, the rule that splits a text into words: an old tool has "
            "converted it. The default rule of llama.cpp is used, and token ids may differ from "
            "the token ids that the model was trained with. Convert the model again, or give "
            "--tokenizer",
            model.paths[0],
            _PRE,
        )


def _bytes(model: GGUFModel, tokens: list[str], words: Words) -> "Tokenizer":
    """Return a byte-level BPE tokenizer, whose merges are in the metadata."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    made = Tokenizer(_bpe(tokens, _merges(model), ignore_merges=words.keeps_whole_words))
    if words.normalizes:
        made.normalizer = normalizers.NFC()
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _merges(model: GGUFModel) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are merged, the first ones first.

    Raises:
        ConfigError: there is no list of such pairs.
    """
    parts = [line.partition(" ") for line in _list(model, "merges", str)]
    pairs = [(first, second) for first, _, second in parts]
    if any(not first or not second or " " in second for first, second in pairs):
        raise ConfigError(
            "the metadata 'tokenizer.ggml.merges' must be a list of strings, each of two tokens "
            "with a space between them"
        )
    return pairs


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **settings: Any) -> "models.BPE":
    from tokenizers import models

    try:
        return models.BPE({token: i for i, token in enumerate(tokens)}, merges, **settings)
    except Exception as error:  # the library raises a plain Exception
        raise ConfigError(
            f"the metadata 'tokenizer.ggml.merges' names tokens that are not in "
            f"'tokenizer.ggml.tokens': {error}"
        ) from error


def _pieces(
    model: GGUFModel, tokens: list[str], merges: list[tuple[str, str]], *, adds_space: bool
) -> "Tokenizer":
    """Return a BPE tokenizer as SentencePiece has: a sign instead of each space, and tokens for
    the bytes of characters that the vocabulary lacks.

    Args:
        model: model with the tokenizer.
        tokens: vocabulary.
        merges: pairs of tokens, the first ones are merged first.
        adds_space: whether a text gets a space before it if the metadata does not say it.
    """
    from tokenizers import Tokenizer, decoders, normalizers

    unknown = tokens[_unknown_id(model, tokens)]
    made = Tokenizer(_bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if model.metadata.get("tokenizer.ggml.add_space_prefix", adds_space):
        steps.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(decoding)
    return made


def _word_pieces(model: GGUFModel, tokens: list[str], kinds: list[int] | None) -> "Tokenizer":
    """Return a WordPiece tokenizer (BERT).

    The file marks a piece that begins a word by a space, and other pieces lack the signs that they
    have in vocab.txt.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces: dict[str, int] = {}
    for i, token in enumerate(tokens):
        is_special = kinds is not None and kinds[i] in (_UNKNOWN, _CONTROL)
        if token.startswith(_SPACE):
            token = token.removeprefix(_SPACE)
        elif not is_special and not (token.startswith("[") and token.endswith("]")):
            token = _INSIDE_WORD + token
        pieces[token] = i
    unknown = tokens[_unknown_id(model, tokens)]
    made = Tokenizer(models.WordPiece(pieces, unk_token=unknown))
    switches = [
        bool(model.metadata.get(f"tokenizer.ggml.normalizer.{name}", True))
        for name in ("lowercase", "strip_accents")
    ]
    made.normalizer = normalizers.BertNormalizer(lowercase=switches[0], strip_accents=switches[1])
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(_INSIDE_WORD)
    return made


def _unknown_id(model: GGUFModel, tokens: list[str]) -> int:
    unknown = model.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise ConfigError(
            "the metadata 'tokenizer.ggml.unknown_token_id' must be a token id from 0 to "
            f"{len(tokens) - 1}, got {str(unknown)[:40]}"
        )
    return unknown


def _add_tokens(made: "Tokenizer", tokens: list[str], kinds: list[int], *, is_phi3: bool) -> None:
    """Add the tokens that are searched in a text before it is split into words."""
    from tokenizers import AddedToken

    special, others = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        strips = is_phi3 and token not in _PHI3_KEEPS_SPACES
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(token, special=True, normalized=False, rstrip=strips))
        elif kind == _USER_DEFINED:
            others.append(AddedToken(token, special=False, normalized=False, rstrip=strips))
    made.add_special_tokens(special)
    made.add_tokens(others)


def _special_tokens(
    model: GGUFModel, tokens: list[str], names_of: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, names in names_of.items():
        for name in names:
            token_id = model.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if type(token_id) is int and 0 <= token_id < len(tokens):
                found.setdefault(f"{key}_token", tokens[token_id])
    return found


def _add_ends(
    made: "Tokenizer",
    model: GGUFModel,
    tokens: list[str],
    special: Mapping[str, str],
    ends: _Ends,
) -> None:
    """Add the special tokens before and after every text."""
    from tokenizers import decoders, processors

    before = special.get(f"{ends.before}_token")
    if not model.metadata.get("tokenizer.ggml.add_bos_token", ends.adds_before):
        before = None
    after = special.get(f"{ends.after}_token")
    if not model.metadata.get("tokenizer.ggml.add_eos_token", ends.adds_after):
        after = None
    first = [*([before] if before else ()), "$A", *([after] if after else ())]
    second = [each.replace("$A", "$B") for each in first if ends.before != "cls" or each != before]
    is_byte_level = isinstance(made.decoder, decoders.ByteLevel)
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if is_byte_level else []
    if before or after:
        single = [f"{each}:0" for each in first]
        steps.append(
            processors.TemplateProcessing(
                single=single,
                pair=[*single, *(f"{each}:1" for each in second)],
                special_tokens=[(t, tokens.index(t)) for t in {before, after} if t],
            )
        )
    if steps:
        made.post_processor = processors.Sequence(steps)


def _list(model: GGUFModel, name: str, kind: type[_Item], count: int | None = None) -> list[_Item]:
    """Return the metadata list `tokenizer.ggml.NAME`.

    Raises:
        ConfigError: there is no list of this type and length.
    """
    value = model.metadata.get(f"tokenizer.ggml.{name}")
    is_list = isinstance(value, list) and all(type(each) is kind for each in value)
    if is_list and value and count in (None, len(value)):
        return cast(list[_Item], value)
    each = "" if count is None else f" with a value for each of the {count} tokens"
    found = f"a list of {len(value)}" if isinstance(value, list) else str(value)[:40]
    raise ConfigError(
        f"the metadata 'tokenizer.ggml.{name}' must be a list of {kind.__name__}{each}, got {found}"
    )
