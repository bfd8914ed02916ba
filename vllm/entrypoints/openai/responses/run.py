"""Run a chat turn and write the events of its response."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from fastapi import Request

from vllm.entrypoints.http.errors import describe_error
from vllm.entrypoints.openai.chat.prompt import chat_prompt
from vllm.entrypoints.openai.chat.turn import ChatTurn, TurnDelta
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.responses.output import Event, ResponseWriter, describe_usage
from vllm.entrypoints.openai.shared.logprob_formats import chat_logprobs
from vllm.entrypoints.openai.shared.prompts import request_id_of
from vllm.entrypoints.shared.context import ServerContext
from vllm.errors import TextTooLongError


def engine_id(request: Request, response_id: str) -> str:
    """Return the engine's id for a response: the id of the response, and the client's request id if
    given, for traces.
    """
    given = request_id_of(request, "")
    return f"{response_id}-{given}" if given else response_id


async def write_at_once(turn: ChatTurn, writer: ResponseWriter) -> None:
    """Run the turn and write its complete response. Errors of the turn are raised."""
    async with aclosing(write_events(turn, writer)) as events:
        async for _ in events:
            pass


async def write_events(
    turn: ChatTurn, writer: ResponseWriter
) -> AsyncGenerator[Sequence[Event], None]:
    """Yield the events of a response, one list per engine step.

    Nothing is yielded before the first output of the engine, because that is when errors of the
    request appear.

    Raises:
        Exception: the error that the turn raises.
    """
    async with aclosing(turn.stream()) as deltas:
        is_begun = False
        async for delta in deltas:
            events = [] if is_begun else writer.begin()
            is_begun = True
            events += _write_delta(writer, delta)
            if delta.finish_reason is not None:
                events += _finish(turn, writer, delta)
            if events:
                yield events


async def fail_in_stream(
    events: AsyncGenerator[Sequence[Event], None],
    writer: ResponseWriter,
    on_end: Callable[[], None],
    *,
    is_early_raised: bool,
) -> AsyncGenerator[Sequence[Event], None]:
    """Yield events, and convert errors to events.

    Args:
        events: result of `write_events`.
        writer: writer of the events.
        on_end: called when the response has ended, before the last events are yielded.
        is_early_raised: raise an error before the first event, so that it gets an HTTP status.
    """
    is_begun = False
    async with aclosing(events):
        try:
            async for few in events:
                is_begun = True
                if writer.has_ended:
                    on_end()
                yield few
        except Exception as error:  # last resort: the client gets it as an event
            if is_early_raised and not is_begun:
                raise
            last = writer.fail(describe_error(error).body()["error"])
            on_end()
            yield last


async def truncate_conversation(
    context: ServerContext, body: ChatCompletionRequest, fetched: dict[str, bytes]
) -> ChatCompletionRequest:
    """Remove the oldest turns of the request until it fits into the context length.

    The first system message and the last turn are kept; if these are too long, the request is
    refused. Each turn begins with a user message, so that every tool result keeps its call.

    Args:
        context: context of the server; its engine is ready.
        body: body of the request.
        fetched: content of media by URL; fetched media are added.
    """
    limit = context.config.scheduler.max_model_len - (body.wanted_tokens or 1)
    messages = body.messages
    num_kept_first = 1 if messages[0]["role"] == "system" else 0
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"] or [0]

    def keep_from(start: int) -> ChatCompletionRequest:
        kept = messages if start == starts[0] else messages[:num_kept_first] + messages[start:]
        return body.model_copy(update={"messages": kept})

    async def fits(start: int) -> bool:
        with_tools = body.tool_choice != "none"
        try:
            prompt = await chat_prompt(
                context,
                keep_from(start),
                with_tools=with_tools,
                max_tokens=max(limit, 1),
                fetched=fetched,
            )
        except TextTooLongError:
            return False
        return len(prompt["prompt_token_ids"]) <= limit

    if await fits(starts[0]):
        return body
    # Binary search for the first message to keep.
    low, high = min(1, len(starts) - 1), len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(starts[middle]):
            high = middle
        else:
            low = middle + 1
    return keep_from(starts[low])


def _write_delta(writer: ResponseWriter, delta: TurnDelta) -> list[Event]:
    events = writer.add_reasoning(delta.reasoning) if delta.reasoning else []
    logprobs = None
    if delta.logprobs is not None and not delta.reasoning:
        num_top = writer.response["top_logprobs"]
        logprobs = chat_logprobs(delta.logprobs, num_top, as_token_ids=False)["content"]
    if delta.content or logprobs:
        events += writer.add_text(delta.content, logprobs)
    for call in delta.tool_calls:
        events += writer.add_tool_call(call)
    return events


def _finish(turn: ChatTurn, writer: ResponseWriter, delta: TurnDelta) -> list[Event]:
    usage = describe_usage(
        num_prompt_tokens=turn.usage.prompt_tokens,
        num_output_tokens=turn.usage.completion_tokens,
        num_cached_tokens=turn.usage.cached_tokens or 0,
        num_reasoning_tokens=turn.usage.reasoning_tokens or 0,
    )
    if delta.finish_reason == "length":
        return writer.finish("incomplete", usage=usage, incomplete_reason="max_output_tokens")
    if delta.is_call_cut:  # the field `stop` is not part of OpenAI's API, nor is its reason
        return writer.finish("incomplete", usage=usage, incomplete_reason="stop")
    is_aborted = delta.finish_reason == "abort"
    return writer.finish("cancelled" if is_aborted else "completed", usage=usage)
