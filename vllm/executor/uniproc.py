"""One worker in the engine's own process."""

from vllm.config import VllmConfig
from vllm.executor.base import Executor
from vllm.messages import RunnerStats, SchedulerOutput
from vllm.platforms import resolve_platform
from vllm.utils.imports import load_class
from vllm.worker.interface import StepHandleLike, Worker


class UniProcExecutor(Executor):
    """Loads the model at construction.

    Args:
        config: of the engine.
    """

    def __init__(self, config: VllmConfig) -> None:
        platform = resolve_platform(config.device.device)
        self._worker: Worker | None = load_class(platform.worker_class)(config)
        self._worker.load_model()

    def initialize_cache(self) -> int:
        """Allocate the KV cache; the number of its blocks."""
        return self._running_worker.initialize_cache()

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step."""
        return self._running_worker.execute_model(step)

    def preload(self) -> None:
        """Load in the background what only some requests need."""
        self._running_worker.preload()

    def stats(self) -> RunnerStats:
        """What the worker has done."""
        return self._running_worker.stats()

    def shutdown(self) -> None:
        """Drop the model and its caches."""
        self._worker = None

    @property
    def _running_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor has been shut down")
        return self._worker
