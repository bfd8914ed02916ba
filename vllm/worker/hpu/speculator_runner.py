"""Runs a speculator on Gaudi: a network that guesses next tokens from hidden states of the model.

The launches of the model write the hidden states of their tokens to the card, at the slots of the
KV cache that their keys have. A launch of the speculator reads those of its positions, and takes
with each the token behind it. It leaves what the newest token of each row has become, which the
launch for the next draft reads; the draft itself is on the card, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm.attention.backends.sdpa import SDPAKernel
from vllm.bucketing import Phase
from vllm.config import VllmConfig
from vllm.kv_cache_spec import KVCacheLayout
from vllm.messages import IntArray
from vllm.model_executor.speculators.interface import Speculator
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.sample.metadata import ALL_GREEDY
from vllm.worker.drafts.draft_progress import DraftProgress, NewestTokens
from vllm.worker.hpu.draft_runner import DraftInputBuilder, HPUDraftRunner
from vllm.worker.hpu.launches.input import HPUInputBuilder, unpack_decode
from vllm.worker.hpu.launches.launches import PaddedLaunches, Sampling
from vllm.worker.hpu.launches.model import HPUModel
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.launches.resident import ResidentDrafts
from vllm.worker.hpu.model_runner import HPUModelRunner


class StatesOnCard:
    """What a speculator reads: hidden states by slot of the KV cache, and by row of the batch.

    Args:
        bridge: the card.
        speculator: what it keeps.
        block_size: tokens of a block.
        num_rows: of the batch, and one of padding.
        dtype: of the states.

    Attributes:
        by_slot: [slots, kept_size]; of each token whose keys and values are in the KV cache.
        by_row: [rows, step_size]; what the newest token of a row has become in the last launch.
    """

    by_slot: Tensor

    def __init__(
        self,
        bridge: HabanaBridge,
        speculator: Speculator,
        block_size: int,
        num_rows: int,
        dtype: torch.dtype,
    ) -> None:
        self._bridge, self._speculator, self._block_size = bridge, speculator, block_size
        self._dtype = dtype
        self.by_row = bridge.zeros((num_rows, speculator.step_size), dtype)

    @property
    def block_bytes(self) -> int:
        """Of the states of the tokens of a block."""
        return self._block_size * self._speculator.kept_size * self._dtype.itemsize

    def bind(self, num_blocks: int) -> None:
        """Take memory for the states of so many blocks."""
        size = (num_blocks * self._block_size, self._speculator.kept_size)
        self.by_slot = self._bridge.zeros(size, self._dtype)

    def release(self) -> None:
        """Give the memory of `bind` back."""
        del self.by_slot

    def keep(self, slots: Tensor, result: Tensor, inner: Sequence[Tensor]) -> None:
        """See `StateKeeper`."""
        self.by_slot.index_copy_(0, slots.long(), self._speculator.keep(result, inner))


class HPUSpeculatorModel(HPUModel):
    """A speculator over padded launches, for the draft at one place.

    Attributes:
        place: of the draft.
        states: what it reads and leaves.
    """

    place: int
    states: StatesOnCard
    model: Any  # a speculator: it has the layers and no embedding and head of its own

    def forward(
        self, packed: Tensor, shape: PaddedShape, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `HPUModel`; the hidden states are the next states of the speculator."""
        launch = self.prepare(packed, shape)
        states = self._states(packed, shape, launch.slots)
        result: Tensor = self._run(launch, launch.token_ids, states)
        if shape.bucket.phase is Phase.DECODE:
            self._leave(packed, shape, result)
        last = launch.last_tokens
        rows = result if last is None else result.index_select(0, last)
        logits: Tensor = self.model.compute_logits(self.place, rows)
        return logits, result

    def _forward(self, inputs: Tensor, positions: Tensor, *more: Any) -> Any:
        (states,) = more
        return self.model.step(self.place, inputs, states, positions)

    def _states(self, packed: Tensor, shape: PaddedShape, slots: Tensor) -> Tensor:
        """Those that go with the tokens of a launch: of tokens of the model what it has left at
        their slots [T], and of drafts what the launch before has left."""
        has_networks = self.model.num_networks > 1
        has_drafts = shape.bucket.phase is Phase.DECODE and shape.bucket.query_len == 1
        if self.place == 0:
            states = self.states.by_slot.index_select(0, slots)
            if has_networks or not has_drafts:
                return states
        given = unpack_decode(packed, shape)
        of_rows = self.states.by_row.index_select(0, given.rows)
        if self.place:
            return of_rows
        assert isinstance(self.resident, ResidentDrafts)
        return torch.where(self.resident.are_drafts(given)[:, None], of_rows, states)

    def _leave(self, packed: Tensor, shape: PaddedShape, result: Tensor) -> None:
        """Keep what the last token of each row has become."""
        given, query_len = unpack_decode(packed, shape), shape.bucket.query_len
        if query_len > 1:
            assert isinstance(self.resident, ResidentDrafts)
            last = self.resident.last_column(given, shape)
            first = torch.arange(len(last), dtype=torch.int32, device=last.device) * query_len
            result = result.index_select(0, first + last)
        self.states.by_row.index_copy_(0, given.rows.long(), result)


class SpeculatorInputBuilder(DraftInputBuilder):
    """Packs launches of a speculator: with the hidden state of a position goes the next token."""

    tokens_ahead = 1


class HPUSpeculatorRunner(HPUDraftRunner):
    """A speculator in padded launches; see `DraftMaker`.

    Args:
        config: of the speculator.
        speculator: on the card.
        target: see `HPUDraftRunner`.
        kernel: attention of prompts.
        max_drafts: drafts of a row in one step.
    """

    tokens_ahead = SpeculatorInputBuilder.tokens_ahead

    def __init__(
        self,
        config: VllmConfig,
        speculator: Speculator,
        target: HPUModelRunner,
        kernel: SDPAKernel,
        max_drafts: int,
    ) -> None:
        dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        num_rows = config.scheduler.max_num_seqs + 1
        block_size = config.cache.block_size
        self._speculator = speculator
        self._states = StatesOnCard(target._bridge, speculator, block_size, num_rows, dtype)
        self._padded_arguments: tuple[Any, ...] = ()
        # The runner reads the stage and the layers of a model, which a speculator has.
        super().__init__(config, speculator, target, kernel, max_drafts)  # type: ignore[arg-type]
        target_model = target.launches.execution.model
        assert isinstance(target_model, HPUModel)
        target_model.keeper = self._states
        self._at_place = [self.launches]
        for place in range(1, speculator.num_networks):
            launches = PaddedLaunches(
                config,
                self._bridge,
                self._pad_at(place),
                self.launches.inputs,
                self.batch,
                single_tokens=True,
            )
            target.launches.add_beside(launches)
            self._at_place.append(launches)

    def _plan_cache(self, config: VllmConfig) -> KVCacheLayout:
        """With the bytes of the states that are kept by slot."""
        layout = super()._plan_cache(config)
        return replace(layout, block_bytes=layout.block_bytes + self._states.block_bytes)

    def start(self, num_blocks: int) -> None:
        """See `DraftMaker.start`."""
        if not self.attention_layers:
            self._progress = NewestTokens()
            return
        max_len = self.config.model.max_model_len
        assert max_len is not None
        self._progress = DraftProgress(
            self.batch, self.block_size, num_blocks, max_len, reads_states=True
        )

    def bind_states(self, num_blocks: int) -> None:
        """See `HPUDraftRunner.bind_states`."""
        self._states.bind(num_blocks)

    def release_states(self) -> None:
        """See `HPUDraftRunner.release_states`."""
        self._states.release()

    def _pad_model(self, *args: Any) -> HPUModel:
        self._padded_arguments = args
        return self._pad_at(0)

    def _pad_at(self, place: int) -> HPUModel:
        padded = HPUSpeculatorModel(*self._padded_arguments)
        padded.place, padded.states = place, self._states
        return padded

    def _make_inputs(self, slot_of_row: IntArray | None) -> HPUInputBuilder:
        return SpeculatorInputBuilder(self.batch, self.block_size, slot_of_row)

    def _launches_at(self, place: int) -> PaddedLaunches:
        return self._at_place[min(place, len(self._at_place) - 1)]

    @torch.inference_mode()
    def warm_up(self, shape: PaddedShape, *, sampling: Sampling = "none") -> None:
        """See `PaddedRunner.warm_up`."""
        for launches in self._at_place:
            if launches.runs(shape):
                device_input, (logits, _) = launches.run_padding(shape)
                self._warm_up_sampler(shape, device_input, logits, [ALL_GREEDY])
