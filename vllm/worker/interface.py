"""What an executor asks of a worker."""

from concurrent.futures import Future
from typing import Protocol

from vllm.config import VllmConfig
from vllm.messages import EngineRequest, ModelRunnerOutput, RunnerStats, SchedulerOutput


class StepHandleLike(Protocol):
    """A step in flight."""

    def result(self) -> ModelRunnerOutput:
        """The result of the step; waits for it."""
        ...


class Worker(Protocol):
    """One device, its part of the model, and its KV cache."""

    def __init__(self, config: VllmConfig) -> None: ...

    def load_model(self) -> None:
        """Build the model and read its weights."""
        ...

    def initialize_cache(self) -> int:
        """Size and allocate the KV cache; the number of blocks, the null block included."""
        ...

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step; at most one other is in flight."""
        ...

    def prepare(self, request: EngineRequest) -> Future[None] | None:
        """Load in the background what the steps of a request need; see `Executor.prepare`."""
        ...

    def stats(self) -> RunnerStats:
        """What it has done since it started; costs next to nothing, so may follow every step."""
        ...
