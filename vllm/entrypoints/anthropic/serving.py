"""Serve Anthropic's API: POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.anthropic.errors import PATH, AnthropicRoute, AnthropicStream
from vllm.entrypoints.anthropic.output import Event, MessageWriter, describe_stop, describe_usage
from vllm.entrypoints.anthropic.protocol import AnthropicError, CountTokensRequest, MessagesRequest
from vllm.entrypoints.anthropic.request import as_chat_request, prompt_fields
from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.sse import run_until_disconnect, typed_events
from vllm.entrypoints.openai.chat.prompt import chat_prompt
from vllm.entrypoints.openai.chat.turn import ChatTurn, TurnDelta, prepare_turn
from vllm.entrypoints.openai.protocol.base import STREAMED, error_responses, random_id
from vllm.entrypoints.openai.responses.request import make_chat_request
from vllm.entrypoints.openai.responses.run import engine_id
from vllm.entrypoints.openai.shared.chunks import json_response
from vllm.entrypoints.openai.shared.prompts import trace_headers_of
from vllm.entrypoints.shared.context import get_context

router = APIRouter(tags=["messages"], route_class=AnthropicRoute)

_ERRORS = error_responses(400, 404, 500, 503, body=AnthropicError)


@router.post(PATH, responses=STREAMED | _ERRORS)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, as one message or as a stream of events."""
    context = get_context(request)
    message_id = f"msg_{random_id()}"
    chat = await off_loop.run(partial(as_chat_request, body))
    request_id = engine_id(request, message_id)
    turn = await run_until_disconnect(
        request, prepare_turn(context, chat, request_id, trace_headers=trace_headers_of(request))
    )
    writer = MessageWriter(message_id, turn.model)
    if not body.stream:
        await run_until_disconnect(request, _write_at_once(turn, writer))
        return json_response(writer.message)
    return AnthropicStream(typed_events(_write_events(turn, writer)))


@router.post(PATH + "/count_tokens", responses=_ERRORS)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Count the prompt tokens that a request would have."""
    context = get_context(request)
    context.check_model(body.model)
    fields, name = prompt_fields(body), "output_config.format"
    chat = await off_loop.run(lambda: make_chat_request(fields, format_field=name))
    prompt = await run_until_disconnect(
        request, chat_prompt(context, chat, with_tools=chat.tool_choice != "none")
    )
    return json_response({"input_tokens": len(prompt["prompt_token_ids"])})


async def _write_at_once(turn: ChatTurn, writer: MessageWriter) -> None:
    (choice,) = await turn.complete()
    writer.begin(_usage(turn))
    calls = [{"index": index, **call} for index, call in enumerate(choice.tool_calls)]
    whole = TurnDelta(0, choice.reasoning or "", choice.content or "", calls)
    whole.finish_reason, whole.stop_reason = choice.finish_reason, choice.stop_reason
    whole.is_call_cut = choice.is_call_cut
    _write_delta(turn, writer, whole)


async def _write_events(turn: ChatTurn, writer: MessageWriter) -> AsyncGenerator[list[Event], None]:
    """Yield the events of a message, one list per engine step. Nothing is yielded before the first
    output.
    """
    async with aclosing(turn.stream()) as deltas:
        is_begun = False
        async for delta in deltas:
            events = [] if is_begun else writer.begin(_usage(turn, num_output_tokens=1))
            is_begun = True
            events += _write_delta(turn, writer, delta)
            if events:
                yield events


def _write_delta(turn: ChatTurn, writer: MessageWriter, delta: TurnDelta) -> list[Event]:
    events = writer.add_reasoning(delta.reasoning) if delta.reasoning else []
    if delta.content:
        events += writer.add_text(delta.content)
    for call in delta.tool_calls:
        events += writer.add_tool_call(call)
    if delta.finish_reason is not None:
        has_whole_calls = writer.has_calls and not delta.is_call_cut
        stop, sequence = describe_stop(
            delta.finish_reason, delta.stop_reason, has_calls=has_whole_calls
        )
        events += writer.finish(stop, sequence, _usage(turn))
    return events


def _usage(turn: ChatTurn, num_output_tokens: int | None = None) -> dict[str, Any]:
    usage = turn.usage
    if num_output_tokens is None:
        num_output_tokens = usage.completion_tokens
    return describe_usage(
        usage.prompt_tokens, num_output_tokens, usage.cached_tokens or 0, usage.reasoning_tokens
    )
