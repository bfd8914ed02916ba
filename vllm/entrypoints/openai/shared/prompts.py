"""Prompts of requests: tokenises them, and computes the room for the output."""

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

if TYPE_CHECKING:
    from vllm.engine.async_llm_engine import AsyncLLM

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")
_TRACE_HEADERS = ("traceparent", "tracestate")


def request_id_of(request: Request, default: str) -> str:
    """Return the id of the header X-Request-Id, if it is valid.

    It becomes part of responses, logs and ids in the engine (`engine_key`), so only letters, digits
    and `._:-` are accepted.
    """
    chosen = request.headers.get("x-request-id", "")
    return chosen if _REQUEST_ID.fullmatch(chosen) else default


def engine_key(response_id: str) -> str:
    """Return an id for the engine that begins with the id of a response.

    The end is the server's own, because clients choose the rest: a proxy may pass one X-Request-Id
    on to several requests, all of which run.
    """
    return f"{response_id}-{secrets.token_hex(4)}"


def trace_headers_of(request: Request) -> Mapping[str, str] | None:
    """Return the W3C trace context of a request, or None."""
    found = {name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers}
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
        engine: is ready.
        prompt: of any prompt type.
        truncate: keep only this many tokens, the last ones.
        cache_salt: requests share cached prefixes only when their salts are equal.
        is_long: it is part of a long batch of prompts.
        max_tokens: a text that certainly has more is refused before it is tokenised; None: no
            limit. Without effect if the prompt is truncated.

    Raises:
        RequestError: it has no tokens, or some that the model does not have, or it has media and
            would be truncated.
        TextTooLongError: it has more than `max_tokens`.
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
    """Read and check the prompt that a request sends as base64 of a tensor.

    Raises:
        RequestError: the model cannot take this tensor, or it would have to be truncated.
    """
    if truncate is not None:
        raise needs_tokens("truncate_prompt_tokens")
    read = await engine.run_in_background(lambda processor: processor.prompt_embeds.read(text))
    made: EmbedsPrompt = {"prompt_embeds": read}
    if cache_salt is not None:
        made["cache_salt"] = cache_salt
    return made


def max_running(context: ServerContext, num_samples: int = 1) -> int:
    """Return how many prompts of one request run at a time.

    A quarter more than its batch holds: the batch stays full, and the request of another client
    waits for a few sequences and not for a whole batch of prompts.

    Args:
        context: of the server; its engine is ready.
        num_samples: outputs per prompt.
    """
    most = context.config.scheduler.max_num_seqs
    return max(1, (most + most // 4) // num_samples)


def output_budget(
    config: VllmConfig, defaults: Mapping[str, Any], num_prompt_tokens: int, wanted: int | None
) -> int:
    """Return the maximum number of output tokens.

    Args:
        config: for the length of the context.
        defaults: `generation_defaults` of the engine; its `max_tokens` is a cap.
        num_prompt_tokens: of the prompt.
        wanted: by the request; None is as many as possible.

    Raises:
        RequestError: prompt and output do not fit. The wording is OpenAI's, because clients
            parse the numbers.
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
