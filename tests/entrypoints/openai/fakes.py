"""A server without a core process: real tokenizer and output processor around a scripted core."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.testclient import TestClient

from tests.engine.fakes import FakeEngineCore, Reply, make_config
from tests.engine.tokenizers_for_tests import byte_level
from vllm.engine.fan_out import fan_out
from vllm.engine.input.input_processor import InputProcessor
from vllm.engine.output.output_processor import OutputProcessor
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.errors import add_error_handlers
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import RequestError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

MODEL = "stdlib"


class FakeAsyncLLM:
    """Generates what a script says, one token per turn of the event loop.

    Args:
        reply: the tokens of a request, cycled when they run out.
        max_model_len: prompt and output tokens.
        generation_defaults: as from generation_config.json.

    Attributes:
        core: what was added and aborted.
        fail_at: after this many steps a step raises `failure`.
        steps: taken so far.
    """

    def __init__(
        self,
        reply: Reply = lambda request: [10],
        max_model_len: int = 256,
        generation_defaults: dict[str, Any] | None = None,
        capacity: int = 10**6,
    ) -> None:
        self.vllm_config = make_config(max_model_len)
        self.tokenizer = byte_level()
        self.generation_defaults = {"eos_token_ids": [], **(generation_defaults or {})}
        self.input_processor = InputProcessor(
            self.vllm_config, self.tokenizer, self.generation_defaults
        )
        self.core = FakeEngineCore(reply, capacity)
        self.fail_at: int | None = None
        self.failure: Exception = RuntimeError("secret detail")
        self.steps = 0
        self.seen: list[tuple[Any, SamplingParams, str]] = []
        self.calls: list[dict[str, Any]] = []
        self._processor = OutputProcessor(self.tokenizer)
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._stepper: asyncio.Task[None] | None = None

    async def tokenize(
        self, prompt: Any, *, is_long: bool = False, max_tokens: int | None = None
    ) -> Any:
        return self.input_processor.prompts.tokenize(prompt, max_tokens=max_tokens)

    async def in_slow_lane(self, work: Any, num_chars: int = 0) -> Any:
        return work(self.input_processor)

    async def get_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError("this engine runs without a tokenizer")
        return self.tokenizer

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if request_id in self._queues:
            raise RequestError(f"request {request_id} is running already")
        self.seen.append((prompt, sampling_params, request_id))
        self.calls.append(more)
        guided, sampling_params.guided_decoding = sampling_params.guided_decoding, None
        text, request = self.input_processor.process(request_id, prompt, sampling_params)
        sampling_params.guided_decoding = guided
        requests = fan_out(request)
        self._processor.add_request(request_id, text, sampling_params, requests)
        queue = self._queues[request_id] = asyncio.Queue()
        try:
            for each in requests:
                self.core.add_request(each)
            if self._stepper is None or self._stepper.done():
                self._stepper = asyncio.ensure_future(self._step())
            while True:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            del self._queues[request_id]
            _, core_ids = self._processor.abort([request_id])
            self.core.abort_requests(core_ids)

    async def _step(self) -> None:
        while self.core.has_unfinished_requests():
            await asyncio.sleep(0)
            self.steps += 1
            if self.fail_at is not None and self.steps > self.fail_at:
                for queue in self._queues.values():
                    queue.put_nowait(self.failure)
                return
            outputs, stopped = self._processor.process(self.core.step())
            self.core.abort_requests(stopped)
            for output in outputs:
                if output.request_id in self._queues:
                    self._queues[output.request_id].put_nowait(output)


def make_app(engine: Any, *routers: APIRouter, **args: Any) -> FastAPI:
    """An application with these routes and nothing around them."""
    app = FastAPI()
    app.state.context = ServerContext(ServerArgs(**args), engine, time.time())
    for router in routers:
        app.include_router(router)
    add_error_handlers(app)
    return app


@contextmanager
def client_of(engine: Any, *routers: APIRouter, **args: Any):
    """A client of such an application; errors of the server become responses."""
    app = make_app(engine, *routers, **args)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
