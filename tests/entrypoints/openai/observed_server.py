"""A server with metrics and status page, whose engine only has values that the test sets."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException

from tests.engine.fakes import make_config
from vllm.config.vllm import Device, DeviceConfig
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.engine.metrics.engine_metrics import EngineMetrics, FinishedRequestStats, IterationStats
from vllm.engine.metrics.replica_metrics import ReplicaMetrics
from vllm.entrypoints.middleware.auth import Authentication
from vllm.entrypoints.operations import metrics_route
from vllm.entrypoints.pages.routes import page_routers
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.messages import RunnerStats, SchedulerStats

MODEL = "stdlib"
KEY = "secret"


class ObservedEngine(AsyncLLM):
    """The real engine without a core: the test gives the reports of the core.

    Args:
        device: device in its config.

    Attributes:
        buckets: buckets of its workers, as `Worker.list_buckets` returns them.
    """

    metrics: ReplicaMetrics

    def __init__(self, device: Device = "cpu") -> None:
        config = replace(make_config(max_model_len=2048), device=DeviceConfig(device=device))
        super().__init__(config=config)
        self.core_metrics = EngineMetrics(MODEL, config)
        self.metrics = ReplicaMetrics([self.core_metrics])
        self.buckets: list[tuple[int, int, int, int, bool]] = []

    async def list_buckets(self) -> list[tuple[int, int, int, int, bool]]:
        return self.buckets

    def work(
        self, num_tokens: int = 64, num_waiting: int = 3, stats: SchedulerStats | None = None
    ) -> None:
        """Report a step of a busy Gaudi; the arguments replace its figures."""
        stats = stats or SchedulerStats(
            num_running=6,
            num_waiting=num_waiting,
            kv_cache_usage=0.421,
            num_kv_blocks=4106,
            num_prefix_queries=1000,
            num_prefix_hits=640,
            num_preemptions=2,
            runner=RunnerStats(
                num_steps=9,
                num_useful_tokens=900,
                num_padded_tokens=100,
                num_bucket_hits=41,
                num_bucket_misses=1,
                num_late_compilations=5,
                num_decode_blocks=300,
                num_padded_blocks=100,
                recent_launches=(2, 1, 6, 1, 150, 8, 1, 200, 0, 1, 6, 1, 150, 8, 1, 200, 0),
            ),
        )
        self.core_metrics.record_output(stats, IterationStats(10, num_tokens, [0.03], [0.012] * 5))

    def finish(self, request_id: str, reason: str = "stop") -> None:
        """Report that a request ends."""
        now = time.time()
        self.core_metrics.record_finished(
            FinishedRequestStats(
                finish_reason=reason,
                num_prompt_tokens=120,
                num_generation_tokens=48,
                n=1,
                max_tokens=64,
                arrival=now - 2,
                first_scheduled=now - 1.9,
                first_token=now - 1.75,
                last_token=now,
                finished=now,
                num_cached_tokens=64,
                request_id=request_id,
            )
        )


def make_app(engine: ObservedEngine, keys: tuple[str, ...] = ()) -> FastAPI:
    """Return the application of the server; POST /v1/things/{number} answers with this status."""
    app = FastAPI()
    app.state.context = ServerContext(ServerArgs(), engine, created=time.time() - 4000)
    things = APIRouter()

    @things.post("/v1/things/{number}")
    async def answer(number: int) -> dict[str, str]:
        if number == 500:
            raise RuntimeError("broken")
        raise HTTPException(number)

    routers = (things, metrics_route.router, *page_routers(ServerArgs()))
    for router in routers:
        app.include_router(router)
    if keys:
        app.add_middleware(Authentication, keys=keys)
    metrics_route.count_http(app, routers)
    return app


@contextlib.contextmanager
def served(app: FastAPI, port: int = 0) -> Iterator[str]:
    """Return the address of a live server on this machine."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def ready_engine(device: Device = "cpu") -> ObservedEngine:
    """Return an engine that accepts requests."""
    engine = ObservedEngine(device)
    engine.startup.set_ready()
    return engine
