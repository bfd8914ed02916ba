"""Stores hidden states of tokens, which a speculator reads in later steps."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from vllm.messages import IntArray
from vllm.utils.ragged import positions_within
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch


class HiddenStateStore(ABC):
    """Stores a vector of `size` elements for each token that is kept.

    Args:
        batch: the running requests.
        size: size of a vector.
        dtype: data type of its elements.

    Attributes:
        memory: [slots, size]
    """

    def __init__(self, batch: InputBatch, size: int, dtype: torch.dtype) -> None:
        self._batch = batch
        self.memory = torch.zeros(self._num_slots, size, dtype=dtype)

    @property
    @abstractmethod
    def _num_slots(self) -> int:
        """Number of vectors that the memory has space for."""

    @abstractmethod
    def _slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the memory slots of the vectors of tokens."""

    def _is_kept(self, positions: IntArray, ends: IntArray) -> IntArray:
        """Return the indices of those tokens of a forward pass whose vectors are stored.

        Args:
            positions: [T]
            ends: [T] position after the last token of the same request.
        """
        return np.arange(len(positions), dtype=np.int32)

    def write(self, launch: Launch, states: Tensor) -> None:
        """Store the vectors [T, size] of the tokens of a forward pass."""
        start, count = launch.num_computed_tokens, launch.num_scheduled_tokens
        if len(states) == len(start):  # each request has one token
            self.memory[self._index(launch.rows, start)] = states
            return
        rows = np.repeat(launch.rows, count)
        positions = np.repeat(start, count) + positions_within(count)
        kept = self._is_kept(positions, np.repeat(start + count, count))
        if len(kept) < len(rows):
            states = states[torch.from_numpy(kept)]
        self.memory[self._index(rows[kept], positions[kept])] = states

    def read(self, rows: IntArray, positions: IntArray) -> Tensor:
        """Return the stored vectors [n, size] of n tokens."""
        return self.memory[self._index(rows, positions)]

    def _index(self, rows: IntArray, positions: IntArray) -> Tensor:
        return torch.from_numpy(self._slots(rows, positions).astype(np.int64))


class BlockHiddenStates(HiddenStateStore):
    """Stores hidden states of all tokens in the KV cache; requests with shared blocks
    share them.
    """

    def __init__(
        self, batch: InputBatch, size: int, dtype: torch.dtype, num_blocks: int, block_size: int
    ) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        super().__init__(batch, size, dtype)

    @property
    def _num_slots(self) -> int:
        return self._num_blocks * self._block_size

    def _slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        block_size = self._block_size
        blocks = self._batch.block_table[rows, positions // block_size]
        return blocks * block_size + positions % block_size


class LastHiddenStates(HiddenStateStore):
    """Stores hidden states only of the last tokens of each request: the newest one and its
    drafts.
    """

    def __init__(self, batch: InputBatch, size: int, dtype: torch.dtype, num_latest: int) -> None:
        self._num_latest = num_latest
        super().__init__(batch, size, dtype)

    @property
    def _num_slots(self) -> int:
        return len(self._batch.num_tokens) * self._num_latest

    def _slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        return rows * self._num_latest + positions % self._num_latest

    def _is_kept(self, positions: IntArray, ends: IntArray) -> IntArray:
        return np.flatnonzero(positions >= ends - self._num_latest).astype(np.int32)
