"""Copies KV blocks from the caches of a card to bytes and back, in a few warmed-up shapes."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm.attention import CachedLayer
from vllm.messages import NULL_BLOCK_ID, IntArray
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches.host_buffers import HostBuffers

COPY_SIZES = (1, 8)
"""Blocks that are copied at a time."""


class CardBlockCopies:
    """Access to the KV caches of some layers, block by block; see
    `vllm.worker.block_store.BlockStore`.

    Args:
        bridge: the card.
        layers: layers with their caches bound, [blocks * block_size, ...] each.
        block_size: tokens per block.

    Attributes:
        block_bytes: bytes of one block in all layers.
        layout: shape and dtype of a block in each of the caches.
    """

    def __init__(
        self, bridge: HabanaBridge, layers: Sequence[CachedLayer], block_size: int
    ) -> None:
        self._bridge = bridge
        self._layers = layers
        self._offsets = np.arange(block_size, dtype=np.int32)
        self._to_device = HostBuffers(bridge).to_device
        self.layout = [((block_size, *cache.shape[1:]), str(cache.dtype)) for cache in self._caches]
        sizes = [block_size * cache[0].numel() * cache.itemsize for cache in self._caches]
        self._ends = np.cumsum(sizes).tolist()
        self.block_bytes = sum(sizes)

    @property
    def _caches(self) -> list[Tensor]:
        return [cache for layer in self._layers for cache in layer.kv_caches]

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each block, all layers concatenated."""
        blocks: list[bytes] = []
        for part, count in padded_parts(block_ids):
            slots = self._slots(part)
            copies = []
            for cache in self._caches:
                copies.append(cache.index_select(0, slots))
                self._bridge.mark_step()
            on_host = [_bytes_of(copy.cpu()).reshape(len(part), -1) for copy in copies]
            blocks += [b"".join([each[index] for each in on_host]) for index in range(count)]
        return blocks

    def write(self, block_ids: Sequence[int], blocks: Sequence[bytes]) -> bool:
        """Write blocks that `read` has returned.

        Return False, and write nothing, if a block has the wrong size. Values that are not finite
        become 0, because one such block could spoil all requests: see `write_kv_cache`.
        """
        if any(len(block) != self.block_bytes for block in blocks):
            return False
        data = [np.frombuffer(block, np.uint8) for block in blocks]
        done = 0
        for part, count in padded_parts(block_ids):
            slots, start = self._slots(part).long(), 0
            for cache, end in zip(self._caches, self._ends, strict=True):
                # Entries of padding are written to the null block, whose content is never used.
                rows = np.zeros((len(part), end - start), np.uint8)
                for index in range(count):
                    rows[index] = data[done + index][start:end]
                new = torch.from_numpy(rows).view(cache.dtype)
                new = _finite(new).view(-1, *cache.shape[1:])
                cache.index_copy_(0, slots, new.to(self._bridge.device))
                self._bridge.mark_step()
                start = end
            done += count
        return True

    def warm_up(self) -> None:
        """Warm up every shape by copying the null block."""
        for size in COPY_SIZES:
            none = [NULL_BLOCK_ID] * size
            self.write(none, self.read(none))

    def _slots(self, block_ids: IntArray) -> Tensor:
        """Return the slots [n * block_size] of n blocks, on the card."""
        slots = block_ids[:, None] * np.int32(len(self._offsets)) + self._offsets
        return self._to_device(slots.ravel())


def padded_parts(block_ids: Sequence[int]) -> Iterator[tuple[IntArray, int]]:
    """Yield (block ids padded with the null block to a copy size, number of real blocks).

    >>> [(len(part), count) for part, count in padded_parts([5] * 19)]
    [(8, 8), (8, 8), (8, 3)]
    >>> [(len(part), count) for part, count in padded_parts([5])]
    [(1, 1)]
    """
    for start in range(0, len(block_ids), COPY_SIZES[-1]):
        ids = np.array(block_ids[start : start + COPY_SIZES[-1]], np.int32)
        size = next(size for size in COPY_SIZES if size >= len(ids))
        yield np.pad(ids, (0, size - len(ids)), constant_values=NULL_BLOCK_ID), len(ids)


def _bytes_of(copy: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return copy.contiguous().flatten().view(torch.uint8).numpy()


def _finite(new: Tensor) -> Tensor:
    """Replace values that are not finite by 0."""
    bits = new.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[new.itemsize])
    bits[~new.float().isfinite()] = 0
    return new
