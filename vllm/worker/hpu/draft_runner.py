"""Runs the draft model on Gaudi: the buckets of the model, and drafts that stay on the card.

What is known and not computed yet runs first: up to 1 + k tokens of a row in the bucket of decodes
that verify drafts, what is before them as a prompt. Each further draft is a decode, which finds the
draft before it on the card, and so does the launch that verifies them. The host reads drafts only
where sampling depends on them.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.attention.backends.sdpa import SDPAKernel
from vllm.config import VllmConfig
from vllm.messages import IntArray, SchedulerOutput
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.metadata import ALL_GREEDY, SamplingMetadata
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import SamplingState
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.drafts.draft_maker import DraftMaker
from vllm.worker.drafts.draft_progress import DraftSpans
from vllm.worker.hpu.launches.input import BoolArray, HPUInputBuilder
from vllm.worker.hpu.launches.launches import PaddedLaunches, Sampling
from vllm.worker.hpu.launches.model import HPUModel
from vllm.worker.hpu.launches.planner import PaddedLaunch, PaddedShape
from vllm.worker.hpu.launches.resident import ResidentDrafts
from vllm.worker.hpu.model_runner import HPUModelRunner


class HPUDraftModel(HPUModel):
    """A draft model with the vocabulary of the model, from which its own may differ by padding.

    Attributes:
        vocab_size: of the model.
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
    """Packs launches of a draft model. Several tokens of a row are known to the host, or are those
    that the model has put out last."""

    def _on_device(self, launch: PaddedLaunch) -> BoolArray:
        return np.repeat(self.are_resident(launch.rows)[:, None], launch.bucket.query_len, 1)


class HPUDraftRunner(DraftMaker, HPUModelRunner):
    """A draft model in padded launches; see `DraftMaker`.

    Args:
        config: of the draft model.
        model: the draft model, on the card.
        target: the runner of the model, whose rows, blocks, buckets and random numbers this one
            uses.
        kernel: attention of prompts.
        max_drafts: k, drafts of a row in one step.
    """

    tokens_ahead = 0
    """See `HPUInputBuilder`."""

    def __init__(
        self,
        config: VllmConfig,
        model: CausalLM,
        target: HPUModelRunner,
        kernel: SDPAKernel,
        max_drafts: int,
    ) -> None:
        self._target = target
        super().__init__(config, model, target._bridge, kernel)
        self.config = config
        self._max_drafts = max_drafts
        self._stages = target._stages  # logits have the same shapes
        self._has_moves = False  # the cache of a model with a draft model stays where it is
        self._reads = False
        """The host needs the drafts of the step."""
        self._made: list[tuple[PaddedLaunch, IntArray, SamplerOutput]] = []
        """Of each launch that has sampled, where it does: the positions of its drafts, and what it
        has sampled."""
        target.launches.add_beside(self.launches)

    def bind_states(self, num_blocks: int) -> None:
        """Take memory of a KV cache of so many blocks for what is kept besides keys and values."""

    def release_states(self) -> None:
        """Give back what `bind_states` has taken."""

    def _make_batch(self, config: VllmConfig) -> InputBatch:
        return self._target.batch

    def _make_sampler(self, config: VllmConfig) -> tuple[SamplingState, Sampler]:
        return self._target.sampling, self._target.sampler

    def _make_resident(self, config: VllmConfig) -> ResidentDrafts:
        num_rows, ahead = len(self.batch.num_tokens), self.tokens_ahead
        return ResidentDrafts(self._target.resident, num_rows, self.device, self.block_size, ahead)

    def _pad_model(self, *args: Any) -> HPUModel:
        padded = HPUDraftModel(*args)
        padded.vocab_size = self._target.vocab_size
        return padded

    def _make_inputs(self, slot_of_row: IntArray | None) -> HPUInputBuilder:
        return DraftInputBuilder(self.batch, self.block_size, slot_of_row)

    # ---- steps ----------------------------------------------------------------------------

    def propose(self, step: SchedulerOutput) -> None:
        """See `DraftMaker.propose`."""
        self._shifts = self._target._shifts
        self._reads = not self._target.resident.max_drafts
        if step.num_draft_tokens is not None and not self._reads:
            self._reads = self.sampling.follows_output(step.rows[step.num_draft_tokens > 0])
        super().propose(step)

    def _run_known(self, spans: DraftSpans) -> None:
        has_drafts = spans.num_drafts > 0
        # Of tokens in flight the card knows the values, and how many there are.
        is_in_flight = has_drafts & (spans.in_flight >= 0)
        self.launches.inputs.place(spans.rows.tolist())
        self.launches.inputs.mark_sampled(spans.rows[is_in_flight])
        most = np.where(is_in_flight, spans.in_flight, np.int32(self._max_drafts)) + 1
        num_last = np.where(has_drafts, np.minimum(spans.count, most), 0)
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

    def _run_newest(self, rows: IntArray, place: int) -> None:
        newest = self.batch.num_tokens[rows] - 1 - self.tokens_ahead
        self._run_decodes(rows, newest, np.ones_like(newest), place)

    def _run_decodes(self, rows: IntArray, first: IntArray, count: IntArray, place: int) -> None:
        for launch in self.launches.planner.plan_known(rows, first, count, is_decode=True):
            self._run_draft(launch, samples=True, place=place)

    def _launches_at(self, place: int) -> PaddedLaunches:
        """Those that make the draft at a place."""
        return self.launches

    def _run_draft(self, launch: PaddedLaunch, *, samples: bool, place: int = 0) -> None:
        launches = self._launches_at(place)
        with launches.running(launch) as self._warmed:
            packed, _ = launches.inputs.pack(launch)
            device_input = launches.to_device(packed)
            logits, _ = launches.execution.run(device_input, launch.shape)
            if not samples:
                return
            # Which token of a row is its last one, the card may know alone.
            query_len, real = launch.bucket.query_len, launch.rows
            behind = launch.num_computed_tokens + self.tokens_ahead + 1
            first = behind - self.batch.num_prompt_tokens[real]
            num_output = first[:, None] + np.arange(query_len)
            num_output = np.maximum(num_output, 0).astype(np.int32)  # of tokens of the prompt: 0
            draws = self._draws(launch, first) if query_len == 1 else None
            rows = np.repeat(real, query_len).astype(np.int32)
            metadata = self.sampling.distribution(rows, num_output.ravel(), len(logits), draws)
            if draws is not None:
                metadata = self._select_draws(metadata, device_input, launch.shape)
            self._check_stages(len(logits), metadata)
            sampled = self.sampler(logits, metadata)
            self._keep_tokens(device_input, launch.shape, sampled)
        launches.inputs.mark_sampled(real)
        if self._reads:
            self._made.append((launch, self.batch.num_tokens[real], sampled))
        self.batch.num_tokens[real] += 1

    def _write_drafts(self) -> None:
        made, self._made = self._made, []
        for launch, positions, sampled in made:
            first = np.arange(len(launch.rows)) * launch.bucket.query_len
            places = first + launch.num_scheduled_tokens - 1
            token_ids = sampled.host_ids.cpu().numpy()[places]
            self.batch.token_ids[launch.rows, positions] = np.maximum(token_ids, 0)

    # ---- warm-up --------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self, shape: PaddedShape, *, sampling: Sampling = "none") -> None:
        """See `PaddedRunner.warm_up`; how it samples is what the model has warmed up, if that
        samples on this stage."""
        device_input, (logits, _) = self.launches.run_padding(shape)
        launches: Iterable[SamplingMetadata] = [ALL_GREEDY]
        if not self._target.stage.is_last:
            launches = self._sampling_launches(shape.num_rows, sampling)
        self._warm_up_sampler(shape, device_input, logits, launches)
