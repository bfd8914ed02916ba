"""The types of a prompt."""

from typing import Any, TypedDict

from typing_extensions import NotRequired

_NAMES = {
    "image": ("an image", "images"),
    "audio": ("a sound", "sounds"),
    "video": ("a video", "videos"),
}
MODALITIES = tuple(_NAMES)
"""Kinds of items that a prompt may have in addition to text."""


def plural(modality: str) -> str:
    """Return the plural of a modality for messages, such as "images"."""
    return _NAMES[modality][1]


def singular(modality: str) -> str:
    """Return the singular of a modality for messages, such as "an image"."""
    return _NAMES[modality][0]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    add_special_tokens: NotRequired[bool]
    """False: the text has its special tokens already, as a rendered chat template has."""
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    """Modality -> items. An image is one of Pillow, an array, a tensor, or a `MediaSource`; a sound
    is an array and its samples per second, and a video is its frames."""
    multi_modal_uuids: NotRequired[dict[str, list[str | None]]]
    """Modality -> a name of each item, which identifies it in caches; None: its content does."""
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    """Overrides settings of the processor of the model for this prompt."""
    literal_placeholders: NotRequired[list[int]]
    """Indices of the placeholders of media, of all in the text, that a user has written: they
    remain text."""


class TokensPrompt(TypedDict):
    """A prompt as token ids, which are used unchanged."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """Text of the token ids, where it is known; shown in outputs, and not tokenised."""
    token_type_ids: NotRequired[list[int]]
    """One per token, for pooling models that tell the parts of a pair apart."""
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, list[str | None]]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    media: NotRequired[Any]
    """The media of a prompt that has been tokenised already: their tokens are expanded."""


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, for an engine with `enable_prompt_embeds`."""

    prompt_embeds: Any
    """Tensor of torch or array of numpy [tokens, size of the model's embeddings]."""
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """Both prompts of a model with an encoder and a decoder, such as Whisper."""

    encoder_prompt: TextPrompt
    """Prompt of the encoder: its `multi_modal_data` is what the encoder reads, and its text is
    empty."""
    decoder_prompt: str | list[int] | TextPrompt | TokensPrompt
    mm_processor_kwargs: NotRequired[dict[str, Any]]


PromptType = (
    str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | ExplicitEncoderDecoderPrompt
)
"""A string is tokenised with the tokenizer's special tokens (BOS); a list holds token ids."""
