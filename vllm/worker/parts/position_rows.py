"""Positions that requests give instead of the indices of their tokens (M-RoPE).

A position only rotates queries and keys. Slots, lengths, masks and limits of chunks depend on the
index of a token in its request, whatever its positions are.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm.attention import LaunchParts
from vllm.config import ModelArch
from vllm.messages import BoolArray, IntArray, NewRequest
from vllm.utils.ragged import positions_within
from vllm.worker.batch.launch import Launch
from vllm.worker.parts.row_parts import RowPart, RowParts


class PositionRows(RowPart):
    """The positions that requests in the batch give, by batch index.

    Args:
        arch: architecture of the model.
        num_rows: number of rows of the batch.
        device: device of the model.

    Attributes:
        num_positions: P, positions of a token.
        offsets: [rows] position minus index of tokens after the prompt.
        ends: [rows] number of tokens up to the last one with a different offset; 0: none has.
    """

    def __init__(self, arch: ModelArch, num_rows: int, device: torch.device) -> None:
        self.num_positions = arch.num_positions
        self.offsets: IntArray = np.zeros(num_rows, np.int32)
        self._device = device
        self.ends: IntArray = np.zeros(num_rows, np.int32)
        self._rows: dict[int, IntArray] = {}
        """[P, n] positions of the prompt, by row."""

    def add(self, new: NewRequest) -> None:
        given = new.request.positions
        if given is None:
            return
        positions = np.frombuffer(given.data, "<i4").reshape(self.num_positions, -1)
        num_prompt = len(new.request.prompt_token_ids)
        is_moved = (positions != np.arange(num_prompt) + given.offset).any(0)
        self._rows[new.row] = positions
        self.offsets[new.row] = given.offset
        self.ends[new.row] = np.flatnonzero(is_moved).max(initial=-1) + 1

    def remove(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self.ends[row] = self.offsets[row] = 0

    def needs_prefill(self, rows: IntArray, indices: IntArray) -> BoolArray | None:
        """Return which tokens have given positions: they need a prefill, decodes only add an
        offset.
        """
        if not self._rows:
            return None
        return indices < self.ends[rows]

    def part_of(self, launch: Launch) -> LaunchParts:
        rows, count = launch.rows, launch.num_scheduled_tokens
        if not self._rows or not (self.offsets[rows] | self.ends[rows]).any():
            return {}
        first = launch.num_computed_tokens + self.offsets[rows]
        positions = (np.repeat(first, count) + positions_within(count))[None]
        if (launch.num_computed_tokens < self.ends[rows]).any():
            positions = np.repeat(positions, self.num_positions, 0)
            self.write_prompts(launch, positions)
        return {"positions": torch.from_numpy(positions.astype(np.int64)).to(self._device)}

    def write_prompts(self, launch: Launch, positions: npt.NDArray[np.integer[Any]]) -> None:
        """Write the given positions of prompt tokens.

        Args:
            launch: a forward pass with these tokens.
            positions: [P, T] of the forward pass; changed.
        """
        starts = launch.starts
        is_given = launch.num_computed_tokens < self.ends[launch.rows]
        for index in np.flatnonzero(is_given).tolist():
            of_prompt = self._rows[int(launch.rows[index])]
            begin = int(launch.num_computed_tokens[index])
            given = of_prompt[:, begin : begin + int(launch.num_scheduled_tokens[index])]
            first = int(starts[index])
            positions[:, first : first + given.shape[1]] = given


def draft_parts(parts: RowParts, arch: ModelArch) -> RowParts:
    """Return the parts that a draft model needs of the target's requests: their positions.

    Empty if the draft model takes another number of positions for each token.

    Args:
        parts: parts of the target model.
        arch: architecture of the draft model.
    """
    found = parts.find(PositionRows)
    if found is None or found.num_positions != arch.num_positions:
        return RowParts(())
    return RowParts((found,))
