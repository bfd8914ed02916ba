"""Store blocks in host memory and in a folder."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.block_folder import BlockFolder
from vllm.distributed.kv_transfer.host_blocks import HostBlocks
from vllm.distributed.kv_transfer.interface import BlockData, KVConnector


class TieredConnector(KVConnector):
    """Stores blocks in host memory and, if there is a folder, in files.

    Files are read and written in a thread. If an engine only produces blocks, its requests finish
    when these are written, so that they can be loaded elsewhere.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, config: KVTransferConfig) -> None:
        super().__init__(config)
        self._host = HostBlocks(int(config.kv_buffer_size))
        self._folder: BlockFolder | None = None
        if config.folder is not None:
            self._folder = BlockFolder(config.folder, config.folder_bytes, config.saves)
        self._thread = ThreadPoolExecutor(1, "kv-blocks")
        self._namespace: str | None = None
        self._num_unwritten = 0
        """Bytes that wait to be written."""
        self._lock = threading.Lock()

    def open(self, namespace: str) -> None:
        """Use the blocks of a namespace from now on."""
        if namespace == self._namespace:
            return
        self._namespace = namespace
        if self._folder is not None:
            # The thread opens it after it has finished the reads and writes of the previous
            # namespace.
            self._thread.submit(self._folder.open, namespace).result()
        self._host.clear()

    def prefetch(self, keys: Sequence[bytes]) -> "Future[None] | None":
        """Read blocks from the folder in the background."""
        folder = self._folder
        remote = [key for key in keys if key not in self._host]
        if folder is None or not remote or not folder.has(remote[0]):
            return None
        return self._thread.submit(self._read, remote)

    def load(self, keys: Sequence[bytes]) -> list[BlockData]:
        """Return the blocks with these keys, up to the first missing one."""
        blocks: list[BlockData] = []
        for key in keys:
            block = self._host.get(key)
            if block is None and self._folder is not None:
                block = self._folder.read(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Return the indices of the keys whose blocks should be saved: those missing in the folder,
        or in host memory if there is no folder.
        """
        folder = self._folder
        return [
            index
            for index, key in enumerate(keys)
            if (key not in self._host if folder is None else not folder.has(key))
        ]

    def save(self, keys: Sequence[bytes], blocks: Sequence[BlockData]) -> "Future[None] | None":
        """Store blocks in host memory, and write them to the folder in the background."""
        for key, block in zip(keys, blocks, strict=True):
            self._host.put(key, block)
        num_bytes = sum(len(part) for block in blocks for part in block)
        if self._folder is None:
            return None
        is_full = self._num_unwritten > self.config.kv_buffer_size
        if is_full and self.config.loads:
            return None  # writing is slower than computing, so skip this block
        with self._lock:
            self._num_unwritten += num_bytes
        written = self._thread.submit(self._write, list(keys), list(blocks), num_bytes)
        if self.config.loads:
            return None
        if is_full:
            written.result()
        return written

    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop the blocks with these keys from both tiers."""
        for key in keys:
            self._host.drop(key)
        if self._folder is not None:
            self._thread.submit(self._remove, list(keys)).result()

    def close(self) -> None:
        """Wait for the writes, and drop the blocks in host memory."""
        self._thread.shutdown()
        self._host.clear()

    def _read(self, keys: Sequence[bytes]) -> None:
        assert self._folder is not None
        for key in keys:
            if key in self._host:
                continue  # another request has read it meanwhile
            block = self._folder.read(key)
            if block is None:
                return
            self._host.put(key, block)

    def _write(self, keys: Sequence[bytes], blocks: Sequence[BlockData], num_bytes: int) -> None:
        assert self._folder is not None
        for key, block in zip(keys, blocks, strict=True):
            self._folder.write(key, block)
        with self._lock:
            self._num_unwritten -= num_bytes

    def _remove(self, keys: Sequence[bytes]) -> None:
        assert self._folder is not None
        for key in keys:
            self._folder.remove(key)
