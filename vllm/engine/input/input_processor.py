"""Converts a user's request to an `EngineRequest`: tokenises it and checks it against model and
limits.

All errors of a request are found here, before the core sees it. Only the core knows whether it fits
the KV cache.
"""

import copy
import json
import operator
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.config import VllmConfig
from vllm.engine.input.pooling_input import PoolingInput, refuse_generation
from vllm.engine.input.prompt_embeds import (
    PLACEHOLDER_TOKEN_ID,
    PromptEmbeds,
    cache_keys,
)
from vllm.engine.input.sampling_input import SamplingInput, check_without_tokens
from vllm.errors import PromptTooLongError, RequestError, TextTooLongError
from vllm.inputs import PromptType
from vllm.lora.files import adapter_keys, find_adapter
from vllm.lora.request import LoRARequest
from vllm.messages import AdapterRef, EngineRequest, Grammar, TokenEmbeddings
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.structured_output.compiler import GrammarCompiler
from vllm.transformers_utils.token_bytes import USUAL_TOKEN_BYTES, TextLengthBound
from vllm.utils.background_work import Pace, no_rest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG_TEXT_CHARS = 16 * 1024
"""A text of this length takes so long to tokenise that a server does it in a thread. The same limit
holds for other slow preparation."""

_PROMPT_TYPES = (
    "a string, a list of token ids, {'prompt': str} or {'prompt_token_ids': list of int}"
)
_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "add_special_tokens", "token_type_ids"}
_MEDIA_KEYS = {"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"}


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The token ids of a prompt, or the embeddings in place of them."""

    token_ids: list[int]
    text: str | None
    cache_salt: str | None = None
    embeddings: tuple[TokenEmbeddings, ...] = ()
    """The embeddings, or None. The tokens are placeholders then."""


class InputProcessor:
    """Makes requests for one engine.

    Args:
        config: complete and consistent.
        tokenizer: None: only token ids are accepted.
        generation_defaults: from the model's generation_config.json; of it, only
            "eos_token_ids" is used here: end tokens besides the tokenizer's.
    """

    def __init__(
        self,
        config: VllmConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        generation_defaults: Mapping[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._generation_defaults = generation_defaults
        self._vocab_size = config.model.resolved_arch.vocab_size
        self._max_model_len = config.scheduler.max_model_len
        self._structured_output = config.structured_output
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._pooler = config.model.pooler
        self._length_bound: TextLengthBound | None = None
        self.sampling = SamplingInput(config, self)
        self.pooling = PoolingInput(config, self)
        self.prompt_embeds = PromptEmbeds(config.model, self._max_model_len)
        self._config_end_tokens = _as_ids(config.model.resolved_arch.hf_config.get("eos_token_id"))
        self._default_end_tokens = _as_ids(generation_defaults.get("eos_token_ids"))
        # Requests without a seed get one from here, so that an offline run is reproducible.
        self._seeds = random.Random(config.model.seed)

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self._max_model_len

    def with_tokenizer(self, tokenizer: "PreTrainedTokenizerBase | None") -> "InputProcessor":
        """A processor for the same engine with its own tokenizer, for another thread."""
        return InputProcessor(self._config, tokenizer, self._generation_defaults)

    @property
    def end_tokens(self) -> tuple[int | None, frozenset[int]]:
        """The end token that is not reported as a stop reason, and further end tokens of the model.

        The first is the tokenizer's, or config.json's when there is none. The others come from
        generation_config.json and are reported as stop reason, like a user's stop tokens.
        """
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        others = self._default_end_tokens
        if eos is None and self._config_end_tokens:
            eos, *rest = self._config_end_tokens
            others = [*others, *rest]
        return eos, frozenset(others) - {eos}

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> tuple[str | None, EngineRequest]:
        """Check and tokenise a request. `params` is shared with the result, and not changed.

        Args:
            request_id: the user's.
            prompt: of any prompt type.
            params: how to sample; for several samples see `fan_out.fan_out`.
            arrival_time: in seconds of `time.time()`; None is now.
            priority: a smaller one goes first.
            lora_request: the adapter to use; None: the model alone.

        Returns:
            The prompt's text, None when it is not known, and the request.

        Raises:
            RequestError: the request is wrong; names the field and the accepted values.
        """
        refuse_generation(self._pooler)
        self.sampling.check(params)
        adapter = None if lora_request is None else self.adapter(lora_request)
        is_truncated = params.truncate_prompt_tokens is not None
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            tokenized = self._read_embeddings(prompt)
            check_without_tokens(params)
        else:
            tokenized = self.tokenize(
                prompt, max_tokens=None if is_truncated else self._max_model_len - 1
            )
        token_ids = tokenized.token_ids
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        if len(token_ids) >= self._max_model_len:
            raise PromptTooLongError(len(token_ids), self._max_model_len)
        max_total = self._max_model_len
        if params.max_tokens is not None:
            max_total = min(max_total, len(token_ids) + params.max_tokens)
        eos, others = self.end_tokens
        # With structured output, the end token ends the output when the grammar is complete.
        if params.ignore_eos and params.guided_decoding is None:
            eos, others = None, frozenset()
        return tokenized.text, EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_token_id=eos,
            stop_token_ids=others.union(
                params.stop_token_ids or (), params.all_stop_token_ids - {eos}
            ),
            bad_words_token_ids=self.sampling.tokenize_bad_words(params.bad_words or ()),
            max_total_tokens=max_total,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=tokenized.cache_salt,
            cache_extra_keys=adapter_keys(adapter) + cache_keys(tokenized.embeddings),
            embeddings=tokenized.embeddings,
            adapter=adapter,
        )

    def adapter(self, asked: LoRARequest, is_busy: Callable[[], bool] | None = None) -> AdapterRef:
        """The adapter that a request names; its files have been looked at, and hashed, which takes
        a while when they are new.

        Args:
            asked: names it.
            is_busy: whether to do that in short turns, as requests run. None: they wait for it.

        Raises:
            RequestError: the engine accepts none, or its files are missing or wrong.
        """
        if not isinstance(asked, LoRARequest):
            raise RequestError(
                f"lora_request must be a LoRARequest, got {type(asked).__name__}",
                param="lora_request",
            )
        lora = self._config.lora
        if not lora.enable_lora:
            raise RequestError(
                f"lora_request: the engine was started without LoRA, and the adapter "
                f"{asked.lora_name!r} is asked for. Start it with enable_lora=True",
                param="lora_request",
            )
        rest = no_rest if is_busy is None else Pace(is_busy).rest
        return find_adapter(asked, lora.max_lora_rank, rest)

    def process_pooling(
        self,
        request_id: str,
        prompt: PromptType,
        params: PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> tuple[str | None, EngineRequest]:
        """`process` for a pooling model; see there.

        Raises:
            RequestError: the request is wrong, or the model generates text.
        """
        return self.pooling.process(
            request_id, prompt, params, arrival_time=arrival_time, priority=priority
        )

    def attach_grammar(self, request: EngineRequest) -> EngineRequest:
        """The request with its compiled grammar, if it asks for structured output.

        Blocks for as long as compiling takes, within the limits of the config. To be called
        from any thread, after `process` and before the request goes to the core.

        Raises:
            RequestError: the grammar is not valid, cannot be enforced, or is too costly to compile.
            CapacityError: (503) too many grammars are being compiled.
        """
        guided = request.sampling_params.guided_decoding
        if guided is None or request.grammar is not None:
            return request
        return _with_grammar(request, self.grammar_compiler.compile(guided))

    def attach_cached_grammar(self, request: EngineRequest) -> EngineRequest | None:
        """As `attach_grammar` if nothing has to be compiled, else None; does not block."""
        guided = request.sampling_params.guided_decoding
        if guided is None or request.grammar is not None:
            return request
        grammar = self.grammar_compiler.cached(guided)
        return None if grammar is None else _with_grammar(request, grammar)

    def close(self) -> None:
        """End the processes that compile grammars. Running compilations fail."""
        with self._compiler_lock:
            if self._compiler is not None:
                self._compiler.close()

    @property
    def grammar_compiler(self) -> GrammarCompiler:
        """The compiler for the current tokenizer, made when first used. Its processes start
        later."""
        with self._compiler_lock:
            if self._compiler is None or self._compiler.tokenizer is not self.tokenizer:
                self._compiler = GrammarCompiler(
                    self._structured_output, self.tokenizer, self._vocab_size
                )
            return self._compiler

    def tokenize(self, prompt: PromptType, *, max_tokens: int | None = None) -> TokenizedPrompt:
        """Token ids of a prompt of any type; at least one, and all of them in the vocabulary.

        Args:
            prompt: of any prompt type.
            max_tokens: a text that certainly has more tokens is refused before it is tokenised;
                None: no limit.

        Raises:
            RequestError: its type is not known, or it has no tokens, or one that is not in the
                vocabulary.
            PromptTooLongError: it certainly has more than `max_tokens`.
        """
        if isinstance(prompt, str):
            return TokenizedPrompt(self._encode(prompt, max_tokens=max_tokens), prompt)
        if isinstance(prompt, Mapping):
            return self._tokenize_mapping(prompt, max_tokens)
        return TokenizedPrompt(self._check_prompt_ids(prompt), None)

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a part of a text, without special tokens at its ends."""
        assert self.tokenizer is not None
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return len(encoded["input_ids"])

    # ---- prompts --------------------------------------------------------------------------

    def _tokenize_mapping(
        self, prompt: Mapping[str, Any], max_tokens: int | None
    ) -> TokenizedPrompt:
        if media := [key for key in prompt if key in _MEDIA_KEYS and prompt[key]]:
            raise RequestError(
                f"{', '.join(media)}: this version reads text only. Leave it out of the prompt",
                param="prompt",
            )
        if "encoder_prompt" in prompt:
            raise RequestError(
                "models with an encoder and a decoder are not supported: send a prompt without "
                f"'encoder_prompt', as {_PROMPT_TYPES}",
                param="prompt",
            )
        if prompt.get("prompt_embeds") is not None:
            raise RequestError(
                "prompt_embeds: a pooling model does not accept embeddings as a prompt. Send text "
                "or token ids",
                param="prompt_embeds",
            )
        if unknown := [key for key in prompt if key not in _KEYS | _MEDIA_KEYS]:
            raise RequestError(
                f"the prompt has the unknown key {', '.join(map(repr, unknown))}; accepted: "
                f"{_PROMPT_TYPES}",
                param="prompt",
            )
        text, salt = prompt.get("prompt"), _cache_salt_of(prompt)
        if text is not None and not isinstance(text, str):
            raise RequestError(
                f"'prompt' of a prompt must be a string, got {type(text).__name__}", param="prompt"
            )
        if prompt.get("prompt_token_ids") is not None:
            return TokenizedPrompt(self._check_prompt_ids(prompt["prompt_token_ids"]), text, salt)
        if text is None:
            raise RequestError(f"the prompt is empty: expected {_PROMPT_TYPES}", param="prompt")
        add_special_tokens = bool(prompt.get("add_special_tokens", True))
        token_ids = self._encode(text, add_special_tokens, max_tokens=max_tokens)
        return TokenizedPrompt(token_ids, text, salt)

    def _read_embeddings(self, prompt: Mapping[str, Any]) -> TokenizedPrompt:
        others = {"prompt_embeds", "cache_salt"}
        if more := [key for key in prompt if key not in others and prompt[key] is not None]:
            raise RequestError(
                f"a prompt with prompt_embeds must not have {', '.join(map(repr, more))}: the "
                "embeddings are the whole prompt",
                param="prompt",
            )
        embeddings = self.prompt_embeds.read(prompt["prompt_embeds"])
        placeholders = [PLACEHOLDER_TOKEN_ID] * embeddings.shape[0]
        return TokenizedPrompt(placeholders, None, _cache_salt_of(prompt), (embeddings,))

    def _encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None
    ) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer, and this engine runs without one "
                "(skip_tokenizer_init): send token ids",
                param="prompt",
            )
        if not text:
            bos = self.tokenizer.bos_token_id
            hint = "" if bos is None else f"; to generate from nothing, send the token ids [{bos}]"
            raise RequestError(f"the prompt is empty{hint}", param="prompt")
        self.check_length(text, max_tokens)
        # verbose: the tokenizer would warn about prompts longer than its own limit.
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return self._check_prompt_ids(encoded["input_ids"])

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Refuse text that is not valid, or certainly has more than `max_tokens` tokens.

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
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            position = next(i for i, t in enumerate(ids) if not 0 <= t < self._vocab_size)
            raise RequestError(
                f"token id {ids[position]} at position {position} of the prompt is not in the "
                f"vocabulary of {self._vocab_size} tokens (0 to {self._vocab_size - 1})",
                param="prompt",
            )
        return ids


def _cache_salt_of(prompt: Mapping[str, Any]) -> str | None:
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(
            f"cache_salt must be a non-empty string, got {salt!r}", param="cache_salt"
        )
    return salt


def _with_grammar(request: EngineRequest, grammar: Grammar) -> EngineRequest:
    """The request with its grammar, and with a JSON schema as text.

    The schema becomes text because it may have integers beyond 64 bits, which messages to the core
    cannot.
    """
    params = request.sampling_params
    guided = params.guided_decoding
    if guided is not None and isinstance(guided.json, dict):
        params = copy.copy(params)
        params.guided_decoding = msgspec.structs.replace(guided, json=json.dumps(guided.json))
    return msgspec.structs.replace(request, sampling_params=params, grammar=grammar)


def _as_ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _as_int(token_id: Any, position: int) -> int:
    """Convert an integer of any type, such as numpy's, to a Python int."""
    if not isinstance(token_id, bool):
        try:
            return operator.index(token_id)
        except TypeError:
            pass  # reported below, with its position
    raise RequestError(
        f"token ids must be integers, got {type(token_id).__name__} {token_id!r} "
        f"at position {position} of the prompt",
        param="prompt",
    )
