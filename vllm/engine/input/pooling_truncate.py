"""Truncate tokenised texts to a length, keeping special tokens.

The tokenizer's own truncation is a setting of an object that threads share, so it is not used.
"""

from typing import TYPE_CHECKING, Any

from vllm.errors import RequestError
from vllm.transformers_utils.special_tokens import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode(
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    other: str | None,
    most: int | None,
    add_special_tokens: bool = True,
) -> tuple[list[int], list[int] | None]:
    """Return the token ids of a text or of a joined pair of texts, and their types.

    Args:
        tokenizer: tokenizer of the model.
        text: the first text.
        other: the second text of a pair, or None.
        most: maximum number of tokens; None: no limit. Of a pair the longer text is cut first.
        add_special_tokens: whether to add special tokens.

    Returns:
        (token ids, types). The types are None for a single text, and if the `model_input_names` of
        the tokenizer have no types.

    Raises:
        RequestError: the special tokens leave no room for the text.
    """
    encoded = tokenizer(text, other, add_special_tokens=add_special_tokens, verbose=False)
    token_ids: list[int] = encoded["input_ids"]
    types: list[int] | None = None if other is None else encoded.get("token_type_ids")
    if most is None or len(token_ids) <= most:
        return token_ids, types
    parts = _parts(tokenizer, encoded, token_ids)
    kept = _kept(parts, most, is_left=tokenizer.truncation_side == "left")
    return [token_ids[i] for i in kept], None if types is None else [types[i] for i in kept]


def _parts(
    tokenizer: "PreTrainedTokenizerBase", encoded: Any, token_ids: list[int]
) -> list[int | None]:
    """Return for each token the index of the text that it belongs to; None for special tokens."""
    if tokenizer.is_fast:
        return encoded.sequence_ids(0)
    special = SpecialTokens.of(tokenizer).ids
    return [None if token_id in special else 0 for token_id in token_ids]


def _kept(parts: list[int | None], most: int, *, is_left: bool) -> list[int]:
    """Return the indices of the tokens to keep, in order."""
    indices = [[i for i, part in enumerate(parts) if part == text] for text in (0, 1)]
    room = most - parts.count(None)
    if room < 1:
        raise RequestError(
            f"truncate_prompt_tokens must be more than the {parts.count(None)} special tokens of "
            f"the prompt, got {most}",
            param="truncate_prompt_tokens",
        )
    sizes = share_room(len(indices[0]), len(indices[1]), room)
    kept = {i for i, part in enumerate(parts) if part is None}
    for own, size in zip(indices, sizes, strict=True):
        kept.update(own[len(own) - size :] if is_left else own[:size])
    return sorted(kept)


def share_room(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens each of two texts keeps; the longer one is cut first, as in
    `tokenizers`.

    >>> share_room(3, 100, 11), share_room(100, 100, 11)
    ((3, 8), (5, 6))
    """
    if first + second <= room:
        return first, second
    if first > second:
        return share_room(second, first, room)[::-1]
    first = min(first, room // 2)
    return first, room - first
