"""Log-probabilities of prompt tokens, for the few requests that ask for them."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.messages import EngineRequest, IntArray, LogprobRows
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.logprobs import LogprobTensors
from vllm.sample.sampler import Sampler
from vllm.worker.input_batch import InputBatch
from vllm.worker.launch import Launch

PART_SIZE = 256
"""Positions whose logits are in memory at one time."""

PADDING_ROW = -1
"""The last entry of arrays over the rows of the batch and padding."""


@dataclass(frozen=True)
class PendingLogprobs:
    """Log-probabilities of consecutive positions of one row, still on the device."""

    parts: list[LogprobTensors]
    """Parts of consecutive positions; the last part ends with padding."""
    num_positions: int
    num_logprobs: int

    def result(self) -> LogprobRows:
        """Copy to the host; waits for the device."""
        found, logprobs, ranks = (
            np.concatenate([tensor.cpu().numpy() for tensor in column])[: self.num_positions]
            for column in zip(*self.parts, strict=True)
        )
        width = 1 + self.num_logprobs
        return LogprobRows(token_ids=found[:, :width], logprobs=logprobs[:, :width], ranks=ranks)


def join_logprobs(parts: list[LogprobRows]) -> LogprobRows:
    """Concatenate the positions of one row."""
    return LogprobRows(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
    )


class PromptLogprobs:
    """Remembers which rows want them, and computes them from a launch's hidden states.

    Args:
        model: has `compute_logits`.
        sampler: has the log-probabilities of given tokens, for the device of the model.
        with_adapters: in which the head runs for hidden states of these rows [N]; None: as it is.
        round_width: likeliest tokens to compute when so many are wanted; for a device that
            compiles shapes. Positions are then taken in parts of one fixed size.
        end_stage: ends a recorded graph, for such a device.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        with_adapters: Callable[[IntArray], AbstractContextManager[None]] | None = None,
        round_width: Callable[[int], int] | None = None,
        end_stage: Callable[[], None] | None = None,
    ) -> None:
        self._compute_logits = model.compute_logits
        self._gather_logprobs = sampler.gather_logprobs
        self._with_adapters = with_adapters or (lambda _: nullcontext())
        self._round_width = round_width
        self._end_stage = end_stage
        self._wanted: dict[int, int] = {}

    @property
    def rows(self) -> Collection[int]:
        """The rows that currently want them; a live view."""
        return self._wanted.keys()

    def add(self, row: int, request: EngineRequest) -> None:
        """Place a request in the row."""
        if request.sampling_params.prompt_logprobs is not None:
            self._wanted[row] = request.sampling_params.prompt_logprobs

    def remove(self, row: int) -> None:
        """Clear the row."""
        self._wanted.pop(row, None)

    def compute(
        self, batch: InputBatch, launch: Launch, hidden_states: Tensor, starts: IntArray
    ) -> list[tuple[int, PendingLogprobs]]:
        """Log-probabilities of the tokens that follow this launch's prompt positions.

        Args:
            batch: has the prompts.
            launch: n rows.
            hidden_states: [T, hidden].
            starts: [n] where the tokens of each row begin in them.

        Returns:
            (row, one entry per position p of the launch with p + 1 inside the prompt, for token
            p + 1), in the order of the launch.
        """
        if not self._wanted:
            return []
        found: list[tuple[int, PendingLogprobs]] = []
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
        """Log-probabilities of `targets`, which follow the positions from `first` on.

        Args:
            hidden_states: of a launch.
            first: index of the first position among them.
            targets: [n] token ids.
            num_logprobs: likeliest tokens to give besides.
            row: of the batch, whose adapter counts.
        """
        parts = []
        for start in range(0, len(targets), PART_SIZE):
            chunk = targets[start : start + PART_SIZE]
            begin = first + start
            if self._round_width is None:
                hidden = hidden_states[begin : begin + len(chunk)]
                width = num_logprobs
            else:
                hidden, chunk = self._fixed_size(hidden_states, begin, chunk)
                width = self._round_width(num_logprobs)
            with self._with_adapters(np.full(len(hidden), row)):
                logits = self._compute_logits(hidden)
            token_ids = torch.from_numpy(chunk.astype(np.int64)).to(logits.device)
            parts.append(self._gather_logprobs(logits, token_ids, width))
            if self._end_stage is not None:
                self._end_stage()
        return PendingLogprobs(parts, len(targets), num_logprobs)

    def _fixed_size(
        self, hidden_states: Tensor, begin: int, targets: IntArray
    ) -> tuple[Tensor, IntArray]:
        """[PART_SIZE, hidden] from `begin` on, and their targets; the last ones repeated."""
        index = np.minimum(np.arange(PART_SIZE), len(targets) - 1)
        positions = torch.from_numpy((begin + index).astype(np.int32)).to(hidden_states.device)
        hidden = hidden_states.index_select(0, positions)
        if self._end_stage is not None:
            self._end_stage()  # the rest does not depend on the size of the launch
        return hidden, targets[index]
