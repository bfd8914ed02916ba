"""The connector between engines: each keeps blocks in host memory, and sends them over TCP."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.block_peers import BlockPeer, BlockServer
from vllm.distributed.kv_transfer.host_blocks import HostBlocks
from vllm.distributed.kv_transfer.interface import BlockData, KVConnector

_NUM_FETCHES = 4
"""Requests whose blocks are fetched at the same time."""


class TCPConnector(KVConnector):
    """Blocks in host memory, and in that of other engines.

    A request waits, without a step waiting for it, until the blocks of its prompt that other
    engines have are in host memory. Blocks that do not come are computed.

    Raises:
        ConfigError: the address to listen on cannot be used.
    """

    def __init__(self, config: KVTransferConfig) -> None:
        super().__init__(config)
        size = int(config.kv_buffer_size)
        self._host = HostBlocks(size)
        self._namespace = ""
        self._server: BlockServer | None = None
        if config.saves:
            self._server = BlockServer(config.kv_ip, config.kv_port, self._host.get)
        self._peers = [BlockPeer(host, port, size) for host, port in config.peers]
        self._threads = ThreadPoolExecutor(_NUM_FETCHES, "kv-fetch")

    def open(self, namespace: str) -> None:
        """See `KVConnector`."""
        if namespace == self._namespace:
            return
        self._namespace = namespace
        self._host.clear()
        if self._server is not None:
            self._server.namespace = namespace

    def prefetch(self, keys: Sequence[bytes]) -> "Future[None] | None":
        """See `KVConnector`."""
        far = [key for key in keys if key not in self._host]
        if not far or not any(peer.is_asked for peer in self._peers):
            return None
        return self._threads.submit(self._fetch, self._namespace, far)

    def load(self, keys: Sequence[bytes]) -> list[BlockData]:
        """See `KVConnector`."""
        blocks = []
        for key in keys:
            block = self._host.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """See `KVConnector`."""
        return [index for index, key in enumerate(keys) if key not in self._host]

    def save(self, keys: Sequence[bytes], blocks: Sequence[BlockData]) -> None:
        """See `KVConnector`."""
        for key, block in zip(keys, blocks, strict=True):
            self._host.put(key, block)

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `KVConnector`."""
        for key in keys:
            self._host.drop(key)

    def close(self) -> None:
        """See `KVConnector`."""
        if self._server is not None:
            self._server.close()
        self._threads.shutdown(cancel_futures=True)
        self._host.clear()

    def _fetch(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Ask one engine after the other for the blocks that those before it do not have."""
        for peer in self._peers:
            if not keys:
                return
            if not peer.is_asked:
                continue
            found = peer.fetch(namespace, keys, self.config.timeout_s)
            if namespace != self._namespace:
                return  # the weights have changed meanwhile
            for key, block in found:
                self._host.put(key, block)
            keys = keys[len(found) :]
