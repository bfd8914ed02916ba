"""The asynchronous engine over the core of an `LLM` in the test process."""

from typing import Any

from starlette.testclient import TestClient

from tests.entrypoints.openai.scripted_engine import clients, make_app
from tests.fake_core import CoreInProcess
from vllm import LLM


class InlineEngine(CoreInProcess):
    """The real engine with the model of an `LLM`."""

    def __init__(self, llm: LLM) -> None:
        engine = llm.llm_engine
        super().__init__(
            engine.vllm_config,
            engine.engine_core,
            engine.get_tokenizer(),
            engine.generation_defaults,
        )


def pooling_client(engine: InlineEngine, **settings: Any) -> TestClient:
    """Return a client of a server with this engine; entering the client starts both."""
    app = make_app(engine, chat_template=None, **settings)
    return TestClient(app, raise_server_exceptions=False)


def make_pooling_client(llm: LLM, **settings: Any) -> tuple[TestClient, InlineEngine]:
    """Return a client of a server with this model, and the server's engine. Both run until the end
    of the test.
    """
    engine = InlineEngine(llm)
    return clients.enter_context(pooling_client(engine, **settings)), engine
