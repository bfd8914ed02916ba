"""The tokenizer of a GGUF model, from its metadata, as files of the library tokenizers.

There are two kinds: byte-level BPE (`gpt2`), whose metadata names the rule by which a text is split
into words, and SentencePiece BPE (`llama`), whose metadata has a score for each token.
"""

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.transformers_utils.bpe_merges import merges_in_order
from vllm.transformers_utils.gguf.model import GGUFModel
from vllm.transformers_utils.gguf.words import WORDS, Words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = init_logger(__name__)

_Item = TypeVar("_Item")

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type`."""
_SPACE = "\u2581"
_PRE = "tokenizer.ggml.pre"


def tokenizer_files(model: GGUFModel) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json: name -> content.

    Raises:
        ConfigError: the metadata has no tokenizer, or one that is not supported.
    """
    kind = model.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"the metadata 'tokenizer.ggml.model' is {str(kind)[:40]!r}; supported: gpt2, llama"
        )
    tokens = _list(model, "tokens", str)
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise ConfigError(
            f"the metadata 'tokenizer.ggml.tokens' has {twice[:40]!r} more than once; each token "
            f"must have one number: convert the model again, or give --tokenizer"
        )
    words = _words_of(model) if kind == "gpt2" else None
    made = _sentence_pieces(model, tokens) if words is None else _bytes(model, tokens, words)
    if "tokenizer.ggml.token_type" in model.metadata:
        _add_tokens(made, tokens, _list(model, "token_type", int, len(tokens)))
    settings = _special_tokens(model, tokens)
    adds_bos = words is None or words.adds_bos
    _add_ends(made, model, tokens, adds_bos, is_byte_level=words is not None)
    template = model.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps(config)}


def _words_of(model: GGUFModel) -> Words:
    name = model.metadata.get(_PRE, "default")
    if name not in WORDS:
        raise ConfigError(
            f"the metadata {_PRE!r} is {str(name)[:40]!r}, which is no known rule to split a text "
            f"into words. Give the tokenizer of the original model with --tokenizer"
        )
    return WORDS[name]


def warn_of_missing_rule(model: GGUFModel) -> None:
    """Log that the metadata does not say how a text is split into words, if it should."""
    if model.metadata.get("tokenizer.ggml.model") == "gpt2" and _PRE not in model.metadata:
        logger.warning(
            "%s has no metadata %r, which says how a text is split into words: an old tool has "
            "converted it. The default rule is taken, as in llama.cpp, and token ids may differ "
            "from those that the model was trained with. Convert the model again, or give "
            "--tokenizer",
            model.paths[0],
            _PRE,
        )


def _bytes(model: GGUFModel, tokens: list[str], words: Words) -> "Tokenizer":
    """Byte-level BPE, whose merges are in the metadata."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    parts = [line.partition(" ") for line in _list(model, "merges", str)]
    pairs = [(first, second) for first, _, second in parts]
    if any(not first or not second or " " in second for first, second in pairs):
        raise ConfigError(
            "the metadata 'tokenizer.ggml.merges' must be a list of texts, each with two tokens "
            "and a space between them"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocabulary, pairs, ignore_merges=words.keeps_whole_words)
    except Exception as error:  # tokenizers raises a plain Exception
        raise ConfigError(
            f"the metadata 'tokenizer.ggml.merges' names tokens that are not in "
            f"'tokenizer.ggml.tokens': {error}"
        ) from error
    made = Tokenizer(bpe)
    if words.normalizes:
        made.normalizer = normalizers.NFC()
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_pieces(model: GGUFModel, tokens: list[str]) -> "Tokenizer":
    """SentencePiece BPE, whose merges follow from the scores: the best token is made first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _list(model, "scores", float, len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    best_first = [tokens[i] for i in sorted(vocabulary.values(), key=lambda i: (-scores[i], i))]
    unknown = model.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise ConfigError(
            f"the metadata 'tokenizer.ggml.unknown_token_id' must be the number of a token, from 0 "
            f"to {len(tokens) - 1}; it is {str(unknown)[:40]}"
        )
    made = Tokenizer(
        models.BPE(
            vocabulary,
            list(merges_in_order(best_first, vocabulary)),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if model.metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(decoding)
    return made


def _add_tokens(made: "Tokenizer", tokens: list[str], kinds: list[int]) -> None:
    """Add the tokens that are found in a text before it is split into words."""
    from tokenizers import AddedToken

    special, others = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            others.append(AddedToken(token, special=False, normalized=False))
    made.add_special_tokens(special)
    made.add_tokens(others)


def _special_tokens(model: GGUFModel, tokens: list[str]) -> dict[str, Any]:
    found = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        place = model.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(place) is int and 0 <= place < len(tokens):
            found[f"{key}_token"] = tokens[place]
    return found


def _add_ends(
    made: "Tokenizer", model: GGUFModel, tokens: list[str], adds_bos: bool, is_byte_level: bool
) -> None:
    """Add the tokens that stand before and behind every text."""
    from tokenizers import processors

    special = _special_tokens(model, tokens)
    template, ids = ["$A:0"], {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        token = special.get(f"{name}_token")
        if token is not None and model.metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            ids[token] = tokens.index(token)
            template = [f"{token}:0", *template] if name == "bos" else [*template, f"{token}:0"]
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if is_byte_level else []
    if ids:
        second = [part.replace(":0", ":1").replace("$A", "$B") for part in template]
        steps.append(
            processors.TemplateProcessing(
                single=template, pair=[*template, *second], special_tokens=list(ids.items())
            )
        )
    if steps:
        made.post_processor = processors.Sequence(steps)


def _list(model: GGUFModel, name: str, kind: type[_Item], count: int | None = None) -> list[_Item]:
    """The list `tokenizer.ggml.NAME`.

    Raises:
        ConfigError: there is none of this type and length.
    """
    value = model.metadata.get(f"tokenizer.ggml.{name}")
    is_list = isinstance(value, list) and all(type(each) is kind for each in value)
    if is_list and value and count in (None, len(value)):
        return cast(list[_Item], value)
    each = "" if count is None else f" with a value for each of the {count} tokens"
    found = f"a list of {len(value)}" if isinstance(value, list) else str(value)[:40]
    raise ConfigError(
        f"the metadata 'tokenizer.ggml.{name}' must be a list of {kind.__name__}{each}; "
        f"it is {found}"
    )
