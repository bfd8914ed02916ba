"""Represent cores on other machines in the server: it listens, and the machines connect
(`headless`). Everything happens in one event loop.
"""

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection

import msgspec

from vllm.config import VllmConfig
from vllm.engine.process.core_supervisor import Core
from vllm.engine.process.wire import FromCore, ToCore, decode_from_core, encode
from vllm.engine.replicas.remote_wire import (
    BEGIN,
    ENDED,
    HELLO,
    MESSAGE,
    CoreExited,
    HandshakeRequest,
    RemoteProtocolError,
    StartCore,
    check_kind,
    enable_keepalive,
)
from vllm.errors import ConfigError
from vllm.executor.compared_settings import settings_of_replica
from vllm.logger import init_logger
from vllm.utils.process.frames import FrameError, frame, read_frame_async
from vllm.version import __version__

logger = init_logger(__name__)

_HELLO_BYTES = 1024
_HELLO_S = 10.0
"""Seconds to wait for the first message of a connection."""


class RemoteEngineCore:
    """A core on another machine.

    Args:
        reader, writer: connection to the machine, which is ready to start the core.
    """

    pid: int | None = None

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_lost(self) -> bool:
        """Whether the connection is closed."""
        return self._reader.at_eof() or self._writer.is_closing()

    def configure(self, config: VllmConfig, models: dict[str, str]) -> None:
        """Send the settings on which both machines must agree. The other machine has its own
        config.
        """
        data = msgspec.msgpack.encode(StartCore(settings_of_replica(config)))
        self._loop.call_soon_threadsafe(self._write, BEGIN, data)

    def attach(
        self, on_message: Callable[[FromCore], None], on_death: Callable[[str], None]
    ) -> None:
        """Start to read the messages of the core."""
        self._task = self._loop.create_task(self._read(on_message, on_death))

    def send(self, message: ToCore) -> None:
        """Send a message to the core."""
        self._write(MESSAGE, encode(message))

    def kill(self) -> None:
        """Close the connection, which ends the core."""
        self.close()

    def close(self) -> None:
        """Close the connection. The other machine ends the core when the connection is closed."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._writer.close()

    def _write(self, kind: int, data: bytes) -> None:
        if not self._is_closed:
            self._writer.write(frame(kind, data))

    async def _read(
        self, on_message: Callable[[FromCore], None], on_death: Callable[[str], None]
    ) -> None:
        cause = "the connection to its machine was lost"
        try:
            while True:
                kind, data = await read_frame_async(self._reader)
                if kind == ENDED:
                    cause = msgspec.msgpack.decode(data, type=CoreExited).cause
                    break
                check_kind(kind, MESSAGE)
                on_message(decode_from_core(data))
        except (OSError, EOFError):
            pass  # the cause was reported when the core failed
        except (RemoteProtocolError, FrameError, msgspec.MsgspecError) as error:
            cause = f"its machine has sent a message that cannot be read: {error}"
        if not self._is_closed:
            on_death(cause)


class RemoteEngineCores:
    """Listens for the machines that run some of the replicas.

    Args:
        address, port: address to listen on.
        replicas: indices of these replicas.
    """

    def __init__(self, address: str, port: int, replicas: Collection[int]) -> None:
        self._address, self._port = address, port
        self._replicas = replicas
        self._server: asyncio.Server | None = None
        self._lock = asyncio.Lock()
        self._waiting: dict[int, deque[asyncio.Future[RemoteEngineCore]]] = defaultdict(deque)
        self._offered: dict[int, deque[RemoteEngineCore]] = defaultdict(deque)
        self._is_closed = False

    def wait_for_core(self, replica: int) -> "asyncio.Future[Core]":
        """Return a future for the core on the machine of a replica, done when the machine has
        connected.

        The future has a ConfigError if the address cannot be used.
        """
        return asyncio.ensure_future(self._wait_for_core(replica))

    async def _wait_for_core(self, replica: int) -> Core:
        await self._listen()
        offered = self._offered[replica]
        while offered:
            core = offered.popleft()
            if not core.is_lost:
                return core
            core.close()
        future: asyncio.Future[RemoteEngineCore] = asyncio.get_running_loop().create_future()
        self._waiting[replica].append(future)
        return await future

    def close(self) -> None:
        """Stop listening, and cancel all callers that wait."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for futures in self._waiting.values():
            for future in futures:
                future.cancel()
        for offered in self._offered.values():
            for core in offered:
                core.close()

    async def _listen(self) -> None:
        async with self._lock:
            if self._server is not None or self._is_closed:
                return
            try:
                self._server = await asyncio.start_server(self._accept, self._address, self._port)
            except OSError as error:
                raise ConfigError(
                    f"data_parallel_address={self._address!r} and data_parallel_rpc_port="
                    f"{self._port} cannot be used: {error}. Give an address of this machine and a "
                    f"free port"
                ) from None
            logger.info(
                "listening on %s:%d; waiting for the machines of the replicas %s to connect",
                self._address,
                self._port,
                ", ".join(map(str, sorted(self._replicas))),
            )

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        try:
            enable_keepalive(writer)
            kind, data = await asyncio.wait_for(read_frame_async(reader, _HELLO_BYTES), _HELLO_S)
            hello = self._check(kind, data)
        except (
            RemoteProtocolError,
            FrameError,
            OSError,
            EOFError,
            TimeoutError,
            asyncio.TimeoutError,
        ) as error:
            logger.warning(
                "a connection from %s was refused: %s",
                peer,
                error or ("its first message did not arrive in time"),
            )
            with contextlib.suppress(OSError):
                writer.write(frame(ENDED, msgspec.msgpack.encode(CoreExited(str(error)))))
                writer.close()
            return
        logger.info("the machine of replica %d has connected from %s", hello.replica, peer)
        core = RemoteEngineCore(reader, writer)
        waiting = self._waiting[hello.replica]
        while waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_result(core)
                return
        self._offered[hello.replica].append(core)

    def _check(self, kind: int, data: bytes) -> HandshakeRequest:
        """Check and return the first message of a connection.

        Raises:
            RemoteProtocolError: it is not acceptable.
        """
        check_kind(kind, HELLO)
        try:
            hello = msgspec.msgpack.decode(data, type=HandshakeRequest)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"its first message cannot be read: {error}") from None
        if hello.version != __version__:
            raise RemoteProtocolError(
                f"that machine has version {hello.version} of vllm, and the server has "
                f"{__version__}. Install the same version on both"
            )
        if hello.replica not in self._replicas:
            raise RemoteProtocolError(
                f"replica {hello.replica} does not belong to another machine; accepted: "
                f"{', '.join(map(str, sorted(self._replicas)))}. Check data_parallel_start_rank "
                "and data_parallel_size_local on both machines"
            )
        return hello
