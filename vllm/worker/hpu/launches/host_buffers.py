"""Host memory from which inputs are copied to the device, while the host continues."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.platforms.habana.bridge import DeviceEvent, HabanaBridge


@dataclass
class _Buffer:
    memory: Tensor
    copied: DeviceEvent
    """Event after the last copy from the buffer."""


class HostBuffers:
    """Copies arrays to the device. A buffer is not written while a copy from it may be in flight.

    There are as many buffers as copies in flight at once: one or two, more for a step with many
    forward passes.

    Args:
        bridge: the card.
    """

    def __init__(self, bridge: HabanaBridge) -> None:
        self._bridge = bridge
        self._buffers: list[_Buffer] = []

    def to_device(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy an array to the device; forward passes started from now on can read it.

        Args:
            array: array of any shape, of elements of 4 or 8 bytes.
        """
        source = torch.from_numpy(np.ascontiguousarray(array))
        num_words = source.nbytes // 4
        buffer = self._free_buffer(num_words)
        memory = self._bridge.pinned(_capacity(num_words)) if buffer is None else buffer.memory
        used = memory[:num_words].view(source.dtype).view(source.shape).copy_(source)
        on_device = used.to(self._bridge.device, non_blocking=True)
        copied = self._bridge.record_event()
        if buffer is None:
            self._buffers.append(_Buffer(memory, copied))
        else:
            buffer.copied = copied
        return on_device

    def _free_buffer(self, size: int) -> _Buffer | None:
        for buffer in self._buffers:
            if len(buffer.memory) >= size and buffer.copied.query():
                return buffer
        return None


def _capacity(size: int) -> int:
    """Round up to a power of two, so that arrays of similar sizes share buffers.

    >>> [_capacity(size) for size in (1, 1024, 1025)]
    [1024, 1024, 2048]
    """
    return 1 << max(10, (size - 1).bit_length())
