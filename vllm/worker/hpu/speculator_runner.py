"""Runs a speculator on Gaudi: a network that predicts draft tokens from hidden states.

The forward passes of the model store the hidden states of their tokens on the card, by the KV-cache
slots of the tokens. A forward pass of the speculator reads the hidden states of its positions, each
together with the token after it. For the newest token of each request it stores a hidden state,
which the forward pass for the next draft reads. The draft itself is also kept on the card.
"""

from typing import Any

import torch
from torch import Tensor

from vllm.bucketing import Phase
from vllm.config import VllmConfig
from vllm.model_executor.speculators.interface import Speculator
from vllm.worker.hpu.draft_runner import (
    DraftInputBuilder,
    HPUDraftRunner,
    device_drafts,
    draft_positions,
    make_draft_launches,
)
from vllm.worker.hpu.launches.device_tokens import DeviceDrafts
from vllm.worker.hpu.launches.input import unpack_decode
from vllm.worker.hpu.launches.model import HPUModel, softmax_normaliser
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.model_runner import HPUModelRunner
from vllm.worker.hpu.speculator_states import DeviceHiddenStates


class HPUSpeculatorModel(HPUModel):
    """A speculator in padded forward passes, for the draft at one position.

    Attributes:
        index: index of the draft.
        states: hidden states that it reads and stores.
    """

    index: int
    states: DeviceHiddenStates
    model: Any  # a speculator, which has layers, but no embedding and no output head

    def forward(
        self, packed: Tensor, shape: PaddedShape, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one step; the returned hidden states are the next states of the speculator."""
        launch = self.prepare(packed, shape)
        states = self._states(packed, shape, launch.slots)
        result: Tensor = self._run(launch, launch.token_ids, states)
        if shape.bucket.phase is Phase.DECODE:
            self._leave(packed, shape, result)
        last = launch.last_tokens
        rows = result if last is None else result.index_select(0, last)
        logits: Tensor = self.model.compute_logits(self.index, rows)
        return logits, result

    def _forward(self, inputs: Tensor, positions: Tensor, *more: Any) -> Any:
        (states,) = more
        return self.model.step(self.index, inputs, states, positions)

    def _states(self, packed: Tensor, shape: PaddedShape, slots: Tensor) -> Tensor:
        """Return the hidden states for the tokens of a forward pass.

        For tokens of the model these are the stored states at their slots [T]; for drafts the
        states of the previous step.
        """
        has_networks = self.model.num_networks > 1
        has_drafts = shape.bucket.phase is Phase.DECODE and shape.bucket.query_len == 1
        if self.index == 0:
            states = self.states.by_slot.index_select(0, slots)
            if has_networks or not has_drafts:
                return states
        given = unpack_decode(packed, shape)
        of_rows = self.states.by_row.index_select(0, given.rows)
        if self.index:
            return of_rows
        assert isinstance(self.device_tokens, DeviceDrafts)
        return torch.where(self.device_tokens.are_drafts(given)[:, None], of_rows, states)

    def _leave(self, packed: Tensor, shape: PaddedShape, result: Tensor) -> None:
        """Store the speculator's output for the last token of each request; the forward pass for
        the next draft reads it.
        """
        given, query_len = unpack_decode(packed, shape), shape.bucket.query_len
        if query_len > 1:
            assert isinstance(self.device_tokens, DeviceDrafts)
            last = self.device_tokens.last_column(given, shape)
            first = torch.arange(len(last), dtype=torch.int32, device=last.device) * query_len
            result = result.index_select(0, first + last)
        self.states.by_row.index_copy_(0, given.rows.long(), result)


class SpeculatorInputBuilder(DraftInputBuilder):
    """Packs forward passes of a speculator: a position is paired with the token after it."""

    tokens_ahead = 1


def make_speculator_runner(
    config: VllmConfig, speculator: Speculator, target: HPUModelRunner, max_drafts: int
) -> HPUDraftRunner:
    """Make the runner of a speculator, and let the model store hidden states for it.

    Args:
        config: config of the speculator.
        speculator: speculator on the card.
        target: target model; see `HPUDraftRunner`.
        max_drafts: drafts of a request in one step.
    """
    block_size, num_rows = config.cache.block_size, config.scheduler.max_num_seqs + 1
    dtype: torch.dtype = getattr(torch, config.model.dtype_name)
    states = DeviceHiddenStates(target.bridge, speculator, block_size, num_rows, dtype)
    target_model = target.launches.execution.model
    assert isinstance(target_model, HPUModel)
    target_model.keeper = states
    device_tokens = device_drafts(target, SpeculatorInputBuilder.tokens_ahead)
    positions = draft_positions(target, config)
    inputs = SpeculatorInputBuilder(target.batch, block_size, positions=positions)
    launches = []
    for index in range(max(1, speculator.num_networks)):
        padded = HPUSpeculatorModel(
            speculator,  # type: ignore[arg-type]  # only what a speculator has, too, is read
            block_size,
            target.kernel,
            softmax_normaliser(config.hpu, target.bridge.kernels),
            device_tokens,
            dtype=dtype,
            num_positions=0 if positions is None else positions.num_positions,
        )
        padded.index, padded.states = index, states
        launches.append(
            make_draft_launches(config, target, padded, inputs, single_tokens=index > 0)
        )
    return HPUDraftRunner(config, speculator, target, max_drafts, launches, states)
