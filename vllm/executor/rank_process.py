"""The process of one rank: `python -m vllm.executor.rank_process SOCKET PARENT`.

Does what its parent says, in order, and ends with it: the kernel kills it when the thread that
started it ends, and it ends by itself when the socket is closed.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import traceback
from importlib import import_module
from typing import Any

from vllm.errors import ConfigError
from vllm.executor.rank_wire import (
    CallRank,
    FrameReader,
    FromRank,
    PrepareRequest,
    RankFailed,
    RankResult,
    RunStep,
    StartRank,
    decode_to_rank,
    frame,
)
from vllm.executor.worker_call import call_worker, make_worker
from vllm.logger import init_logger
from vllm.message_codec import CallError, decode_arguments, encode, encode_value
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.process_memory import keep_for_good
from vllm.worker.interface import StepHandleLike, Worker

logger = init_logger(__name__)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

EXIT_CONFIG_ERROR = 2


class RankLoop:
    """Handles the messages of the engine.

    Args:
        connection: to the engine.
        store_fd: see `Meeting`.
    """

    def __init__(self, connection: socket.socket, meeting_fds: tuple[int, int]) -> None:
        self._connection = connection
        self._reader = FrameReader(connection)
        self._meeting_fds = meeting_fds
        self._worker: Worker | None = None
        self._start: StartRank | None = None
        self._last_step: StepHandleLike | None = None

    def run(self) -> None:
        """Handle messages until the engine closes the connection."""
        while True:
            for data in self._reader.messages():
                self._handle(decode_to_rank(data))
            if self._last_step is not None and not self._has_message():
                self._finish_step()
            if not self._reader.receive():
                return

    def _has_message(self) -> bool:
        return bool(select.select([self._connection], [], [], 0)[0])

    def _finish_step(self) -> None:
        """Wait for the step in flight and note its tokens. Nobody else asks for its result here."""
        if self._last_step is not None:
            self._last_step.result()
            self._last_step = None

    def _handle(self, message: Any) -> None:
        if isinstance(message, RunStep):
            handle = self._running_worker.execute_model(message.step)
            self._finish_step()  # at most one other is in flight
            self._last_step = handle
        elif isinstance(message, CallRank):
            self._finish_step()
            self._send(self._call(message))
        elif isinstance(message, PrepareRequest):
            self._running_worker.prepare(message.request)
        elif isinstance(message, StartRank):
            for name, place in message.models.items():
                ModelRegistry.register_model(name, place)
            self._start = message
            self._worker = make_worker(message.config, message.rank)

    def _call(self, message: CallRank) -> RankResult:
        args, kwargs = decode_arguments(message.arguments)
        worker, method = self._running_worker, message.method
        if not message.is_user:
            # A failure of the start is the end of the rank.
            return RankResult(call_id=message.call_id, value=encode(self._own(method, args)))
        try:
            value = encode_value(
                f"the result of {method}", call_worker(worker, method, args, kwargs)
            )
        except Exception as error:  # reported to the caller; the rank goes on
            return RankResult(call_id=message.call_id, error=CallError.of(error))
        return RankResult(call_id=message.call_id, value=value)

    def _own(self, method: str, args: list[Any]) -> Any:
        """A call of the start sequence."""
        assert self._start is not None
        if method == "join":
            # Here, as torch takes seconds to import.
            from vllm.distributed import Meeting

            meeting = Meeting.of(self._start.config.parallel, self._start.rank, *self._meeting_fds)
            return self._running_worker.join(meeting)
        if method == "load":
            return self._running_worker.load(self._start.rank)
        result = getattr(self._running_worker, method)(*args)
        if method == "allocate":
            keep_for_good()
        return result

    def _send(self, message: FromRank) -> None:
        self._connection.sendall(frame(encode(message)))

    def fail(self, message: str, *, is_config_error: bool) -> None:
        """Tell the engine, if it is still there, why this rank ends."""
        try:
            self._send(RankFailed(message=message, is_config_error=is_config_error))
        except OSError:
            logger.debug("the engine has ended before rank could report: %s", message)

    @property
    def _running_worker(self) -> Worker:
        assert self._worker is not None, "the first message is StartRank"
        return self._worker


def main(socket_fd: int, store_fd: int, arena_fd: int, parent: int) -> int:
    """Run a rank until its engine ends. Returns the exit code."""
    # The engine decides when to end, also at a Ctrl-C, which a terminal sends to all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(parent)
    loop = RankLoop(socket.socket(fileno=socket_fd), (store_fd, arena_fd))
    import_module("torch")  # while the engine reads its model
    try:
        loop.run()
    except ConfigError as error:
        loop.fail(str(error), is_config_error=True)
        return EXIT_CONFIG_ERROR
    except Exception as error:  # last resort: the engine must be told about any error
        traceback.print_exc()
        loop.fail(f"{type(error).__name__}: {error}", is_config_error=False)
        return 1
    return 0


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, also while it is stopped.

    Args:
        parent: process id of the parent. If it is another one by now, this process ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    code = main(*(int(argument) for argument in sys.argv[1:]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries may still wait for ranks that have ended, and nothing is left to save.
    os._exit(code)
