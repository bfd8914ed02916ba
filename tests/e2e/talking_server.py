"""The whole server around an engine that says what a test wrote, for the chat page."""

import asyncio
import threading

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.entrypoints.openai.scripted_engine import ScriptedEngine
from vllm.engine.metrics.engine_metrics import EngineMetrics
from vllm.sampling_params import SamplingParams


class _Release:
    """An event that any thread may set, and the loop of the server waits for."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set, self.clear = self._event.set, self._event.clear

    async def wait(self) -> None:
        while not self._event.is_set():
            await asyncio.sleep(0.005)


class TalkingEngine(ScriptedEngine):
    """A scripted engine in another thread than the test's."""

    def __init__(self) -> None:
        super().__init__("ok", max_model_len=100_000)
        self.metrics = EngineMetrics("stdlib", self.vllm_config)
        self.release = _Release()  # type: ignore[assignment]

    def say(self, *pieces: str, is_held: bool = False) -> None:
        """What all later answers are; held ones stop after the first piece until `release`."""
        self.pieces = pieces
        self.is_held = is_held
        self.release.clear()

    @property
    def prompts(self) -> list[str]:
        """Of all requests."""
        return [prompt for prompt, _ in self.requests.values()]

    @property
    def last_params(self) -> SamplingParams:
        """Of the last request."""
        return list(self.requests.values())[-1][1]


class Faulty:
    """Answers chat requests in place of the application while `answer` is set."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.answer: Response | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_chat = scope["type"] == "http" and scope["path"] == "/v1/chat/completions"
        await (self.answer if is_chat and self.answer is not None else self.app)(
            scope, receive, send
        )
