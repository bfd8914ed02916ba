"""Moves blocks of the KV cache on a card, in few shapes, all of which are warmed up."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from vllm.attention.cached_layer import CachedLayer
from vllm.messages import NULL_BLOCK_ID, IntArray
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches.host_buffers import HostBuffers

MOVE_SIZES = (2, 8, 32)
"""Blocks that are moved at a time; even, since the two of an exchange are neighbours."""


class BlockMover:
    """Copies blocks within the caches of all layers.

    Args:
        bridge: the card.
        layers: with caches of one group.
        block_size: tokens per block.
    """

    def __init__(
        self, bridge: HabanaBridge, layers: Sequence[CachedLayer], block_size: int
    ) -> None:
        self._bridge = bridge
        self._layers = layers
        self._offsets = np.arange(block_size, dtype=np.int32)
        self._to_device = HostBuffers(bridge).to_device

    def move(self, copied: IntArray) -> None:
        """Copy blocks, [n, 2] (source, target); see `BlockMoves.copied`."""
        for part in padded_parts(copied):
            slots = part.T[:, :, None] * np.int32(len(self._offsets)) + self._offsets
            slots_on_card = self._to_device(slots.reshape(2, -1))
            sources, targets = slots_on_card[0].long(), slots_on_card[1].long()
            self._bridge.mark_step()
            for layer in self._layers:
                for cache in layer.kv_caches:
                    self._copy(cache, sources, targets)

    def warm_up(self) -> None:
        """Copy the null block to itself in every shape."""
        for size in MOVE_SIZES:
            self.move(np.full((size, 2), NULL_BLOCK_ID, np.int32))

    def _copy(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Within a cache of [slots, ...]: all are read before any is written."""
        cache.index_copy_(0, targets, cache.index_select(0, sources))
        self._bridge.mark_step()


def padded_parts(copied: IntArray) -> Iterator[IntArray]:
    """Parts of [n, 2] moves, each of one of the sizes; the null block pads the last.

    >>> [len(part) for part in padded_parts(np.ones((43, 2), np.int32))]
    [32, 8, 2, 2]
    """
    while len(copied):
        left = len(copied)
        size = next((s for s in reversed(MOVE_SIZES) if s <= left), MOVE_SIZES[0])
        part, copied = copied[:size], copied[size:]
        yield np.pad(part, ((0, size - len(part)), (0, 0)), constant_values=NULL_BLOCK_ID)
