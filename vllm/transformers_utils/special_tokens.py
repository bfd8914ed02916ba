"""Define the special tokens of a tokenizer. All other code uses this definition.

The text of an output, the markers of tool calls and reasoning, grammars and end tokens depend on
it. transformers has two lists: tokens with a name, and tokens that tokenizer.json flags. A token in
either list is special here.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SpecialTokens:
    """The special tokens of one tokenizer; `of` creates the object, once per tokenizer.

    Args:
        texts: id -> text of each special token.
        eos_token_id: id of the end token; None if there is none.
    """

    def __init__(self, texts: Mapping[int, str], eos_token_id: int | None = None) -> None:
        self.texts = texts
        self.ids = frozenset(texts)
        self.eos_token_id = eos_token_id

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase | None") -> "SpecialTokens":
        """Return the special tokens of a tokenizer; an empty object without a tokenizer."""
        if tokenizer is None:
            return cls({})
        found = _MADE.get(tokenizer)
        if found is None:
            found = _MADE[tokenizer] = cls(_texts_of(tokenizer), tokenizer.eos_token_id)
        return found

    def parts_of(self, texts: Iterable[str]) -> dict[int, str]:
        """Return id -> text of the special tokens that contain one of these texts."""
        wanted = tuple(texts)
        if not wanted:
            return {}
        return {i: t for i, t in self.texts.items() if t and any(t in text for text in wanted)}


_MADE: "WeakKeyDictionary[PreTrainedTokenizerBase, SpecialTokens]" = WeakKeyDictionary()


def _texts_of(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    added = tokenizer.added_tokens_decoder
    texts = {token_id: token.content for token_id, token in added.items() if token.special}
    # A special token may have a name without being in the vocabulary.
    named = zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True)
    for token_id, text in named:
        if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == text:
            texts[token_id] = text
    return texts
