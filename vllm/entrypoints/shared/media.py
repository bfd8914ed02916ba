"""Find which media the model of an engine accepts in conversations, and create prompts with
them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from vllm.entrypoints.conversation.media import MediaPart, MediaRules, MediaText, RenderedChat
from vllm.errors import RequestError
from vllm.inputs import TextPrompt

if TYPE_CHECKING:
    from vllm.engine.input.input_processor import InputProcessor
    from vllm.multimodal.fetching.fetch import MediaFetcher


def media_rules(processor: "InputProcessor", *, is_local: bool = False) -> MediaRules | None:
    """Return the rules for media in conversations with the model; None if it reads only text.

    Args:
        processor: input processor of the engine.
        is_local: the conversations come from this program, so relative paths can be resolved.
    """
    family = processor.media.family
    if family is None:
        return None
    # Without line breaks, because in string content each item is on its own line anyway.
    texts = {
        modality: MediaText(placeholder, family.text_of(modality).strip("\n"))
        for modality in family.modalities
        if (placeholder := family.placeholder_of(modality))
    }
    if not texts:
        return None
    limits = {modality: processor.media.limits[modality] for modality in texts}
    return MediaRules(texts=texts, limits=limits, is_local=is_local)


def chat_modalities(processor: "InputProcessor") -> list[str]:
    """Return the modalities that chat messages may contain: "text", and "image", "audio" and
    "video" if the model reads them.

    Empty if each prompt needs an item that messages cannot contain, as for models that only
    transcribe.

    Args:
        processor: input processor of the engine.
    """
    rules, family = media_rules(processor), processor.media.family
    if family is not None and family.required is not None and rules is None:
        return []
    limits = {} if rules is None else rules.limits
    return ["text", *(modality for modality, limit in limits.items() if limit)]


def require_chat(processor: "InputProcessor") -> None:
    """Refuse a conversation with a model that only transcribes.

    Raises:
        RequestError: names the right methods.
    """
    if not chat_modalities(processor):
        raise RequestError(
            "this model transcribes sound and has no conversations: use POST "
            "/v1/audio/transcriptions, or multi_modal_data of LLM.generate",
            param="messages",
        )


class MediaSources(Protocol):
    """Settings with the allowed sources of media: a config, or the arguments of an engine."""

    @property
    def allowed_local_media_path(self) -> str: ...
    @property
    def allowed_media_domains(self) -> Sequence[str]: ...


def make_fetcher(config: MediaSources) -> "MediaFetcher":
    """Return the fetcher for the media of an engine.

    Raises:
        ConfigError: the folder does not exist, or a domain is malformed.
    """
    from vllm.multimodal import utils

    return utils.make_fetcher(config.allowed_local_media_path, config.allowed_media_domains)


async def fetch_media(
    fetcher: "MediaFetcher", parts: Sequence[MediaPart], fetched: dict[str, bytes] | None = None
) -> list[MediaPart]:
    """Replace the URLs of media by their content. All are fetched at the same time.

    A URL that occurs several times is fetched once. If one fails, or the request is cancelled,
    the others are cancelled.

    Args:
        fetcher: fetcher of the server.
        parts: the media.
        fetched: content of media that need not be fetched again, by URL; newly fetched media are
            added, except data: URLs. None: fetch all, and keep nothing.

    Raises:
        RequestError: a URL is not allowed, or cannot be fetched; names the item.
    """
    contents: dict[str | int, bytes] = dict((fetched or {}).items())
    budget = fetcher.make_budget()
    tasks = {
        key: asyncio.create_task(fetcher.fetch(part.source, part.modality, part.where, budget))
        for key, part in _by_url(parts).items()
        if key not in contents
    }
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
    contents.update((key, task.result()) for key, task in tasks.items())
    if fetched is not None:
        fetched.update((key, content) for key, content in contents.items() if isinstance(key, str))
    return _with_content(parts, contents)


def fetch_media_sync(fetcher: "MediaFetcher", parts: Sequence[MediaPart]) -> list[MediaPart]:
    """Replace the URLs of media by their content, one after another. Blocks."""
    contents = {
        key: fetcher.fetch_sync(part.source, part.modality, part.where)
        for key, part in _by_url(parts).items()
    }
    return _with_content(parts, contents)


def _by_url(parts: Sequence[MediaPart]) -> dict[str | int, MediaPart]:
    """Return the first part of each URL, by `_key_of`."""
    return {_key_of(part.source): part for part in reversed(parts) if isinstance(part.source, str)}


def _key_of(url: str) -> str | int:
    """Return what identifies a URL in one request: for a data: URL the object, because the hash of
    a file of megabytes would keep the event loop waiting."""
    return id(url) if url[:5].lower() == "data:" else url


def _with_content(
    parts: Sequence[MediaPart], contents: Mapping[str | int, bytes]
) -> list[MediaPart]:
    return [
        replace(part, source=contents[_key_of(part.source)])
        if isinstance(part.source, str)
        else part
        for part in parts
    ]


def media_prompt(
    chat: RenderedChat,
    media: Sequence[MediaPart],
    rules: MediaRules | None,
    processor_kwargs: Mapping[str, Any] | None,
) -> TextPrompt:
    """Return the prompt of a rendered conversation with its media.

    Args:
        chat: the rendered text.
        media: media of the prompt, already fetched.
        rules: media rules of the model.
        processor_kwargs: settings that override settings of the model's processor, or None.

    Raises:
        RequestError: such settings are given to a model that reads only text.
    """
    prompt: TextPrompt = {"prompt": chat.text, "add_special_tokens": False}
    if processor_kwargs and rules is None:
        raise RequestError(
            "mm_processor_kwargs: this model reads text only. Leave it out",
            param="mm_processor_kwargs",
        )
    if rules is not None:
        prompt["literal_placeholders"] = chat.literals
    if not media:
        return prompt
    by_modality: dict[str, list[MediaPart]] = {}
    for part in media:
        by_modality.setdefault(part.modality, []).append(part)
    prompt["multi_modal_data"] = {
        modality: [_as_item(part) for part in parts] for modality, parts in by_modality.items()
    }
    if any(part.uuid is not None for part in media):
        prompt["multi_modal_uuids"] = {
            modality: [part.uuid for part in parts] for modality, parts in by_modality.items()
        }
    if processor_kwargs:
        prompt["mm_processor_kwargs"] = dict(processor_kwargs)
    return prompt


def _as_item(part: MediaPart) -> Any:
    """Return an item in the form that the engine reads: a fetched file with its description, or an
    object.
    """
    from vllm.multimodal.given import NamedItem
    from vllm.multimodal.interface.source import MediaSource

    if not isinstance(part.source, bytes):
        return NamedItem(part.where, part.source)
    return MediaSource(
        modality=part.modality,
        where=part.where,
        data=part.source,
        uuid=part.uuid,
        detail=part.detail,
    )
