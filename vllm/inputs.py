"""The forms a prompt may have."""

from typing import TYPE_CHECKING, Any, TypedDict

from typing_extensions import NotRequired

if TYPE_CHECKING:
    import torch


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    add_special_tokens: NotRequired[bool]
    """False: the text has its special tokens already, as a rendered chat template has."""
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids, run as they are."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """Text of the token ids, where it is known; shown in outputs, and not tokenised."""
    token_type_ids: NotRequired[list[int]]
    """One per token, for pooling models that tell the parts of a pair apart."""
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings of its tokens, in place of the tokens."""

    prompt_embeds: "torch.Tensor"
    """[tokens, hidden_size]."""
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """Both prompts of a model with an encoder and a decoder. No such model runs here yet."""

    encoder_prompt: "PromptType"
    decoder_prompt: "PromptType | None"
    mm_processor_kwargs: NotRequired[dict[str, Any]]


PromptType = str | list[int] | TextPrompt | TokensPrompt
"""A string is tokenised with the tokenizer's special tokens (BOS); a list holds token ids."""
