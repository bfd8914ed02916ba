"""Run replicas of a server on another machine: `vllm serve --headless`.

Each replica has a connection to the server. The server tells it when to start a core; afterwards
messages are forwarded unchanged between the server and the core. When the connection closes, the
core is ended and a new connection is made, because the server or the core may be restarted.
"""

import asyncio
import contextlib
import signal

import msgspec

from vllm.config import VllmConfig
from vllm.engine.process.core_client import CoreClient
from vllm.engine.process.wire import CoreFailed, encode
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
from vllm.engine.resolve.replicas import replica_configs
from vllm.executor.compared_settings import difference, settings_of_replica
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.process.frames import FrameError, frame, read_frame_async

logger = init_logger(__name__)

_PAUSE_S = 1.0
"""Seconds between two attempts to reach the server."""
_ATTEMPTS_PER_LINE = 30


class HeadlessReplicas:
    """Runs the replicas of this machine.

    Args:
        config: config of the engine.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._cores: set[CoreClient] = set()

    async def run(self) -> None:
        """Run the replicas until the task is cancelled."""
        configs = await asyncio.to_thread(replica_configs, self._config)
        try:
            await asyncio.gather(*(self._run_replica(config) for config in configs))
        finally:
            for core in self._cores:
                core.close()

    async def _run_replica(self, config: VllmConfig) -> None:
        parallel = config.parallel
        num_failed = 0
        while True:
            try:
                reader, writer = await asyncio.open_connection(
                    parallel.data_parallel_address, parallel.data_parallel_rpc_port
                )
            except OSError as error:
                if num_failed % _ATTEMPTS_PER_LINE == 0:
                    logger.info(
                        "replica %d is waiting for the server at %s:%d (%s)",
                        parallel.data_parallel_rank,
                        parallel.data_parallel_address,
                        parallel.data_parallel_rpc_port,
                        error,
                    )
                num_failed += 1
            else:
                num_failed = 0
                await self._serve(config, reader, writer)
            await asyncio.sleep(_PAUSE_S)

    async def _serve(
        self, config: VllmConfig, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Handle one connection, from the first message to its end."""
        replica = config.parallel.data_parallel_rank
        core: CoreClient | None = None
        try:
            enable_keepalive(writer)
            writer.write(frame(HELLO, msgspec.msgpack.encode(HandshakeRequest(replica))))
            core = await self._start(config, reader, writer)
            if core is not None:
                await self._pass_on(core, reader)
        except (OSError, EOFError):
            logger.info("replica %d: the server has closed the connection", replica)
        except (RemoteProtocolError, FrameError, msgspec.MsgspecError) as error:
            logger.error(
                "replica %d: the server has sent a message that cannot be used: %s", replica, error
            )
        finally:
            if core is not None:
                self._cores.discard(core)
                await asyncio.to_thread(core.close)
            writer.close()

    async def _start(
        self, config: VllmConfig, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> CoreClient | None:
        """Start the core when the server asks for it; None if it cannot be one of the server's
        replicas.

        Raises:
            RemoteProtocolError: the server refuses this machine.
        """
        kind, data = await read_frame_async(reader)
        if kind == ENDED:
            raise RemoteProtocolError(msgspec.msgpack.decode(data, type=CoreExited).cause)
        check_kind(kind, BEGIN)
        replica = config.parallel.data_parallel_rank
        differs = difference(
            settings_of_replica(config), msgspec.msgpack.decode(data, type=StartCore).settings
        )
        if differs is not None:
            text = (
                f"replica {replica} differs from the server: {differs.name} is {differs.ours} on "
                f"this machine and {differs.theirs} on the machine of the server. Start all "
                "machines with the same version and the same flags"
            )
            logger.error("%s", text)
            failed = CoreFailed(message=text, is_config_error=True)
            writer.write(frame(MESSAGE, encode(failed)))
            writer.write(
                frame(ENDED, msgspec.msgpack.encode(CoreExited("it differs from the server")))
            )
            await writer.drain()
            return None
        core = await asyncio.to_thread(CoreClient)
        self._cores.add(core)
        logger.info("replica %d runs as process %d", replica, core.pid)

        def end(cause: str) -> None:
            logger.error("replica %d: its process has exited (%s)", replica, cause)
            writer.write(frame(ENDED, msgspec.msgpack.encode(CoreExited(cause))))

        core.attach_raw(lambda message: writer.write(frame(MESSAGE, message)), end)
        await asyncio.to_thread(core.configure, config, ModelRegistry.plugins())
        return core

    async def _pass_on(self, core: CoreClient, reader: asyncio.StreamReader) -> None:
        while True:
            kind, data = await read_frame_async(reader)
            check_kind(kind, MESSAGE)
            core.send_raw(data)


def run_host(config: VllmConfig) -> int:
    """Run the replicas of this machine until SIGINT or SIGTERM. Returns the exit code."""

    async def run() -> None:
        task = asyncio.ensure_future(HeadlessReplicas(config).run())
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    return 0
