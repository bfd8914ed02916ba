"""Slots of images and sounds that tokens see by cross-attention, as kernels take them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ItemSlots:
    """For each of n tokens, or rows of a batch, the slots that it sees.

    Whoever makes this keeps the slots where they are, as long as it is used.
    """

    addresses: npt.NDArray[np.int64]
    """[n] of the first slot, int32 each; not read where there are none."""
    counts: npt.NDArray[np.int32]
    """[n] how many."""

    @classmethod
    def empty(cls, size: int) -> "ItemSlots":
        """Return the slots of tokens that see nothing."""
        return cls(np.zeros(size, np.int64), np.zeros(size, np.int32))

    def put(self, where: int | slice, slots: npt.NDArray[np.int32]) -> None:
        """Let tokens see these slots [n], which are dense."""
        self.addresses[where], self.counts[where] = slots.ctypes.data, len(slots)
