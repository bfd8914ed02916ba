"""Copies KV blocks from the caches of all layers to bytes, and back."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm.attention import CachedLayer
from vllm.worker.block_store import has_uncopied_states


class BlockCopies:
    """Access to the KV caches of some layers, block by block.

    Args:
        layers: layers with their caches bound, [num_blocks, ...] each.
        num_blocks: number of blocks of the caches.

    Attributes:
        block_bytes: bytes of one block in all layers.
        layout: shape and dtype of a block in each of the caches.

    Raises:
        ConfigError: a cache is not divided into blocks.
    """

    def __init__(self, layers: Sequence[CachedLayer], num_blocks: int) -> None:
        tensors = {cache.data_ptr(): cache for layer in layers for cache in layer.kv_caches}
        if any(len(cache) != num_blocks for cache in tensors.values()):
            raise has_uncopied_states()
        self.layout = [(tuple(cache.shape[1:]), str(cache.dtype)) for cache in tensors.values()]
        self._caches = [
            cache.view(torch.uint8).view(len(cache), -1).numpy() for cache in tensors.values()
        ]
        self.block_bytes = sum(cache.shape[1] for cache in self._caches)

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each block, all layers concatenated."""
        return [b"".join([cache[block_id] for cache in self._caches]) for block_id in block_ids]

    def write(self, block_ids: Sequence[int], blocks: Sequence[bytes]) -> bool:
        """Write blocks that `read` has returned.

        Returns False, and writes nothing, if a block has the wrong size.
        """
        if any(len(block) != self.block_bytes for block in blocks):
            return False
        for block_id, block in zip(block_ids, blocks, strict=True):
            data, start = np.frombuffer(block, np.uint8), 0
            for cache in self._caches:
                end = start + cache.shape[1]
                cache[block_id] = data[start:end]
                start = end
        return True
