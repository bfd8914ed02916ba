"""Store KV blocks in host memory."""

import threading
from collections import OrderedDict

from vllm.distributed.kv_transfer.interface import BlockData


class HostBlocks:
    """Stores blocks by key, up to a total size; the least recently used ones are dropped. Any
    thread may use it.

    Args:
        max_bytes: limit for all blocks together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, BlockData] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._num_bytes

    def get(self, key: bytes) -> BlockData | None:
        """Return the block with this key, and mark it as most recently used; None if it is
        missing.
        """
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def put(self, key: bytes, block: BlockData) -> None:
        """Store a block, which replaces a block with the same key."""
        with self._lock:
            self._drop(key)
            self._blocks[key] = block
            self._num_bytes += _size(block)
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._blocks)))

    def drop(self, key: bytes) -> None:
        """Drop a block; an unknown key is ignored."""
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()
            self._num_bytes = 0

    def _drop(self, key: bytes) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._num_bytes -= _size(block)


def _size(block: BlockData) -> int:
    return sum(map(len, block))
