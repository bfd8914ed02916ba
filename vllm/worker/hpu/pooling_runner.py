"""Runs scheduler steps of a pooling model on Gaudi. Nothing is sampled.

There are no decodes, so they need no buckets. A decoder that pools last tokens uses the prefills of
generation, with the outputs of its head instead of logits. If pooling needs all tokens of a prompt,
a forward pass contains whole prompts.
"""

from collections.abc import Callable

import numpy as np
import torch

from vllm.attention.backends.sdpa import SDPAKernel
from vllm.config import VllmConfig
from vllm.messages import ModelRunnerOutput, SchedulerOutput
from vllm.model_executor.models.interface import PoolingModel
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.utils.ragged import positions_within
from vllm.worker.hpu.launches.input import HPUInputBuilder
from vllm.worker.hpu.launches.launches import PaddedInput, PaddedLaunches, PaddedOutput, Sampling
from vllm.worker.hpu.launches.model import HPUModel, LaunchModel, softmax_normaliser
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.pooling_model import TypedInputBuilder, WholePromptModel
from vllm.worker.pooling_runner import PooledRows, PoolingRunner, pooling_rows
from vllm.worker.runner import RunnerParts, plan_batch


class HPUPoolingRunner(PoolingRunner):
    """Runs one pooling model on one card.

    Args:
        config: config of the engine; `model.pooler` is set.
        model: loaded, on the card.
        bridge: the card.
        kernel: attention kernel for prompts.
    """

    launches: PaddedLaunches

    def __init__(
        self, config: VllmConfig, model: PoolingModel, bridge: HabanaBridge, kernel: SDPAKernel
    ) -> None:
        layout, batch = plan_batch(config, model, keeps_all=True)
        requests, types, rows = pooling_rows(config, model, batch)
        pooler, size = requests.pooler, config.cache.block_size
        dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        launch_model: LaunchModel
        if pooler.needs_whole_prompts:
            launch_model = WholePromptModel(model, pooler, size, kernel, dtype)
        else:
            normaliser = softmax_normaliser(config.hpu, bridge.kernels)
            launch_model = HPUModel(model, size, kernel, normaliser, dtype=dtype)
        inputs = HPUInputBuilder(batch, size)
        if types is not None:
            inputs = TypedInputBuilder(batch, size, types)
        launches = PaddedLaunches(
            config,
            bridge,
            launch_model,
            inputs,
            batch,
            rows,
            has_decodes=False,
            whole_prompts=pooler.needs_whole_prompts,
        )

        def pool(given: PaddedInput, output: PaddedOutput) -> PooledRows:
            launch, indices = given.launch, given.sampled
            counts = np.ones_like(indices)
            if pooler.pooling_type in ("ALL", "STEP"):
                counts = launch.num_scheduled_tokens[indices]
                first = np.repeat(indices * launch.bucket.query_len, counts)
                indices = first + positions_within(counts)
            return PooledRows(given.rows, counts, launches.kept(output.result), indices)

        made = RunnerParts(cache_layout=layout, batch=batch, rows=rows, launches=launches)
        super().__init__(model, made, requests, pool)

    def _start(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        return self.launches.recorded(lambda: super(HPUPoolingRunner, self)._start(step))

    @torch.inference_mode()
    def warm_up(self, shape: PaddedShape, *, sampling: Sampling = "none") -> None:
        """Run a forward pass of padding; pooling models do not sample."""
        self.launches.kept(self.launches.run_padding(shape).result).cpu()
