"""Runs scheduler steps of a pooling model.

A step is one forward pass, and returns a result for each prompt that is completed. Nothing is
sampled, so no step depends on the result of another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vllm.config import VllmConfig
from vllm.messages import FloatArray, IntArray, ModelRunnerOutput, NewRequest, SchedulerOutput
from vllm.model_executor.layers.pooler import finish, split_results
from vllm.model_executor.models.interface import PoolingModel
from vllm.pooling_params import PoolingParams
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import LaunchInput
from vllm.worker.parts.row_parts import RowPart, RowParts
from vllm.worker.runner import Runner, RunnerParts, run_launch

_NOT_FINITE = (
    "the output of the model contains infinite or NaN values: {dtype} has overflowed. Use dtype "
    "float32 or bfloat16, which have a larger range"
)


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The results of one forward pass of a pooling model, on the device."""

    rows: IntArray
    """[n]"""
    counts: IntArray
    """[n] tokens of each."""
    numbers: Tensor
    """[n, size], or [sum(counts), size] with one result per token."""
    indices: IntArray | None = None
    """Indices of the valid rows of `numbers`; None: all."""


class PoolingRequests(RowPart):
    """The pooling parameters of the requests in the batch; assembles their results.

    Args:
        config: config of the engine.
        batch: has the prompts.
    """

    def __init__(self, config: VllmConfig, batch: InputBatch) -> None:
        assert config.model.pooler is not None
        self.pooler = config.model.pooler
        self._dtype_name = config.model.dtype_name
        self._batch = batch
        self._params: dict[int, PoolingParams] = {}

    def remove(self, row: int) -> None:
        self._params.pop(row, None)

    def add(self, new: NewRequest) -> None:
        assert new.request.pooling_params is not None
        self._params[new.row] = new.request.pooling_params

    def output(self, step_id: int, launches: list[PooledRows]) -> ModelRunnerOutput:
        """Wait for the device, and return the results of a step."""
        pooled: dict[int, FloatArray] = {}
        errors: dict[int, str] = {}
        for launch in launches:
            if not len(launch.rows):
                continue
            numbers = launch.numbers.cpu().float().numpy()
            if launch.indices is not None:
                numbers = numbers[launch.indices]
            parts = split_results(numbers, self.pooler, launch.counts)
            for row, part in zip(launch.rows.tolist(), parts, strict=True):
                if np.isfinite(part).all():
                    pooled[row] = self._finish(row, part)
                else:
                    errors[row] = _NOT_FINITE.format(dtype=self._dtype_name)
        none = np.empty(0, np.int32)
        return ModelRunnerOutput(
            step_id=step_id, rows=none, token_ids=none, pooled=pooled, errors=errors
        )

    def _finish(self, row: int, numbers: FloatArray) -> FloatArray:
        token_ids = self._batch.token_ids[row, : self._batch.num_prompt_tokens[row]]
        return finish(numbers, self.pooler, self._params[row], token_ids)


class TokenTypes(RowPart):
    """The types of the prompt tokens of every request (`token_type_ids`).

    Attributes:
        values: [rows, max_model_len] int32.
    """

    def __init__(self, batch: InputBatch) -> None:
        self.values: IntArray = np.zeros_like(batch.token_ids)

    def add(self, new: NewRequest) -> None:
        types, num_prompt = new.request.token_type_ids, len(new.request.prompt_token_ids)
        self.values[new.row, :num_prompt] = 0 if types is None else types


class PoolingRunner(Runner):
    """Runs one pooling model on one device.

    Args:
        model: loaded, on the device.
        made: the parts of the runner.
        requests: pooling requests of the batch.
        pool: computes the results of a forward pass from its output.
    """

    model: PoolingModel

    def __init__(
        self,
        model: PoolingModel,
        made: RunnerParts,
        requests: PoolingRequests,
        pool: Callable[[Any, Any], PooledRows],
    ) -> None:
        super().__init__(model, made)
        self._requests, self._pool = requests, pool

    def _start(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        launches = self.launches
        found = [run_launch(launch, launches, self._begin) for launch in launches.plan(step)]
        pooled = [rows for rows in found if rows is not None]
        return lambda: self._requests.output(step.step_id, pooled)

    def _begin(self, given: LaunchInput) -> Callable[[Any], PooledRows | None]:
        """Return a function that pools the output of a forward pass; it returns None if a later
        pipeline stage pools.
        """
        if not self.stage.is_last:
            return lambda _: None
        return lambda output: self._pool(given, output)


def pooling_rows(
    config: VllmConfig, model: PoolingModel, batch: InputBatch
) -> tuple[PoolingRequests, TokenTypes | None, RowParts]:
    """Make the parts of a pooling runner: requests, token types, and the list of both.

    The token types are None if the model does not use them.
    """
    requests = PoolingRequests(config, batch)
    types = TokenTypes(batch) if model.num_token_types > 1 else None
    return requests, types, RowParts([requests] if types is None else [requests, types])
