"""Tokenise the prompts of requests, and compute the room for the output."""

import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import Request

from vllm.config import VllmConfig
from vllm.engine.input.prompt_embeds import needs_tokens
from vllm.entrypoints.shared.context import ServerContext
from vllm.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from vllm.inputs import EmbedsPrompt, PromptType, TokensPrompt
from vllm.utils.otel import CONTEXT_HEADERS

if TYPE_CHECKING:
    from vllm.engine.async_llm_engine import AsyncLLM

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")


def request_id_of(request: Request, default: str) -> str:
    """Return the id in the header X-Request-Id if it is valid, else `default`.

    It becomes part of responses, logs and ids in the engine (`engine_key`), so only letters, digits
    and `._:-` are accepted.
    """
    chosen = request.headers.get("x-request-id", "")
    return chosen if _REQUEST_ID.fullmatch(chosen) else default


def engine_key(response_id: str) -> str:
    """Return an id for the engine that begins with the id of a response.

    The server adds a random end, because clients choose the rest: a proxy may use one X-Request-Id
    for several requests that run at the same time.
    """
    return f"{response_id}-{secrets.token_hex(4)}"


def trace_headers_of(request: Request) -> Mapping[str, str] | None:
    """Return the W3C trace context of a request, or None."""
    found = {name: request.headers[name] for name in CONTEXT_HEADERS if name in request.headers}
    return found or None


async def tokenize(
    engine: "AsyncLLM",
    prompt: PromptType,
    *,
    truncate: int | None = None,
    cache_salt: str | None = None,
    is_long: bool = False,
    max_tokens: int | None = None,
) -> TokensPrompt:
    """Return the prompt with its token ids, checked against the vocabulary.

    Args:
        engine: engine that is ready.
        prompt: prompt of any type.
        truncate: keep only the last `truncate` tokens.
        cache_salt: requests share cached prefixes only when their salts are equal.
        is_long: the prompt is part of a long batch of prompts.
        max_tokens: refuse a text that certainly has more tokens before it is tokenised; None: no
            limit. Has no effect if the prompt is truncated.

    Raises:
        RequestError: the prompt has no tokens, has tokens that the model does not have, or has
            media and would be truncated.
        TextTooLongError: it has more than `max_tokens` tokens.
    """
    if truncate is not None and isinstance(prompt, dict) and prompt.get("multi_modal_data"):
        raise RequestError(
            "truncate_prompt_tokens: a prompt with images, sounds or videos cannot be truncated. "
            "Leave truncate_prompt_tokens out, and send a shorter prompt if necessary",
            param="truncate_prompt_tokens",
        )
    most = max_tokens if truncate is None else None
    tokenized = await engine.tokenize(prompt, is_long=is_long, max_tokens=most)
    token_ids, known_text = tokenized.token_ids, tokenized.text
    if truncate is not None and truncate < len(token_ids):
        token_ids, known_text = token_ids[-truncate:], None
    made: TokensPrompt = {"prompt_token_ids": token_ids}
    if known_text is not None:
        made["prompt"] = known_text
    if cache_salt is not None:
        made["cache_salt"] = cache_salt
    if tokenized.media:
        made["media"] = tokenized.media
    return made


async def read_embeds(
    engine: "AsyncLLM", text: str, *, truncate: int | None, cache_salt: str | None
) -> EmbedsPrompt:
    """Read and check a prompt that a request sends as a base64 tensor.

    Raises:
        RequestError: the model does not accept this tensor, or it would have to be truncated.
    """
    if truncate is not None:
        raise needs_tokens("truncate_prompt_tokens")
    read = await engine.run_in_background(lambda processor: processor.prompt_embeds.read(text))
    made: EmbedsPrompt = {"prompt_embeds": read}
    if cache_salt is not None:
        made["cache_salt"] = cache_salt
    return made


def max_running(context: ServerContext, num_samples: int = 1) -> int:
    """Return how many prompts of one request may run at a time.

    This is a quarter more than the batch holds: the batch is always full, and the request of
    another client waits for a few sequences instead of a whole batch of prompts.

    Args:
        context: context of the server; its engine is ready.
        num_samples: number of outputs per prompt.
    """
    most = context.config.scheduler.max_num_seqs
    return max(1, (most + most // 4) // num_samples)


def output_budget(
    config: VllmConfig, defaults: Mapping[str, Any], num_prompt_tokens: int, wanted: int | None
) -> int:
    """Return the maximum number of output tokens of a request.

    Args:
        config: config with the context length.
        defaults: `generation_defaults` of the engine; its `max_tokens` is an upper limit.
        num_prompt_tokens: number of prompt tokens.
        wanted: number that the request asks for; None: as many as possible.

    Raises:
        RequestError: prompt and output do not fit. The wording is OpenAI's, because clients parse
            the numbers.
    """
    limit = config.scheduler.max_model_len
    room = limit - num_prompt_tokens
    if wanted is None and room < 1:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt_tokens} tokens in the prompt, which leaves none for the completion. "
            f"Please reduce the length of the prompt.",
            param="prompt",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    if wanted is not None and wanted > room:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the prompt, {wanted} in "
            f"the completion). Please reduce the length of the prompt or of the completion.",
            param="max_tokens",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    cap = defaults.get("max_tokens")
    return min(x for x in (room, wanted, cap) if x is not None)
