"""Runs scheduler steps of a pooling model on Gaudi. Nothing is sampled.

A decoder that pools last tokens has the launches of generation, with the numbers of its head in
the place of logits: buckets, warm-up and graphs are the same. Where all tokens of a prompt count,
a launch holds whole prompts, and there are no decodes.
"""

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backends.sdpa import SDPAKernel
from vllm.config import VllmConfig
from vllm.messages import RunnerStats
from vllm.model_executor.models.interface import PoolingModel
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.utils.ragged import positions_within
from vllm.worker.batch.launch import Launch
from vllm.worker.hpu.launches.input import HPUInputBuilder
from vllm.worker.hpu.launches.launches import PaddedLaunches, Sampling
from vllm.worker.hpu.launches.model import HPUModel, LaunchModel, softmax_normaliser
from vllm.worker.hpu.launches.planner import PaddedLaunch, PaddedShape
from vllm.worker.hpu.pooling_model import TypedInputBuilder, WholePromptModel
from vllm.worker.pooling_runner import PooledRows, PoolingRunner


class HPUPoolingRunner(PoolingRunner):
    """One pooling model on one card.

    Args:
        config: of the engine; `model.pooler` is set.
        model: loaded, on the card.
        bridge: the card.
        kernel: attention of prompts.
    """

    _keeps_all_blocks = True

    def __init__(
        self, config: VllmConfig, model: PoolingModel, bridge: HabanaBridge, kernel: SDPAKernel
    ) -> None:
        super().__init__(config, model, bridge.device)
        self._bridge = bridge
        pooler, size = self.requests.pooler, self.block_size
        launch_model: LaunchModel
        if pooler.needs_whole_prompts:
            launch_model = WholePromptModel(model, pooler, size, kernel, self._dtype)
        else:
            normaliser = softmax_normaliser(config.hpu, bridge.kernels)
            launch_model = HPUModel(model, size, kernel, normaliser, dtype=self._dtype)
        inputs = HPUInputBuilder(self.batch, size)
        if self._types is not None:
            inputs = TypedInputBuilder(self.batch, size, self._types)
        whole = pooler.needs_whole_prompts
        self._planner = self.launches = PaddedLaunches(
            config, bridge, launch_model, inputs, self.batch, whole_prompts=whole
        )

    def stats(self) -> RunnerStats:
        """What it has done."""
        return self.launches.stats(self._num_steps, self._num_useful_tokens)

    @torch.inference_mode()
    def _run(self, launch: Launch) -> PooledRows | None:
        assert isinstance(launch, PaddedLaunch)
        with self.launches.running(launch):
            packed, indices = self.launches.inputs.pack(launch)
            numbers = self._run_packed(
                self.launches.to_device(packed),
                launch.shape,
                *self.launches.received(launch.shape),
            )
            if not self.stage.is_last:
                self.stage.connected.send(numbers)
                return None
        rows, counts, places = launch.rows[indices], np.ones_like(indices), indices
        if self.requests.pooler.pooling_type in ("ALL", "STEP"):
            counts = launch.num_scheduled_tokens[indices]
            first = np.repeat(indices * launch.bucket.query_len, counts)
            places = first + positions_within(counts)
        return PooledRows(rows, counts, numbers, places)

    def _run_packed(self, packed: Tensor, shape: PaddedShape, *before: Tensor) -> Tensor:
        """A copy of the numbers, or of the hidden states for the next stage: the next launch of
        this shape writes over what a graph gives."""
        numbers, _ = self.launches.execution.run(packed, shape, *before)
        kept = numbers.clone()
        self._bridge.mark_step()
        return kept

    @torch.inference_mode()
    def warm_up(self, shape: PaddedShape, *, sampling: Sampling = "none") -> None:
        """See `PaddedRunner.warm_up`; there is no sampler."""
        packed, *before = self.launches.padding_inputs(shape)
        self._run_packed(packed, shape, *before).cpu()
