"""The OpenAI server on Ray Serve: replicas of a model on the machines of a Ray cluster, as many as
the load needs.

    pip install 'vllm[ray]' 'ray[serve]'
    cd examples/online_serving/ray_serve
    serve run app:make model=Qwen/Qwen2.5-0.5B-Instruct max_replicas=4

Then http://localhost:8000/v1 takes what `vllm serve` takes. Further settings:

    flags="--max-model-len 8192 --dtype bfloat16"   any flags of `vllm serve`
    min_replicas=1 max_replicas=4                    Ray Serve starts and stops replicas in between
    requests_per_replica=32                          requests in progress that one should have
    num_cpus=8                                       of each replica
    num_hpus=1                                       Gaudi cards of each; 0: it runs on the CPU

A replica is one engine. One that spans several cards (flags="--tensor-parallel-size 8") needs them
on one machine, and as many `num_hpus`. For several machines see docs/pipeline_parallel.md.
"""

import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pydantic import BaseModel
from ray import cloudpickle, serve

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Settings(BaseModel):
    """The settings that `serve run` accepts as name=value."""

    model: str = ""
    flags: str = ""
    min_replicas: int = 1
    max_replicas: int = 1
    requests_per_replica: int = 32
    num_cpus: int = 1
    num_hpus: int = 0


class OpenAIApp:
    """The routes of `vllm serve` as an ASGI application.

    The engine starts and stops with the application.
    """

    def __init__(self, flags: list[str]) -> None:
        self._flags = flags
        self._engine: Any = None
        self.error: BaseException | None = None
        """Error of the engine after it has failed."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._routes(scope, receive, send)
            return
        await receive()
        try:
            await self._start()
        except Exception as error:
            await self._end()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._end()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> None:
        from vllm.engine.async_llm_engine import AsyncLLM
        from vllm.entrypoints.openai.cli_args import make_arg_parser, read_args
        from vllm.entrypoints.server.app import load_server
        from vllm.utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser(prog="app:make"))
        engine_args, args = read_args(parser.parse_args(self._flags))
        self._engine = AsyncLLM(engine_args)
        self._engine.on_death(self._note_death)
        context, self._routes = load_server(self._engine, args)
        await self._engine.start()
        context.has_been_ready = True

    async def _end(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    def _note_death(self, error: BaseException) -> None:
        self.error = error


def make(settings: Settings) -> serve.Application:
    """Make the application of Ray Serve."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # replicas do not have this file
    flags = [*([settings.model] if settings.model else []), *shlex.split(settings.flags)]
    app: OpenAIApp | None = None

    def build() -> OpenAIApp:
        nonlocal app
        app = OpenAIApp(flags)
        return app

    @serve.deployment(
        name="vllm",
        max_ongoing_requests=4 * settings.requests_per_replica,
        autoscaling_config={
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "target_ongoing_requests": settings.requests_per_replica,
        },
        ray_actor_options={
            "num_cpus": settings.num_cpus,
            "resources": {"HPU": settings.num_hpus} if settings.num_hpus else {},
        },
    )
    @serve.ingress(build)
    class OpenAI:
        """A replica: one engine with its server."""

        def check_health(self) -> None:
            """Raise if the engine has died; Ray Serve then starts another replica."""
            if app is not None and app.error is not None:
                raise RuntimeError(f"the engine has died: {app.error}")

    return OpenAI.bind()
