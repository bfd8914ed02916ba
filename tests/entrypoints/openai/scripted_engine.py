"""An engine that says what the test wrote, and a client of the whole server around it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

from tests.engine.fakes import make_config
from tests.engine.tokenizers_for_tests import byte_level
from vllm.engine.input.input_processor import InputProcessor
from vllm.engine.process.startup_state import StartupState
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

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


class ScriptedEngine:
    """Gives one piece of text per step, each with one token, then ends.

    Args:
        pieces: of the output.
        max_model_len: of the model.

    Attributes:
        error: raised in place of the piece with number `error_at`.
        is_held: a request stops after its first piece until `release` is set.
        requests: (prompt text, params) by request id.
        aborted: ids of requests whose consumer left before their end.
    """

    def __init__(self, *pieces: str, max_model_len: int = 256) -> None:
        self.pieces = pieces
        self.finish_reason = "stop"
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.error_at = 0
        self.is_held = False
        self.release = asyncio.Event()
        self.requests: dict[str, tuple[str, SamplingParams]] = {}
        self.aborted: list[str] = []
        self.startup = StartupState()
        self.refusal = None
        self.startup.set_ready()
        self.vllm_config = make_config(max_model_len)
        self.generation_defaults: dict[str, Any] = {}
        self.tokenizer = byte_level()
        self.input_processor = InputProcessor(self.vllm_config, self.tokenizer, {})

    @property
    def errored(self) -> bool:
        return False

    async def tokenize(
        self, prompt: Any, *, is_long: bool = False, max_tokens: int | None = None
    ) -> Any:
        return self.input_processor.prompts.tokenize(prompt, max_tokens=max_tokens)

    async def in_slow_lane(self, work: Any, num_chars: int = 0) -> Any:
        return work(self.input_processor)

    async def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def generate(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        token_ids = self.input_processor.prompts.tokenize(prompt).token_ids
        self.requests[request_id] = (self.tokenizer.decode(token_ids), params)
        is_final = params.output_kind is RequestOutputKind.FINAL_ONLY
        text, steps, is_done = "", self._steps(), False
        try:
            for i, piece in enumerate(steps):
                await asyncio.sleep(0)
                if self.error is not None and i == self.error_at:
                    raise self.error
                if i == 1 and self.is_held:
                    await self.release.wait()
                is_done = i == len(steps) - 1
                text += piece
                if is_done or not is_final:
                    shown, num_tokens = (text, len(steps)) if is_final else (piece, 1)
                    sample = self._sample(shown, num_tokens, params, is_done=is_done)
                    yield RequestOutput(
                        request_id, None, token_ids, None, [sample], is_done, num_cached_tokens=2
                    )
        finally:
            if not is_done:
                self.aborted.append(request_id)

    def _steps(self) -> list[str]:
        """The pieces, and the end token that has no text."""
        return [*self.pieces, ""]

    def _sample(
        self, text: str, num_tokens: int, params: SamplingParams, *, is_done: bool
    ) -> CompletionOutput:
        token_ids = [self.tokenizer.encode(text or "x", add_special_tokens=False)[0]] * num_tokens
        logprobs = None
        if params.logprobs is not None:
            logprobs = [{token_ids[0]: Logprob(-0.5, 1, text)}] * num_tokens
        return CompletionOutput(
            0,
            text,
            token_ids,
            logprobs=logprobs,
            finish_reason=self.finish_reason if is_done else None,
            stop_reason=self.stop_reason if is_done else None,
        )


def make_app(engine: ScriptedEngine, **settings: Any) -> FastAPI:
    """The whole server around an engine."""
    args = ServerArgs(**{"chat_template": TEMPLATE, "disable_uvicorn_access_log": True, **settings})
    return build_app(ServerContext(args, engine, created=0.0))


def make_client(engine: ScriptedEngine, **settings: Any) -> TestClient:
    """A client of `make_app` that sees errors as responses."""
    return TestClient(make_app(engine, **settings), raise_server_exceptions=False)


@contextlib.asynccontextmanager
async def open_stream(app: FastAPI, path: str, body: bytes) -> AsyncIterator["OpenStream"]:
    """A POST whose answer is read piece by piece; leaving the block is leaving as a client."""
    stream = OpenStream()
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
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
        await asyncio.wait_for(task, 5)


class OpenStream:
    """Messages to and from the application."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()

    async def read_until(self, text: bytes) -> bytes:
        """What came up to and with the message that holds this text."""
        read = b""
        while text not in read:
            read += (await asyncio.wait_for(self.outbox.get(), 5)).get("body", b"")
        return read
