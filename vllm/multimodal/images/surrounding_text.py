"""Inserts text before and after the tokens of an image.

A tokenizer joins it with the neighbouring text: most vocabularies have one token for two line
breaks and one for three.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def surround_in_text(
    text: str, placeholder: str, around: tuple[str, str], literal: Collection[int]
) -> str:
    """Insert text before and after the image placeholders in a text.

    Args:
        text: text of a prompt.
        placeholder: placeholder of one image.
        around: text before and after an image.
        literal: indices of placeholders that are ordinary text, not images.

    >>> surround_in_text("a<i>b<i>", "<i>", ("(", ")"), {1})
    'a(<i>)b<i>'
    """
    before, after = around
    first, *others = text.split(placeholder)
    found = [first]
    for number, part in enumerate(others):
        is_image = number not in literal
        found += [before, placeholder, after, part] if is_image else [placeholder, part]
    return "".join(found)


def surround_in_tokens(
    token_ids: list[int],
    tokenizer: "PreTrainedTokenizerBase",
    placeholder: int,
    around: tuple[str, str],
) -> list[int]:
    """Insert the tokens of text before and after the image placeholders in a prompt.

    A token next to a placeholder is replaced if the tokenizer joins its text with the new text.

    Args:
        token_ids: token ids of a prompt whose images are not expanded.
        tokenizer: tokenizer of the model.
        placeholder: token of one image.
        around: text before and after an image.
    """
    positions = [index for index, token in enumerate(token_ids) if token == placeholder]
    found: list[int] = []
    start = 0
    for position in positions:
        left = around[1] if start else ""
        found += [*_between(tokenizer, token_ids[start:position], left, around[0]), placeholder]
        start = position + 1
    return found + _between(tokenizer, token_ids[start:], around[1] if start else "", "")


def _between(
    tokenizer: "PreTrainedTokenizerBase", token_ids: list[int], left: str, right: str
) -> list[int]:
    """Add text before and after some tokens, and tokenize the result."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    if len(token_ids) > 1:
        first, last = _between(tokenizer, token_ids[:1], left, ""), token_ids[-1:]
        return [*first, *token_ids[1:-1], *_between(tokenizer, last, "", right)]
    text = str(tokenizer.decode(token_ids)) if left + right else ""
    if encode(text) == token_ids:  # true only if the tokens end at a character boundary
        return encode(left + text + right)
    return [*encode(left), *token_ids, *encode(right)]
