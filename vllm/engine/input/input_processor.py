"""Convert a user's request to an `EngineRequest`: tokenise it, and check it against the model and
the limits.

All errors of a request are found here, before it reaches the core, with one exception: only the
core knows whether it fits into the KV cache.
"""

import copy
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from vllm.config import VllmConfig
from vllm.engine.input.media_input import MEDIA_KEYS, MediaInput
from vllm.engine.input.pooling_input import PoolingInput, refuse_generation
from vllm.engine.input.prompt_embeds import PLACEHOLDER_TOKEN_ID, PromptEmbeds, cache_keys
from vllm.engine.input.prompt_tokenizer import PromptTokenizer, TokenizedPrompt, cache_salt_of
from vllm.engine.input.sampling_input import SamplingInput, check_without_tokens
from vllm.engine.input.token_positions import with_positions
from vllm.errors import PromptTooLongError, RequestError
from vllm.inputs import PromptType
from vllm.lora.files import adapter_keys, find_adapter
from vllm.lora.request import LoRARequest
from vllm.messages import AdapterRef, EngineRequest, Grammar, OutputRules
from vllm.sampling_params import SamplingParams
from vllm.structured_output.compiler import GrammarCompiler
from vllm.utils.background_work import Throttle, no_pause

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG_TEXT_CHARS = 16 * 1024
"""A text of this length takes so long to tokenise that a server does it in a thread. The same limit
holds for other slow preparation."""


class InputProcessor:
    """Converts the requests of users for one engine.

    Args:
        config: complete and consistent config.
        tokenizer: tokenizer of the model; None: only token ids are accepted.
        generation_defaults: defaults of the model; see `PromptTokenizer`.
    """

    def __init__(
        self,
        config: VllmConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        generation_defaults: Mapping[str, Any],
    ) -> None:
        self.prompts = PromptTokenizer(config, tokenizer, generation_defaults)
        self._config = config
        self._generation_defaults = generation_defaults
        self._vocab_size = config.model.resolved_arch.vocab_size
        self._max_model_len = config.scheduler.max_model_len
        self._structured_output = config.structured_output
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._pooler = config.model.pooler
        self.sampling = SamplingInput(config, self.prompts)
        self.pooling = PoolingInput(config, self.prompts)
        self.prompt_embeds = PromptEmbeds(config.model, self._max_model_len)
        self.media = MediaInput(config)
        # Seeds for requests that have none, so that an offline run is reproducible.
        self._seeds = random.Random(config.model.seed)

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Tokenizer of the model; may be replaced at any time."""
        return self.prompts.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self.prompts.tokenizer = tokenizer

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self._max_model_len

    def with_tokenizer(self, tokenizer: "PreTrainedTokenizerBase | None") -> "InputProcessor":
        """Return a processor for the same engine with another tokenizer object, for another
        thread.
        """
        return InputProcessor(self._config, tokenizer, self._generation_defaults)

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
        """Check and tokenise a request. The result shares `params`, which is not changed.

        Args:
            request_id: id that the user gave.
            prompt: prompt of any type.
            params: how to sample; for several samples see `fan_out.fan_out`.
            arrival_time: arrival in seconds of `time.time()`; None: now.
            priority: smaller values run first.
            lora_request: the adapter to use; None: the model without an adapter.

        Returns:
            (text of the prompt or None if it is not known, request).

        Raises:
            RequestError: the request is not valid; names the field and the accepted values.
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
        token_ids, media = tokenized.token_ids, tokenized.media
        if params.truncate_prompt_tokens is not None:
            if media is not None and media.items:
                raise RequestError(
                    "truncate_prompt_tokens cannot be used in a request with images, sounds or "
                    "videos: their tokens cannot be cut off. Leave it out",
                    param="truncate_prompt_tokens",
                )
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        if len(token_ids) >= self._max_model_len:
            raise PromptTooLongError(len(token_ids), self._max_model_len)
        max_total = self._max_model_len
        if params.max_tokens is not None:
            max_total = min(max_total, len(token_ids) + params.max_tokens)
        eos, others = self.prompts.end_tokens
        # With structured output, the grammar decides when the end token is allowed, and it ends the
        # output even with ignore_eos.
        if params.ignore_eos and params.guided_decoding is None:
            eos, others = None, frozenset()
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_token_id=eos,
            model_end_token_ids=others,
            stop_token_ids=others.union(
                params.stop_token_ids or (), params.all_stop_token_ids - {eos}
            ),
            bad_words_token_ids=self.sampling.tokenize_bad_words(params.bad_words or ()),
            max_total_tokens=max_total,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=tokenized.cache_salt,
            cache_extra_keys=(
                *adapter_keys(adapter),
                *cache_keys(tokenized.embeddings),
                *(() if media is None else media.cache_keys),
            ),
            embeddings=tokenized.embeddings,
            media=() if media is None else media.items,
            adapter=adapter,
            output_rules=self._output_rules(token_ids, params),
        )
        if media is not None and media.positions is not None:
            arch = self._config.model.resolved_arch
            request = with_positions(request, media.positions, arch)
        return tokenized.text, request

    def _output_rules(self, token_ids: list[int], params: SamplingParams) -> OutputRules | None:
        """Return the model's rules for an output; None if it has none, or if the request itself
        restricts the tokens.
        """
        if params.allowed_token_ids is not None or params.guided_decoding is not None:
            return None
        speech = self.media.speech(self.tokenizer)
        return None if speech is None else speech.output_rules(token_ids)

    def tokenize(self, prompt: PromptType, *, max_tokens: int | None = None) -> TokenizedPrompt:
        """Return the tokens of a prompt, with the tokens of its media.

        Args:
            prompt: prompt of any type except embeddings. Media that are not read yet are read here.
            max_tokens: maximum number of tokens; see `PromptTokenizer.tokenize`.

        Raises:
            RequestError: the prompt or one of its media items is not valid.
        """
        prompt = self.media.joined(prompt)
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        items = self.media.read(given) if given.get("multi_modal_data") is not None else []
        if any(key in given for key in MEDIA_KEYS):
            prompt = cast(PromptType, {k: v for k, v in given.items() if k not in MEDIA_KEYS})
        has_tokens, text = given.get("prompt_token_ids") is not None, given.get("prompt")
        if items and isinstance(text, str) and not has_tokens:
            around = self.media.placer.surround_text(text, given.get("literal_placeholders", ()))
            prompt = cast(PromptType, {**cast(Mapping[str, Any], prompt), "prompt": around})
        tokenized = self.prompts.tokenize(prompt, max_tokens=max_tokens)
        if (known := given.get("media")) is not None:
            return replace(tokenized, media=known.followed_by(tokenized.token_ids))
        if self.media.family is None:
            return tokenized
        is_text = isinstance(prompt, str) or given.get("prompt") is not None
        literal = given.get("literal_placeholders", () if items else None)
        token_ids = tokenized.token_ids
        if has_tokens:
            token_ids = self.media.placer.surround_tokens(token_ids, items, self.tokenizer)
        elif isinstance(text, str):
            tokenized = replace(tokenized, text=text)
        self.media.check_required(len(items))
        media = self.media.placer.place(
            token_ids, items, self.tokenizer, is_text=is_text, literal=literal
        )
        if media is None:
            return tokenized
        return replace(tokenized, token_ids=media.token_ids, media=media)

    def adapter(self, asked: LoRARequest, is_busy: Callable[[], bool] | None = None) -> AdapterRef:
        """Return the adapter that a request names. Reads and hashes its files, which takes a while
        if they are new.

        Args:
            asked: names the adapter.
            is_busy: returns whether other requests run, so that the work must be done in short time
                slices. None: other work may wait.

        Raises:
            RequestError: the engine accepts no adapters, or the files are missing or wrong.
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
        pause = no_pause if is_busy is None else Throttle(is_busy).pause
        return find_adapter(asked, lora.max_lora_rank, pause)

    def attach_grammar(self, request: EngineRequest) -> EngineRequest:
        """Return the request with its compiled grammar, if it asks for structured output.

        Blocks while the grammar is compiled, within the limits of the config. Call it from any
        thread, after `process` and before the request is sent to the core.

        Raises:
            RequestError: the grammar is not valid, cannot be enforced, or is too costly to compile.
            CapacityError: (503) too many grammars are being compiled.
        """
        guided = request.sampling_params.guided_decoding
        if guided is None or request.grammar is not None:
            return request
        return _with_grammar(request, self.grammar_compiler.compile(guided))

    def attach_cached_grammar(self, request: EngineRequest) -> EngineRequest | None:
        """Return the request with its compiled grammar without blocking; None if the grammar must
        still be compiled.
        """
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
        """Grammar compiler for the current tokenizer. Created at the first use; its processes start
        later.
        """
        with self._compiler_lock:
            if self._compiler is None or self._compiler.tokenizer is not self.tokenizer:
                self._compiler = GrammarCompiler(
                    self._structured_output, self.tokenizer, self._vocab_size
                )
            return self._compiler

    def _read_embeddings(self, prompt: Mapping[str, Any]) -> TokenizedPrompt:
        others = {"prompt_embeds", "cache_salt"}
        if more := [key for key in prompt if key not in others and prompt[key] is not None]:
            raise RequestError(
                f"a prompt with prompt_embeds must not have {', '.join(map(repr, more))}: the "
                "embeddings are the whole prompt",
                param="prompt",
            )
        self.media.check_required(0)
        embeddings = self.prompt_embeds.read(prompt["prompt_embeds"])
        placeholders = [PLACEHOLDER_TOKEN_ID] * embeddings.shape[0]
        return TokenizedPrompt(placeholders, None, cache_salt_of(prompt), (embeddings,))


def _with_grammar(request: EngineRequest, grammar: Grammar) -> EngineRequest:
    """Return the request with its grammar, and with its JSON schema as a string.

    The schema becomes a string because it may have integers beyond 64 bits, which messages to the
    core cannot contain.
    """
    params = request.sampling_params
    guided = params.guided_decoding
    if guided is not None and isinstance(guided.json, dict):
        params = copy.copy(params)
        params.guided_decoding = msgspec.structs.replace(guided, json=json.dumps(guided.json))
    return msgspec.structs.replace(request, sampling_params=params, grammar=grammar)
