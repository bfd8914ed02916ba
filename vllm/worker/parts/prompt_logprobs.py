"""Log-probabilities of prompt tokens, for the few requests that ask for them."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllm.messages import BoolArray, IntArray, NewRequest
from vllm.sample.sampler import Sampler
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.launch_result import PendingLogprobs, PendingRows
from vllm.worker.parts.row_parts import OutputHead, RowPart

PART_SIZE = 256
"""Positions whose logits are in memory at one time."""

PADDING_ROW = -1
"""The last entry of arrays over the rows of the batch and padding."""


class PromptLogprobs(RowPart):
    """Computes prompt log-probabilities for the requests that ask for them.

    Args:
        batch: has the prompts.
        sampler: computes log-probabilities of given tokens on the device.
        head: computes logits.
        round_width: rounds up the number of most likely tokens, for a device that compiles shapes.
            Positions are then computed in parts of one fixed size.
        end_stage: ends a recorded graph, for such a device.
    """

    def __init__(
        self,
        batch: InputBatch,
        sampler: Sampler,
        head: OutputHead,
        round_width: Callable[[int], int] | None = None,
        end_stage: Callable[[], None] | None = None,
    ) -> None:
        self._batch = batch
        self._gather_logprobs = sampler.gather_logprobs
        self._head = head
        self._round_width = round_width
        self._end_stage = end_stage
        self._wanted: dict[int, int] = {}

    def add(self, new: NewRequest) -> None:
        """Note what the request asks for, even if another pipeline stage computes it.

        All stages must plan the same forward passes.
        """
        wanted = new.request.sampling_params.prompt_logprobs
        if wanted is not None:
            self._wanted[new.row] = wanted

    def remove(self, row: int) -> None:
        """Clear the entry of this batch index."""
        self._wanted.pop(row, None)

    def needs_prefill(self, rows: IntArray, indices: IntArray) -> BoolArray | None:
        """Return which tokens need a prefill: only a prefill gives log-probabilities of prompt
        tokens.
        """
        if not self._wanted:
            return None
        is_inside: BoolArray = indices + 1 < self._batch.num_prompt_tokens[rows]
        return is_inside & np.isin(rows, list(self._wanted))

    def read(self, launch: Launch, hidden_states: Tensor) -> list[PendingRows]:
        """Compute log-probabilities of the tokens that follow the prompt positions of a forward
        pass.

        Returns:
            (batch index, one entry per position p of the forward pass with p + 1 inside the prompt,
            for token p + 1), in the order of the forward pass.
        """
        if not self._wanted:
            return []
        batch, starts = self._batch, launch.starts
        found: list[PendingRows] = []
        for index, row in enumerate(launch.rows.tolist()):
            if row not in self._wanted:
                continue
            start = int(launch.num_computed_tokens[index])
            count = min(
                int(launch.num_scheduled_tokens[index]),
                int(batch.num_prompt_tokens[row]) - 1 - start,
            )
            if count <= 0:
                continue
            targets = batch.token_ids[row, start + 1 : start + 1 + count]
            first = int(starts[index])
            found.append((row, self.gather(hidden_states, first, targets, self._wanted[row], row)))
        return found

    def gather(
        self,
        hidden_states: Tensor,
        first: int,
        targets: IntArray,
        num_logprobs: int,
        row: int = PADDING_ROW,
    ) -> PendingLogprobs:
        """Compute log-probabilities of `targets`, which follow the positions from `first` on.

        Args:
            hidden_states: hidden states of a forward pass.
            first: index of the first position among them.
            targets: [n] token ids.
            num_logprobs: number of most likely tokens to return in addition.
            row: batch index of the request, whose adapter is used.
        """
        parts, vocab_size = [], 0
        for start in range(0, len(targets), PART_SIZE):
            chunk = targets[start : start + PART_SIZE]
            begin = first + start
            if self._round_width is None:
                hidden = hidden_states[begin : begin + len(chunk)]
                width = num_logprobs
            else:
                hidden, chunk = self._fixed_size(hidden_states, begin, chunk)
                width = self._round_width(num_logprobs)
            logits = self._head(hidden, np.full(len(hidden), row))
            vocab_size = logits.shape[1]
            known = np.minimum(chunk, vocab_size - 1)
            token_ids = torch.from_numpy(known.astype(np.int64)).to(logits.device)
            parts.append(self._gather_logprobs(logits, token_ids, width))
            if self._end_stage is not None:
                self._end_stage()
        indices = np.flatnonzero(targets >= vocab_size).tolist()
        absent = {index: int(targets[index]) for index in indices}
        return PendingLogprobs(parts, len(targets), num_logprobs, vocab_size, absent)

    def _fixed_size(
        self, hidden_states: Tensor, begin: int, targets: IntArray
    ) -> tuple[Tensor, IntArray]:
        """Return PART_SIZE hidden states [PART_SIZE, hidden] from `begin` on, and their targets.

        If the part has fewer, the last one is repeated.
        """
        index = np.minimum(np.arange(PART_SIZE), len(targets) - 1)
        positions = torch.from_numpy((begin + index).astype(np.int32)).to(hidden_states.device)
        hidden = hidden_states.index_select(0, positions)
        if self._end_stage is not None:
            self._end_stage()  # later operations do not depend on the size of the launch
        return hidden, targets[index]
