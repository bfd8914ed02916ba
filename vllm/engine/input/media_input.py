"""Images of prompts: reads them, and inserts the tokens that represent them.

Reading an image (decode, cut, resize) takes long, and a server does it in other processes. So a
prompt is processed in two parts: `read` or `MediaWorkers` make `ReadMedia` of its images, and
`place` makes a request of that.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm.config import VllmConfig
from vllm.errors import ConfigError, RequestError
from vllm.messages import CacheKey, MediaItem
from vllm.multimodal.images.image import to_rgb
from vllm.multimodal.images.surrounding_text import surround_in_text, surround_in_tokens
from vllm.multimodal.interface.family import EncoderInput, Expansion, MediaFamily, PlacedItem
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.job import Job, family_of_model, job_arguments, make_job
from vllm.multimodal.media_file import MediaFile, inline_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Keys of a prompt that are about images."""


@dataclass(frozen=True, slots=True)
class ReadMedia:
    """One image as the encoder reads it."""

    modality: str
    key: str
    """Identifies the image and all settings that decide its embeddings."""
    given: EncoderInput
    file: MediaFile | None = None
    """File from which other processes read its tensors; None: the request has them."""


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """A prompt with the tokens of its images."""

    token_ids: list[int]
    items: tuple[MediaItem, ...]
    cache_keys: tuple[CacheKey, ...]
    positions: npt.NDArray[np.int32] | None
    """[P, n] of the n tokens; None: their indices."""

    def followed_by(self, token_ids: list[int]) -> "PlacedMedia":
        """Return the same images in a longer prompt, which continues this one with text.

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
    """Images for one model.

    Args:
        config: complete and consistent.

    Attributes:
        limits: by modality: how many items a prompt may have.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._engine, self._model, self._config = config, config.model, config.multimodal
        self.limits: Mapping[str, int] = {}
        if self._model.resolved_arch.media_config is not None:
            self.limits = {"image": self._config.image_limit.count}

    @property
    def uses_files(self) -> bool:
        """Whether all processes of the engine can read files of this one."""
        return self._engine.parallel.is_on_this_machine

    @property
    def cache_bytes(self) -> int:
        """Memory for images that have been read."""
        return self._config.processor_cache_bytes

    @cached_property
    def family(self) -> MediaFamily | None:
        """The rules of the model's images, with the settings of the engine; None: it takes none."""
        return family_of_model(self._engine)

    @cached_property
    def job_arguments(self) -> dict[str, Any]:
        """The arguments of `make_job` for the images of the model."""
        return job_arguments(self._engine)

    @cached_property
    def _job(self) -> Job:
        return make_job(**self.job_arguments)

    def sources(self, prompt: Mapping[str, Any]) -> list[MediaSource]:
        """Return the images of a prompt, in the order of their placeholders.

        Raises:
            RequestError: the model takes no images, or one is of another type.
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
        if unknown := [kind for kind in given if kind != "image"]:
            raise _refused(
                f"multi_modal_data must have the key 'image', got {', '.join(map(repr, unknown))}: "
                f"this model reads images and no other media"
            )
        images = given["image"]
        if not isinstance(images, (list, tuple)):
            images = [images]
        if len(images) > self.limits["image"]:
            raise _refused(
                f"a prompt may have at most {self.limits['image']} images, got {len(images)}. Send "
                f"fewer, or start the engine with a larger limit_mm_per_prompt"
            )
        uuids = self._uuids(prompt, len(images))
        overrides = _overrides_of(prompt)
        return [
            _as_source(image, f"multi_modal_data['image'][{index}]", uuid, overrides)
            for index, (image, uuid) in enumerate(zip(images, uuids, strict=True))
        ]

    def _uuids(self, prompt: Mapping[str, Any], count: int) -> Sequence[str | None]:
        given = prompt.get("multi_modal_uuids")
        given = {} if given is None else given
        if not isinstance(given, Mapping) or set(given) - {"image"}:
            raise _refused(
                f"multi_modal_uuids must be a dict such as {{'image': [...]}}, got "
                f"{list(given) if isinstance(given, Mapping) else type(given).__name__}"
            )
        uuids = given.get("image")
        if uuids is None:
            return [None] * count
        if isinstance(uuids, str):
            uuids = [uuids]
        if (
            not isinstance(uuids, (list, tuple))
            or len(uuids) != count
            or not all(uuid is None or (isinstance(uuid, str) and uuid) for uuid in uuids)
        ):
            raise _refused(
                f"multi_modal_uuids['image'] must be a list of {count} non-empty strings or None, "
                f"one for each image"
            )
        return list(uuids)

    def read(self, prompt: Mapping[str, Any]) -> list[ReadMedia]:
        """Return the images of a prompt; decode what has not been read, in this process.

        Raises:
            RequestError: one cannot be read; names it.
        """
        if (found := read_media(prompt)) is not None:
            return found
        salt = cache_salt_of(prompt)
        return [
            ReadMedia(source.modality, media_key(source, salt), self._job(source))
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
        """Return tokens with those of the text that belongs around images, unless these are
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
        lookup = _token_lookup(tokenizer)
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
        """Replace the placeholders of images by their tokens.

        Args:
            token_ids: of the prompt.
            items: its images, in order.
            tokenizer: of the model.
            is_text: the prompt was given as text, and not as tokens.
            literal: which of the placeholders, in order, a user has written as text, and stay
                text. None: all of a text without images.

        Returns:
            None: the prompt has neither images nor placeholders.

        Raises:
            RequestError: there are more or fewer placeholders than images.
        """
        family = self.family
        assert family is not None
        if not items and tokenizer is None:
            return None
        lookup = _token_lookup(tokenizer)
        placeholder = lookup(family.placeholder)
        if not items and placeholder not in token_ids:
            return None
        expansions = [family.expand(item.given.grid, lookup) for item in items]
        if items and not literal:
            starts = _find_expanded(token_ids, expansions, placeholder)
            if starts is not None:
                return self._placed(token_ids, items, expansions, starts)
        found_at = [index for index, token in enumerate(token_ids) if token == placeholder]
        kept = set(range(len(found_at)) if literal is None and is_text else literal or ())
        if len(found_at) - len(kept) != len(items):
            raise _refused(
                f"the prompt must have as many placeholders {family.placeholder} as images: it has "
                f"{len(found_at) - len(kept)}, and {len(items)} images are given"
            )
        of_text = _as_text(tokenizer, family.placeholder) if kept else []
        found: list[int] = []
        starts, before = [], 0
        waiting = iter(expansions)
        for number, index in enumerate(found_at):
            found += token_ids[before:index]
            before = index + 1
            if number in kept:
                found += of_text
                continue
            starts.append(len(found))
            found += next(waiting).token_ids
        return self._placed(found + token_ids[before:], items, expansions, starts)

    def _placed(
        self,
        token_ids: list[int],
        items: Sequence[ReadMedia],
        expansions: Sequence[Expansion],
        starts: Sequence[int],
    ) -> PlacedMedia:
        family = self.family
        assert family is not None
        media = tuple(
            MediaItem(
                modality=item.modality,
                key=item.key,
                runs=tuple(_runs(expansion.is_embedding, start)),
                tensors=inline_tensors(item.given.tensors)
                if item.file is None
                else item.file.tensors,
            )
            for item, expansion, start in zip(items, expansions, starts, strict=True)
        )
        placed = [
            PlacedItem(start, len(expansion.token_ids), item.given.grid)
            for item, expansion, start in zip(items, expansions, starts, strict=True)
        ]
        return PlacedMedia(
            token_ids,
            media,
            tuple(CacheKey(item.start, item.key) for item in media),
            family.positions(len(token_ids), placed) if placed else None,
        )


def read_media(prompt: Mapping[str, Any]) -> list[ReadMedia] | None:
    """Return the images of a prompt if they have been read already, else None."""
    data = prompt.get("multi_modal_data")
    images = data.get("image") if isinstance(data, Mapping) else None
    is_read = isinstance(images, list) and images and isinstance(images[0], ReadMedia)
    return images if is_read else None


def cache_salt_of(prompt: Mapping[str, Any]) -> str | None:
    """Return the cache salt of a prompt; raise RequestError if it is not a text."""
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(
            f"cache_salt must be a non-empty string, got {salt!r}", param="cache_salt"
        )
    return salt


def _overrides_of(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the image processor that a prompt brings.

    Raises:
        RequestError: they are no object of JSON.
    """
    overrides = prompt.get("mm_processor_kwargs")
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise _refused(
            f"mm_processor_kwargs must be a dict whose keys are strings, got {_kind_of(overrides)}"
        )
    try:
        json.dumps(dict(overrides))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(f"mm_processor_kwargs must have values of JSON: {error}") from error
    return overrides


def media_key(source: MediaSource, cache_salt: str | None) -> str:
    """Return the identity of the embeddings of an image of one model.

    A name that the client gives (uuid) replaces the content, never the settings.
    """
    digest = hashlib.sha256()
    settings = [source.modality, source.detail, dict(source.overrides), cache_salt]
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    if source.uuid is not None:
        digest.update(b"\0uuid\0" + source.uuid.encode())
    elif source.data is not None:
        digest.update(b"\0file\0")
        digest.update(source.data)
    else:
        assert source.pixels is not None
        digest.update(f"\0pixels\0{source.pixels.shape}\0".encode())
        digest.update(np.ascontiguousarray(source.pixels).data)
    return f"{source.modality}:{digest.hexdigest()}"


def _as_source(
    image: Any, where: str, uuid: str | None, overrides: Mapping[str, Any]
) -> MediaSource:
    """Return an image that a program gives: a file, or pixels in any of the usual forms."""
    if isinstance(image, MediaSource):
        return replace(image, overrides=overrides)
    if isinstance(image, bytes):
        return MediaSource(
            modality="image", where=where, data=image, uuid=uuid, overrides=overrides
        )
    if hasattr(image, "getexif"):  # PIL.Image.Image
        image = np.asarray(to_rgb(image, where=where), np.uint8)
    pixels = _as_pixels(image)
    if pixels is None:
        raise _refused(
            f"{where} must be an image of Pillow, the bytes of a file, or an array or tensor "
            f"[height, width, 3] or [3, height, width] of bytes, or of floats from 0 to 1; got "
            f"{_kind_of(image)}"
        )
    return MediaSource(modality="image", where=where, pixels=pixels, uuid=uuid, overrides=overrides)


def _as_pixels(image: Any) -> npt.NDArray[np.uint8] | None:
    """Return the pixels [H, W, 3] of an array or a tensor; None: it has another shape or type."""
    if hasattr(image, "detach"):
        try:
            image = image.detach().cpu()
            # numpy has no bfloat16
            image = (image.float() if image.is_floating_point() else image).numpy()
        except (RuntimeError, TypeError):  # it is sparse, or has no values
            return None
    if not isinstance(image, np.ndarray) or image.ndim != 3:
        return None
    if image.shape[2] != 3:
        if image.shape[0] != 3:
            return None
        image = image.transpose(1, 2, 0)
    if not image.size:
        return None
    if image.dtype.kind == "f":
        if not (np.isfinite(image).all() and image.min() >= 0 and image.max() <= 1):
            return None
        image = np.rint(image * 255)
    elif image.dtype.kind not in "iu" or image.min() < 0 or image.max() > 255:
        return None
    return np.ascontiguousarray(image, np.uint8)


def _kind_of(image: Any) -> str:
    shape, dtype = getattr(image, "shape", None), getattr(image, "dtype", None)
    if shape is None or dtype is None:
        return type(image).__name__
    return f"{type(image).__name__} {list(shape)} of {dtype}"


def _token_lookup(tokenizer: "PreTrainedTokenizerBase | None") -> Any:
    if tokenizer is None:
        raise _refused(
            "images need a tokenizer, and this engine runs without one (skip_tokenizer_init)"
        )

    def lookup(token: str) -> int:
        found = tokenizer.convert_tokens_to_ids(token)
        if not isinstance(found, int) or (
            found == tokenizer.unk_token_id and token != tokenizer.unk_token
        ):
            raise ConfigError(f"the tokenizer of the model has no token {token!r}")
        return found

    return lookup


def _as_text(tokenizer: "PreTrainedTokenizerBase | None", text: str) -> list[int]:
    """Return the tokens of the words of a placeholder, as if it were no token of its own."""
    assert tokenizer is not None
    whole = tokenizer.convert_tokens_to_ids(text)
    found: list[int] = []
    for part in (text[:2], text[2:]):
        found += tokenizer(part, add_special_tokens=False)["input_ids"]
    assert whole not in found
    return found


def _find_expanded(
    token_ids: list[int], expansions: Sequence[Expansion], placeholder: int
) -> list[int] | None:
    """Return where the expansions of images begin, if the prompt has all of them already; None: it
    has not.

    Args:
        token_ids: of the prompt.
        expansions: of its images, in order.
        placeholder: token of one image that is not expanded.
    """
    if all(len(expansion.token_ids) == 1 for expansion in expansions):
        return None
    starts, index = [], 0
    for expansion in expansions:
        size, first = len(expansion.token_ids), expansion.token_ids[0]
        while index < len(token_ids) and token_ids[index] != first:
            if token_ids[index] == placeholder:
                return None
            index += 1
        if token_ids[index : index + size] != expansion.token_ids:
            return None
        starts.append(index)
        index += size
    return None if placeholder in token_ids[index:] else starts


def _runs(is_embedding: Sequence[bool], start: int) -> Iterator[tuple[int, int]]:
    """Yield (index, n) of the runs of tokens that are embeddings of an image."""
    edges = np.flatnonzero(np.diff(np.array([False, *is_embedding, False], np.int8)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield start + begin, end - begin


def _refused(message: str) -> RequestError:
    return RequestError(message, param="prompt")
