"""Exchange KV blocks between engines over TCP. A connection has one request and its answer.

    request:  REQUEST: magic, namespace, keys of consecutive blocks
answer:   BLOCK (`block_format`) for each key, up to the first one that is missing; then END.
              Or OTHER_NAMESPACE

All are frames (`utils/frames`). Nothing that is sent can run code, and no more is read than was
requested.
"""

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from socketserver import BaseRequestHandler, ThreadingTCPServer

from vllm.distributed.kv_transfer.block_format import MAX_HEAD_BYTES, compose, parse
from vllm.distributed.kv_transfer.host_blocks import HostBlocks
from vllm.distributed.kv_transfer.interface import BlockData
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.utils.process.frames import (
    FrameError,
    frame,
    frame_header,
    read_exactly,
    read_frame,
    read_header,
)

logger = init_logger(__name__)

REQUEST, BLOCK, END, OTHER_NAMESPACE = range(4)
"""Kinds of frames."""

_MAGIC = b"KVPEERS2"
_NAMESPACE_BYTES = 32
_REQUEST = struct.Struct(f"<8s{_NAMESPACE_BYTES}s")
_KEY_BYTES = 32
_MAX_KEYS = 1 << 16
_MAX_REQUEST_BYTES = _REQUEST.size + _MAX_KEYS * _KEY_BYTES

_POLL_S = 0.05
"""Interval at which the server checks whether it has to stop. `close` waits for this check."""
_SERVER_TIMEOUT_S = 30.0
"""Seconds to wait for the request of a peer, which may be slow or gone, and for each part of the
answer to be sent."""
_MAX_CONNECTIONS = 64
"""Maximum number of connections at the same time. Further ones are closed; the other engine
computes its prompts then."""
PAUSE_S = 5.0
"""A peer that failed is not asked for this time, so that requests do not wait for it."""


BlocksOf = Callable[[str], HostBlocks | None]


class PeerError(Exception):
    """A peer does not send what was requested; str() says why."""


class BlockServer:
    """Sends blocks to other engines, in threads.

    Args:
        host, port: address to listen on.
        blocks_of: returns the blocks of a namespace, or None if this engine does not use the
            namespace; called from any thread.

    Attributes:
        port: port on which it listens, even if 0 was requested.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, host: str, port: int, blocks_of: BlocksOf) -> None:
        try:
            self._server = _Server((host, port), blocks_of)
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_config: cannot listen on {host}:{port}: {error.strerror or error}. "
                f"Set kv_ip to an address of this machine, and kv_port to a free port"
            ) from None
        self.port: int = self._server.server_address[1]
        logger.info("serving KV blocks to other engines at %s:%d", host, self.port)
        threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="kv-block-server", daemon=True
        ).start()

    def close(self) -> None:
        """Stop listening. Answers in flight are cut off when the process exits."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 2 * _MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], blocks_of: BlocksOf) -> None:
        self.blocks_of = blocks_of
        self.free_connections = threading.Semaphore(_MAX_CONNECTIONS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Answer)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log an error in the connection of a peer that is gone, too slow, or not a peer. Only this
        connection is dropped.
        """
        logger.debug(
            "the connection from %s, which reads KV blocks of this engine, failed",
            client_address,
            exc_info=True,
        )


class _Answer(BaseRequestHandler):
    request: socket.socket
    server: _Server

    def handle(self) -> None:
        if not self.server.free_connections.acquire(blocking=False):
            return
        try:
            self._answer()
        finally:
            self.server.free_connections.release()

    def _answer(self) -> None:
        left_s = _countdown(_SERVER_TIMEOUT_S, time.monotonic)
        kind, data = read_frame(receiver(self.request, left_s), _MAX_REQUEST_BYTES)
        if kind != REQUEST or len(data) < _REQUEST.size:
            return
        magic, name = _REQUEST.unpack_from(data)
        if magic != _MAGIC:
            return
        keys = data[_REQUEST.size :]
        self.request.settimeout(_SERVER_TIMEOUT_S)
        kept = self.server.blocks_of(name.rstrip(b"\0").decode(errors="replace"))
        if kept is None:
            self.request.sendall(frame(OTHER_NAMESPACE, b""))
            return
        blocks = []
        for start in range(0, len(keys), _KEY_BYTES):
            key = keys[start : start + _KEY_BYTES]
            block = kept.get(key)
            if block is None:
                break
            blocks.append((key, block))
        for key, block in blocks:
            parts = compose(key, block)
            self.request.sendall(frame_header(BLOCK, sum(map(len, parts))))
            for part in parts:
                self.request.sendall(part)
        self.request.sendall(frame(END, b""))


class BlockPeer:
    """Another engine, from which blocks are requested. Any thread may use it.

    Args:
        host, port: address on which the engine listens.
        max_bytes: limit of bytes that are read for one request; further blocks are not read.
        clock: returns seconds, as `time.monotonic`.
    """

    def __init__(
        self, host: str, port: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = (host, port)
        self._max_bytes = max_bytes
        self._clock = clock
        self._paused_until = float("-inf")
        self._reason: str | None = None
        """Reason why it failed when it was last asked."""

    @property
    def is_asked(self) -> bool:
        """Whether the peer is used now. It is not used for a while after a failure."""
        return self._clock() >= self._paused_until

    def fetch(
        self,
        namespace: str,
        keys: Sequence[bytes],
        timeout_s: float,
        block_bytes: int | None = None,
    ) -> list[tuple[bytes, BlockData]]:
        """Request consecutive blocks, and return the blocks that arrived before anything failed.
        Never raises.

        Args:
            namespace: namespace of the blocks.
            keys: keys of the blocks.
            timeout_s: seconds for the whole request.
            block_bytes: size of a block; larger ones are not received. None: not known.
        """
        found: list[tuple[bytes, BlockData]] = []
        try:
            left_s = _countdown(timeout_s, self._clock)
            most = self._max_bytes if block_bytes is None else block_bytes + MAX_HEAD_BYTES
            self._fetch(namespace, keys[:_MAX_KEYS], left_s, most, found)
        except (OSError, EOFError, FrameError, PeerError) as error:
            self._fail(f"{type(error).__name__}" if not str(error) else str(error))
        else:
            self._recover()
        return found

    def _fetch(
        self,
        namespace: str,
        keys: Sequence[bytes],
        left_s: Callable[[], float],
        most_bytes: int,
        found: list[tuple[bytes, BlockData]],
    ) -> None:
        with socket.create_connection(self._address, left_s()) as connection:
            connection.sendall(
                frame(REQUEST, _REQUEST.pack(_MAGIC, _name(namespace)) + b"".join(keys))
            )
            read = receiver(connection, left_s)
            num_bytes = 0
            for key in keys:
                kind, size = read_header(read, sys.maxsize)
                if kind == END:
                    return
                if kind == OTHER_NAMESPACE:
                    raise PeerError(
                        "its model, weights, or layout of the KV cache (dtype, block_size, "
                        "tensor_parallel_size) differ from this engine's"
                    )
                if kind != BLOCK:
                    raise PeerError("it is not an engine of this version with a TCPConnector")
                num_bytes += size
                if num_bytes > self._max_bytes:
                    return
                if size > most_bytes:
                    raise PeerError("it sent a block of an unexpected size")
                block = parse(key, read_exactly(read, size))
                if block is None:
                    raise PeerError("it sent a damaged block")
                found.append((key, block))

    def _fail(self, reason: str) -> None:
        self._paused_until = self._clock() + PAUSE_S
        if reason != self._reason:
            logger.warning(
                "no KV blocks from the engine at %s:%d: %s. This engine computes the prompts "
                "itself until the other engine answers again",
                *self._address,
                reason,
            )
        self._reason = reason

    def _recover(self) -> None:
        if self._reason is not None:
            logger.info("KV blocks from the engine at %s:%d are available again", *self._address)
        self._reason = None


def _name(namespace: str) -> bytes:
    return namespace.encode().ljust(_NAMESPACE_BYTES, b"\0")


def _countdown(seconds: float, clock: Callable[[], float]) -> Callable[[], float]:
    """Return a function that returns the seconds left from now on, and raises TimeoutError when
    none are left.
    """
    deadline = clock() + seconds

    def left_s() -> float:
        left = deadline - clock()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    return left_s


def receiver(connection: socket.socket, left_s: Callable[[], float]) -> Callable[[int], bytes]:
    """Return a function that reads at most the requested number of bytes.

    Args:
        connection: the socket.
        left_s: returns the seconds until the deadline before each read; raises after the deadline.
    """

    def read(size: int) -> bytes:
        connection.settimeout(left_s())
        return connection.recv(size)

    return read
