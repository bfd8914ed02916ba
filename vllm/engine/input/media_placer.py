"""Insert the tokens that represent the images, audio and videos of a prompt."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm.errors import ConfigError, RequestError
from vllm.inputs import plural
from vllm.messages import CacheKey, MediaItem
from vllm.multimodal.images.surrounding_text import surround_in_text, surround_in_tokens
from vllm.multimodal.interface.family import (
    EMBEDDINGS,
    EncoderInput,
    Expansion,
    MediaFamily,
    PlacedItem,
    TokenLookup,
)
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.media_file import MediaFile, inline_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ReadMedia:
    """One image, audio clip or video, as input of the encoder."""

    modality: str
    key: str
    """Identifies the item and all settings that decide its embeddings."""
    given: EncoderInput
    where: str
    """Position of the item in the request, for errors."""
    file: MediaFile | None = None
    """File from which other processes read the tensors; None: the request has them."""

    @classmethod
    def of(cls, source: MediaSource, source_key: str, given: EncoderInput) -> "ReadMedia":
        """Create an item with a key that contains its size.

        A client may give one id to items of several sizes. Each size gets its own key, because the
        prompt has a token for every embedding of an item.

        Args:
            source: source of the item.
            source_key: key from `media_key`.
            given: encoder input of the item.
        """
        key = ":".join([source_key, *map(str, given.grid)])
        return cls(source.modality, key, given, source.where)


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """A prompt that contains the tokens of its media."""

    token_ids: list[int]
    items: tuple[MediaItem, ...]
    cache_keys: tuple[CacheKey, ...]
    positions: npt.NDArray[np.int32] | None
    """[P, n] of the n tokens; None: their indices."""

    def followed_by(self, token_ids: list[int]) -> "PlacedMedia":
        """Return the same media for a longer prompt, which continues this one with text.

        Args:
            token_ids: tokens of the longer prompt.
        """
        positions, num_more = self.positions, len(token_ids) - len(self.token_ids)
        if positions is not None and num_more:
            following = np.arange(1, num_more + 1, dtype=np.int32) + positions.max()
            more = np.broadcast_to(following, (len(positions), num_more))
            positions = np.concatenate((positions, more), axis=1)
        return replace(self, token_ids=token_ids, positions=positions)


class MediaPlacer:
    """Replaces the placeholders in prompts by the tokens of their media.

    Args:
        family: rules for the model's media.
        modalities: modalities that prompts may contain.
    """

    def __init__(self, family: MediaFamily, modalities: Iterable[str]) -> None:
        self._family, self._modalities = family, tuple(modalities)

    def surround_text(self, text: str, literal: Sequence[int]) -> str:
        """Return the text of a prompt with the text that the model expects around images.

        Args:
            text: text of a prompt with images.
            literal: indices of placeholders that are plain text; see `place`.
        """
        family = self._family
        if not any(family.text_around):
            return text
        return surround_in_text(text, family.placeholder, family.text_around, literal)

    def surround_tokens(
        self,
        token_ids: list[int],
        items: Sequence[ReadMedia],
        tokenizer: "PreTrainedTokenizerBase | None",
    ) -> list[int]:
        """Return tokens with the tokens of the text that the model expects around images, unless
        the images are expanded already.

        Args:
            token_ids: tokens of a prompt that was given as tokens.
            items: images of the prompt.
            tokenizer: tokenizer of the model.
        """
        family = self._family
        if not any(family.text_around) or not items:
            return token_ids
        lookup = Vocabulary(tokenizer)
        _, inside, *_ = family.expand(items[0].given.grid, lookup).token_ids
        if inside in token_ids:
            return token_ids
        assert tokenizer is not None
        placeholder = lookup(family.placeholder)
        return surround_in_tokens(token_ids, tokenizer, placeholder, family.text_around)

    def place(
        self,
        token_ids: list[int],
        items: Sequence[ReadMedia],
        tokenizer: "PreTrainedTokenizerBase | None",
        *,
        is_text: bool,
        literal: Sequence[int] | None = None,
    ) -> PlacedMedia | None:
        """Replace the placeholders in a prompt by the tokens of its media.

        Args:
            token_ids: tokens of the prompt.
            items: media of the prompt; items of one modality are in order.
            tokenizer: tokenizer of the model.
            is_text: whether the prompt was given as text, not as tokens.
            literal: indices of the placeholders that a user has written as text, and which remain
                text. None: all placeholders of a text without media.

        Returns:
            The prompt with media tokens; None: it has neither media nor placeholders.

        Raises:
            RequestError: the number of placeholders differs from the number of items of a modality.
        """
        family = self._family
        if not items and tokenizer is None:
            return None
        lookup = Vocabulary(tokenizer)
        texts = {kind: family.placeholder_of(kind) for kind in self._modalities}
        kind_of = {lookup(text): kind for kind, text in texts.items() if text}
        found_at = [index for index, token in enumerate(token_ids) if token in kind_of]
        if not items and not found_at:
            return None
        expanded = [Expanded(item, family.expand(item.given.grid, lookup)) for item in items]
        if items and not literal:
            placed = find_expanded(token_ids, expanded, kind_of)
            if placed is not None:
                return self._placed(token_ids, placed)
        kept = set(range(len(found_at)) if literal is None and is_text else literal or ())
        waiting = _by_kind(expanded)
        for kind in kind_of.values():
            replaced_at = [at for n, at in enumerate(found_at) if n not in kept]
            count = sum(kind_of[token_ids[at]] == kind for at in replaced_at)
            if count != len(waiting[kind]):
                raise _refused(
                    f"the prompt must have as many placeholders {texts[kind]} as {plural(kind)}, "
                    f"got {count} placeholders and {len(waiting[kind])} {plural(kind)}"
                )
        found: list[int] = []
        placed, before = [(each, 0) for each in expanded if not texts[each.item.modality]], 0
        for number, index in enumerate(found_at):
            found += token_ids[before:index]
            before = index + 1
            kind = kind_of[token_ids[index]]
            if number in kept:
                found += _as_text(tokenizer, texts[kind])
                continue
            each = waiting[kind].popleft()
            if _is_within(family.around(kind), found, token_ids[before : before + 1], lookup):
                del found[-1]
                before += 1
            placed.append((each, len(found)))
            found += each.expansion.token_ids
        return self._placed(found + token_ids[before:], placed)

    def _num_parts(self, item: ReadMedia) -> int:
        """Return into how many parts the encoder divides an item; 1 if it does not run."""
        if EMBEDDINGS in item.given.tensors:
            return 1
        return self._family.num_parts(item.given.grid)

    def _placed(
        self, token_ids: list[int], placed: Sequence[tuple["Expanded", int]]
    ) -> PlacedMedia:
        """Create the prompt with media tokens.

        Args:
            token_ids: tokens of the prompt, with the media tokens.
            placed: each item with the index of its first token, in order.
        """
        family = self._family
        items = [
            PlacedItem(
                start,
                len(each.expansion.token_ids),
                each.item.given.grid,
                tuple(_runs(each.expansion.is_embedding, start)),
            )
            for each, start in placed
        ]
        media = tuple(
            MediaItem(
                modality=each.item.modality,
                key=each.item.key,
                where=each.item.where,
                runs=item.runs,
                num_states=each.expansion.num_states,
                seen_by=seen_by,
                num_parts=self._num_parts(each.item),
                tensors=inline_tensors(each.item.given.tensors)
                if each.item.file is None
                else each.item.file.tensors,
            )
            for (each, _), item, seen_by in zip(placed, items, family.seen_by(items), strict=True)
        )
        return PlacedMedia(
            token_ids,
            media,
            tuple(CacheKey(item.start, item.key) for item in media),
            family.positions(len(token_ids), items) if items else None,
        )


class Expanded(NamedTuple):
    """A media item and the tokens that represent it."""

    item: ReadMedia
    expansion: Expansion


class Vocabulary:
    """Looks up the ids of tokens, for the rules of a media family.

    Args:
        tokenizer: tokenizer of the model; None: the engine runs without one, and each lookup is
            refused.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._given = tokenizer

    def __call__(self, token: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        if not isinstance(found, int) or (
            found == self._tokenizer.unk_token_id and token != self._tokenizer.unk_token
        ):
            raise ConfigError(
                f"the tokenizer of the model has no token {token!r}, which prompts "
                f"with media need. Use the tokenizer of the original model"
            )
        return found

    def text(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        if self._given is None:
            raise _refused(
                "media need a tokenizer, and this engine runs without one (skip_tokenizer_init)"
            )
        return self._given


def _is_within(
    around: tuple[str, str] | None, before: Sequence[int], after: Sequence[int], lookup: TokenLookup
) -> bool:
    """Return whether a placeholder is already between the two given tokens."""
    if around is None or not before or not after:
        return False
    return (before[-1], after[0]) == (lookup(around[0]), lookup(around[1]))


def _as_text(tokenizer: "PreTrainedTokenizerBase | None", text: str) -> list[int]:
    """Return the tokens of the characters of a placeholder, as if it were ordinary text."""
    assert tokenizer is not None
    whole = tokenizer.convert_tokens_to_ids(text)
    found: list[int] = []
    for part in (text[:2], text[2:]):
        found += tokenizer(part, add_special_tokens=False)["input_ids"]
    assert whole not in found
    return found


def _by_kind(expanded: Sequence["Expanded"]) -> dict[str, deque["Expanded"]]:
    """Return the items of each modality, in order."""
    found: dict[str, deque[Expanded]] = defaultdict(deque)
    for each in expanded:
        found[each.item.modality].append(each)
    return found


def find_expanded(
    token_ids: list[int], expanded: Sequence["Expanded"], kind_of: Mapping[int, str]
) -> list[tuple["Expanded", int]] | None:
    """Return the items and the indices of their first tokens, if the prompt already has the tokens
    of all items; else None.

    Args:
        token_ids: tokens of the prompt.
        expanded: items of the prompt; items of one modality are in order.
        kind_of: token of an item that is not expanded -> modality.
    """
    if all(len(each.expansion.token_ids) <= 1 for each in expanded):
        return None
    waiting = _by_kind(expanded)
    found = []
    index = 0
    while index < len(token_ids):
        for several in waiting.values():
            tokens = several[0].expansion.token_ids if several else []
            # Compare the first token first: comparing slices at every token would copy many tokens.
            if (
                tokens
                and token_ids[index] == tokens[0]
                and token_ids[index : index + len(tokens)] == tokens
            ):
                found.append((several.popleft(), index))
                index += len(tokens)
                break
        else:
            if token_ids[index] in kind_of:
                return None
            index += 1
    return None if any(waiting.values()) else found


def _runs(is_embedding: Sequence[bool], start: int) -> Iterator[tuple[int, int]]:
    """Yield (index, length) of each run of tokens that embeddings of an item replace."""
    edges = np.flatnonzero(np.diff(np.array([False, *is_embedding, False], np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield start + begin, end - begin


def _refused(message: str) -> RequestError:
    return RequestError(message, param="prompt")
