"""Runs scheduler steps on Gaudi: padded launches, nothing read back before the tokens."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm.attention import StateLayer
from vllm.attention.backends.sdpa import SDPAKernel
from vllm.bucketing import Phase
from vllm.config import VllmConfig
from vllm.kv_cache_spec import KVCacheLayout
from vllm.lora.reader import AdapterReader
from vllm.messages import IntArray, RunnerStats, SchedulerOutput
from vllm.model_executor.models.interface import CausalLM
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.sample.blocks import num_draws
from vllm.sample.metadata import ALL_GREEDY, SamplingMetadata
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import Draws, SamplingState
from vllm.sample.static_shapes import class_of, size_classes
from vllm.sample.warmup import (
    Stage,
    basic_launches,
    heaviest_launch,
    stages_of,
    warmup_launches,
)
from vllm.structured_output.matchers import GrammarMatchers
from vllm.utils.ragged import positions_within
from vllm.worker.batch.input_batch import ExpectedTokens
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.launch_result import LaunchResult, PendingRows
from vllm.worker.hpu.adapters import DeviceRows
from vllm.worker.hpu.launches.embeddings import DeviceEmbeddings
from vllm.worker.hpu.launches.host_buffers import HostBuffers
from vllm.worker.hpu.launches.input import HPUInputBuilder
from vllm.worker.hpu.launches.launches import PaddedLaunches, PaddedRunner, Sampling
from vllm.worker.hpu.launches.model import HPUModel, softmax_normaliser
from vllm.worker.hpu.launches.planner import PaddedLaunch, PaddedShape
from vllm.worker.hpu.launches.resident import ResidentTokens
from vllm.worker.hpu.memory.block_moves import BlockMover
from vllm.worker.kv_cache import cache_dtype, cache_layout
from vllm.worker.model_runner import Drafter, ModelRunner
from vllm.worker.parts.adapters import Adapters
from vllm.worker.parts.embedding_rows import EmbeddingRows
from vllm.worker.parts.prompt_logprobs import PromptLogprobs


class PaddedDrafter(Drafter, PaddedRunner, Protocol):
    """Makes drafts in the buckets of the model."""

    def warm_up_sampling(self, shape: PaddedShape, metadata: SamplingMetadata) -> None:
        """See `HPUModelRunner.warm_up_sampling`."""
        ...


class HPUModelRunner(ModelRunner):
    """One model on one card.

    Args:
        config: of the engine.
        model: loaded, on the card.
        bridge: the card.
        kernel: attention of prompts.
        grammars: see `ModelRunner`.
    """

    drafter: PaddedDrafter | None
    adapts_experts = False  # every launch would pay for it, also without an adapter

    def __init__(
        self,
        config: VllmConfig,
        model: CausalLM,
        bridge: HabanaBridge,
        kernel: SDPAKernel,
        grammars: GrammarMatchers | None = None,
    ) -> None:
        self._bridge = bridge
        super().__init__(config, model, bridge.device, grammars)
        self._warms_all = config.hpu.sampling_warmup == "all" or config.hpu.full_warmup
        self._stages: dict[int, set[Stage]] = {}
        """Stages of the sampler that are compiled, by padded batch."""
        self._warmed = ExitStack()
        """Of the launch that runs; closed where it may compile."""
        self.resident = self._make_resident(config)
        self._shifts = False
        """Rows of the step may begin earlier than the host has packed them."""
        normaliser = softmax_normaliser(config.hpu, bridge.kernels)
        adapters, slot_of_row = None, None
        self._embeddings = self.parts.find(DeviceEmbeddings)
        if (of_rows := self.parts.find(DeviceRows)) is not None:
            adapters, slot_of_row = of_rows.slots, of_rows.slot_of_row
        hpu_model = self._pad_model(
            model, self.block_size, kernel, normaliser, self.resident, adapters, self._dtype
        )
        hpu_model.inner_layers = self._inner_layers
        if self._embeddings is not None:
            hpu_model.embeddings = self._embeddings.table
        inputs = self._make_inputs(slot_of_row)
        with_blocks = [
            layer for layer in self.attention_layers if not isinstance(layer, StateLayer)
        ]
        self._mover = BlockMover(bridge, with_blocks, self.block_size)
        self._has_moves = config.has_dense_cache
        self.planner = self.launches = PaddedLaunches(
            config,
            bridge,
            hpu_model,
            inputs,
            self.batch,
            needs_prefill=self.parts.needs_prefill,
        )

    def _pad_model(self, *args: Any) -> HPUModel:
        return HPUModel(*args)

    def _make_inputs(self, slot_of_row: IntArray | None) -> HPUInputBuilder:
        return HPUInputBuilder(
            self.batch,
            self.block_size,
            slot_of_row,
            has_resident_drafts=self.resident.max_drafts > 0,
            embeddings=self._embeddings,
        )

    def _make_resident(self, config: VllmConfig) -> ResidentTokens:
        scheduler = config.scheduler
        # In a pipeline the stage that makes drafts is not the one that verifies them.
        has_drafter = config.speculative.draft_model is not None and self.stage.count == 1
        max_drafts = scheduler.max_draft_tokens if has_drafter else 0
        return ResidentTokens(scheduler.max_num_seqs, self.device, self.block_size, max_drafts)

    def _plan_cache(self, config: VllmConfig) -> KVCacheLayout:
        """One block table for all layers, and no null blocks in it: the block lists of a launch
        serve all layers, and a contiguous launch has each block once."""
        return cache_layout(config, self.attention_layers, cache_dtype(config), keeps_all=True)

    def _make_prompt_logprobs(self) -> PromptLogprobs:
        assert self.sampling.shapes is not None
        self._likeliest = most = self.sampling.shapes.max_likeliest
        self._prompt_logprobs = PromptLogprobs(
            self.model,
            self.batch,
            self.sampler,
            self._running_head,
            lambda width: class_of(width, most),
            self._bridge.mark_step,
        )
        return self._prompt_logprobs

    def _make_embeddings(self, config: VllmConfig) -> Iterator[EmbeddingRows]:
        """Make the rows on every stage, as all of them plan the same launches."""
        model = self.model if self.stage.is_first else None
        yield DeviceEmbeddings(model, config, self._bridge)

    def _make_adapters(self, config: VllmConfig, reader: AdapterReader) -> Adapters:
        return DeviceRows(config, reader, self._bridge)

    def _make_sampler(self, config: VllmConfig) -> tuple[SamplingState, Sampler]:
        state = SamplingState(
            config.scheduler.max_num_seqs,
            config.model.resolved_arch.vocab_size,
            self.device,
            static_shapes=True,
            max_model_len=config.scheduler.max_model_len,
            max_logprobs=config.model.max_logprobs,
            to_device=HostBuffers(self._bridge).to_device,
        )
        return state, Sampler(pass_elements=None, end_stage=self._end_stage)

    def _end_stage(self) -> None:
        self._bridge.mark_step()

    # ---- steps ----------------------------------------------------------------------------

    def _update_state(self, step: SchedulerOutput) -> None:
        super()._update_state(step)
        in_flight = step.drafts_in_flight
        self._shifts = in_flight is not None and bool((in_flight > 0).any())
        if step.block_moves is not None and len(step.block_moves.copied):
            with self.launches.warmed_section(is_promised=self.launches.is_warm):
                self._mover.move(step.block_moves.copied)
        self.launches.inputs.place([new.row for new in step.new_requests])

    def _needs_tokens(self, step: SchedulerOutput) -> bool:
        """Sampled tokens are on the card, where the next step reads them. The host needs those
        of requests whose logits depend on their output: penalties, structured output, logits
        processors."""
        return self.sampling.follows_output(step.rows)

    def _retract(self, expected: ExpectedTokens, places: IntArray) -> None:
        super()._retract(expected, places)
        # What is on the card are tokens behind those that are left.
        self.launches.inputs.place(expected.rows[places].tolist())

    @torch.inference_mode()
    def _run(self, launch: Launch) -> LaunchResult:
        assert isinstance(launch, PaddedLaunch)
        # Nobody knows what a logits processor of a user runs.
        may_compile = self.sampling.has_processors
        is_decode = launch.bucket.phase is Phase.DECODE
        is_late = is_decode and not self.launches.planner.is_compiled(launch.shape)
        with self.launches.running(launch, may_compile=may_compile) as self._warmed:
            result = self._run_launch(launch)
            if is_late and self._has_moves:
                self._mover.warm_up()  # as with every decode of a warm-up
            return result

    def stats(self) -> RunnerStats:
        """What it has done."""
        return self.launches.stats(self._num_steps, self._num_useful_tokens)

    def _run_launch(self, launch: PaddedLaunch) -> LaunchResult:
        if launch.bucket.phase is Phase.PREFILL:
            self.parts.send(launch)
        packed, indices = self.launches.inputs.pack(launch)
        num_drafts = None if launch.num_drafts is None else launch.num_drafts[indices]
        drafts = None
        if self.stage.is_last:
            drafts = self._followed_drafts(launch.rows[indices], num_drafts)
            self.sampling.start_masks(launch.rows[indices], drafts)
        device_input = self.launches.to_device(packed)
        logits, hidden_states = self.launches.execution.run(
            device_input, launch.shape, *self.launches.received(launch.shape)
        )
        if not self.stage.is_last:
            self.stage.connected.send(self._kept_states(hidden_states))
            return LaunchResult.unsampled(launch.rows[indices], num_drafts)
        pending: list[PendingRows] = []
        if launch.bucket.phase is Phase.PREFILL:
            pending = self.parts.read(launch, hidden_states)
        places, within = self._sampled_places(launch, indices, num_drafts)
        num_logits = len(launch.rows) * launch.tokens_with_logits
        rows = np.full(num_logits, self.sampling.padding_row, np.int32)
        rows[places] = launch.rows[places // launch.tokens_with_logits]
        sampled, accepted = None, None
        if len(indices):
            num_known = launch.num_computed_tokens + launch.num_scheduled_tokens
            num_known = num_known if launch.num_drafts is None else num_known - launch.num_drafts
            first = num_known - self.batch.num_prompt_tokens[launch.rows]
            num_output = np.zeros_like(rows)
            num_output[places] = first[places // launch.tokens_with_logits] + within
            draws = self._draws(launch, first)
            metadata = self.sampling.metadata(rows, num_output, len(logits), drafts, draws)
            if draws is not None:
                metadata = self._select_draws(metadata, device_input, launch.shape)
            self._check_stages(len(logits), metadata)
            sampled = self.sampler(logits, metadata)
            accepted = self._keep_tokens(device_input, launch.shape, sampled)
            self.launches.inputs.mark_sampled(launch.rows[indices])
        return LaunchResult(
            rows, places, sampled, pending, num_drafts=num_drafts, accepted=accepted
        )

    def _kept_states(self, hidden_states: Tensor) -> Tensor:
        """A copy: the next launch of this shape writes over what a graph gives."""
        kept = hidden_states.clone()
        self._bridge.mark_step()
        return kept

    def _sampled_places(
        self, launch: PaddedLaunch, indices: IntArray, num_drafts: IntArray | None
    ) -> tuple[IntArray, IntArray]:
        """Rows of the logits that are sampled, and which token of its row each of them follows,
        of those that run.

        Args:
            launch: its rows are padded to so many tokens with logits.
            indices: [m] its rows that sample.
            num_drafts: [m] drafts of each; None: none has any.
        """
        places = indices * np.int32(launch.tokens_with_logits)
        if num_drafts is None:
            return places, np.zeros_like(places)
        within = positions_within(num_drafts + 1).astype(np.int32)
        return np.repeat(places, num_drafts + 1) + within, within

    def _draws(self, launch: PaddedLaunch, num_output: IntArray) -> Draws | None:
        """The random numbers of a launch whose rows may begin earlier than the host says: for each
        padded row those of all positions that it may sample for.

        Args:
            launch: n rows.
            num_output: [n] what the first token with logits of each would be the number of.

        Returns:
            None: the host knows the positions.
        """
        most, query_len = launch.max_shift, launch.bucket.query_len
        if not most or not self._shifts:
            return None
        rows = np.full(launch.bucket.batch, self.sampling.padding_row, np.int32)
        first = np.zeros_like(rows)
        rows[: len(launch.rows)], first[: len(launch.rows)] = launch.rows, num_output
        numbers = first[:, None] + np.arange(-most, query_len, dtype=np.int32)
        return np.repeat(rows, most + query_len), np.maximum(numbers, 0).ravel()

    def _select_draws(
        self, metadata: SamplingMetadata, device_input: Tensor, shape: PaddedShape
    ) -> SamplingMetadata:
        """With the random numbers of the places where the rows are."""
        if metadata.exponentials is None:
            return metadata
        self._bridge.mark_step()
        index = self.resident.draw_index(device_input, shape)
        chosen = metadata.exponentials.index_select(0, index)
        self._bridge.mark_step()
        return replace(metadata, exponentials=chosen)

    def _check_stages(self, batch: int, metadata: SamplingMetadata) -> None:
        """Note what the sampler compiles now; after the warm-up a line in the log says so."""
        missing = self._note_stages(batch, metadata)
        if missing and self.launches.is_warm:
            self._warmed.close()  # it may compile from here on
            self.launches.report.miss_sampling(batch, [(name, n) for name, n, _ in sorted(missing)])

    def _note_stages(self, batch: int, metadata: SamplingMetadata) -> frozenset[Stage]:
        """The stages of a launch that were not compiled yet; from here on they are."""
        known = self._stages.setdefault(batch, set())
        missing = stages_of(metadata) - known
        known |= missing
        return missing

    def _keep_tokens(
        self, device_input: Tensor, shape: PaddedShape, sampled: SamplerOutput
    ) -> Tensor | None:
        """The sampled tokens stay on the device, for the next step of their rows; see
        `ResidentTokens.accept`."""
        accepted = self.resident.accept(device_input, shape, sampled)
        self._bridge.mark_step()
        return accepted

    # ---- warm-up --------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self, shape: PaddedShape, *, sampling: Sampling = "none") -> None:
        """See `PaddedRunner.warm_up`."""
        device_input, (logits, hidden_states) = self.launches.run_padding(shape)
        if self._has_moves and shape.bucket.phase is Phase.DECODE:
            self._mover.warm_up()
        if not self.stage.is_last:
            self._kept_states(hidden_states)
        elif shape.bucket.phase is Phase.PREFILL:
            widths = (1,) if sampling == "none" else size_classes(self._likeliest)
            for width in widths:
                self._prompt_logprobs.gather(hidden_states, 0, np.zeros(1, np.int32), width)
        launches = self._sampling_launches(shape.num_rows, sampling)
        self._warm_up_sampler(shape, device_input, logits, launches)
        if self.drafter is not None:
            self.drafter.warm_up(shape, sampling=sampling)

    def uncompiled_sampling(self, batch: int) -> Iterator[SamplingMetadata]:
        """Launches of so many rows that compile what is missing of the sampler; see
        `warmup_launches`."""
        for metadata in warmup_launches(self.sampling, batch):
            if stages_of(metadata) - self._stages.get(batch, set()):
                yield metadata

    @torch.inference_mode()
    def warm_up_sampling(self, shape: PaddedShape, metadata: SamplingMetadata) -> None:
        """Run a launch of padding alone after the warm-up, and compile how it samples. What that
        compiles counts as warmed up."""
        with self.launches.report.warming_up():
            device_input, (logits, _) = self.launches.run_padding(shape)
            self._warm_up_sampler(shape, device_input, logits, [metadata])
        if self.drafter is not None and not self.stage.is_last:
            self.drafter.warm_up_sampling(shape, metadata)  # drafts alone are sampled here

    def _warm_up_sampler(
        self,
        shape: PaddedShape,
        device_input: Tensor,
        logits: Tensor,
        launches: Iterable[SamplingMetadata],
    ) -> None:
        """A stage of a pipeline that does not sample goes through the same steps as the last."""
        sampled = None
        for metadata in launches:
            self._note_stages(shape.num_rows, metadata)
            if self.stage.is_last:
                sampled = self.sampler(logits, metadata)
        if sampled is None:
            return
        if shape.max_shift:
            self._warm_up_draws(device_input, shape)
        accepted = self._keep_tokens(device_input, shape, sampled)
        (sampled.host_ids if accepted is None else accepted).cpu()

    def _warm_up_draws(self, device_input: Tensor, shape: PaddedShape) -> None:
        rows = shape.bucket.batch * (shape.max_shift + shape.bucket.query_len)
        numbers = np.ones((rows, num_draws(self.vocab_size)), np.float32)
        metadata = SamplingMetadata(exponentials=self.sampling.to_device(numbers))
        self._select_draws(metadata, device_input, shape)

    def _sampling_launches(self, batch: int, sampling: Sampling) -> Iterable[SamplingMetadata]:
        if sampling == "none":
            return [ALL_GREEDY]
        if sampling == "heaviest":
            return [heaviest_launch(self.sampling, batch)]
        launches = warmup_launches if self._warms_all else basic_launches
        return launches(self.sampling, batch)
