"""Serve the Responses API: POST /v1/responses, and the routes for stored responses."""

import hashlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.body_route import BodyRoute
from vllm.entrypoints.http.sse import EventStream, run_until_disconnect, typed_events
from vllm.entrypoints.openai.chat.prompt import chat_prompt
from vllm.entrypoints.openai.chat.turn import ChatTurn, prepare_turn
from vllm.entrypoints.openai.protocol.base import STREAMED, error_responses
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.responses import ResponsesRequest, echo_fields
from vllm.entrypoints.openai.responses.job import BackgroundJob
from vllm.entrypoints.openai.responses.output import Event, ResponseWriter
from vllm.entrypoints.openai.responses.request import as_chat_request, check_request
from vllm.entrypoints.openai.responses.run import (
    engine_id,
    fail_in_stream,
    truncate_conversation,
    write_at_once,
    write_events,
)
from vllm.entrypoints.openai.responses.store import ResponseStore, StoredResponse
from vllm.entrypoints.openai.shared.chunks import json_response
from vllm.entrypoints.openai.shared.prompts import trace_headers_of
from vllm.entrypoints.openai.shared.response_items import (
    Item,
    as_messages,
    new_id,
    read_input,
    resolve_references,
)
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.errors import RequestError

router = APIRouter(tags=["responses"], route_class=BodyRoute)

PATH = "/v1/responses"
_ERRORS = error_responses(400, 404, 500, 503)
_MANY_ITEMS = 256
"""A conversation with this many items is large, even if the request that continues it is small."""


@router.post(PATH, responses=STREAMED | _ERRORS)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Create a response: as one object, as a stream of events, or in the background."""
    context = get_context(request)
    store = _get_store(request)
    entry = await _read_request(context, body, request)
    turn = await run_until_disconnect(request, _prepare(context, body, entry, request))
    entry.response = _describe(entry.response["id"], body, turn)
    writer = ResponseWriter(entry.response)
    if body.background:
        return _begin_in_background(context, body, store, entry, turn, writer)

    def keep() -> None:
        if body.store is not False:
            store.add(entry)

    if body.stream:
        events = write_events(turn, writer)
        events = fail_in_stream(events, writer, keep, is_early_raised=True)
        return EventStream(typed_events(events))
    await run_until_disconnect(request, write_at_once(turn, writer))
    keep()
    return json_response(entry.response)


@router.post(PATH + "/input_tokens", responses=_ERRORS)
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """Count the prompt tokens that a request would have."""
    context = get_context(request)
    context.check_model(body.model)
    entry = await _read_request(context, body, request)
    chat = await _chat_request(context, body, entry, {})
    with _named_as_input():
        work = chat_prompt(context, chat, with_tools=chat.tool_choice != "none")
        prompt = await run_until_disconnect(request, work)
    count = len(prompt["prompt_token_ids"])
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.get(PATH + "/{response_id}", responses=STREAMED | _ERRORS)
async def retrieve_response(
    response_id: str,
    request: Request,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=0, le=2**31)] | None = None,
) -> Response:
    """Get a stored response. If it was created in the background with stream=true, its events can
    be streamed.
    """
    entry = _get_entry(request, response_id)
    if not stream:
        return json_response(entry.response)
    if entry.job is None or not entry.job.is_log_kept:
        raise RequestError(
            "only a response that was created with background=true and stream=true can be "
            "streamed again",
            param="stream",
        )
    return EventStream(entry.job.follow(0 if starting_after is None else starting_after + 1))


@router.post(PATH + "/{response_id}/cancel", responses=_ERRORS)
async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a background response. A finished response does not change."""
    entry = _get_entry(request, response_id)
    if entry.job is None:
        raise RequestError(
            "only a response that was created with background=true can be cancelled",
            param="response_id",
        )
    await entry.job.cancel()
    return json_response(entry.response)


@router.delete(PATH + "/{response_id}", responses=_ERRORS)
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a stored response. A response in progress is cancelled."""
    entry = _get_entry(request, response_id)
    _get_store(request).delete(entry)
    if entry.job is not None:
        await entry.job.cancel()
    return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


@router.get(PATH + "/{response_id}/input_items", responses=_ERRORS)
async def list_input_items(
    response_id: str,
    request: Request,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List the input items of a response, including the items of earlier responses that it
    continues.
    """
    entry = _get_entry(request, response_id)
    items = [*entry.history, *entry.input_items]
    if order == "desc":
        items.reverse()
    if after is not None:
        indices = [i for i, item in enumerate(items) if item["id"] == after]
        if not indices:
            raise RequestError(f"after: no item has the id {after!r:.100}", param="after")
        items = items[indices[-1] + 1 :]  # the last match, because ids set by clients may repeat
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )


async def _prepare(
    context: ServerContext, body: ResponsesRequest, entry: StoredResponse, request: Request
) -> ChatTurn:
    """Prepare the turn for a response, without running it."""
    request_id = engine_id(request, entry.response["id"])
    fetched: dict[str, bytes] = {}
    chat = await _chat_request(context, body, entry, fetched)
    with _named_as_input():
        return await prepare_turn(
            context, chat, request_id, trace_headers=trace_headers_of(request), fetched=fetched
        )


@contextmanager
def _named_as_input() -> Iterator[None]:
    """Name the field `messages` in errors as the Responses API does."""
    try:
        yield
    except RequestError as error:
        if error.param == "messages":
            error.param = "input"
        raise


async def _read_request(
    context: ServerContext, body: ResponsesRequest, request: Request
) -> StoredResponse:
    """Check a request, and return a new response with its conversation.

    Raises:
        RequestError: names the field.
    """
    check_request(body)
    store, owner = _get_store(request), _owner_of(request, context)
    history = _read_history(body, store, owner)
    items = await off_loop.run(partial(read_input, body.input))
    items = resolve_references(items, history, partial(store.find_items, owner=owner))
    _check_length(context, history, items)
    return StoredResponse({"id": new_id("resp")}, items, history, owner)


async def _chat_request(
    context: ServerContext, body: ResponsesRequest, entry: StoredResponse, fetched: dict[str, bytes]
) -> ChatCompletionRequest:
    """Return the chat request of a response, truncated if the request says so. Media that had to be
    fetched for this are added to `fetched`.
    """
    items = [*entry.history, *entry.input_items]
    if len(items) > _MANY_ITEMS:
        off_loop.mark_request(off_loop.LARGE_BODY_BYTES)
    make_messages = partial(as_messages, num_earlier=len(entry.history))
    chat = await off_loop.run(
        lambda: as_chat_request(body, make_messages(body.instructions, items))
    )
    if body.truncation == "auto":
        chat = await truncate_conversation(context, chat, fetched)
    return chat


def _check_length(context: ServerContext, history: Sequence[Item], items: Sequence[Item]) -> None:
    """Refuse a conversation that has grown too long over several requests."""
    count, most = len(history) + len(items), context.args.max_messages
    if count > most:
        raise RequestError(
            f"previous_response_id: with the input the conversation has {count} items, more than "
            f"the {most} that this server takes (--max-messages). Begin a new one.",
            param="previous_response_id",
        )


def _begin_in_background(
    context: ServerContext,
    body: ResponsesRequest,
    store: ResponseStore,
    entry: StoredResponse,
    turn: ChatTurn,
    writer: ResponseWriter,
) -> Response:
    def end() -> None:
        context.num_in_progress -= 1
        if not writer.has_ended:
            writer.finish("cancelled")
        store.finish(entry)

    store.check_room()
    queued = writer.queue()
    answer = json_response(entry.response)
    events = fail_in_stream(write_events(turn, writer), writer, lambda: None, is_early_raised=False)
    # Count it as a request in progress, so that a shutdown waits for it.
    context.num_in_progress += 1
    entry.job = BackgroundJob(_after(queued, events), is_log_kept=bool(body.stream), on_end=end)
    store.add(entry)
    if body.stream:
        return EventStream(entry.job.follow())
    return answer


def _read_history(body: ResponsesRequest, store: ResponseStore, owner: bytes) -> list[Item]:
    """Return the earlier items of the conversation that the request continues."""
    if not body.previous_response_id:
        return []
    previous = store.get(body.previous_response_id, owner, param="previous_response_id")
    if previous.is_running:
        raise RequestError(
            "previous_response_id: this response has not finished yet", param="previous_response_id"
        )
    return previous.conversation


def _describe(response_id: str, body: ResponsesRequest, turn: ChatTurn) -> dict[str, Any]:
    """Return the fields of a new response."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": turn.model,
        "output": [],
        "temperature": turn.params.temperature,
        "top_p": turn.params.top_p,
        "usage": None,
        **echo_fields(body),
    }


async def _after(
    first: Sequence[Event], events: AsyncGenerator[Sequence[Event], None]
) -> AsyncGenerator[Sequence[Event], None]:
    async with aclosing(events):
        yield first
        async for few in events:
            yield few


def _get_store(request: Request) -> ResponseStore:
    """Return the response store of this server, created at the first use."""
    state = request.app.state
    if not hasattr(state, "responses"):
        state.responses = ResponseStore()
    return state.responses


def _get_entry(request: Request, response_id: str) -> StoredResponse:
    return _get_store(request).get(response_id, _owner_of(request, get_context(request)))


def _owner_of(request: Request, context: ServerContext) -> bytes:
    """Return the owner of a request. With API keys, responses belong to the key that created
    them.
    """
    if not context.args.api_key:
        return b""
    given = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
    return hashlib.sha256(given.rpartition(" ")[2].encode()).digest()
