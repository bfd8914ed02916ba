"""A whole server whose engine generates the text that a test sets, for the chat page."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.engine.fakes import make_config
from tests.engine.tokenizers_for_tests import byte_level
from tests.entrypoints.openai.scripted_engine import TEMPLATE
from vllm.engine.input.input_processor import InputProcessor
from vllm.engine.metrics.engine_metrics import EngineMetrics
from vllm.engine.process.startup_state import StartupState
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.multimodal.interface.family import EncoderInput, Expansion, MediaFamily, TokenLookup
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams


class _Release:
    """An event that any thread may set and for which the event loop of the server waits."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set, self.clear = self._event.set, self._event.clear

    async def wait(self) -> None:
        while not self._event.is_set():
            await asyncio.sleep(0.005)


class ReadsMedia(MediaFamily):
    """A family whose items are never processed.

    Args:
        modalities: modalities that the model reads.
    """

    placeholder = text_of_image = "<image>"

    def __init__(self, modalities: tuple[str, ...]) -> None:
        super().__init__({}, {})
        self.modalities = modalities  # type: ignore[misc]

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        raise NotImplementedError

    def largest(self) -> EncoderInput:
        raise NotImplementedError


class TalkingEngine:
    """Generates one piece of text per step, each as one token, then the end token.

    It runs in a different thread than the test. Pieces may be any text, even if no tokenizer has it
    as a token.

    Attributes:
        images: content of the images of each chat request, in the order of the requests.
        error: error that is raised instead of piece `error_at`.
        is_held: a request stops after its first piece until `release` is set.
        requests: (prompt text, params) by request id.
        aborted: ids of requests whose client left before they finished.
    """

    def __init__(self) -> None:
        self.pieces: tuple[str, ...] = ("ok",)
        self.finish_reason = "stop"
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.error_at = 0
        self.is_held = False
        self.release = _Release()
        self.requests: dict[str, tuple[str, SamplingParams]] = {}
        self.images: list[list[bytes]] = []
        self.aborted: list[str] = []
        self.startup = StartupState()
        self.refusal = None
        self.startup.set_ready()
        self.vllm_config = make_config(max_model_len=100_000)
        self.metrics = EngineMetrics("stdlib", self.vllm_config)
        self.generation_defaults: dict[str, Any] = {}
        self.tokenizer = byte_level()
        self.input_processor = InputProcessor(self.vllm_config, self.tokenizer, {})

    @property
    def errored(self) -> bool:
        return False

    @property
    def is_loaded(self) -> bool:
        return True

    def read_media(self, *modalities: str) -> None:
        """Let the model read these modalities and text from now on."""
        media = self.input_processor.media
        media.family = ReadsMedia(modalities) if modalities else None
        media.limits = dict.fromkeys(modalities, 16)

    async def tokenize(
        self, prompt: Any, *, is_long: bool = False, max_tokens: int | None = None
    ) -> Any:
        found = prompt.get("multi_modal_data", {}).get("image", [])
        self.images.append([each.data for each in found])
        text = {key: prompt[key] for key in prompt if "multi_modal" not in key}
        return self.input_processor.prompts.tokenize(text, max_tokens=max_tokens)

    async def run_in_background(self, work: Any, num_chars: int = 0) -> Any:
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
        """Return the pieces, and the end token, which has no text."""
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

    def say(self, *pieces: str, is_held: bool = False) -> None:
        """Set the text of all later answers. With `is_held`, they stop after the first piece until
        `release`.
        """
        self.pieces = pieces
        self.is_held = is_held
        self.release.clear()

    @property
    def prompts(self) -> list[str]:
        """Return the prompts of all requests."""
        return [prompt for prompt, _ in self.requests.values()]

    @property
    def last_params(self) -> SamplingParams:
        """Return the parameters of the last request."""
        return list(self.requests.values())[-1][1]


class Faulty:
    """Answers chat requests instead of the application while `answer` is set."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.answer: Response | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_chat = scope["type"] == "http" and scope["path"] == "/v1/chat/completions"
        await (self.answer if is_chat and self.answer is not None else self.app)(
            scope, receive, send
        )


def make_app(engine: TalkingEngine, **settings: Any) -> FastAPI:
    """Return the app of the whole server around an engine."""
    args = ServerArgs(**{"chat_template": TEMPLATE, "disable_uvicorn_access_log": True, **settings})
    return build_app(ServerContext(args, engine, created=0.0))  # type: ignore[arg-type]
