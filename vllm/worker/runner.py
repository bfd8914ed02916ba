"""The sequence of a step and of a forward pass, for runners of all devices and tasks.

    step            update the batch, plan forward passes, run each of them, collect their results
    forward pass    build inputs, begin results (masks), run the model, send on or finish results

`Launches` differ by device. A function turns hidden states into tokens, drafts or pooled vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from vllm.attention import CachedLayer
from vllm.attention.cached_layer import layers_with_cache
from vllm.config import VllmConfig
from vllm.distributed import Stage
from vllm.kv_cache_spec import KVCacheLayout
from vllm.messages import ModelRunnerOutput, RunnerStats, SchedulerOutput
from vllm.model_executor.models.interface import LayeredModel
from vllm.model_executor.speculators.interface import Speculator
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch
from vllm.worker.kv_cache import cache_dtype, cache_layout
from vllm.worker.parts.row_parts import RowParts

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")
ResultT = TypeVar("ResultT")


class StepHandle:
    """A step in flight.

    `result` waits for the device and returns the tokens; further calls return the same.

    Args:
        finish: called once, after earlier steps have their results.
        before: the previous step, if it may still be in flight.
    """

    def __init__(
        self, finish: Callable[[], ModelRunnerOutput], before: "StepHandle | None" = None
    ) -> None:
        self._finish = finish
        self._before = before
        self._output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        """Wait for the step, and return its result."""
        if self._output is None:
            if self._before is not None:
                self._before.result()
                self._before = None
            self._output = self._finish()
        return self._output


class Launches(Protocol[InputT, OutputT]):
    """The forward passes of one model: the parts of the sequence that depend on the device."""

    @property
    def stage(self) -> Stage:
        """Pipeline stage of the model."""
        ...

    def plan(self, step: SchedulerOutput) -> list[Launch]:
        """Plan the forward passes of a step, in the order in which they run.

        Together they cover all its requests.
        """
        ...

    def running(self, launch: Launch) -> AbstractContextManager[None]:
        """Return the context manager in which a forward pass runs, from inputs to results."""
        ...

    def build(self, launch: Launch) -> InputT:
        """Build the inputs of a forward pass."""
        ...

    def run(self, given: InputT) -> OutputT:
        """Run the model, or this pipeline stage of it."""
        ...

    def send(self, output: OutputT) -> None:
        """Send the output of this pipeline stage to the next one."""
        ...

    def stats(self, num_steps: int, num_useful_tokens: int) -> RunnerStats:
        """Return the counters of a runner."""
        ...


@torch.inference_mode()
def run_launch(
    launch: Launch,
    launches: Launches[InputT, OutputT],
    begin: Callable[[InputT], Callable[[OutputT], ResultT]],
) -> ResultT:
    """Run one forward pass: build inputs, run the model, then send the output on or finish.

    Args:
        launch: planned by `launches`.
        launches: forward passes of the device.
        begin: starts the work of the host during the forward pass. Returns a function that computes
            the result from the output.
    """
    with launches.running(launch):
        given = launches.build(launch)
        finish = begin(given)
        output = launches.run(given)
        if not launches.stage.is_last:
            launches.send(output)
        return finish(output)


def plan_batch(
    config: VllmConfig, model: LayeredModel | Speculator, *, keeps_all: bool = False
) -> tuple[KVCacheLayout, InputBatch]:
    """Plan the layout of the KV cache, and make the batch.

    Args:
        config: config of the engine.
        model: loaded.
        keeps_all: one block table serves all layers, so it includes blocks outside of sliding
            windows. Pipeline stages, and a model and its draft model, always keep all tokens:
            they share block tables, and may have different windows.
    """
    keeps_all |= config.speculative.draft_model is not None or model.stage.count > 1
    layers, dtype = layers_with_cache(model), cache_dtype(config)
    layout = cache_layout(config, layers, dtype, keeps_all=keeps_all)
    limits = config.scheduler
    return layout, InputBatch(
        limits.max_num_seqs, limits.max_model_len, config.max_blocks_per_request, len(layout.groups)
    )


@dataclass(frozen=True, kw_only=True)
class RunnerParts:
    """The parts of a runner, which are made by the constructor for each device."""

    cache_layout: KVCacheLayout
    batch: InputBatch
    rows: RowParts
    """Embeddings, adapters and the like of the requests in the batch."""
    launches: Launches[Any, Any]


class Runner(ABC):
    """Runs one model on one device.

    Args:
        model: loaded, on the device.
        made: the parts of the runner.
    """

    def __init__(self, model: LayeredModel, made: RunnerParts) -> None:
        self.model = model
        self.stage = model.stage
        self.cache_layout, self.batch = made.cache_layout, made.batch
        self.parts, self.launches = made.rows, made.launches
        self._in_flight: StepHandle | None = None
        self._num_steps = 0
        self._num_useful_tokens = 0

    @property
    def attention_layers(self) -> list[CachedLayer]:
        """The layers that own a KV cache, in the order of the model; an encoder has none."""
        return layers_with_cache(self.model)

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Start a step; the previous one may be in flight.

        If the host needs the tokens of the previous step, this waits for them.
        """
        if self._in_flight is not None and self._needs_tokens(step):
            self._in_flight.result()
        self.parts.note_step()
        self.parts.update(step)
        self.batch.update(step)
        self._prepare_step(step)
        self._num_steps += 1
        self._num_useful_tokens += step.num_tokens
        self._in_flight = StepHandle(self._start(step), before=self._in_flight)
        return self._in_flight

    def stats(self) -> RunnerStats:
        """Return the counters since the start."""
        return self.parts.count(self.launches.stats(self._num_steps, self._num_useful_tokens))

    def _needs_tokens(self, step: SchedulerOutput) -> bool:
        """Return whether the host needs the results of the step in flight before this one starts.

        It does if inputs are built from them, or if this step may reassign batch indices.
        """
        return True

    def _prepare_step(self, step: SchedulerOutput) -> None:  # noqa: B027
        """Prepare a step before forward passes are planned; the batch is up to date."""

    @abstractmethod
    def _start(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start the forward passes of a step; the returned function waits for the result."""
