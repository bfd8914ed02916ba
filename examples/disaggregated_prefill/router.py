"""A router in front of an engine that computes prompts and one that generates.

    python router.py --prefill http://localhost:8100 --decode http://localhost:8200 [--port 8000]

Each chat or completion goes to the first server with max_tokens 1, which saves the KV blocks of the
prompt in the folder that both share (docs/kv_transfer.md), and then to the second, whose answer is
passed on. If the first one fails, the second computes the prompt itself. Needs httpx, which the
openai package brings along.
"""

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

PREFILLED = ("/v1/chat/completions", "/v1/completions")


class Router:
    """Passes requests on.

    Args:
        prefill, decode: addresses of the servers.
    """

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._client = httpx.AsyncClient(timeout=None)

    async def handle(self, request: Request) -> Response:
        """Send a request to both servers, and return the answer of the second."""
        body = await request.body()
        headers = {
            name: value
            for name, value in request.headers.items()
            if name in ("authorization", "content-type", "x-request-id")
        }
        if request.url.path in PREFILLED and request.method == "POST":
            await self._compute_prompt(request.url.path, body, headers)
        query = f"?{request.url.query}" if request.url.query else ""
        url = f"{self._decode}{request.url.path}{query}"
        passed_on = self._client.build_request(request.method, url, content=body, headers=headers)
        answer = await self._client.send(passed_on, stream=True)

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()  # also when the client has left: the request is aborted

        kind = {"content-type": answer.headers.get("content-type", "application/json")}
        return StreamingResponse(chunks(), answer.status_code, kind)

    async def _compute_prompt(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        try:
            asked = json.loads(body)
            short = {**asked, "max_tokens": 1, "stream": False}
            for name in ("max_completion_tokens", "stream_options", "min_tokens", "n", "best_of"):
                short.pop(name, None)
            await self._client.post(
                self._prefill + path, content=json.dumps(short), headers=headers
            )
        except (ValueError, TypeError, httpx.HTTPError) as error:
            # The second server computes the prompt, or says what is wrong with the request.
            print(f"the prompt was not computed ahead: {error!r}", flush=True)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Closes the connections at the end."""
        async with self._client:
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", required=True, help="address of the server for prompts")
    parser.add_argument("--decode", required=True, help="address of the server that answers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    router = Router(args.prefill.rstrip("/"), args.decode.rstrip("/"))
    routes = [Route("/{path:path}", router.handle, methods=["GET", "POST"])]
    app = Starlette(routes=routes, lifespan=router.lifespan)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
