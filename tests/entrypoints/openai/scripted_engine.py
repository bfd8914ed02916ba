"""An engine that generates the text of the test, and a client of a whole server with it."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient
from tokenizers import AddedToken

from tests.engine.tokenizers_for_tests import byte_level
from tests.fake_core import CoreInProcess, FakeCoreLLM, running
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.messages import EngineRequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

ODD_VALUES = [
    *(None, True, 0, -1, 1.5, 1e308, 2**31, 2**63, 2**70, "", "x", "x" * 5000, "\ud800"),
    *([], [None], [[]], ["x"], [{}], [{"type": "message"}], [{"role": "user", "content": [{}]}]),
    *(
        {},
        {"": None},
        {"type": None},
        {"type": "function"},
        {"format": {"type": "json_schema"}},
        {"role": "user"},
    ),
]
"""For any field of a request."""


class ScriptedEngine(FakeCoreLLM):
    """The real engine, whose core returns one piece of text per step, each as one token, then the
    end token.

    Args:
        pieces: pieces of the output.
        max_model_len: largest number of tokens of a request.
        model: further arguments of `make_config`.

    Attributes:
        error: error that is raised instead of output `error_at`, or of the last output.
    """

    def __init__(self, *pieces: str, max_model_len: int = 256, **model: Any) -> None:
        tokenizer = copy.deepcopy(byte_level())
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces if piece])
        super().__init__(
            self._script,
            max_model_len,
            given_tokenizer=tokenizer,
            num_added_tokens=len(pieces),
            **model,
        )
        self.pieces = pieces
        self.error: Exception | None = None
        self.error_at = 0

    def _script(self, request: EngineRequest) -> list[int]:
        tokenizer = self.given_tokenizer
        # The first token has no text: use the token that begins a text.
        tokens = [piece or tokenizer.bos_token for piece in self.pieces]
        return [*tokenizer.convert_tokens_to_ids(tokens), tokenizer.eos_token_id]

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        outputs = super().generate(*args, **kwargs)
        return outputs if self.error is None else self._failing(outputs)

    async def _failing(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        async with contextlib.aclosing(outputs):
            for _ in range(self.error_at):
                output = await anext(outputs)
                if not output.finished:
                    yield output
            assert self.error is not None
            raise self.error

    def hold(self) -> None:
        """Let every request wait after its first piece until `release`."""
        self.core.hold_after = 1

    def release(self) -> None:
        """Let the requests continue; may be called from any thread."""
        self.core.hold_after = None
        self.loop.call_soon_threadsafe(self.client.turn)

    async def settle(self) -> None:
        """Wait until the core has read all messages."""
        while self.client.has_messages:
            await asyncio.sleep(0)

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        await super().start()

    @property
    def requests(self) -> dict[str, tuple[str, SamplingParams]]:
        """Return prompt text and parameters of all requests, by their ids."""
        decode = self.given_tokenizer.decode
        return {
            request_id: (decode(prompt["prompt_token_ids"]), params)
            for prompt, params, request_id in self.seen
        }

    @property
    def aborted(self) -> list[str]:
        """Return the ids of requests whose client left before they finished."""
        return [request_id.rpartition("-")[0] for request_id in self.core.aborted]


def make_app(engine: CoreInProcess, **settings: Any) -> FastAPI:
    """Return the application of the whole server around an engine, which runs during the lifespan
    of the server."""
    args = ServerArgs(**{"chat_template": TEMPLATE, "disable_uvicorn_access_log": True, **settings})
    app = build_app(ServerContext(args, engine, created=0.0))
    app.router.lifespan_context = lambda app: running(engine)
    return app


clients = contextlib.ExitStack()
"""Clients of the running test, which the fixture `close_clients` closes."""


def make_client(engine: CoreInProcess, **settings: Any) -> TestClient:
    """Return a client of `make_app` that sees errors as responses, until the end of the test."""
    client = TestClient(make_app(engine, **settings), raise_server_exceptions=False)
    return clients.enter_context(client)


@contextlib.asynccontextmanager
async def open_stream(
    app: FastAPI, path: str, body: bytes, *, content_type: bytes = b"application/json"
) -> AsyncIterator["OpenStream"]:
    """Send a POST whose answer is read piece by piece. The connection is closed at the end of the
    block.
    """
    stream = OpenStream()
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", content_type), (b"content-length", b"%d" % len(body))],
        "client": ("test", 1),
        "server": ("test", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    stream.inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
    task = asyncio.create_task(app(scope, stream.inbox.get, stream.outbox.put))
    try:
        yield stream
    finally:
        stream.inbox.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(task, 120)


class OpenStream:
    """Messages to and from the application."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()

    async def read_until(self, text: bytes) -> bytes:
        """Return everything up to and including the message that contains this text."""
        read = b""
        while text not in read:
            read += (await asyncio.wait_for(self.outbox.get(), 120)).get("body", b"")
        return read
