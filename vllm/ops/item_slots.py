"""Slots of images and sounds that tokens see by cross-attention, in the format of the kernels."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ItemSlots:
    """For each of n tokens, or requests of a batch, the slots that it sees.

    It stores addresses: keep the arrays of slots alive as long as it is used.
    """

    addresses: npt.NDArray[np.int64]
    """[n] of the first slot, int32 each; not read where there are none."""
    counts: npt.NDArray[np.int32]
    """[n] how many."""

    @classmethod
    def empty(cls, size: int) -> "ItemSlots":
        """Return the slots of `size` tokens that see nothing."""
        return cls(np.zeros(size, np.int64), np.zeros(size, np.int32))

    def put(self, where: int | slice, slots: npt.NDArray[np.int32]) -> None:
        """Let tokens see these slots [n], a dense array."""
        self.addresses[where], self.counts[where] = slots.ctypes.data, len(slots)
