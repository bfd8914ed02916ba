"""Connect engines: each stores blocks in host memory, and sends them to others over TCP."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.block_peers import BlockPeer, BlockServer
from vllm.distributed.kv_transfer.host_blocks import HostBlocks
from vllm.distributed.kv_transfer.interface import BlockData, KVConnector

_NUM_FETCHES = 4
"""Requests whose blocks are fetched at the same time."""


class TCPConnector(KVConnector):
    """Stores blocks in host memory, and reads blocks from the host memory of other engines.

    A request waits, without delaying steps, until the blocks of its prompt that other engines have
    are in host memory. Blocks that do not arrive are computed.

    Raises:
        ConfigError: the address to listen on cannot be used.
    """

    def __init__(self, config: KVTransferConfig) -> None:
        super().__init__(config)
        self._max_bytes = int(config.kv_buffer_size)
        self._host = HostBlocks(self._max_bytes)
        self._in_use = "", self._host
        """The namespace and its blocks; replaced at once, as other threads read it."""
        self._server: BlockServer | None = None
        if config.saves:
            self._server = BlockServer(config.kv_ip, config.kv_port, self._blocks_of)
        self._peers = [BlockPeer(host, port, self._max_bytes) for host, port in config.peers]
        self._threads = ThreadPoolExecutor(_NUM_FETCHES, "kv-fetch")
        self._fetches: dict[tuple[bytes, bytes], Future[None]] = {}
        """Fetches in progress, by their first and their last key."""

    def open(self, namespace: str) -> None:
        """Use the blocks of a namespace from now on."""
        if namespace == self._in_use[0]:
            return
        # New objects: fetches of the previous namespace that still run write into the old ones.
        self._host = HostBlocks(self._max_bytes)
        self._fetches = {}
        self._in_use = namespace, self._host

    def prefetch(self, keys: Sequence[bytes]) -> "Future[None] | None":
        """Fetch blocks from other engines in the background."""
        remote = [key for key in keys if key not in self._host]
        if not remote or not any(peer.is_asked for peer in self._peers):
            return None
        span, fetches = (remote[0], remote[-1]), self._fetches
        future = fetches.get(span)
        if future is None:
            future = fetches[span] = self._threads.submit(self._fetch, *self._in_use, remote)
            future.add_done_callback(lambda _: fetches.pop(span, None))
        return future

    def load(self, keys: Sequence[bytes]) -> list[BlockData]:
        """Return the blocks with these keys that are in host memory, up to the first missing
        one."""
        blocks = []
        for key in keys:
            block = self._host.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Return the indices of the keys whose blocks are not in host memory."""
        return [index for index, key in enumerate(keys) if key not in self._host]

    def save(self, keys: Sequence[bytes], blocks: Sequence[BlockData]) -> "Future[None] | None":
        """Store blocks in host memory."""
        for key, block in zip(keys, blocks, strict=True):
            self._host.put(key, block)
        return None

    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop the blocks with these keys."""
        for key in keys:
            self._host.drop(key)

    def close(self) -> None:
        """Stop the server and the threads, and drop all blocks."""
        if self._server is not None:
            self._server.close()
        self._threads.shutdown(cancel_futures=True)
        self._host.clear()

    def _blocks_of(self, namespace: str) -> HostBlocks | None:
        """Return the blocks of this namespace; None if it is not the namespace in use."""
        name, blocks = self._in_use
        return blocks if namespace == name else None

    def _fetch(self, namespace: str, blocks: HostBlocks, keys: Sequence[bytes]) -> None:
        """Ask one engine after another for the blocks that the previous ones did not have."""
        keys = [key for key in keys if key not in blocks]  # some may have arrived meanwhile
        for peer in self._peers:
            if not keys:
                return
            if not peer.is_asked:
                continue
            found = peer.fetch(namespace, keys, self.config.timeout_s, self.block_bytes)
            for key, block in found:
                blocks.put(key, block)
            keys = keys[len(found) :]
