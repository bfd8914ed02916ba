"""Serve POST /tokenize and POST /detokenize."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.engine.input.input_processor import InputProcessor
from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.body_route import BodyRoute
from vllm.entrypoints.http.sse import run_until_disconnect
from vllm.entrypoints.openai.chat.prompt import chat_prompt
from vllm.entrypoints.openai.protocol.base import error_responses
from vllm.entrypoints.openai.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.openai.shared.chunks import json_response
from vllm.entrypoints.openai.shared.prompts import tokenize
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.errors import RequestError

router = APIRouter(route_class=BodyRoute)

_MANY_TOKENS = 4096
"""With this many tokens or more, they are decoded in a thread."""
_ERRORS = error_responses(400, 404)


@router.post("/tokenize", response_model=TokenizeResponse, responses=_ERRORS)
async def tokenize_prompt(request: Request, body: TokenizeRequest) -> Response:
    """Tokenise a text or a conversation, as it is done for the model."""
    return await run_until_disconnect(request, _tokenize(get_context(request), body))


async def _tokenize(context: ServerContext, body: TokenizeRequest) -> Response:
    context.check_model(body.model)
    token_ids = await _token_ids(context, body)
    is_large = len(token_ids) >= _MANY_TOKENS
    token_strs = None
    if body.return_token_strs:
        await context.engine.get_tokenizer()  # raises if the model has no tokenizer

        def convert(processor: InputProcessor) -> list[str]:
            assert processor.tokenizer is not None
            return list(map(str, processor.tokenizer.convert_ids_to_tokens(token_ids)))

        if is_large:
            token_strs = await context.engine.run_in_background(convert)
        else:
            token_strs = convert(context.engine.input_processor)
    answer = {
        "count": len(token_ids),
        "max_model_len": context.config.scheduler.max_model_len,
        "tokens": token_ids,
        "token_strs": token_strs,
    }
    return await off_loop.run(partial(json_response, answer), is_large=is_large)


async def _token_ids(context: ServerContext, body: TokenizeRequest) -> list[int]:
    if isinstance(body, TokenizeChatRequest):
        return (await chat_prompt(context, body))["prompt_token_ids"]
    if not body.prompt:  # it may have no tokens, which the model would not accept
        tokenizer = await context.engine.get_tokenizer()
        encoded = tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)
        return list(encoded["input_ids"])
    tokenized = await tokenize(
        context.engine, {"prompt": body.prompt, "add_special_tokens": body.add_special_tokens}
    )
    return tokenized["prompt_token_ids"]


@router.post("/detokenize", response_model=DetokenizeResponse, responses=_ERRORS)
async def detokenize_tokens(request: Request, body: DetokenizeRequest) -> Response:
    """Decode tokens, including special ones."""
    return await run_until_disconnect(request, _detokenize(get_context(request), body))


async def _detokenize(context: ServerContext, body: DetokenizeRequest) -> Response:
    context.check_model(body.model)
    engine = context.engine
    await engine.get_tokenizer()  # raises if the model has no tokenizer
    vocab_size = context.config.model.resolved_arch.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        raise RequestError(
            f"tokens: {max(body.tokens)} is not in the vocabulary of {vocab_size} tokens",
            param="tokens",
        )

    def decode(processor: InputProcessor) -> str:
        assert processor.tokenizer is not None
        return str(processor.tokenizer.decode(body.tokens))

    is_large = len(body.tokens) >= _MANY_TOKENS
    if is_large:
        text = await engine.run_in_background(decode)
    else:
        text = decode(engine.input_processor)
    return await off_loop.run(partial(json_response, {"prompt": text}), is_large=is_large)
