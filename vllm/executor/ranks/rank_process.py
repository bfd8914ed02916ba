"""Run the process of one rank: `python -m vllm.executor.ranks.rank_process SOCKET ARENA PORT
PARENT`, or a fork of the engine's process.

The process follows the messages of its parent in order, and exits with it: the kernel kills it when
the thread that started it exits, and it exits when the socket is closed.
"""

import os
import select
import socket
import sys
import threading
import time
import traceback
from importlib import import_module
from typing import TYPE_CHECKING

from vllm.executor.ranks.rank_wire import (
    FromRank,
    RankFailed,
    StartRank,
    ToRank,
    decode_to_rank,
    framed,
)
from vllm.logger import init_logger
from vllm.utils.process.blocking_sockets import blocking_socket
from vllm.utils.process.child_process import exit_with_parent, name_process
from vllm.utils.process.frames import FrameReader

if TYPE_CHECKING:
    from vllm.executor.ranks.rank_server import RankServer

logger = init_logger(__name__)

EXIT_CONFIG_ERROR = 2

LOOK_S = 5e-4
"""Seconds after a step in which the process looks for the next one without sleeping; an engine that
generates sends it within this time."""
LONG_STEP_S = 5e-3
"""Seconds. After a shorter step the process sleeps at once, because other processes of the machine
need the time more."""


class RankLoop:
    """Receives the messages of the engine from a socket, and handles them.

    Args:
        connection: socket to the engine.
        arena_fd, port: shared memory and port of the rendezvous; see `Rendezvous.of`.
    """

    def __init__(self, connection: socket.socket, arena_fd: int, port: int) -> None:
        self._connection = connection
        self._reader = FrameReader(connection)
        self._arena_fd, self._port = arena_fd, port
        self._server: RankServer | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Handle messages until the engine closes the connection."""
        while True:
            began = time.perf_counter()
            for kind, data in self._reader.frames():
                self._handle(decode_to_rank(data, kind))
            server = self._server
            if server is not None and server.has_step and not self._has_message():
                server.finish_step()
                if server.expects_step and time.perf_counter() - began > LONG_STEP_S:
                    self._look_for_message()
            if not self._reader.receive():
                return

    def _has_message(self) -> bool:
        return bool(select.select([self._connection], [], [], 0)[0])

    def _look_for_message(self) -> None:
        """Poll for a message for a moment before sleeping. Waking a sleeping process would take the
        engine longer than sending, because a long step has emptied the caches.
        """
        deadline = time.perf_counter() + LOOK_S
        while not self._has_message() and time.perf_counter() < deadline:
            os.sched_yield()

    def _handle(self, message: ToRank) -> None:
        if isinstance(message, StartRank):
            self._server = self._start(message)
            return
        assert self._server is not None, "the first message is StartRank"
        self._server.handle(message)

    def _start(self, start: StartRank) -> "RankServer":
        # Imported here, because torch takes seconds to import.
        from vllm.distributed import Rendezvous
        from vllm.executor.ranks.rank_server import RankServer, is_result_rank

        name_process(f"vllm-rank-{start.rank}")

        def meet() -> Rendezvous:
            return Rendezvous.of(start.config.parallel, start.rank, self._arena_fd, self._port)

        # Without pipeline stages, the engine gets the result from its own rank.
        sends_results = start.config.parallel.pipeline_parallel_size > 1 and is_result_rank(start)
        return RankServer(start, self._send, meet, sends_results=sends_results)

    def _send(self, message: FromRank) -> None:
        with self._lock:  # several threads send
            self._connection.sendall(framed(message))

    def fail(self, failure: RankFailed) -> None:
        """Report to the engine, if it still runs, why this rank exits."""
        try:
            self._send(failure)
        except OSError:
            logger.debug(
                "the engine exited before this rank could report its error: %s", failure.message
            )


def main(socket_fd: int, arena_fd: int, port: int) -> int:
    """Run a rank until its engine exits. Returns the exit code."""
    loop = RankLoop(blocking_socket(socket_fd), arena_fd, port)
    import_module("torch")  # imported now, while the engine reads the model's config
    try:
        loop.run()
    except Exception as error:  # last resort: the engine must be told about any error
        from vllm.executor.ranks.rank_server import failure_of

        failure = failure_of(error)
        if not failure.is_config_error:
            traceback.print_exc()
        loop.fail(failure)
        return EXIT_CONFIG_ERROR if failure.is_config_error else 1
    return 0


if __name__ == "__main__":
    *numbers, parent_id = map(int, sys.argv[1:])
    exit_with_parent(parent_id)
    code = main(*numbers)
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit without cleanup: threads of libraries may still wait for ranks that have exited.
    os._exit(code)
