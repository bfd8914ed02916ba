"""Check and read the images, audio and videos of prompts.

Reading an item (decode, cut, resize) takes long, and a server does it in other processes. So a
prompt is processed in two steps: `read` or `MediaWorkers` turn its items into `ReadMedia`, and
`MediaPlacer` turns these into a request.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vllm.config import VllmConfig
from vllm.engine.input.media_placer import MediaPlacer, ReadMedia, Vocabulary
from vllm.errors import RequestError
from vllm.inputs import PromptType, plural
from vllm.multimodal.given import as_list, as_source, kind_of
from vllm.multimodal.given_embeddings import GivenEmbeddings
from vllm.multimodal.interface.family import MediaFamily
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.interface.speech import SpeechRules
from vllm.multimodal.job import (
    Job,
    family_class,
    family_of_model,
    job_arguments,
    make_job,
    speech_of_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Keys of a prompt that are about media."""


class MediaInput:
    """Reads the images, audio and videos of prompts for one model.

    Args:
        config: complete and consistent config.

    Attributes:
        limits: how many items a prompt may have, by modality that the model reads.
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
        """Whether all processes of the engine can read files of this process."""
        return self._engine.parallel.is_on_this_machine

    @property
    def cache_bytes(self) -> int:
        """Bytes of memory for items that have been read."""
        return self._config.processor_cache_bytes

    @cached_property
    def family(self) -> MediaFamily | None:
        """Rules for the model's media, with the settings of the engine; None: the model reads only
        text.
        """
        return family_of_model(self._engine)

    def speech(self, tokenizer: "PreTrainedTokenizerBase | None") -> SpeechRules | None:
        """Return the rules by which the model transcribes speech; None if it does not.

        Args:
            tokenizer: tokenizer of the model.
        """
        if self.family is None:
            return None
        if self._speech is None:
            self._speech = (speech_of_model(self._engine, Vocabulary(tokenizer)),)
        return self._speech[0]

    def joined(self, prompt: PromptType) -> PromptType:
        """Return the prompt for the decoder, with the media of the encoder prompt if the prompt has
        both.

        Raises:
            RequestError: one of the two is missing, or contains something that belongs to the
                other.
        """
        if not isinstance(prompt, Mapping) or "encoder_prompt" not in prompt:
            return prompt
        if self.family is None or self.family.required is None:
            return prompt  # the tokenizer refuses it later
        return _joined_prompts(prompt)

    @cached_property
    def placer(self) -> MediaPlacer:
        """Object that replaces the placeholders in prompts. The model must read media."""
        assert self.family is not None
        return MediaPlacer(self.family, self.limits)

    def check_required(self, num_items: int) -> None:
        """Refuse a prompt without the media item that the model needs.

        Raises:
            RequestError: the model needs exactly one item of media, and the prompt does not have
                it.
        """
        if self.family is not None and self.family.required is not None and num_items != 1:
            raise _refused(
                f"this model needs exactly one {self.family.required!r} item in multi_modal_data "
                f"of each prompt, got {num_items or 'none'}. On a server, send sound files to POST "
                "/v1/audio/transcriptions"
            )

    @cached_property
    def job_arguments(self) -> dict[str, Any]:
        """Arguments of `make_job` to read the media of the model."""
        return job_arguments(self._engine)

    @cached_property
    def _embeddings(self) -> GivenEmbeddings:
        assert self.family is not None
        return GivenEmbeddings(
            self.family,
            self._model.resolved_arch.embedding_size,
            self._model.dtype_name,
            is_enabled=self._config.enable_mm_embeds,
        )

    @cached_property
    def _job(self) -> Job:
        return make_job(**self.job_arguments)

    def sources(self, prompt: Mapping[str, Any]) -> list[MediaSource]:
        """Return the media items of a prompt, modality by modality.

        Raises:
            RequestError: the model does not read such items, or an item has the wrong type.
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
        if "image" in items:
            items["image"] = self._embeddings.divide(items["image"])
        uuids = self._uuids(prompt)
        overrides = _overrides_of(prompt)
        found = []
        for kind, several in items.items():
            if several and not self.limits[kind]:
                raise _refused(
                    f"this engine does not accept {plural(kind)}: limit_mm_per_prompt allows 0. "
                    "Leave them out"
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
                    background=self._config.background,
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
        """Return the media items of a prompt. Items that are not read yet are decoded in this
        process.

        Raises:
            RequestError: an item cannot be read; the message names it.
        """
        if (found := read_media(prompt)) is not None:
            return found
        salt = cache_salt_of(prompt)
        return [
            ReadMedia.of(source, media_key(source, salt), source.encoded or self._job(source))
            for source in self.sources(prompt)
        ]


def read_media(prompt: Mapping[str, Any]) -> list[ReadMedia] | None:
    """Return the media items of a prompt if they have been read already, else None."""
    data = prompt.get("multi_modal_data")
    several = list(data.values()) if isinstance(data, Mapping) else []
    if not several or not all(isinstance(given, _ReadItems) for given in several):
        return None
    return [item for given in several for item in given]


def with_read_media(prompt: Mapping[str, Any], items: Sequence[ReadMedia]) -> PromptType:
    """Return the prompt with its media replaced by items that have been read."""
    data = {
        kind: _ReadItems(item for item in items if item.modality == kind)
        for kind in dict.fromkeys(item.modality for item in items)
    }
    return cast(PromptType, {**prompt, "multi_modal_data": data})


class _ReadItems(list[ReadMedia]):
    """Items of one modality that have been read. A user's prompt cannot contain this type."""


def cache_salt_of(prompt: Mapping[str, Any]) -> str | None:
    """Return the cache salt of a prompt, or None.

    Raises:
        RequestError: the salt is not a non-empty string.
    """
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
    """Return the processor settings that a prompt contains.

    Raises:
        RequestError: they are not a JSON object.
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
        raise _refused(
            f"mm_processor_kwargs must have only values that JSON can express: {error}"
        ) from error
    return overrides


def media_key(source: MediaSource, cache_salt: str | None) -> str:
    """Return the cache key of a media item, before its size is known.

    An id that the client gives (uuid) replaces the hash of the content, never the settings.
    """
    digest = hashlib.sha256()
    is_encoded = source.encoded is not None
    settings = [source.modality, is_encoded, source.detail, dict(source.overrides), cache_salt]
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    if source.uuid is not None:
        digest.update(b"\0uuid\0" + source.uuid.encode())
        return f"{source.modality}:{digest.hexdigest()}"
    for name, content in source.arrays.items():
        digest.update(f"\0{name}\0{content.shape}{source.sampling_rate}\0".encode())
        digest.update(np.ascontiguousarray(content).data)
    return f"{source.modality}:{digest.hexdigest()}"


def _names_of(kind: str, given: Any, count: int) -> Sequence[str | None]:
    """Return the ids (uuid) that a prompt gives to its items of one modality.

    Raises:
        RequestError: the number of ids differs from the number of items, or an id is not a string.
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


def _refused(message: str) -> RequestError:
    return RequestError(message, param="prompt")
