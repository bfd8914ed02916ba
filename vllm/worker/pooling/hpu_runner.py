"""Runs scheduler steps of a pooling model on Gaudi. Nothing is sampled.

A decoder that pools last tokens has the launches of generation, with the numbers of its head in
the place of logits: buckets, warm-up and graphs are the same. Where all tokens of a prompt count,
a launch holds whole prompts, and there are no decodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backends.sdpa import SDPAKernel
from vllm.bucketing import Catalog, Phase, StepLimits
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.messages import ModelRunnerOutput, SchedulerOutput
from vllm.model_executor.models.interface import PoolingModel
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.input import to_device
from vllm.worker.hpu.model_runner import HPUModelRunner
from vllm.worker.hpu.planner import BucketLaunch, HPULaunchPlanner, LaunchShape
from vllm.worker.launch import Launch
from vllm.worker.model_runner import LaunchResult, PendingLaunch
from vllm.worker.pooling.hpu_model import HeadAsLogits, TypedInputBuilder, WholePromptModel
from vllm.worker.pooling.runner import PooledRows, PoolingRequests, TokenTypes


@dataclass(frozen=True, slots=True)
class PooledLaunch(LaunchResult):
    """What a launch of a pooling model leaves on the device."""

    numbers: Tensor
    """[B, size], or [B * Q, size] with one result per token."""
    query_len: int
    """Q where there is one result per token, else 1."""


class HPUPoolingRunner(HPUModelRunner):
    """A decoder that pools last tokens, on one card.

    Args:
        config: of the engine; its `model.pooler` is set.
        model: loaded, on the card.
        bridge: the card.
        kernel: attention of prompts.
    """

    def __init__(
        self, config: VllmConfig, model: PoolingModel, bridge: HabanaBridge, kernel: SDPAKernel
    ) -> None:
        assert config.model.pooler is not None
        super().__init__(config, HeadAsLogits(model, config.model.pooler), bridge, kernel)
        self.requests = PoolingRequests(config, self.batch)

    def _update_state(self, step: SchedulerOutput) -> None:
        self.requests.update(step)
        self.batch.update(step)
        self._inputs.place([new.row for new in step.new_requests])

    def _run_launch(self, launch: BucketLaunch) -> LaunchResult:
        packed, indices = self._inputs.pack(launch)
        numbers, _ = self.execution.run(to_device(packed, self.device), launch.shape)
        is_per_token = self.requests.pooler.pooling_type in ("ALL", "STEP")
        query_len = launch.bucket.query_len if is_per_token else 1
        return PooledLaunch(launch.rows, indices, None, [], self._keep(numbers), query_len)

    def _keep(self, numbers: Tensor) -> Tensor:
        """A copy: the next launch of the same shape writes over what a graph gives."""
        kept = numbers.clone()
        self._bridge.mark_step()
        return kept

    def _needs_tokens(self, step: SchedulerOutput) -> bool:
        """Rows may be given away in this step, so the results of the last are made before."""
        return True

    def _collect(self, step_id: int, launches: list[PendingLaunch]) -> ModelRunnerOutput:
        """Copy the numbers to the host."""
        pooled = []
        for result, _ in launches:
            assert isinstance(result, PooledLaunch)
            rows, first = result.rows[result.indices], result.indices * result.query_len
            counts = np.ones_like(rows)
            if result.query_len > 1:
                counts = self.batch.num_prompt_tokens[rows]
            places = [np.arange(f, f + c) for f, c in zip(first, counts, strict=True)]
            if places:
                numbers = result.numbers.cpu()[np.concatenate(places)]
                pooled.append(PooledRows(rows, counts, numbers))
        return self.requests.output(step_id, pooled)

    @torch.inference_mode()
    def warm_up(self, shape: LaunchShape, *, with_sampler: bool) -> None:
        """Run a launch of padding alone; there is no sampler."""
        numbers, _ = self.execution.run(self.padding_input(shape), shape)
        self._keep(numbers).cpu()


class WholePromptRunner(HPUPoolingRunner):
    """A model of which all tokens of a prompt count: an encoder, or one that pools more than the
    last token."""

    _make_model = WholePromptModel
    phases: Sequence[Phase] = (Phase.PREFILL,)

    def __init__(
        self, config: VllmConfig, model: PoolingModel, bridge: HabanaBridge, kernel: SDPAKernel
    ) -> None:
        super().__init__(config, model, bridge, kernel)
        self._max_model_len = config.scheduler.max_model_len
        self._merged_prompts = 0
        self._types: TokenTypes | None = None
        if model.num_token_types > 1:
            self._types = TokenTypes(self.batch)
            self._inputs = TypedInputBuilder(self.batch, self.block_size)
            self._inputs.token_types = self._types.values

    def use_catalog(self, catalog: Catalog, limits: StepLimits) -> None:
        """Launch in these buckets from now on.

        Raises:
            ConfigError: they do not hold a prompt of max_model_len tokens.
        """
        longest = max((bucket.query_len for bucket in catalog.prefill), default=0)
        if longest < self._max_model_len:
            raise ConfigError(
                f"the longest prompt bucket has {longest} tokens, max_model_len is "
                f"{self._max_model_len}, and this model cannot run a prompt in parts: set "
                f"VLLM_PROMPT_SEQ_BUCKET_MAX={self._max_model_len}, or lower --max-model-len"
            )
        super().use_catalog(catalog, limits)
        self.planner = _WholePrompts(HPULaunchPlanner(catalog, limits, self.batch))

    def _update_state(self, step: SchedulerOutput) -> None:
        super()._update_state(step)
        if self._types is not None:
            self._types.update(step)


class _WholePrompts:
    """Plans every row as a whole prompt, also one of a single token."""

    def __init__(self, planner: HPULaunchPlanner) -> None:
        self._planner = planner

    def plan(self, step: SchedulerOutput) -> list[Launch]:
        """The launches of a step, in the order of its rows."""
        return self._planner.plan_prompts(step)
