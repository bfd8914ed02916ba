"""Keep the shared state of the routes of one server. Routes get it by `get_context(request)`."""

from functools import cached_property
from typing import TYPE_CHECKING

from vllm.config.families import family_of
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import Request

    from vllm.config import VllmConfig
    from vllm.engine.async_llm_engine import AsyncLLM
    from vllm.entrypoints.shared.card_telemetry import CardTelemetry
    from vllm.entrypoints.shared.served_adapters import ServedAdapters
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.fetching.fetch import MediaFetcher
    from vllm.multimodal.interface.speech import SpeechRules
    from vllm.platforms.habana.card_reading import CardReading
    from vllm.utils.otel import Tracer


class ServerContext:
    """One server and its engine.

    Args:
        args: arguments of the server.
        engine: engine, which may not be ready yet; the gate before the routes waits for it.
        created: start of the server, in seconds of `time.time()`.

    Attributes:
        num_in_progress: number of requests whose response has not ended, for GET /load.
        is_draining: the server is shutting down and refuses new requests.
        has_been_ready: the engine was ready at least once.
        tracer: OpenTelemetry tracer; None: send no spans.
    """

    def __init__(self, args: ServerArgs, engine: "AsyncLLM", created: float) -> None:
        self.args = args
        self.engine = engine
        self.created = created
        self.num_in_progress = 0
        self.is_draining = False
        self.has_been_ready = False
        self.tracer: Tracer | None = None
        self._adapters: ServedAdapters | None = None

    @property
    def config(self) -> "VllmConfig":
        """Config of the engine; available after the engine is ready."""
        return self.engine.vllm_config

    @property
    def reasoning_parser(self) -> str | None:
        """Name of the reasoning parser from the flag, or else the parser that the model family
        requires.

        None: all text is the answer.
        """
        arch = self.config.model.arch
        if self.args.reasoning_parser is not None or arch is None:
            return self.args.reasoning_parser
        return family_of(arch.model_type).reasoning_parser

    @property
    def state(self) -> str:
        """State of the server in one word: starting, ready, paused (it runs, but accepts no new
        requests), draining (it shuts down) or failed.
        """
        startup = self.engine.startup
        if self.is_draining:
            return "draining"
        if startup.error is not None:
            return "failed"
        if not startup.is_ready:
            return "starting"
        return "ready" if self.engine.refusal is None else "paused"

    @cached_property
    def _card_telemetry(self) -> "CardTelemetry | None":
        from vllm.entrypoints.shared.card_telemetry import CardTelemetry
        from vllm.platforms import resolve_platform

        parallel = self.config.parallel
        platform = resolve_platform(self.config.device.device)
        read = platform.card_reader(parallel.num_local_replicas * parallel.world_size)
        return None if read is None else CardTelemetry(read)

    @cached_property
    def media_fetcher(self) -> "MediaFetcher":
        """Object that fetches the media that requests name by URLs."""
        from vllm.entrypoints.shared.media import make_fetcher

        return make_fetcher(self.config.multimodal)

    @property
    def speech(self) -> "SpeechRules | None":
        """Speech rules of the model for transcriptions; None: it does not transcribe."""
        processor = self.engine.input_processor
        return processor.media.speech(processor.tokenizer)

    async def card_readings(self) -> "Sequence[CardReading]":
        """Return the newest sensor readings of the engine's cards on this machine.

        Empty before the engine is ready for the first time, and for devices without such sensors.
        """
        is_known = self.has_been_ready or self.engine.startup.is_ready
        telemetry = self._card_telemetry if is_known else None
        return () if telemetry is None else await telemetry.latest()

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use as `model`; responses have the first one."""
        return self.config.model.served_model_name

    @property
    def adapters(self) -> "ServedAdapters | None":
        """The LoRA adapters that are served; None if LoRA is off."""
        if self._adapters is None and self.config.lora.enable_lora:
            from vllm.entrypoints.shared.served_adapters import ServedAdapters

            self._adapters = ServedAdapters(
                self.args.lora_modules,
                self.model_names,
                self.config.lora.max_lora_rank,
                self.args.adapters_folder,
            )
        return self._adapters

    def adapter(self, name: str | None) -> "LoRARequest | None":
        """Return the adapter that a request names as `model`; None for the model itself."""
        return None if self.adapters is None else self.adapters.find(name)

    def check_model(self, name: str | None) -> str:
        """Check the model name of a request, and return the name for the response.

        Args:
            name: name in the request; None or "": use the first name of the server.

        Raises:
            NotFoundError: no model has this name.
        """
        if not name:
            return self.model_names[0]
        if name not in self.model_names and self.adapter(name) is None:
            raise NotFoundError(
                f"The model `{name:.200}` does not exist.", param="model", code="model_not_found"
            )
        return name


def get_context(request: "Request") -> ServerContext:
    """Return the context of the server that handles this request."""
    return request.app.state.context
