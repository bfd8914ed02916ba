"""Serve POST /v1/chat/completions: format the result of a `ChatTurn` as the OpenAI API does."""

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.conversation.media import MediaParts
from vllm.entrypoints.conversation.messages import read_messages, without_media
from vllm.entrypoints.conversation.rules import as_text
from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.body_route import BodyRoute
from vllm.entrypoints.http.errors import openai_stream
from vllm.entrypoints.http.sse import run_until_disconnect
from vllm.entrypoints.openai.chat.body import ChatBody
from vllm.entrypoints.openai.chat.prompt import chat_prompt
from vllm.entrypoints.openai.chat.tool_choice import split_beginning
from vllm.entrypoints.openai.chat.turn import ChatTurn, TurnChoice, TurnDelta, prepare_turn
from vllm.entrypoints.openai.protocol.base import STREAMED, error_responses, now
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.protocol.sampling import beam_search_params, check_sampling_fields
from vllm.entrypoints.openai.shared import beam_requests
from vllm.entrypoints.openai.shared.chunks import (
    ChunkWriter,
    includes_usage,
    json_response,
    usage_of,
)
from vllm.entrypoints.openai.shared.logprob_formats import (
    MANY_POSITIONS,
    bytes_of_tokens,
    chat_logprobs,
    prompt_logprobs,
)
from vllm.entrypoints.openai.shared.prompts import (
    engine_key,
    output_budget,
    request_id_of,
    trace_headers_of,
)
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.inputs import MODALITIES

router = APIRouter(route_class=BodyRoute)

_ANY_NUMBER = dict.fromkeys(MODALITIES, sys.maxsize)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionResponse,
    responses=STREAMED | error_responses(400, 404, 500, 503),
)
async def create_chat_completion(request: Request, body: ChatBody) -> Response:
    """Answer a conversation."""
    context = get_context(request)
    request_id = "chatcmpl-" + request_id_of(request, body.request_id)
    if body.use_beam_search:
        work = _search_beams(context, body, request_id)
        return json_response(await run_until_disconnect(request, work))
    turn = await run_until_disconnect(
        request,
        prepare_turn(
            context, body, engine_key(request_id), trace_headers=trace_headers_of(request)
        ),
    )
    answer_format = _ChatFormat(context, body, turn, request_id)
    if body.stream:
        return openai_stream(_stream(answer_format))
    return await run_until_disconnect(request, _complete(answer_format))


class _ChatFormat:
    """Formats the answers of one request."""

    def __init__(
        self,
        context: ServerContext,
        body: ChatCompletionRequest,
        turn: ChatTurn,
        response_id: str,
    ) -> None:
        self.turn = turn
        self.response_id = response_id
        self.num_answers = body.num_samples
        self.role = _role(context, body)
        self.echoed = _echoed(body, self.role)
        self.includes_usage = includes_usage(context, body)
        self._context = context
        self._body = body
        self._as_token_ids = _as_token_ids(context, body)
        self._writer = ChunkWriter(response_id, "chat.completion.chunk", turn.model)

    def usage(self, num_output_tokens: int | None = None) -> dict[str, Any]:
        """Return the usage so far, or with the given number of output tokens."""
        usage = self.turn.usage
        if num_output_tokens is None:
            num_output_tokens = usage.completion_tokens
        return usage_of(
            self._context,
            usage.prompt_tokens,
            num_output_tokens,
            usage.cached_tokens,
            usage.reasoning_tokens,
        )

    def first_chunk(self, index: int) -> bytes:
        """Return the first chunk of an answer: the role and the echoed message, without output
        tokens.
        """
        message = {"role": self.role, "content": self.echoed}
        return self._chunk(TurnDelta(index), message, num_output_tokens=0)

    def chunks(self, delta: TurnDelta) -> list[bytes]:
        """Return the chunks for new text or calls of an answer; none if there is nothing to
        send.
        """
        if delta.is_empty and not self.turn.is_plain and delta.logprobs is None:
            return []
        if delta.tool_calls or (delta.reasoning and delta.content):
            return list(map(self._chunk_of, _pieces(delta)))
        return [self._chunk_of(delta)]

    def _chunk_of(self, delta: TurnDelta) -> bytes:
        message: dict[str, Any] = {}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            message |= self._calls(delta.tool_calls)
        if delta.content or not message:
            message["content"] = delta.content
        return self._chunk(delta, message)

    def usage_chunk(self) -> bytes:
        """Return the last chunk of a stream, which contains the usage."""
        return self._writer.usage(self.usage())

    def choice(self, choice: TurnChoice) -> dict[str, Any]:
        """Return one complete answer as a choice of the response."""
        content = choice.content
        if self.echoed:
            content = self.echoed + (content or "")
        return {
            "index": choice.index,
            "message": {
                "role": self.role,
                "reasoning_content": choice.reasoning,
                "content": content,
                "refusal": None,
                "tool_calls": [],
                **self._calls(choice.tool_calls),
            },
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }

    def _chunk(
        self, delta: TurnDelta, message: dict[str, Any], num_output_tokens: int | None = None
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": message,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": self._finish_reason(delta.finish_reason),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        usage = self.usage(num_output_tokens) if self._body.has_continuous_usage else None
        return self._writer.choice(choice, usage)

    def _calls(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of a message for these calls, or for the parts of a call."""
        if calls and self._body.has_functions:
            return {"function_call": calls[0]["function"]}
        return {"tool_calls": calls}

    def _finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self._body.has_functions else reason

    def _logprobs(self, positions: Any) -> dict[str, Any] | None:
        if positions is None or not self._body.logprobs:
            return None
        tokenizer = self._context.engine.tokenizer
        return chat_logprobs(
            positions,
            self._body.top_logprobs or 0,
            as_token_ids=self._as_token_ids,
            bytes_of=None if tokenizer is None else bytes_of_tokens(tokenizer),
        )


def _pieces(delta: TurnDelta) -> list[TurnDelta]:
    """Split a delta as OpenAI does: reasoning, content and calls follow one another, and a call
    begins with empty arguments. Clients rely on this.
    """
    pieces = []
    if delta.reasoning:
        pieces.append(TurnDelta(delta.index, reasoning=delta.reasoning))
    if delta.content:
        pieces.append(TurnDelta(delta.index, content=delta.content))
    for call in delta.tool_calls:
        pieces += [TurnDelta(delta.index, tool_calls=[part]) for part in split_beginning(call)]
    pieces[0].logprobs = delta.logprobs
    pieces[-1].finish_reason, pieces[-1].stop_reason = delta.finish_reason, delta.stop_reason
    return pieces


async def _stream(answer_format: _ChatFormat) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream."""
    is_started = False
    async with aclosing(answer_format.turn.stream()) as deltas:
        async for delta in deltas:
            if not is_started:
                is_started = True
                for index in range(answer_format.num_answers):
                    yield answer_format.first_chunk(index)
            for chunk in answer_format.chunks(delta):
                yield chunk
    if answer_format.includes_usage:
        yield answer_format.usage_chunk()


async def _complete(answer_format: _ChatFormat) -> Response:
    choices, of_prompt = await answer_format.turn.complete(), answer_format.turn.prompt_logprobs

    def write() -> Response:
        body = {
            **_head(answer_format.response_id, answer_format.turn.model),
            "choices": [answer_format.choice(choice) for choice in choices],
            "usage": answer_format.usage(),
            "prompt_logprobs": prompt_logprobs(of_prompt),
            "kv_transfer_params": None,
        }
        return json_response(body)

    num_positions = sum(len(choice.logprobs or ()) for choice in choices) + len(of_prompt or ())
    return await off_loop.run(write, is_large=num_positions >= MANY_POSITIONS)


async def _search_beams(
    context: ServerContext, body: ChatCompletionRequest, request_id: str
) -> dict[str, Any]:
    model = context.check_model(body.model)
    check_sampling_fields(body)
    prompt = await chat_prompt(
        context,
        body,
        truncate=body.truncate_prompt_tokens,
        max_tokens=context.config.scheduler.max_model_len - 1,
    )
    token_ids, defaults = prompt["prompt_token_ids"], context.engine.generation_defaults
    max_tokens = output_budget(context.config, defaults, len(token_ids), body.wanted_tokens)
    params = beam_search_params(body, defaults, max_tokens)
    beams = await beam_requests.search(
        context,
        prompt,
        params,
        engine_key(request_id),
        context.adapter(body.model),
        priority=body.priority or 0,
    )
    role = _role(context, body)
    return {
        **_head(request_id, model),
        "choices": [
            {
                "index": index,
                "message": {
                    "role": role,
                    "reasoning_content": None,
                    "content": _echoed(body, role) + (beam.text or ""),
                    "refusal": None,
                    "tool_calls": [],
                },
                "logprobs": None,
                "finish_reason": beam.finish_reason,
                "stop_reason": beam.stop_reason,
            }
            for index, beam in enumerate(beams)
        ],
        "usage": usage_of(context, len(token_ids), sum(len(beam.logprobs) for beam in beams)),
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }


def _head(request_id: str, model: str) -> dict[str, Any]:
    return {"id": request_id, "object": "chat.completion", "created": now(), "model": model}


def _role(context: ServerContext, body: ChatCompletionRequest) -> str:
    """Return the role of the answers. If the last message is continued, it is the role of that
    message.
    """
    if body.add_generation_prompt:
        return context.args.response_role
    return str(body.messages[-1].get("role"))


def _echoed(body: ChatCompletionRequest, role: str) -> str:
    """Return the last message, with which the answers begin, if `echo` is set and the role is the
    same; otherwise an empty string.
    """
    last = body.messages[-1]
    if not body.echo or last.get("role") != role:
        return ""
    # No limits: the request was already accepted.
    (parsed,) = read_messages([last], MediaParts(_ANY_NUMBER))
    return as_text(without_media(parsed["content"]))


def _as_token_ids(context: ServerContext, body: ChatCompletionRequest) -> bool:
    if body.return_tokens_as_token_ids is None:
        return context.args.return_tokens_as_token_ids
    return body.return_tokens_as_token_ids
