"""Hidden states on a card, which a speculator reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.model_executor.speculators.interface import Speculator
from vllm.platforms.habana.bridge import HabanaBridge


class DeviceHiddenStates:
    """Hidden states for a speculator, by slot of the KV cache and by batch index.

    Args:
        bridge: the card.
        speculator: whose states are stored.
        block_size: tokens of a block.
        num_rows: number of rows of the batch, plus one of padding.
        dtype: data type of the states.

    Attributes:
        by_slot: [slots, kept_size]; the state of each token in the KV cache.
        by_row: [rows, step_size]; the result of the last step for the newest token of a request.
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
        """Bytes of the hidden states of the tokens in a block."""
        return self._block_size * self._speculator.kept_size * self._dtype.itemsize

    def bind(self, num_blocks: int) -> None:
        """Allocate memory for the states of `num_blocks` blocks."""
        size = (num_blocks * self._block_size, self._speculator.kept_size)
        self.by_slot = self._bridge.zeros(size, self._dtype)

    def release(self) -> None:
        """Free the memory that `bind` allocated."""
        del self.by_slot

    def keep(self, slots: Tensor, result: Tensor, inner: Sequence[Tensor]) -> None:
        self.by_slot.index_copy_(0, slots.long(), self._speculator.keep(result, inner))
