"""Images, sounds and videos of prompts: reads them, and inserts the tokens that represent them.

Reading an item (decode, cut, resize) takes long, and a server does it in other processes. So a
prompt is processed in two parts: `read` or `MediaWorkers` make `ReadMedia` of its items, and
`place` makes a request of that.
"""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from vllm.config import VllmConfig
from vllm.errors import ConfigError, RequestError
from vllm.inputs import PromptType, plural
from vllm.messages import CacheKey, MediaItem
from vllm.multimodal.given import as_list, as_source, kind_of
from vllm.multimodal.images.surrounding_text import surround_in_text, surround_in_tokens
from vllm.multimodal.interface.family import (
    EncoderInput,
    Expansion,
    MediaFamily,
    PlacedItem,
    TokenLookup,
)
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.interface.speech import SpeechRules
from vllm.multimodal.job import Job, family_class, family_of_model, job_arguments, make_job
from vllm.multimodal.media_file import MediaFile, inline_tensors
from vllm.multimodal.speech import speech_of_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Keys of a prompt that are about media."""


@dataclass(frozen=True, slots=True)
class ReadMedia:
    """One image, sound or video as the encoder reads it."""

    modality: str
    key: str
    """Identifies the item and all settings that decide its embeddings."""
    given: EncoderInput
    file: MediaFile | None = None
    """File from which other processes read its tensors; None: the request has them."""

    @classmethod
    def of(cls, modality: str, source_key: str, given: EncoderInput) -> "ReadMedia":
        """Return an item. A client may give one name to items of several sizes: each size is an
        item of its own, as a prompt has tokens for all embeddings of an item.

        Args:
            modality: of it.
            source_key: see `media_key`.
            given: of it.
        """
        return cls(modality, ":".join([source_key, *map(str, given.grid)]), given)


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """A prompt with the tokens of its media."""

    token_ids: list[int]
    items: tuple[MediaItem, ...]
    cache_keys: tuple[CacheKey, ...]
    positions: npt.NDArray[np.int32] | None
    """[P, n] of the n tokens; None: their indices."""

    def followed_by(self, token_ids: list[int]) -> "PlacedMedia":
        """Return the same media in a longer prompt, which continues this one with text.

        Args:
            token_ids: of the longer prompt.
        """
        positions, num_more = self.positions, len(token_ids) - len(self.token_ids)
        if positions is not None and num_more:
            following = np.arange(1, num_more + 1, dtype=np.int32) + positions.max()
            more = np.broadcast_to(following, (len(positions), num_more))
            positions = np.concatenate((positions, more), axis=1)
        return replace(self, token_ids=token_ids, positions=positions)


class MediaInput:
    """Images, sounds and videos for one model.

    Args:
        config: complete and consistent.

    Attributes:
        limits: by modality that the model reads: how many items a prompt may have.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._engine, self._model, self._config = config, config.model, config.multimodal
        self._speech: tuple[SpeechRules | None] | None = None
        self.limits: Mapping[str, int] = {}
        arch = self._model.resolved_arch
        if arch.media_config is not None and arch.media_module is not None:
            modalities = family_class(arch.media_module).modalities
            self.limits = {each: self._config.counts[each] for each in modalities}

    @property
    def uses_files(self) -> bool:
        """Whether all processes of the engine can read files of this one."""
        return self._engine.parallel.is_on_this_machine

    @property
    def cache_bytes(self) -> int:
        """Memory for items that have been read."""
        return self._config.processor_cache_bytes

    @cached_property
    def family(self) -> MediaFamily | None:
        """The rules of the model's media, with the settings of the engine; None: it reads text."""
        return family_of_model(self._engine)

    def speech(self, tokenizer: "PreTrainedTokenizerBase | None") -> SpeechRules | None:
        """Return how the model transcribes; None: it does not.

        Args:
            tokenizer: of the model.
        """
        if self.family is None:
            return None
        if self._speech is None:
            self._speech = (speech_of_model(self._engine, _Vocabulary(tokenizer)),)
        return self._speech[0]

    def joined(self, prompt: PromptType) -> PromptType:
        """Return the prompt of the decoder with the media of the prompt of the encoder, if a prompt
        has both.

        Raises:
            RequestError: one of them is missing, or has something that belongs to the other.
        """
        if not isinstance(prompt, Mapping) or "encoder_prompt" not in prompt:
            return prompt
        if self.family is None or self.family.required is None:
            return prompt  # is refused where it is tokenised
        return _joined_prompts(prompt)

    def check_required(self, num_items: int) -> None:
        """Refuse a prompt without media that it needs.

        Raises:
            RequestError: the model reads a text only with one item of media.
        """
        if self.family is not None and self.family.required is not None and num_items != 1:
            raise _refused(
                f"a prompt of the model '{self._model.model}' must have one item of "
                f"{self.family.required!r} in multi_modal_data, got {num_items or 'none'}"
            )

    @cached_property
    def job_arguments(self) -> dict[str, Any]:
        """The arguments of `make_job` for the media of the model."""
        return job_arguments(self._engine)

    @cached_property
    def _job(self) -> Job:
        return make_job(**self.job_arguments)

    def sources(self, prompt: Mapping[str, Any]) -> list[MediaSource]:
        """Return the items of a prompt, modality by modality.

        Raises:
            RequestError: the model does not read such items, or one is of another type.
        """
        data = prompt.get("multi_modal_data")
        data = {} if data is None else data
        if not isinstance(data, Mapping):
            raise _refused(
                f"multi_modal_data must be a dict such as {{'image': [...]}}, got "
                f"{type(data).__name__}"
            )
        given = {kind: items for kind, items in data.items() if items is not None}
        if not given:
            return []
        if self.family is None:
            raise _refused(
                f"multi_modal_data: the model '{self._model.model}' reads text only. Leave it out "
                f"of the prompt"
            )
        if unknown := [kind for kind in given if kind not in self.limits]:
            raise _refused(
                f"multi_modal_data must have the key {' or '.join(map(repr, self.limits))}, got "
                f"{', '.join(map(repr, unknown))}: this model reads "
                f"{' and '.join(map(plural, self.limits))} and no other media"
            )
        items = {kind: as_list(kind, value) for kind, value in given.items()}
        uuids = self._uuids(prompt)
        overrides = _overrides_of(prompt)
        found = []
        for kind, several in items.items():
            if several and not self.limits[kind]:
                raise _refused(
                    f"this engine takes no {plural(kind)} (limit_mm_per_prompt): leave them out"
                )
            if len(several) > self.limits[kind]:
                raise _refused(
                    f"a prompt may have at most {self.limits[kind]} {plural(kind)}, got "
                    f"{len(several)}. Send fewer, or start the engine with a larger "
                    f"limit_mm_per_prompt"
                )
            names = _names_of(kind, uuids.get(kind), len(several))
            found += [
                as_source(
                    kind,
                    item,
                    where=f"multi_modal_data[{kind!r}][{index}]",
                    uuid=name,
                    overrides=overrides,
                    sampling_rate=self.family.sampling_rate,
                )
                for index, (item, name) in enumerate(zip(several, names, strict=True))
            ]
        return found

    def _uuids(self, prompt: Mapping[str, Any]) -> Mapping[str, Any]:
        given = prompt.get("multi_modal_uuids")
        given = {} if given is None else given
        if not isinstance(given, Mapping) or set(given) - set(self.limits):
            example = ", ".join(f"{kind!r}: [...]" for kind in self.limits)
            raise _refused(
                f"multi_modal_uuids must be a dict such as {{{example}}}, got "
                f"{list(given) if isinstance(given, Mapping) else type(given).__name__}"
            )
        return given

    def read(self, prompt: Mapping[str, Any]) -> list[ReadMedia]:
        """Return the items of a prompt; decode what has not been read, in this process.

        Raises:
            RequestError: one cannot be read; names it.
        """
        if (found := read_media(prompt)) is not None:
            return found
        salt = cache_salt_of(prompt)
        return [
            ReadMedia.of(source.modality, media_key(source, salt), self._job(source))
            for source in self.sources(prompt)
        ]

    def surround_text(self, text: str, literal: Sequence[int]) -> str:
        """Return the text of a prompt with what belongs around its images.

        Args:
            text: of a prompt with images.
            literal: see `place`.
        """
        family = self.family
        assert family is not None
        if not any(family.text_around):
            return text
        return surround_in_text(text, family.placeholder, family.text_around, literal)

    def surround_tokens(
        self,
        token_ids: list[int],
        items: Sequence[ReadMedia],
        tokenizer: "PreTrainedTokenizerBase | None",
    ) -> list[int]:
        """Return tokens with the tokens of the text that belongs around images, unless these are
        expanded already.

        Args:
            token_ids: of a prompt that was given as tokens.
            items: its images.
            tokenizer: of the model.
        """
        family = self.family
        assert family is not None
        if not any(family.text_around) or not items:
            return token_ids
        lookup = _Vocabulary(tokenizer)
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
        """Replace the placeholders of media by their tokens.

        Args:
            token_ids: of the prompt.
            items: its media; items of one modality are in order.
            tokenizer: of the model.
            is_text: the prompt was given as text, and not as tokens.
            literal: which of the placeholders, in order, a user has written as text, and stay
                text. None: all of a text without media.

        Returns:
            None: the prompt has neither media nor placeholders.

        Raises:
            RequestError: there are more or fewer placeholders than items of a modality.
        """
        family = self.family
        assert family is not None
        self.check_required(len(items))
        if not items and tokenizer is None:
            return None
        lookup = _Vocabulary(tokenizer)
        texts = {kind: family.placeholder_of(kind) for kind in self.limits}
        kind_of = {lookup(text): kind for kind, text in texts.items() if text}
        found_at = [index for index, token in enumerate(token_ids) if token in kind_of]
        if not items and not found_at:
            return None
        expanded = [_Expanded(item, family.expand(item.given.grid, lookup)) for item in items]
        if items and not literal:
            placed = _find_expanded(token_ids, expanded, kind_of)
            if placed is not None:
                return self._placed(token_ids, placed)
        kept = set(range(len(found_at)) if literal is None and is_text else literal or ())
        waiting = _by_kind(expanded)
        for kind in kind_of.values():
            replaced_at = [at for n, at in enumerate(found_at) if n not in kept]
            count = sum(kind_of[token_ids[at]] == kind for at in replaced_at)
            if count != len(waiting[kind]):
                raise _refused(
                    f"the prompt must have as many placeholders {texts[kind]} as {plural(kind)}: "
                    f"it has {count}, and {len(waiting[kind])} {plural(kind)} are given"
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

    def _placed(
        self, token_ids: list[int], placed: Sequence[tuple["_Expanded", int]]
    ) -> PlacedMedia:
        """Return a prompt with the tokens of its media.

        Args:
            token_ids: with these tokens.
            placed: the items in the order of their tokens, and the index of the first one.
        """
        family = self.family
        assert family is not None
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
                runs=item.runs,
                num_states=each.expansion.num_states,
                seen_by=seen_by,
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


class _Expanded(NamedTuple):
    """An item and the tokens that represent it."""

    item: ReadMedia
    expansion: Expansion


def read_media(prompt: Mapping[str, Any]) -> list[ReadMedia] | None:
    """Return the items of a prompt if they have been read already, else None."""
    data = prompt.get("multi_modal_data")
    several = list(data.values()) if isinstance(data, Mapping) else []
    if not several or not all(isinstance(given, _ReadItems) for given in several):
        return None
    return [item for given in several for item in given]


def with_read_media(prompt: Mapping[str, Any], items: Sequence[ReadMedia]) -> PromptType:
    """Return a prompt whose items have been read."""
    data = {
        kind: _ReadItems(item for item in items if item.modality == kind)
        for kind in dict.fromkeys(item.modality for item in items)
    }
    return cast(PromptType, {**prompt, "multi_modal_data": data})


class _ReadItems(list[ReadMedia]):
    """Items of one modality that have been read. Programs cannot give such a list."""


def cache_salt_of(prompt: Mapping[str, Any]) -> str | None:
    """Return the cache salt of a prompt; raise RequestError if it is not a text."""
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(
            f"cache_salt must be a non-empty string, got {salt!r}", param="cache_salt"
        )
    return salt


def _joined_prompts(prompt: Mapping[str, Any]) -> PromptType:
    given, asked = prompt["encoder_prompt"], prompt.get("decoder_prompt")
    if unknown := prompt.keys() - {"encoder_prompt", "decoder_prompt", "mm_processor_kwargs"}:
        raise _refused(
            f"a prompt with encoder_prompt must have decoder_prompt and no other key but "
            f"mm_processor_kwargs, got {', '.join(sorted(unknown))}"
        )
    accepted = {"prompt", "cache_salt", *MEDIA_KEYS}
    if not isinstance(given, Mapping) or given.keys() - accepted or given.get("prompt"):
        raise _refused(
            "encoder_prompt must be a dict such as {'prompt': '', 'multi_modal_data': {...}}: the "
            "encoder reads no text. Put text into decoder_prompt"
        )
    if isinstance(asked, Mapping) and asked.keys() & set(MEDIA_KEYS):
        raise _refused("decoder_prompt must be text or token ids; put media into encoder_prompt")
    if not asked:
        raise _refused("decoder_prompt must be text or token ids, and it is empty or missing")
    if not isinstance(asked, Mapping):
        asked = {"prompt" if isinstance(asked, str) else "prompt_token_ids": asked}
    outer = {key: prompt[key] for key in ("mm_processor_kwargs",) if key in prompt}
    media = {key: value for key, value in given.items() if key != "prompt"}
    return cast(PromptType, {**media, **outer, **asked})


def _overrides_of(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the processor that a prompt brings.

    Raises:
        RequestError: they are no object of JSON.
    """
    overrides = prompt.get("mm_processor_kwargs")
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise _refused(
            f"mm_processor_kwargs must be a dict whose keys are strings, got {kind_of(overrides)}"
        )
    try:
        json.dumps(dict(overrides))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(f"mm_processor_kwargs must have values of JSON: {error}") from error
    return overrides


def media_key(source: MediaSource, cache_salt: str | None) -> str:
    """Return the identity of an item of one model, whatever its size is.

    A name that the client gives (uuid) replaces the content, never the settings.
    """
    digest = hashlib.sha256()
    settings = [source.modality, source.detail, dict(source.overrides), cache_salt]
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    if source.uuid is not None:
        digest.update(b"\0uuid\0" + source.uuid.encode())
        return f"{source.modality}:{digest.hexdigest()}"
    for name, content in source.arrays.items():
        digest.update(f"\0{name}\0{content.shape}{source.sampling_rate}\0".encode())
        digest.update(np.ascontiguousarray(content).data)
    return f"{source.modality}:{digest.hexdigest()}"


def _names_of(kind: str, given: Any, count: int) -> Sequence[str | None]:
    """Return the names that a prompt gives its items of a modality.

    Raises:
        RequestError: there are more or fewer than items, or one is no text.
    """
    if given is None:
        return [None] * count
    if isinstance(given, str):
        given = [given]
    if (
        not isinstance(given, (list, tuple))
        or len(given) != count
        or not all(uuid is None or (isinstance(uuid, str) and uuid) for uuid in given)
    ):
        raise _refused(
            f"multi_modal_uuids[{kind!r}] must be a list of {count} non-empty strings or None, one "
            f"for each of the {plural(kind)}"
        )
    return list(given)


class _Vocabulary:
    """The tokens of a tokenizer, for families.

    Args:
        tokenizer: None: the engine runs without one, and each lookup is refused.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._given = tokenizer

    def __call__(self, token: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        if not isinstance(found, int) or (
            found == self._tokenizer.unk_token_id and token != self._tokenizer.unk_token
        ):
            raise ConfigError(f"the tokenizer of the model has no token {token!r}")
        return found

    def text(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    @property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        if self._given is None:
            raise _refused(
                "media need a tokenizer, and this engine runs without one (skip_tokenizer_init)"
            )
        return self._given


def _is_within(
    around: tuple[str, str] | None,
    before: Sequence[int],
    after: Sequence[int],
    lookup: TokenLookup,
) -> bool:
    """Return whether a placeholder is between two tokens."""
    if around is None or not before or not after:
        return False
    return (before[-1], after[0]) == (lookup(around[0]), lookup(around[1]))


def _as_text(tokenizer: "PreTrainedTokenizerBase | None", text: str) -> list[int]:
    """Return the tokens of the words of a placeholder, as if it were no token of its own."""
    assert tokenizer is not None
    whole = tokenizer.convert_tokens_to_ids(text)
    found: list[int] = []
    for part in (text[:2], text[2:]):
        found += tokenizer(part, add_special_tokens=False)["input_ids"]
    assert whole not in found
    return found


def _by_kind(expanded: Sequence["_Expanded"]) -> dict[str, deque["_Expanded"]]:
    """Return the items of each modality, in order."""
    found: dict[str, deque[_Expanded]] = defaultdict(deque)
    for each in expanded:
        found[each.item.modality].append(each)
    return found


def _find_expanded(
    token_ids: list[int], expanded: Sequence["_Expanded"], kind_of: Mapping[int, str]
) -> list[tuple["_Expanded", int]] | None:
    """Return the items and where their tokens begin, if the prompt has the tokens of all items
    already; None: it has not.

    Args:
        token_ids: of the prompt.
        expanded: its items; items of one modality are in order.
        kind_of: modalities by the token of an item that is not expanded.
    """
    if all(len(each.expansion.token_ids) <= 1 for each in expanded):
        return None
    waiting = _by_kind(expanded)
    found = []
    index = 0
    while index < len(token_ids):
        for several in waiting.values():
            tokens = several[0].expansion.token_ids if several else []
            # Without the first comparison, each token of a long text would copy many.
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
    """Yield (index, n) of the runs of tokens that are embeddings of an item."""
    edges = np.flatnonzero(np.diff(np.array([False, *is_embedding, False], np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield start + begin, end - begin


def _refused(message: str) -> RequestError:
    return RequestError(message, param="prompt")
