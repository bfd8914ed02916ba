"""Runs the draft model on Gaudi, in the buckets of the model; drafts are kept on the card.

Known tokens that the draft model has not computed run first: the last 1 + k tokens of a request as
a decode of several tokens, and earlier tokens as a prompt. Each further draft is a decode that
reads the previous draft on the card; the forward pass that verifies drafts reads them there as
well. The host reads drafts only if sampling depends on them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.config import VllmConfig
from vllm.messages import BoolArray, IntArray, SchedulerOutput
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.speculators.interface import Speculator
from vllm.sample.metadata import ALL_GREEDY, SamplingMetadata
from vllm.sample.sampler import SamplerOutput
from vllm.worker.batch.launch import Launch
from vllm.worker.drafts.draft_maker import DraftMaker
from vllm.worker.drafts.draft_progress import DraftSpans
from vllm.worker.hpu.launches.device_tokens import DeviceDrafts
from vllm.worker.hpu.launches.input import HPUInputBuilder
from vllm.worker.hpu.launches.launches import PaddedInput, PaddedLaunches, PaddedOutput, Sampling
from vllm.worker.hpu.launches.model import HPUModel, softmax_normaliser
from vllm.worker.hpu.launches.planner import PaddedLaunch, PaddedShape
from vllm.worker.hpu.model_runner import HPUModelRunner
from vllm.worker.hpu.speculator_states import DeviceHiddenStates
from vllm.worker.parts.position_rows import PositionRows, draft_parts
from vllm.worker.runner import plan_batch, run_launch


class HPUDraftModel(HPUModel):
    """A draft model whose vocabulary may be padded differently from the target's.

    Attributes:
        vocab_size: vocabulary size of the target model.
    """

    vocab_size: int

    def _token_ids(self, token_ids: Tensor) -> Tensor:
        if self.model.arch.vocab_size < self.vocab_size:
            return token_ids.clamp(max=self.model.arch.vocab_size - 1)
        return token_ids

    def _head(self, rows: Tensor) -> Tensor:
        logits = super()._head(rows)
        lacking = self.vocab_size - self.model.arch.vocab_size
        return F.pad(logits, (0, lacking), value=-torch.inf) if lacking else logits


class DraftInputBuilder(HPUInputBuilder):
    """Packs the inputs of forward passes of a draft model."""

    def _on_device(self, launch: PaddedLaunch) -> BoolArray:
        return np.repeat(self.are_on_device(launch.rows)[:, None], launch.bucket.query_len, 1)


class HPUDraftRunner(DraftMaker):
    """Runs a draft model or a speculator in padded forward passes; see `DraftMaker`.

    Args:
        config: config of the draft model or speculator.
        model: the draft model or speculator, on the card.
        target: the runner of the target model, whose batch, blocks, buckets and random numbers this
            one uses.
        max_drafts: k, drafts of a request in one step.
        launches: the first makes the first draft, the second one the second, and so on; the last
            makes all others.
        states: hidden states for a speculator; None: it is a draft model.
    """

    def __init__(
        self,
        config: VllmConfig,
        model: CausalLM | Speculator,
        target: HPUModelRunner,
        max_drafts: int,
        launches: Sequence[PaddedLaunches],
        states: DeviceHiddenStates | None = None,
    ) -> None:
        super().__init__(config, model, target.batch, reads_states=states is not None)
        layout, _ = plan_batch(config, model, keeps_all=True)
        if states is not None:
            layout = replace(layout, block_bytes=layout.block_bytes + states.block_bytes)
        self.cache_layout = layout
        self.states = states
        self._target, self._sampling = target, target.card_sampling
        self._max_drafts = max_drafts
        self._by_index, self.launches = launches, launches[0]
        self._tokens_ahead = self.launches.inputs.tokens_ahead
        self._positions = draft_positions(target, config)
        self._reads = False
        """The host needs the drafts of the step."""
        self._made: list[tuple[PaddedLaunch, IntArray, SamplerOutput]] = []
        """Forward passes whose drafts the host needs: the pass, the positions of its drafts, and
        the sampled tokens."""
        for each in launches:
            target.launches.add_draft_launches(each)

    # ---- steps ----------------------------------------------------------------------------

    def propose(self, step: SchedulerOutput) -> None:
        """Write the drafts of a step into the batch; see `DraftMaker.propose`."""
        self._reads = not self._target.device_tokens.max_drafts
        if step.num_draft_tokens is not None and not self._reads:
            drafted = step.rows[step.num_draft_tokens > 0]
            self._reads = self._sampling.state.follows_output(drafted)
        super().propose(step)

    def _run_known(self, spans: DraftSpans) -> None:
        has_drafts = spans.num_drafts > 0
        self.launches.inputs.place(spans.rows.tolist())
        num_last = np.where(has_drafts, np.minimum(spans.count, self._max_drafts + 1), 0)
        if self._positions is not None:
            # A decode computes positions by adding an offset to the token index. If the token that
            # samples has a different offset, its drafts get worse, but the output of the model
            # stays the same.
            num_more = spans.first + spans.count - self._positions.ends[spans.rows]
            num_last = np.minimum(num_last, np.maximum(num_more, 1))
        num_before = (spans.count - num_last).astype(np.int32)
        planner, runs = self.launches.planner, num_before > 0
        if runs.any():
            first = spans.first[runs]
            for launch in planner.plan_known(
                spans.rows[runs], first, num_before[runs], is_decode=False
            ):
                self._run_draft(launch, samples=False)
        if has_drafts.any():
            first = (spans.first + num_before)[has_drafts]
            count = num_last[has_drafts].astype(np.int32)
            self._run_decodes(spans.rows[has_drafts], first, count, 0)

    def _run_newest(self, rows: IntArray, index: int) -> None:
        newest = self.batch.num_tokens[rows] - 1 - self._tokens_ahead
        self._run_decodes(rows, newest, np.ones_like(newest), index)

    def _run_decodes(self, rows: IntArray, first: IntArray, count: IntArray, index: int) -> None:
        for launch in self.launches.planner.plan_known(rows, first, count, is_decode=True):
            self._run_draft(launch, samples=True, index=index)

    def _run_draft(self, launch: Launch, *, samples: bool, index: int = 0) -> None:
        assert isinstance(launch, PaddedLaunch)
        launches = self._by_index[min(index, len(self._by_index) - 1)]

        def begin(given: PaddedInput) -> Callable[[PaddedOutput], None]:
            return lambda output: self._sample(launches, launch, output) if samples else None

        run_launch(launch, launches, begin)

    def _sample(self, launches: PaddedLaunches, launch: PaddedLaunch, output: PaddedOutput) -> None:
        """Append a draft to each request of a forward pass."""
        # With tokens still in flight, only the card has the index of the last token of a request.
        # So parameters are prepared for each token that may be the last one.
        query_len, real, state = launch.bucket.query_len, launch.rows, self._sampling.state
        behind = launch.num_computed_tokens + self._tokens_ahead + 1
        first = behind - self.batch.num_prompt_tokens[real]
        num_output = first[:, None] + np.arange(query_len)
        # 0 while the token belongs to the prompt.
        num_output = np.maximum(num_output, 0).astype(np.int32)
        rows = np.repeat(real, query_len).astype(np.int32)
        num_logits = len(output.result)
        sampled, _ = self._sampling.sample(
            launches, launch, output, state.distribution(rows, num_output.ravel(), num_logits)
        )
        launches.inputs.mark_sampled(real)
        if self._reads:
            self._made.append((launch, self.batch.num_tokens[real], sampled))
        self.batch.num_tokens[real] += 1

    def _write_drafts(self) -> None:
        made, self._made = self._made, []
        for launch, positions, sampled in made:
            first = np.arange(len(launch.rows)) * launch.bucket.query_len
            indices = first + launch.num_scheduled_tokens - 1
            token_ids = sampled.host_ids.cpu().numpy()[indices]
            self.batch.token_ids[launch.rows, positions] = np.maximum(token_ids, 0)

    # ---- warm-up --------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self, shape: PaddedShape, *, sampling: Sampling = "none") -> None:
        """Warm up a shape for the draft model.

        It samples like the model's warm-up if the model samples on this stage.
        """
        for launches in self._by_index:
            if not launches.runs(shape):
                continue
            output = launches.run_padding(shape)
            metadatas: Iterable[SamplingMetadata] = [ALL_GREEDY]
            if not self._target.stage.is_last:
                metadatas = self._sampling.launches_to_warm_up(shape.num_rows, sampling)
            self._sampling.warm_up(launches, shape, output, metadatas)

    @torch.inference_mode()
    def warm_up_sampling(self, shape: PaddedShape, metadata: SamplingMetadata) -> None:
        """Run a forward pass of padding after the warm-up, to compile its sampling."""
        with self.launches.report.warming_up():
            output = self.launches.run_padding(shape)
            self._sampling.warm_up(self.launches, shape, output, [metadata])


def make_draft_launches(
    config: VllmConfig,
    target: HPUModelRunner,
    padded: HPUModel,
    inputs: HPUInputBuilder,
    *,
    single_tokens: bool = False,
) -> PaddedLaunches:
    """Make the forward passes of a draft model or speculator.

    They get only tokens and their positions, without adapters or images.
    """
    parts = draft_parts(target.parts, config.model.resolved_arch)
    return PaddedLaunches(
        config, target.bridge, padded, inputs, target.batch, parts, single_tokens=single_tokens
    )


def draft_positions(target: HPUModelRunner, config: VllmConfig) -> PositionRows | None:
    """Return the position offsets of the target's requests, if the draft model needs them."""
    return draft_parts(target.parts, config.model.resolved_arch).find(PositionRows)


def device_drafts(target: HPUModelRunner, tokens_ahead: int) -> DeviceDrafts:
    """Make the storage for the drafts of a model's requests on its card."""
    num_rows, device = len(target.batch.num_tokens), target.bridge.device
    return DeviceDrafts(target.device_tokens, num_rows, device, tokens_ahead)


def make_draft_runner(
    config: VllmConfig, model: CausalLM, target: HPUModelRunner, max_drafts: int
) -> HPUDraftRunner:
    """Make the runner of a draft model; see `HPUDraftRunner`."""
    block_size, positions = config.cache.block_size, draft_positions(target, config)
    padded = HPUDraftModel(
        model,
        block_size,
        target.kernel,
        softmax_normaliser(config.hpu, target.bridge.kernels),
        device_drafts(target, DraftInputBuilder.tokens_ahead),
        dtype=getattr(torch, config.model.dtype_name),
        num_positions=0 if positions is None else positions.num_positions,
    )
    padded.vocab_size = target.vocab_size
    inputs = DraftInputBuilder(target.batch, block_size, positions=positions)
    launches = make_draft_launches(config, target, padded, inputs)
    return HPUDraftRunner(config, model, target, max_drafts, [launches])
