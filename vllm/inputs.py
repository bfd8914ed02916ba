"""The types of a prompt."""

from typing import Any, TypedDict

from typing_extensions import NotRequired


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    add_special_tokens: NotRequired[bool]
    """False: the text has its special tokens already, as a rendered chat template has."""
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids, which are used unchanged."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """Text of the token ids, where it is known; shown in outputs, and not tokenised."""
    token_type_ids: NotRequired[list[int]]
    """One per token, for pooling models that tell the parts of a pair apart."""
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, for an engine with `enable_prompt_embeds`."""

    prompt_embeds: Any
    """Tensor of torch or array of numpy [tokens, size of the model's embeddings]."""
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """Both prompts of a model with an encoder and a decoder. No such model runs here yet."""

    encoder_prompt: "PromptType"
    decoder_prompt: "PromptType | None"
    mm_processor_kwargs: NotRequired[dict[str, Any]]


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
"""A string is tokenised with the tokenizer's special tokens (BOS); a list holds token ids."""
