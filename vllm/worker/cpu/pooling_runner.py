"""Runs scheduler steps of a pooling model on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.attention import LaunchContext, bind_prompt_caches, whole_prompts
from vllm.config import VllmConfig
from vllm.messages import ModelRunnerOutput, SchedulerOutput
from vllm.model_executor.layers.pooler import pool_tokens
from vllm.model_executor.models.interface import PoolingModel
from vllm.ops.cpu.threads import one_thread
from vllm.utils.ragged import positions_within
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.model_input import ModelInput
from vllm.worker.cpu.launches import RaggedLaunches, RaggedOutput
from vllm.worker.pooling_runner import PooledRows, PoolingRunner, TokenTypes, pooling_rows
from vllm.worker.runner import RunnerParts, plan_batch


class CPUPoolingRunner(PoolingRunner):
    """A `PoolingRunner` that records its program at the first step, when caches are bound."""

    launches: RaggedLaunches

    def _start(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        self.launches.fuse_pooling(self.model)
        return super()._start(step)


def make_pooling_runner(
    config: VllmConfig, model: PoolingModel, device: torch.device
) -> PoolingRunner:
    """Make a pooling runner for devices that run any shape.

    Args:
        config: config of the engine; `model.pooler` is set.
        model: loaded, on the device.
        device: the device of the model.
    """
    layout, batch = plan_batch(config, model)
    requests, types, rows = pooling_rows(config, model, batch)
    pooler, build = requests.pooler, None
    if not pooler.is_causal:
        build = partial(_build_encoder_input, batch, device, types)
        limits = config.scheduler
        num_tokens = max(limits.max_num_batched_tokens, limits.max_model_len)
        bind_prompt_caches(model, num_tokens, limits.max_num_seqs, model.dtype)
    launches = RaggedLaunches(config, model, device, batch, rows, build)

    def pool(given: ModelInput, output: RaggedOutput) -> PooledRows:
        launch, done = given.launch, given.sampled
        counts = launch.num_scheduled_tokens[done]
        with one_thread():
            pooled = pool_tokens(output.hidden_states, pooler, launch.starts[done], counts)
        return PooledRows(given.rows, counts, model.head(pooled))

    made = RunnerParts(cache_layout=layout, batch=batch, rows=rows, launches=launches)
    return CPUPoolingRunner(model, made, requests, pool)


def _build_encoder_input(
    batch: InputBatch, device: torch.device, types: TokenTypes | None, launch: Launch
) -> ModelInput:
    """Build the inputs of whole prompts whose tokens attend to each other in both directions."""

    def to_device(values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    counts = launch.num_scheduled_tokens
    rows, positions = np.repeat(launch.rows, counts), positions_within(counts)
    of_tokens = None if types is None else types.values[rows, positions]
    return ModelInput(
        launch,
        np.arange(len(launch.rows), dtype=np.int32),
        input_ids=to_device(batch.token_ids[rows, positions]),
        context=LaunchContext(whole_prompts(counts), to_device(positions)[None]),
        logits_indices=None,
        token_type_ids=to_device(of_tokens) if of_tokens is not None and of_tokens.any() else None,
    )
