"""Runs scheduler steps of a pooling model: one forward pass, and a result for each prompt that is
computed with it. Nothing is sampled, so no step depends on the result of another.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.attention import CachedLayer, EncoderMetadata, LaunchContext, share_context
from vllm.config import VllmConfig
from vllm.messages import (
    FloatArray,
    IntArray,
    ModelRunnerOutput,
    NewRequest,
    RunnerStats,
    SchedulerOutput,
)
from vllm.model_executor.layers.pooler import finish, pool_tokens, split_results
from vllm.model_executor.models.interface import PoolingModel
from vllm.pooling_params import PoolingParams
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch, LaunchPlanner, RaggedPlanner
from vllm.worker.batch.model_input import build_ragged_input
from vllm.worker.kv_cache import cache_dtype, cache_layout, layers_with_cache
from vllm.worker.model_runner import StepHandle
from vllm.worker.parts.row_parts import RowPart, RowParts

_NOT_FINITE = (
    "the model's result has values that are not finite: they have overflowed in {dtype}; "
    "dtype float32 or bfloat16 has a larger range"
)


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Results of one launch, on the device."""

    rows: IntArray
    """[n]"""
    counts: IntArray
    """[n] tokens of each."""
    numbers: Tensor
    """[n, size], or [sum(counts), size] with one result per token."""
    places: IntArray | None = None
    """Indices of the valid rows of `numbers`; None: all."""


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """A ragged launch of T tokens, ready to run."""

    input_ids: Tensor
    """[T] int64."""
    context: LaunchContext
    """What the layers have to know."""
    token_type_ids: Tensor | None
    """[T] int64; None: all 0."""


class PoolingRequests(RowPart):
    """The pooling requests of the batch, and how their results are reported.

    Args:
        config: of the engine.
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
        """The results of a step; waits for the device."""
        pooled: dict[int, FloatArray] = {}
        errors: dict[int, str] = {}
        for launch in launches:
            if not len(launch.rows):
                continue
            numbers = launch.numbers.cpu().float().numpy()
            if launch.places is not None:
                numbers = numbers[launch.places]
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
    """Types of the prompt tokens of every row.

    Attributes:
        values: [rows, max_model_len] int32.
    """

    def __init__(self, batch: InputBatch) -> None:
        self.values: IntArray = np.zeros_like(batch.token_ids)

    def add(self, new: NewRequest) -> None:
        types, num_prompt = new.request.token_type_ids, len(new.request.prompt_token_ids)
        self.values[new.row, :num_prompt] = 0 if types is None else types


class PoolingRunner:
    """One pooling model on a device that takes any shape.

    Args:
        config: of the engine; `model.pooler` is set.
        model: loaded, on the device.
        device: where it is.
    """

    _keeps_all_blocks = False
    """Also those that a sliding window has passed, so that one block table serves all layers."""

    def __init__(self, config: VllmConfig, model: PoolingModel, device: torch.device) -> None:
        self.model = model
        self.stage = model.stage
        self._dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        self._launch_holder = share_context(model)
        self.device = device
        self.block_size = config.cache.block_size
        limits = config.scheduler
        # Stages of a pipeline need not have the same windows.
        self.cache_layout = cache_layout(
            config,
            self.attention_layers,
            cache_dtype(config),
            keeps_all=self._keeps_all_blocks or self.stage.count > 1,
        )
        self.batch = InputBatch(
            limits.max_num_seqs,
            limits.max_model_len,
            config.max_blocks_per_request,
            len(self.cache_layout.groups),
        )
        self.requests = PoolingRequests(config, self.batch)
        self._planner: LaunchPlanner = RaggedPlanner()
        self._types = TokenTypes(self.batch) if model.num_token_types > 1 else None
        types = [] if self._types is None else [self._types]
        self.parts = RowParts([self.requests, *types])
        self._in_flight: StepHandle | None = None
        self._num_steps = 0
        self._num_useful_tokens = 0

    @property
    def attention_layers(self) -> list[CachedLayer]:
        """The layers that own a KV cache, in the order of the model; an encoder has none."""
        return layers_with_cache(self.model)

    def stats(self) -> RunnerStats:
        """Counters since the start. Nothing is padded or compiled on a device that accepts any
        shape."""
        return RunnerStats(num_steps=self._num_steps, num_useful_tokens=self._num_useful_tokens)

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Start a step. It may reassign rows, so it first waits for the step before."""
        if self._in_flight is not None:
            self._in_flight.result()
        self._num_steps += 1
        self._num_useful_tokens += step.num_tokens
        self.parts.update(step)
        self.batch.update(step)
        launches = [self._run(launch) for launch in self._planner.plan(step)]
        pooled = [launch for launch in launches if launch is not None]
        self._in_flight = StepHandle(lambda: self.requests.output(step.step_id, pooled))
        return self._in_flight

    @torch.inference_mode()
    def _run(self, launch: Launch) -> PooledRows | None:
        """The results of a launch; None: a later stage of the pipeline has them."""
        given, stage = self._build(launch), self.stage
        inputs, positions = given.input_ids, given.context.positions
        if not stage.is_first:
            size = self.model.arch.hidden_size
            inputs = stage.receive(len(positions), size, self._dtype, self.device)
        with self._launch_holder.running(given.context):
            hidden_states = self.model(inputs, positions, given.token_type_ids)
        if not stage.is_last:
            stage.connected.send(hidden_states)
            return None
        counts = launch.num_scheduled_tokens
        ends = launch.num_computed_tokens + counts
        done = np.flatnonzero(ends >= self.batch.num_tokens[launch.rows])
        starts = (np.cumsum(counts) - counts)[done]
        counts = counts[done]
        pooled = pool_tokens(hidden_states, self.requests.pooler, starts, counts)
        return PooledRows(launch.rows[done], counts, self.model.head(pooled))

    def _build(self, launch: Launch) -> PoolingInput:
        if self.requests.pooler.is_causal:
            given = build_ragged_input(
                self.batch,
                launch,
                self.block_size,
                self.device,
                has_states=bool(self.cache_layout.state_layers),
            )
            return PoolingInput(given.input_ids, given.context, None)
        counts = launch.num_scheduled_tokens
        ends = np.cumsum(counts)
        rows = np.repeat(launch.rows, counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        metadata = EncoderMetadata.build(np.concatenate([[0], ends]), self.device)
        types = None if self._types is None else self._types.values
        return PoolingInput(
            self._to_device(self.batch.token_ids[rows, positions]),
            LaunchContext(metadata, self._to_device(positions)),
            None if types is None else self._to_device(types[rows, positions]),
        )

    def _to_device(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)
