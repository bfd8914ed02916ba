"""Ragged (unpadded) forward passes, for devices that run any shape.

A forward pass, or a whole step of decodes, is one C++ call if the model supports it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from vllm.attention import (
    LaunchAdapters,
    RaggedItems,
    RaggedMetadata,
    ReplacedTokens,
    StateLayer,
    share_context,
)
from vllm.attention.cached_layer import layers_with_cache
from vllm.config import VllmConfig
from vllm.lora.launches import RaggedAdapters
from vllm.messages import RunnerStats, SchedulerOutput
from vllm.model_executor.fusion import fuse, fuse_head
from vllm.model_executor.models.interface import CausalLM, LayeredModel, PoolingModel
from vllm.ops.cpu.operators.decode_step import FusedDecodeStep, RowArrays
from vllm.ops.cpu.operators.program import Program
from vllm.ops.item_slots import ItemSlots
from vllm.ops.lora_weights import AdaptedRows
from vllm.sample.features import MASKS, Feature
from vllm.sample.metadata import FeatureArray
from vllm.sample.state import SamplingState
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.model_input import ModelInput, build_ragged_input
from vllm.worker.drafts.stage_drafts import InnerLayers
from vllm.worker.parts.image_attention import ImageAttention
from vllm.worker.parts.item_rows import ItemRows
from vllm.worker.parts.position_rows import PositionRows
from vllm.worker.parts.row_parts import RowParts


class StateReader(Protocol):
    """Receives hidden states of the tokens that the model has run."""

    def read(self, launch: Launch, result: Tensor, inner: Sequence[Tensor]) -> None:
        """Receive the result of a forward pass over T tokens, request by request.

        Args:
            launch: the requests and tokens of the forward pass.
            result: [T, hidden] of the forward pass.
            inner: [T, hidden] each, the inputs of the other layers that it needs, ascending. The
                receiver may keep them.
        """
        ...


class RaggedOutput(NamedTuple):
    """The result of a forward pass over T tokens."""

    hidden_states: Tensor
    """[T, hidden]"""
    inner: list[Tensor]
    """[T, hidden] each: inputs of inner layers, up to the last one of this stage."""


FusedT = TypeVar("FusedT")


@dataclass(frozen=True)
class ByItems(Generic[FusedT]):
    """Two versions of a program: without items for cross-attention, and with such items."""

    without: FusedT | None
    reading: FusedT | None

    def __iter__(self) -> Iterator[FusedT | None]:
        yield from (self.without, self.reading)

    def of(self, items: object | None) -> FusedT | None:
        """Return the version for a forward pass; None if there is none.

        Args:
            items: items of the forward pass; None: no token sees any.
        """
        return self.without if items is None else self.reading


class RaggedLaunches:
    """Builds and runs ragged forward passes of one model: one for each step, without padding.

    Args:
        config: config of the engine.
        model: loaded, on the device.
        device: the device of the model.
        batch: the running requests.
        parts: what else requests bring, such as adapters or images.
        build: makes the inputs of a forward pass; None: the inputs of a decoder.

    Attributes:
        stage: pipeline stage of the model.
        programs: run the model in one call; None: it runs layer by layer.
        decode_steps: run a whole step of decodes in one call; None: not possible.
        is_fused: whether `fuse` has tried to make these programs.
        reader: receives the hidden states of all forward passes; None: not needed.
    """

    def __init__(
        self,
        config: VllmConfig,
        model: LayeredModel,
        device: torch.device,
        batch: InputBatch,
        parts: RowParts,
        build: Callable[[Launch], ModelInput] | None = None,
    ) -> None:
        self.stage = model.stage
        self.programs = ByItems[Program](None, None)
        self.decode_steps = ByItems[FusedDecodeStep](None, None)
        self.is_fused = False
        self.reader: StateReader | None = None
        self._model, self._device, self._batch, self._parts = model, device, batch, parts
        self._dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        self._block_size = config.cache.block_size
        layers = layers_with_cache(model)
        self._has_states = any(isinstance(layer, StateLayer) for layer in layers)
        self._build = build or self._build_decoder_input
        self._inner_layers = InnerLayers.of(config, model.stage)
        self._holder = share_context(model)
        self._kept: Tensor | None = None
        """Hidden states that were received and are not used yet."""

    def plan(self, step: SchedulerOutput) -> list[Launch]:
        """Return one forward pass with all requests of the step."""
        start, count = step.num_computed_tokens, step.num_scheduled_tokens
        return [
            Launch(
                step.rows,
                start,
                count,
                num_drafts=step.num_draft_tokens,
                restored_states=step.restored_states,
                kept_states=step.kept_states,
                num_replayed_tokens=step.num_replayed_tokens,
            )
        ]

    def running(self, launch: Launch) -> AbstractContextManager[None]:
        """Return a context manager to run a forward pass in; here it does nothing."""
        return nullcontext()

    def build(self, launch: Launch) -> ModelInput:
        """Build the input tensors of a forward pass."""
        return self._build(launch)

    def _build_decoder_input(self, launch: Launch) -> ModelInput:
        image_attention = self._parts.find(ImageAttention)
        return build_ragged_input(
            self._batch,
            launch,
            self._block_size,
            self._device,
            self._parts.of_launch(launch),
            has_states=self._has_states,
            last_keys=None if image_attention is None else image_attention.last_keys(launch),
        )

    def run(self, given: ModelInput) -> RaggedOutput:
        """Run a forward pass, and give its hidden states to the reader."""
        metadata, adapters = given.context.attention, given.context.adapters
        items, program = given.context.items, self.programs.of(given.context.items)
        by_modules = need_modules(adapters) or given.context.added is not None
        by_modules |= isinstance(items, RaggedItems) and items.has_long_runs
        if program is None or type(metadata) is not RaggedMetadata or by_modules:
            output = self.run_modules(given)
        else:
            output = self._run_program(program, given, metadata)
        if self.reader is not None:
            self.reader.read(given.launch, output.hidden_states, output.inner)
        return output

    def run_modules(self, given: ModelInput) -> RaggedOutput:
        """Run a forward pass layer by layer, without a program."""
        inputs, inner = self._inputs(given.input_ids)
        positions, own = given.context.positions, self._inner_layers.own
        types = () if given.token_type_ids is None else (given.token_type_ids,)
        with self._holder.running(given.context):
            if not own:
                return RaggedOutput(self._model(inputs, positions, *types), inner)
            assert isinstance(self._model, CausalLM)
            result, more = self._model.forward_and_inputs(inputs, positions, own)
            return RaggedOutput(result, inner + more)

    def _run_program(
        self, program: Program, given: ModelInput, metadata: RaggedMetadata
    ) -> RaggedOutput:
        inputs, inner = self._inputs(given.input_ids)
        context, embeddings = given.context, None
        if isinstance(context.replaced, ReplacedTokens):
            embeddings = context.replaced.indices, context.replaced.embeddings
        slot_mapping, block_tables = metadata.slot_mapping, metadata.block_tables
        if metadata.more_groups:
            more_slots, more_tables = zip(*metadata.more_groups, strict=True)
            slot_mapping = torch.stack([slot_mapping, *more_slots])
            block_tables = torch.stack([block_tables, *more_tables])
        result = program.forward(
            inputs,
            context.positions,
            slot_mapping,
            block_tables,
            metadata.seq_lens,
            torch.from_numpy(metadata.query_start_loc),
            metadata.num_decodes,
            embeddings,
            adapted_rows(context.adapters),
            metadata.last_keys,
            context.items.by_token() if isinstance(context.items, RaggedItems) else None,
            given.token_type_ids,
        )
        return RaggedOutput(result, inner + program.tapped)

    def send(self, output: RaggedOutput) -> None:
        """Send the hidden states, and the inputs of inner layers, to the next pipeline stage."""
        hidden_states = output.hidden_states
        if output.inner:
            hidden_states = torch.cat((hidden_states, *output.inner), dim=1)
        self.stage.connected.send(hidden_states)

    def _inputs(self, input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the input of this stage, and the inputs of inner layers from previous stages.

        The input is token ids [T] on the first stage, else hidden states [T, hidden].
        """
        if self.stage.is_first:
            return input_ids, []
        return self._inner_layers.split(self.receive(len(input_ids)))

    def receive(self, num_tokens: int) -> Tensor:
        """Return the data of the previous stage: hidden states, and inputs of inner layers, in one
        tensor.
        """
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        size = self._model.arch.hidden_size * (1 + self._inner_layers.num_before)
        return self.stage.receive(num_tokens, size, self._dtype, self._device)

    def keep_received(self, received: Tensor | None) -> None:
        """Keep data received for a forward pass, to use it when the forward pass runs later."""
        self._kept = received

    def stats(self, num_steps: int, num_useful_tokens: int) -> RunnerStats:
        """Return the counters of a runner that pads and compiles nothing."""
        return RunnerStats(num_steps=num_steps, num_useful_tokens=num_useful_tokens)

    def fuse_pooling(self, model: PoolingModel) -> None:
        """Record the program of a pooling model, if possible; caches must be bound.

        Further calls do nothing.
        """
        if not self.is_fused:
            self.is_fused = True
            self.programs = ByItems(fuse(model), None)

    def fuse(
        self, sampling: SamplingState, row_features: FeatureArray, known_features: int
    ) -> None:
        """Record the programs of a generative model, as far as possible; caches must be bound.

        Further calls do nothing.

        Args:
            sampling: sampling state of the batch.
            row_features: [rows] sampling features of each request.
            known_features: the features that a decode step in one call may have.
        """
        if self.is_fused:
            return
        self.is_fused = True
        model, batch = self._model, self._batch
        assert isinstance(model, CausalLM)
        items = self._parts.find(ItemRows)
        inner = self._inner_layers.own
        self.programs = ByItems(
            fuse(model, inner), None if items is None else fuse(model, inner, reads_items=True)
        )
        if not self.stage.is_last or self._inner_layers.num_before:
            # Only the last stage samples; inputs of inner layers are received with the hidden
            # states.
            return
        own = sampling.row_arrays
        positions = self._parts.find(PositionRows)
        slots = ItemSlots.empty(len(batch.num_tokens)) if items is None else items.of_output
        arrays = RowArrays(
            token_ids=batch.token_ids,
            num_tokens=batch.num_tokens,
            num_prompt_tokens=batch.num_prompt_tokens,
            position_offsets=(
                np.zeros_like(batch.num_tokens) if positions is None else positions.offsets
            ),
            end_tokens=batch.end_tokens,
            block_tables=batch.block_tables,
            item_slots=slots.addresses,
            num_item_slots=slots.counts,
            features=row_features,
            params=own.params,
            keys=own.keys,
            masks=own.masks,
            first_times=own.first_times,
        )

        def make_step(program: Program | None) -> FusedDecodeStep | None:
            head = None if program is None else fuse_head(model, program)
            if program is None or head is None:
                return None
            return FusedDecodeStep(
                program,
                head,
                arrays,
                known_features=known_features,
                random_feature=Feature.RANDOM,
                mask_features=known_features & MASKS,
                gives_hidden=self.reader is not None,
            )

        self.decode_steps = ByItems(*map(make_step, self.programs))


def need_modules(adapters: LaunchAdapters | None) -> bool:
    """Return whether adapters change layers that no program supports, so that layers run one by
    one.
    """
    return isinstance(adapters, RaggedAdapters) and adapters.need_modules


def adapted_rows(adapters: LaunchAdapters | None) -> AdaptedRows | None:
    """Return the adapters in the format of a program; None: there are none."""
    return adapters.rows if isinstance(adapters, RaggedAdapters) else None
