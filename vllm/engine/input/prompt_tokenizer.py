"""Tokenise prompts of any type, and check them against the vocabulary."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.config.families import family_of_architecture
from vllm.engine.input.media_input import MEDIA_KEYS, cache_salt_of
from vllm.engine.input.media_placer import PlacedMedia
from vllm.errors import RequestError, TextTooLongError
from vllm.inputs import PromptType, TokensPrompt
from vllm.messages import TokenEmbeddings
from vllm.transformers_utils.special_tokens import SpecialTokens
from vllm.transformers_utils.token_bytes import USUAL_TOKEN_BYTES, TextLengthBound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROMPT_TYPES = (
    "a string, a list of token ids, {'prompt': str} or {'prompt_token_ids': list of int}"
)
_KEYS = {
    *("prompt", "prompt_token_ids", "cache_salt", "add_special_tokens", "token_type_ids"),
    *("literal_placeholders", "media"),
}


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The token ids of a prompt, or its embeddings."""

    token_ids: list[int]
    text: str | None
    cache_salt: str | None = None
    embeddings: tuple[TokenEmbeddings, ...] = ()
    """Embeddings of the prompt, whose token ids are then placeholders; empty: the prompt has
    none."""
    media: PlacedMedia | None = None
    """Media of the prompt, whose tokens are among `token_ids`; None: it has none."""

    def as_prompt(self) -> TokensPrompt:
        """Return a prompt with these tokens. There must be no embeddings."""
        made: TokensPrompt = {"prompt_token_ids": self.token_ids}
        if self.cache_salt is not None:
            made["cache_salt"] = self.cache_salt
        if self.media is not None:
            made["media"] = self.media
        return made


class PromptTokenizer:
    """Tokenises prompts with the tokenizer of an engine, and finds the end tokens.

    Args:
        config: complete and consistent config.
        tokenizer: tokenizer of the model; None: only token ids are accepted. May be replaced at any
            time.
        generation_defaults: result of `load_generation_defaults`. Only its "eos_token_ids" is used
            here: end tokens in addition to the end token of the tokenizer.
    """

    def __init__(
        self,
        config: VllmConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        generation_defaults: Mapping[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        arch = config.model.resolved_arch
        self._num_tokens = arch.num_embeddings
        self.adds_special_tokens = not family_of_architecture(
            arch.architecture
        ).has_complete_prompts
        """Used for prompts that do not give a value."""
        self._max_model_len = config.scheduler.max_model_len
        self._length_bound: TextLengthBound | None = None
        self._config_end_tokens = _as_ids(config.model.resolved_arch.hf_config.get("eos_token_id"))
        self._default_end_tokens = _as_ids(generation_defaults.get("eos_token_ids"))

    @property
    def end_tokens(self) -> tuple[int | None, frozenset[int]]:
        """End token that is not reported as a stop reason, and the other end tokens of the model.

        The first is the end token of the tokenizer, or of config.json if there is no tokenizer. The
        others come from generation_config.json and config.json. They are reported as a stop reason,
        like a user's stop tokens.
        """
        eos = SpecialTokens.of(self.tokenizer).eos_token_id
        others = self._default_end_tokens
        if eos is None and self._config_end_tokens:
            eos, *rest = self._config_end_tokens
            others = [*others, *rest]
        return eos, frozenset(others) - {eos}

    def tokenize(self, prompt: PromptType, *, max_tokens: int | None = None) -> TokenizedPrompt:
        """Return the token ids of a prompt of any type: at least one, and all in the vocabulary.

        Args:
            prompt: prompt of any type.
            max_tokens: refuse a text that certainly has more tokens before it is tokenised; None:
                no limit.

        Raises:
            RequestError: its type is not known, it has no tokens, or a token is not in the
                vocabulary.
            PromptTooLongError: it certainly has more than `max_tokens` tokens.
        """
        if isinstance(prompt, str):
            token_ids = self._encode(prompt, self.adds_special_tokens, max_tokens=max_tokens)
            return TokenizedPrompt(token_ids, prompt)
        if isinstance(prompt, Mapping):
            return self._tokenize_mapping(prompt, max_tokens)
        return TokenizedPrompt(self._check_prompt_ids(prompt), None)

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a part of a text, without special tokens at its ends."""
        assert self.tokenizer is not None
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return len(encoded["input_ids"])

    def _tokenize_mapping(
        self, prompt: Mapping[str, Any], max_tokens: int | None
    ) -> TokenizedPrompt:
        if media := [key for key in prompt if key in MEDIA_KEYS and _is_given(prompt[key])]:
            raise RequestError(
                f"{', '.join(media)}: a pooling model reads text only. Leave it out of the prompt",
                param="prompt",
            )
        if "encoder_prompt" in prompt:
            raise RequestError(
                "encoder_prompt: this model has no encoder that reads a prompt of its own. Send a "
                f"prompt without it, as {_PROMPT_TYPES}",
                param="prompt",
            )
        if prompt.get("prompt_embeds") is not None:
            raise RequestError(
                "prompt_embeds: a pooling model does not accept embeddings as a prompt. Send text "
                "or token ids",
                param="prompt_embeds",
            )
        if unknown := [key for key in prompt if key not in _KEYS.union(MEDIA_KEYS)]:
            raise RequestError(
                f"the prompt has the unknown key {', '.join(map(repr, unknown))}; accepted: "
                f"{_PROMPT_TYPES}",
                param="prompt",
            )
        text, salt = prompt.get("prompt"), cache_salt_of(prompt)
        if text is not None and not isinstance(text, str):
            raise RequestError(
                f"'prompt' of a prompt must be a string, got {type(text).__name__}", param="prompt"
            )
        if prompt.get("prompt_token_ids") is not None:
            return TokenizedPrompt(self._check_prompt_ids(prompt["prompt_token_ids"]), text, salt)
        if text is None:
            raise RequestError(f"the prompt is empty: expected {_PROMPT_TYPES}", param="prompt")
        add_special_tokens = bool(prompt.get("add_special_tokens", self.adds_special_tokens))
        token_ids = self._encode(text, add_special_tokens, max_tokens=max_tokens)
        return TokenizedPrompt(token_ids, text, salt)

    def _encode(
        self, text: str, add_special_tokens: bool, *, max_tokens: int | None = None
    ) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer, but this engine runs without one "
                "(skip_tokenizer_init): send token ids",
                param="prompt",
            )
        self.check_length(text, max_tokens)
        # verbose=False: otherwise the tokenizer warns about prompts longer than its own limit.
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        if not text and not encoded["input_ids"]:
            bos = self.tokenizer.bos_token_id
            hint = "" if bos is None else f"; to generate from nothing, send the token ids [{bos}]"
            raise RequestError(
                f"the prompt is empty, and no special tokens are added to it; at least one token "
                f"is needed{hint}",
                param="prompt",
            )
        return self._check_prompt_ids(encoded["input_ids"])

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Refuse a text that is not valid Unicode or certainly has more than `max_tokens` tokens.

        Raises:
            RequestError: it is not valid Unicode.
            TextTooLongError: it is too long.
        """
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid text: {error.reason} at character {error.start}",
                param="prompt",
            ) from error
        if max_tokens is None or num_bytes <= max_tokens * USUAL_TOKEN_BYTES:
            return
        if self._length_bound is None or self._length_bound.tokenizer is not self.tokenizer:
            assert self.tokenizer is not None
            self._length_bound = TextLengthBound(self.tokenizer)
        if self._length_bound.min_tokens(text, num_bytes) > max_tokens:
            raise TextTooLongError(num_bytes, max_tokens, self._max_model_len)

    def _check_prompt_ids(self, token_ids: Any) -> list[int]:
        if hasattr(token_ids, "tolist"):  # an array of numpy or torch
            token_ids = token_ids.tolist()
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
            raise RequestError(
                f"a prompt cannot be of type {type(token_ids).__name__}: expected {_PROMPT_TYPES}",
                param="prompt",
            )
        if not token_ids:
            raise RequestError("the prompt has no tokens; at least one is needed", param="prompt")
        ids = list(token_ids)
        if set(map(type, ids)) != {int}:
            ids = [_as_int(token_id, position) for position, token_id in enumerate(ids)]
        if min(ids) < 0 or max(ids) >= self._num_tokens:
            position = next(i for i, t in enumerate(ids) if not 0 <= t < self._num_tokens)
            raise RequestError(
                f"token id {ids[position]} at position {position} of the prompt is not in the "
                f"vocabulary of {self._num_tokens} tokens (0 to {self._num_tokens - 1})",
                param="prompt",
            )
        return ids


def _is_given(media: Any) -> bool:
    """Return whether the media of a prompt contain anything."""
    return media is not None and not (isinstance(media, Mapping) and not media)


def _as_ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _as_int(token_id: Any, position: int) -> int:
    """Convert a token id of any integer type, such as numpy's, to a Python int."""
    if not isinstance(token_id, bool):
        try:
            return operator.index(token_id)
        except TypeError:
            pass  # reported below, with the position of the invalid token
    raise RequestError(
        f"token ids must be integers, got {type(token_id).__name__} {token_id!r} "
        f"at position {position} of the prompt",
        param="prompt",
    )
