"""A real engine behind the interface of the asynchronous one, in the process of the test."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.testclient import TestClient

from tests.entrypoints.openai.server_fakes import FakeEngine
from vllm import LLM
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.outputs import AnyRequestOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams


class InlineEngine(FakeEngine):
    """Steps the engine of an `LLM` for whoever waits for a result.

    Attributes:
        asked: request id -> priority and trace headers, of all requests.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.vllm_config = llm.llm_engine.vllm_config
        self.input_processor = llm.llm_engine.input_processor
        self.asked: dict[str, tuple[int, Mapping[str, str] | None]] = {}
        self.generation_defaults = llm.llm_engine.generation_defaults
        self._engine = llm.llm_engine
        self._outputs: dict[str, deque[AnyRequestOutput]] = {}

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    async def tokenize(
        self, prompt: Any, *, is_long: bool = False, max_tokens: int | None = None
    ) -> Any:
        return self.input_processor.prompts.tokenize(prompt)

    async def in_slow_lane(self, work: Any, num_chars: int = 0) -> Any:
        return work(self.input_processor)

    async def get_tokenizer(self) -> Any:
        return self._engine.get_tokenizer()

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        self.asked[request_id] = (priority, trace_headers)
        async for output in self._run(request_id, prompt, pooling_params, priority):
            yield output

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        async for output in self._run(request_id, prompt, sampling_params, priority):
            yield output

    async def _run(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, priority: int
    ) -> AsyncGenerator[Any, None]:
        self._engine.add_request(request_id, prompt, params, priority=priority)
        mine = self._outputs[request_id] = deque()
        try:
            while True:
                while not mine:
                    await asyncio.sleep(0)
                    for output in self._engine.step():
                        self._outputs[output.request_id].append(output)
                yield (output := mine.popleft())
                if output.finished:
                    return
        finally:
            del self._outputs[request_id]
            self._engine.abort_request(request_id)


def make_pooling_client(llm: LLM, **settings: Any) -> tuple[TestClient, InlineEngine]:
    """A client of a server with this model, and the server's engine."""
    engine = InlineEngine(llm)
    app = build_app(ServerContext(ServerArgs(**settings), engine, created=0.0))  # type: ignore[arg-type]
    return TestClient(app, raise_server_exceptions=False), engine
