"""Copies KV blocks and recurrent states on a card, in a few shapes that are all warmed up."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from vllm.attention.cached_layer import CachedLayer
from vllm.messages import NULL_BLOCK_ID, IntArray
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches.host_buffers import HostBuffers

MOVE_SIZES = (2, 8, 32)
"""Blocks that are moved at a time; even, since the two of an exchange are neighbours."""
_STATE_SIZES = (2, 8)
"""Recurrent states that are copied at a time; each may have megabytes in one layer."""


class BlockMover:
    """Copies blocks within the KV caches of all layers.

    Args:
        bridge: the card.
        layers: layers with caches of one group.
        block_size: tokens per block.
        sizes: numbers of blocks that are copied at a time, ascending.
        padding: a block that is never read.
    """

    def __init__(
        self,
        bridge: HabanaBridge,
        layers: Sequence[CachedLayer],
        block_size: int,
        sizes: Sequence[int] = MOVE_SIZES,
        padding: int = NULL_BLOCK_ID,
    ) -> None:
        self._bridge = bridge
        self._layers = layers
        self._sizes, self._padding = sizes, padding
        self._offsets = np.arange(block_size, dtype=np.int32)
        self._to_device = HostBuffers(bridge).to_device

    def move(self, copied: IntArray) -> None:
        """Copy blocks: [n, 2] (source, target); see `BlockMoves.copied`."""
        for part in padded_parts(copied, self._sizes, self._padding):
            slots = part.T[:, :, None] * np.int32(len(self._offsets)) + self._offsets
            slots_on_card = self._to_device(slots.reshape(2, -1))
            sources, targets = slots_on_card[0].long(), slots_on_card[1].long()
            self._bridge.mark_step()
            for layer in self._layers:
                for cache in layer.kv_caches:
                    self._copy(cache, sources, targets)

    def warm_up(self) -> None:
        """Warm up every shape by copying the padding block to itself."""
        for size in self._sizes:
            self.move(np.full((size, 2), self._padding, np.int32))

    def _copy(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy slots within a cache [slots, ...]; all are read before any is written."""
        cache.index_copy_(0, targets, cache.index_select(0, sources))
        self._bridge.mark_step()


class StateMover:
    """Copies recurrent states between requests of the batch and kept states.

    Args:
        bridge: the card.
        layers: layers with recurrent states, in the order: batch, padding, kept states.
        num_requests: rows of the batch.
    """

    def __init__(
        self, bridge: HabanaBridge, layers: Sequence[CachedLayer], num_requests: int
    ) -> None:
        self._num_requests = num_requests
        self._mover = BlockMover(bridge, layers, 1, _STATE_SIZES, padding=num_requests)

    def copy(self, copied: IntArray) -> None:
        """Copy recurrent states: [n, 2] (source, target).

        Each is a batch index or the index of a kept state; no source is a target as well.
        """
        self._mover.move(copied + (copied >= self._num_requests))

    def warm_up(self) -> None:
        """Warm up every shape by copying the padding state to itself."""
        self._mover.warm_up()


def padded_parts(
    copied: IntArray, sizes: Sequence[int] = MOVE_SIZES, padding: int = NULL_BLOCK_ID
) -> Iterator[IntArray]:
    """Divide [n, 2] moves into parts of these sizes; the last part is padded.

    >>> [len(part) for part in padded_parts(np.ones((43, 2), np.int32))]
    [32, 8, 2, 2]
    """
    while len(copied):
        left = len(copied)
        size = next((s for s in reversed(sizes) if s <= left), sizes[0])
        part, copied = copied[:size], copied[size:]
        yield np.pad(part, ((0, size - len(part)), (0, 0)), constant_values=padding)
