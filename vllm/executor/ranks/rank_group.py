"""Start, call, watch and end the processes of all ranks except rank 0.

One thread watches the processes as long as they run. It also starts them, because the kernel kills
a process when the *thread* that started it exits. Forks are started by the main thread, before
there is any other thread. If a rank exits, it is noticed at once and all other ranks are ended,
because the engine cannot continue without it.
"""

import contextlib
import itertools
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import msgspec

from vllm.config import VllmConfig
from vllm.distributed import Rendezvous, ranks_text
from vllm.errors import ConfigError, VllmError
from vllm.executor.ranks.child_rank import END_TIMEOUT_S, ChildRank
from vllm.executor.ranks.rank_wire import (
    CallRank,
    FromRank,
    PrepareRequest,
    RankFailed,
    StartRank,
    StepResult,
    ToRank,
    decode_from_rank,
    framed,
)
from vllm.logger import init_logger
from vllm.message_codec import CallResult, decode_value, encode_arguments
from vllm.messages import EngineRequest, ModelRunnerOutput
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.clean_up import on_failure
from vllm.utils.process.frames import FrameError

logger = init_logger(__name__)

_NOTICE_TIMEOUT_S = 0.5
"""Maximum number of seconds from the end of a connection between two ranks to the end of the
process that has closed it."""


class RankError(VllmError, RuntimeError):
    """A rank has failed, so the engine has to stop."""


def warn_of_wait(
    logger: logging.Logger, method: str, ranks: Sequence[int], waited_s: float
) -> None:
    """Log a warning with the ranks for which a call waits."""
    text = "%s has not answered %s for another %.0f s; still waiting"
    logger.warning(text, ranks_text(ranks), method, waited_s)


def _decoded(answer: "Future[bytes]") -> "Future[str | None]":
    decoded: Future[str | None] = Future()

    def decode(future: "Future[bytes]") -> None:
        if (error := future.exception()) is not None:
            decoded.set_exception(error)
        else:
            decoded.set_result(decode_value(future.result()))

    answer.add_done_callback(decode)
    return decoded


class RankGroup:
    """All ranks of an engine except rank 0.

    Args:
        config: config of the engine.
        rendezvous: rendezvous of rank 0; the processes inherit its memory.
        on_failure: called once, in another thread, when a rank fails.
        are_copies: fork the processes from this one (allowed if `can_fork`).

    Attributes:
        failure_fd: file descriptor that becomes readable when a rank fails.
    """

    def __init__(
        self,
        config: VllmConfig,
        rendezvous: Rendezvous,
        on_failure: Callable[[], None],
        *,
        are_copies: bool = False,
    ) -> None:
        self._config = config
        self._rendezvous = rendezvous
        self._on_failure = on_failure
        self._ranks: list[ChildRank] = []
        self._futures: dict[tuple[int, int], Future[bytes]] = {}
        self._steps: dict[int, Future[ModelRunnerOutput]] = {}
        self._call_ids = itertools.count()
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._has_failed = threading.Event()
        self._is_closing = False
        self.failure_fd, self._failure_end = os.pipe()
        self._wake_fd, self._wake_end = os.pipe()
        if are_copies:
            try:
                self._start(are_copies=True)
            except OSError as error:  # some systems refuse copies of large processes
                logger.warning(
                    "cannot fork the workers (%s): starting new Python processes instead, which "
                    "takes about a second longer",
                    error,
                )
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._watch, args=(started,), name="ranks", daemon=True
        )
        self._thread.start()
        started.result()
        models = ModelRegistry.plugins()
        for each in self._ranks:
            self._send(each, StartRank(config=config, rank=each.rank, models=models))

    # ---- for the engine -------------------------------------------------------------------

    def broadcast(self, message: ToRank, ranks: Container[int] | None = None) -> None:
        """Send a message to ranks. It is encoded once.

        Args:
            message: message to send.
            ranks: ranks that get it; None: all.

        Raises:
            RankError: a rank has failed, or does not accept messages.
        """
        self.check()
        data = framed(message)
        for each in self._ranks:
            if ranks is None or each.rank in ranks:
                self._send_bytes(each, data)

    def expect_step(self, step_id: int) -> "Future[ModelRunnerOutput]":
        """Return a future for the result of a step that the last pipeline stage will send. Call
        this before the step is broadcast.
        """
        future: Future[ModelRunnerOutput] = Future()
        with self._lock:
            self._steps[step_id] = future
        return future

    def call(
        self, method: str, args: Sequence[Any], kwargs: Any = None, *, is_user: bool = False
    ) -> "list[Future[bytes]]":
        """Call a method of the worker of every rank.

        Returns:
            Futures by rank; their results are encoded values.

        Raises:
            RequestError: the arguments cannot be sent.
            RankError: a rank has failed.
        """
        arguments = encode_arguments(args, kwargs or {})
        call_id, futures = self._expect_answers()
        message = CallRank(call_id=call_id, method=method, arguments=arguments, is_user=is_user)
        self.broadcast(message)
        return futures

    def prepare(self, request: EngineRequest) -> "list[Future[str | None]]":
        """Let every rank load in the background what a request needs.

        Returns:
            Futures by rank. The result is None when it is loaded, or the reason why it cannot be.

        Raises:
            RankError: a rank has failed.
        """
        call_id, answers = self._expect_answers()
        self.broadcast(PrepareRequest(request=request, call_id=call_id))
        return [_decoded(answer) for answer in answers]

    def _expect_answers(self) -> "tuple[int, list[Future[bytes]]]":
        """Return the id of a new call, and a future for the answer of each rank."""
        call_id = next(self._call_ids)
        with self._lock:
            futures: dict[tuple[int, int], Future[bytes]] = {
                (each.rank, call_id): Future() for each in self._ranks
            }
            self._futures.update(futures)
        return call_id, list(futures.values())

    def results(
        self,
        method: str,
        calls: "Sequence[Future[bytes]]",
        timeout: float | None = None,
        started: float | None = None,
    ) -> list[bytes]:
        """Wait for the results of a call.

        Without a timeout, a rank may work as long as it needs, but its process may not be stopped
        for longer than an exchange may take.

        Args:
            method: name of the called method, for messages.
            calls: futures that `call` returned.
            timeout: seconds; None: no limit.
            started: time (`time.monotonic`) from which the timeout counts; None: now.

        Raises:
            TimeoutError: after `timeout`.
            RankError: a rank has failed, or is stopped.
        """
        look_s = self._rendezvous.timeout_s
        started = time.monotonic() if started is None else started
        deadline = None if timeout is None else started + timeout
        while True:
            left_s = look_s if deadline is None else max(0.0, deadline - time.monotonic())
            _, waiting = wait(calls, left_s, FIRST_EXCEPTION)
            if not waiting or any(each.done() and each.exception() for each in calls):
                return [each.result() for each in calls if each.done()]
            late = [each for each, call in zip(self._ranks, calls, strict=True) if call in waiting]
            ranks = [each.rank for each in late]
            if deadline is not None:
                text = f"{ranks_text(ranks)} has not answered {method} within {timeout} s"
                raise TimeoutError(text)
            if stopped := [each.name for each in late if each.is_stopped]:
                raise RankError(
                    f"{', '.join(stopped)} is stopped (SIGSTOP), and did not answer {method} "
                    f"within {look_s} s. Continue it with `kill -CONT PID`, or restart the engine"
                )
            warn_of_wait(logger, method, ranks, look_s)

    def check(self) -> None:
        """Raise the error of the first rank that failed, if there is one."""
        if self._failure is not None:
            raise self._failure

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise after rank 0 has failed, and end all ranks.

        This is the failure of another rank, if there is one, because it is the cause. Otherwise it
        is the given error, with the names of stopped ranks.
        """
        # Rank 0 may notice a broken connection before the exit of the other rank is noticed.
        if not self._has_failed.wait(1.0):
            error = self._with_stopped(error)
            # A message and not the error itself, whose traceback references the engine.
            self.end(RankError(f"rank 0 failed: {error!r}"))
            return error
        assert self._failure is not None
        return self._failure

    def _with_stopped(self, error: Exception) -> Exception:
        """Add to an error the names of ranks whose processes are stopped, because they may have
        caused it.
        """
        stopped = [each.name for each in self._ranks if each.is_stopped]
        return (
            RankError(f"{', '.join(stopped)} is stopped (SIGSTOP): {error}") if stopped else error
        )

    def end(self, failure: Exception) -> None:
        """End all ranks at once, and fail everything that waits for a rank.

        Args:
            failure: the cause. Does nothing if there was a failure before.
        """
        with self._lock:
            if self._failure is not None or self._is_closing:
                return
            self._failure = failure
            waiting: list[Future[Any]] = [*self._futures.values(), *self._steps.values()]
            self._futures, self._steps = {}, {}
        self._has_failed.set()
        for each in self._ranks:
            each.process.kill()
        self._on_failure()
        for future in waiting:
            future.set_exception(failure)
        os.write(self._failure_end, b"x")

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [each.process.pid for each in self._ranks]

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        os.write(self._wake_end, b"x")
        self._thread.join()
        for descriptor in (self._wake_fd, self._wake_end, self.failure_fd, self._failure_end):
            os.close(descriptor)

    # ---- the thread -----------------------------------------------------------------------

    def _start(self, *, are_copies: bool) -> None:
        with on_failure(lambda: self._end_processes(0), self._ranks.clear):
            for rank in range(1, self._rendezvous.layout.world_size):
                self._ranks.append(ChildRank(rank, self._rendezvous, is_copy=are_copies))

    def _watch(self, started: "Future[None]") -> None:
        try:
            if not self._ranks:
                self._start(are_copies=False)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        connections = {each.connection.fileno(): each for each in self._ranks}
        while True:
            readable, _, _ = select.select([self._wake_fd, *connections], [], [])
            if self._is_closing:
                self._end_processes(0 if self._failure else END_TIMEOUT_S)
                return
            for descriptor in readable:
                if descriptor in connections and not self._read(connections[descriptor]):
                    del connections[descriptor]

    def _read(self, each: ChildRank) -> bool:
        """Read the messages of a rank. Returns False, and handles the failure, if its connection is
        closed.
        """
        is_open = self._receive(each)
        if not is_open:
            self._fail(each)
        return is_open

    def _receive(self, each: ChildRank) -> bool:
        """Receive messages from a rank. Returns False if its connection is closed."""
        try:
            is_open = each.reader.receive()
        except OSError:  # the process exited without reading our last messages
            is_open = False
        try:
            for _, data in each.reader.frames():
                self._take(each, decode_from_rank(data))
        except (FrameError, msgspec.MsgspecError) as error:
            text = f"its messages cannot be read: {error}"
            each.last_words = RankFailed(message=text, is_config_error=False)
            return False
        return is_open

    def _take(self, each: ChildRank, message: FromRank) -> None:
        if isinstance(message, CallResult):
            self._finish(each.rank, message)
        elif isinstance(message, StepResult):
            with self._lock:
                step = self._steps.pop(message.output.step_id, None)
            if step is not None:
                step.set_result(message.output)
        else:
            each.last_words = message

    def _finish(self, rank: int, message: CallResult) -> None:
        with self._lock:
            future = self._futures.pop((rank, message.call_id), None)
        if future is None:  # `end` has already taken the future
            return
        if message.error is not None:
            future.set_exception(message.error.exception())
        else:
            future.set_result(message.value)

    def _fail(self, each: ChildRank) -> None:
        """Handle the exit of a rank: end the other ranks, and fail everything that waits for
        one.
        """
        if self._failure is not None:
            return
        each = self._first_to_fail(each)
        how, words = each.end(), each.last_words
        failure: Exception
        if words is None:
            failure = RankError(f"{each.name} {how}")
        elif words.is_config_error:
            failure = ConfigError(f"rank {each.rank}: {words.message}")
        else:
            failure = self._with_stopped(RankError(f"{each.name} failed: {words.message}"))
        if self._failure is None:
            logger.error("%s; the engine stops", failure)
        self.end(failure)

    def _first_to_fail(self, each: ChildRank) -> ChildRank:
        """Return the rank that probably failed first: one that exited without a message, if the
        given rank only waited for it.
        """
        if each.last_words is None or not each.last_words.is_of_another:
            return each
        deadline = time.monotonic() + _NOTICE_TIMEOUT_S
        while time.monotonic() < deadline:
            for other in self._ranks:
                if other.process.poll() is None:
                    continue
                while self._receive(other):
                    pass
                if other.last_words is None:
                    return other
            time.sleep(0.01)
        return each

    def _end_processes(self, patience_s: float) -> None:
        """Close the connections, so that the processes exit; kill the ones that do not exit in
        time.
        """
        for each in self._ranks:
            with contextlib.suppress(OSError):
                each.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + patience_s
        for each in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                left_s = 0.0 if each.is_stopped else deadline - time.monotonic()
                each.process.wait(max(0.0, left_s))
            each.process.kill()
        for each in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(END_TIMEOUT_S)
            each.connection.close()

    def _send(self, each: ChildRank, message: ToRank) -> None:
        self._send_bytes(each, framed(message))

    def _send_bytes(self, each: ChildRank, data: bytes | bytearray) -> None:
        try:
            each.connection.sendall(data)
        except BlockingIOError as error:
            reason = f"{each.name} has not read a message for {self._rendezvous.timeout_s} s"
            raise RankError(reason) from error
        except OSError as error:
            raise self.explain(error) from error
