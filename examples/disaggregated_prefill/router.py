"""A router in front of engines that compute prompts and engines that generate.

    python router.py --prefill http://localhost:8100 --decode http://localhost:8200 [--port 8000]

Each request with a prompt is sent to a prefill server with one token to generate, which keeps the
KV blocks of the prompt where the decode servers find them (docs/kv_transfer.md), and then to a
decode server, whose answer is passed on. If the first one fails, the second computes the prompt
itself. Several servers of a kind are used alternately; what one of them stores, such as responses
for `previous_response_id`, the others do not know. A client that leaves ends its request on both.
Needs httpx, which the openai package brings along.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

ONE_TOKEN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 1, "stream": False},
    "/v1/completions": {"max_tokens": 1, "stream": False},
    "/v1/messages": {"max_tokens": 1, "stream": False},
    "/v1/responses": {"max_output_tokens": 1, "stream": False, "store": False, "background": False},
}
"""Settings that let a server compute only the prompt of a request, by path."""
NOT_FOR_PROMPTS = (
    *("max_completion_tokens", "min_tokens", "n", "best_of", "use_beam_search", "stream_options"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo"),
)
"""Fields that do not change the prompt, and cost time or need more than one token."""
OF_A_CONNECTION = ("host", "connection", "keep-alive", "content-length", "transfer-encoding")
"""Headers that are not passed on."""
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
CONNECT_TIMEOUT_S = 5.0
PAUSE_S = 5.0
"""A prefill server that failed is not asked for this time."""

_Result = TypeVar("_Result")


class ClientLeftError(Exception):
    """The client has closed the connection, so nobody waits for the answer."""


class Router:
    """Pass each request to a prefill server, then to a decode server.

    Args:
        prefill, decode: addresses of the servers, at least one of each.
        prefill_timeout_s: the time that a prefill server may take for a prompt, in seconds.
    """

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], prefill_timeout_s: float = 60.0
    ) -> None:
        self._prefill = list(prefill)
        self._decode = list(decode)
        self._paused_until = dict.fromkeys(prefill, 0.0)
        self._prefill_timeout_s = prefill_timeout_s
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def handle(self, request: Request) -> Response:
        """Send a request to a prefill server, then to a decode server, whose answer is returned."""
        body, path = await request.body(), request.url.path
        headers = [
            (name, value) for name, value in request.headers.items() if name not in OF_A_CONNECTION
        ]
        try:
            if path in ONE_TOKEN and request.method == "POST":
                await _unless_left(request, self._compute_prompt(path, body, headers))
            answer = await _unless_left(request, self._ask(request, body, headers))
        except ClientLeftError:
            return Response(status_code=499)  # nobody reads it
        except httpx.HTTPError as error:
            message = f"no decode server answers: {error!r}"
            print(message, flush=True)
            error = {"message": message, "type": "server_error", "param": None, "code": None}
            return JSONResponse({"error": error}, 502)

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()  # if the client has left, this aborts the request

        response = StreamingResponse(chunks(), answer.status_code)
        response.raw_headers = [
            each for each in answer.headers.raw if each[0].lower().decode() not in OF_A_CONNECTION
        ]
        return response

    async def _ask(
        self, request: Request, body: bytes, headers: list[tuple[str, str]]
    ) -> httpx.Response:
        """Send a request to the first decode server that accepts a connection.

        Returns the answer; its body has not been read.
        """
        query = f"?{request.url.query}" if request.url.query else ""
        for number in range(len(self._decode)):
            address = _next(self._decode)
            passed_on = self._client.build_request(
                request.method,
                f"{address}{request.url.path}{query}",
                content=body,
                headers=headers,
            )
            try:
                return await self._client.send(passed_on, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(self._decode) - 1:
                    raise
        raise AssertionError("there is no decode server")

    async def _compute_prompt(self, path: str, body: bytes, headers: list[tuple[str, str]]) -> None:
        address = _next(self._prefill)
        if time.monotonic() < self._paused_until[address]:
            return
        try:
            asked = json.loads(body)
            short = {name: asked[name] for name in asked if name not in NOT_FOR_PROMPTS}
            answer = await self._client.post(
                address + path,
                json=short | ONE_TOKEN[path],
                headers=headers,
                timeout=httpx.Timeout(self._prefill_timeout_s, connect=CONNECT_TIMEOUT_S),
            )
            if answer.is_error:
                print(f"the prompt was not computed ahead: {address} answers {answer.status_code}")
        except (ValueError, TypeError, httpx.HTTPError) as error:
            # The second server computes the prompt, or says what is wrong with the request.
            if isinstance(error, httpx.TransportError):
                self._paused_until[address] = time.monotonic() + PAUSE_S
            print(f"the prompt was not computed ahead: {error!r}", flush=True)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Close the connections to the servers when the router stops."""
        async with self._client:
            yield


def _next(addresses: list[str]) -> str:
    """Return the server whose turn it is, and move it to the end of the list."""
    addresses.append(addresses.pop(0))
    return addresses[-1]


async def _unless_left(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await some work and return its result; cancel it when the client disconnects.

    The body of the request must have been read.

    Raises:
        ClientLeftError: the client has disconnected.
    """
    task, left = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        for each in (task, left):
            each.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", required=True, nargs="+", help="servers that compute prompts")
    parser.add_argument("--decode", required=True, nargs="+", help="servers that answer")
    parser.add_argument("--prefill-timeout", type=float, default=60.0, help="in seconds")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    prefill, decode = ([each.rstrip("/") for each in them] for them in (args.prefill, args.decode))
    router = Router(prefill, decode, args.prefill_timeout)
    routes = [Route("/{path:path}", router.handle, methods=METHODS)]
    app = Starlette(routes=routes, lifespan=router.lifespan)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
