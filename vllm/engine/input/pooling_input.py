"""Convert a request to a pooling model to an `EngineRequest`."""

import time
from typing import Any

from vllm.config import PoolerConfig, VllmConfig
from vllm.engine.input.pooling_truncate import encode
from vllm.engine.input.prompt_tokenizer import PromptTokenizer, TokenizedPrompt
from vllm.errors import RequestError
from vllm.inputs import PromptType, TokensPrompt
from vllm.messages import EngineRequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams

_NO_SAMPLING = SamplingParams(
    max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
_CALLS = {
    "embed": "LLM.embed or LLM.score, POST /v1/embeddings or /score",
    "classify": "LLM.classify, POST /classify",
    "score": "LLM.score, POST /score or /rerank",
    "reward": "LLM.reward or LLM.encode, POST /pooling",
}
"""Task -> the methods and routes for it."""


def refuse_generation(pooler: PoolerConfig | None) -> None:
    """Refuse to generate text with a pooling model.

    Raises:
        RequestError: the model runs a pooling task; the message names the right methods.
    """
    if pooler is not None:
        raise RequestError(
            f"this model does not generate text: it runs with task {pooler.task!r}. Use "
            f"{_CALLS[pooler.task]}; or start the engine with task='generate' if the model can "
            "generate"
        )


def require_task(pooler: PoolerConfig | None, *tasks: str) -> PoolerConfig:
    """Return the pooler config of a model that runs one of the given tasks, or any pooling task if
    none is given.

    Raises:
        RequestError: the model does not run such a task; the message names the right methods, or
            how to start the model.
    """
    wanted = " or ".join(map(repr, tasks))
    if pooler is None:
        advice = f"task={tasks[0]!r}" if tasks else "task='embed'"
        raise RequestError(
            f"this model generates text and does not pool prompts. Use LLM.generate or "
            f"LLM.chat, POST /v1/completions or /v1/chat/completions; or start it with {advice} "
            f"if the model can do that"
        )
    if tasks and pooler.task not in tasks:
        raise RequestError(
            f"this call needs a model that runs with task {wanted}, but this one runs with task "
            f"{pooler.task!r}. Use {_CALLS[pooler.task]}"
        )
    return pooler


def require_scores(pooler: PoolerConfig | None) -> PoolerConfig:
    """Return the pooler config of a model that can score pairs.

    Raises:
        RequestError: the model is neither an embedding model nor a classifier with one label.
    """
    found = require_task(pooler, "score", "embed", "classify")
    if found.task != "embed" and len(found.labels) != 1:
        raise RequestError(
            f"scores need an embedding model, or a classifier with one label; this one has "
            f"{len(found.labels)}: use {_CALLS['classify']}"
        )
    return found


class PoolingInput:
    """Creates requests for the pooling model of one engine.

    Args:
        config: complete and consistent config.
        prompts: tokenises prompts.
    """

    def __init__(self, config: VllmConfig, prompts: PromptTokenizer) -> None:
        self._prompts = prompts
        self._pooler = config.model.pooler
        self._max_model_len = config.scheduler.max_model_len
        self._hidden_size = config.model.resolved_arch.hidden_size
        self._num_types = int(config.model.resolved_arch.hf_config.get("type_vocab_size") or 1)

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> tuple[str | None, EngineRequest]:
        """Check and tokenise a request to a pooling model. The arguments are the same as for
        `InputProcessor.process`.

        Raises:
            RequestError: the request is wrong, or the model generates text.
        """
        if not isinstance(params, PoolingParams):
            raise RequestError(
                f"the parameters must be PoolingParams, got {type(params).__name__}",
                param="pooling_params",
            )
        pooler = require_task(self._pooler)
        self._check_dimensions(pooler, params.dimensions)
        most = self._max_tokens(params)
        tokenized = self._prompts.tokenize(
            prompt, max_tokens=self._max_model_len if most is None else None
        )
        token_ids, types = tokenized.token_ids, _types_of(prompt)
        if types is not None:
            self._check_types(types, len(token_ids))
        if most is not None and len(token_ids) > most:
            token_ids = self._truncate(prompt, tokenized, most)
            types = None if types is None else types[-most:]
        if len(token_ids) > self._max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, "
                f"the prompt has {len(token_ids)} tokens. Please reduce its length, or set "
                f"truncate_prompt_tokens (-1: to the maximum context length).",
                param="prompt",
            )
        return tokenized.text, EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=_NO_SAMPLING,
            seed=0,
            eos_token_id=None,
            max_total_tokens=len(token_ids) + 1,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=tokenized.cache_salt,
            pooling_params=PoolingParams(dimensions=params.dimensions),
            token_type_ids=types,
        )

    def tokenize_pair(
        self, text: str, other: str, truncate_prompt_tokens: int | None = None
    ) -> TokensPrompt:
        """Join two texts into one prompt, as the tokenizer does for a cross-encoder.

        Raises:
            RequestError: one of them is not valid text, there is no tokenizer, or the truncated
                length leaves no room for the special tokens.
        """
        tokenizer = self._prompts.tokenizer
        if tokenizer is None:
            raise RequestError(
                "scoring texts needs a tokenizer, and this engine runs without one "
                "(skip_tokenizer_init)"
            )
        most = self._max_tokens(PoolingParams(truncate_prompt_tokens=truncate_prompt_tokens))
        for part in (text, other):
            _check_text(part)
            self._prompts.check_length(part, self._max_model_len if most is None else None)
        token_ids, types = encode(tokenizer, text, other, most)
        prompt: TokensPrompt = {"prompt_token_ids": token_ids}
        if types is not None and self._num_types > 1:
            prompt["token_type_ids"] = types
        return prompt

    def _max_tokens(self, params: PoolingParams) -> int | None:
        most = params.truncate_prompt_tokens
        if most is None:
            return None
        if most > self._max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens must be at most max_model_len ({self._max_model_len}), "
                f"or -1 for max_model_len, got {most}",
                param="truncate_prompt_tokens",
            )
        return self._max_model_len if most == -1 else most

    def _truncate(self, prompt: PromptType, tokenized: TokenizedPrompt, most: int) -> list[int]:
        """Truncate a prompt to `most` tokens: a text keeps its beginning with special tokens, a
        list of token ids keeps its end.
        """
        if not isinstance(prompt, (str, dict)):
            return tokenized.token_ids[-most:]
        add_special_tokens = True
        if isinstance(prompt, dict):
            if prompt.get("prompt_token_ids") is not None:
                return tokenized.token_ids[-most:]
            add_special_tokens = bool(prompt.get("add_special_tokens", True))
        tokenizer = self._prompts.tokenizer
        assert tokenizer is not None and tokenized.text is not None
        return encode(tokenizer, tokenized.text, None, most, add_special_tokens)[0]

    def _check_dimensions(self, pooler: PoolerConfig, dimensions: int | None) -> None:
        if dimensions in (None, self._hidden_size):
            return  # all of them
        if not pooler.is_matryoshka:
            raise RequestError(
                f"dimensions={dimensions}: the embeddings of this model cannot be shortened, "
                f"because its config.json has neither is_matryoshka nor matryoshka_dimensions. "
                f"Leave "
                f"dimensions out",
                param="dimensions",
            )
        sizes = pooler.matryoshka_dimensions
        if sizes and dimensions not in sizes:
            raise RequestError(
                f"dimensions must be one of {', '.join(map(str, sizes))}, got {dimensions}",
                param="dimensions",
            )
        if dimensions > self._hidden_size:
            raise RequestError(
                f"dimensions must be at most {self._hidden_size}, got {dimensions}",
                param="dimensions",
            )

    def _check_types(self, types: Any, num_tokens: int) -> None:
        if not isinstance(types, list) or not all(
            type(t) is int and 0 <= t < self._num_types for t in types
        ):
            raise RequestError(
                f"token_type_ids must be a list of integers from 0 to {self._num_types - 1}",
                param="prompt",
            )
        if len(types) != num_tokens:
            raise RequestError(
                f"token_type_ids must have one entry for each of the {num_tokens} tokens of the "
                f"prompt, got {len(types)}",
                param="prompt",
            )


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"a string to score is not valid Unicode: {error.reason} at character {error.start}"
        ) from error


def _types_of(prompt: PromptType) -> Any:
    return prompt.get("token_type_ids") if isinstance(prompt, dict) else None
