"""Track the requests of the asynchronous engine that have not ended.

    submit   ->  admission, output processor, core  ->  RequestStream of its consumer
    outputs of a core, refusals, losses, timeouts, aborts  ->  the streams

Everything runs in the event loop of the engine.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from vllm.engine.fan_out import fan_out
from vllm.engine.output.output_processor import OutputProcessor
from vllm.engine.output.stats_recorder import StatsRecorder
from vllm.engine.process.admission import Admission
from vllm.engine.process.wire import CoreOutput, Refused
from vllm.engine.replicas.core_replicas import CoreReplicas
from vllm.errors import CapacityError, RequestError, RequestTimeoutError
from vllm.messages import EngineRequest, FinishReason
from vllm.outputs import AnyRequestOutput

_Output = TypeVar("_Output")


class RequestStream(Generic[_Output]):
    """Queues the outputs of one request, from the engine to the one coroutine that consumes them.

    The queue needs no limit: a request has no more outputs than tokens.

    Attributes:
        is_finished: the last output, or an error, was added.
    """

    __slots__ = ("_error", "_outputs", "_waiter", "is_finished")

    def __init__(self) -> None:
        self.is_finished = False
        self._outputs: deque[_Output] = deque()
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: _Output, *, is_last: bool) -> None:
        """Add an output."""
        self._outputs.append(output)
        self.is_finished = is_last
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, which the consumer gets after the queued outputs."""
        self._error = error
        self.is_finished = True
        self._wake()

    async def get(self) -> _Output:
        """Wait for the next output and return it.

        Raises:
            The error with which the request has failed.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestsInFlight:
    """Manages the streams, timers and samples of the requests that run or wait.

    Args:
        core: the replicas that compute the requests.
        outputs: creates outputs from their tokens.
        recorder: records the statistics of the cores.
        admission: refuses a request if too many wait.
        request_timeout: seconds until a request fails with an error; None: no limit.
    """

    def __init__(
        self,
        core: CoreReplicas,
        outputs: OutputProcessor,
        recorder: StatsRecorder,
        admission: Admission,
        request_timeout: float | None,
    ) -> None:
        self._core = core
        self._outputs = outputs
        self._recorder = recorder
        self._admission = admission
        self._timeout = request_timeout
        self._core_ids = itertools.count()
        self._streams: dict[str, RequestStream[Any]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        """Return the number of requests whose outputs are not complete."""
        return len(self._streams)

    def submit(
        self, text: str | None, request: EngineRequest, replica: int | None = None
    ) -> RequestStream[Any]:
        """Send a request to a core and return its stream.

        Args:
            text: text of the prompt, for the outputs; None: it was given as tokens.
            request: request with the id of the user.
            replica: index of the replica; None: the one with the least load.

        Raises:
            CapacityError: too many requests wait.
            RequestError: a request with this id runs, or there is no such replica.
        """
        # A core id of its own: the user may reuse an id while outputs of its earlier request still
        # arrive.
        own = replace(request, request_id=f"{request.request_id}-{next(self._core_ids)}")
        core_requests = fan_out(own)
        num_tokens = len(request.prompt_token_ids)
        self._admission.check(len(core_requests), num_tokens * len(core_requests))
        core_ids = [core_request.request_id for core_request in core_requests]
        replica = self._core.choose(own, core_ids, replica)
        try:
            self._outputs.add_request(
                request.request_id, text, request.sampling_params, core_requests, replica
            )
        except BaseException:
            self._core.end(core_ids)
            raise
        try:
            self._core.add(replica, own)
        except BaseException:
            self._core.end(core_ids)
            self._outputs.abort([request.request_id])
            raise
        for core_request in core_requests:
            self._admission.add(core_request.request_id, num_tokens)
        stream: RequestStream[Any] = RequestStream()
        self._streams[request.request_id] = stream
        if self._timeout is not None:
            loop = asyncio.get_running_loop()
            self._timers[request.request_id] = loop.call_later(
                self._timeout, self._time_out, request.request_id, self._timeout
            )
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests with finish reason "abort"; unknown ids are ignored."""
        outputs, core_ids = self._outputs.abort(request_ids)
        self._send_aborts(core_ids)
        for output in outputs:
            self._deliver(output)

    def lose_all(self, error: BaseException) -> None:
        """Fail all requests with an error, because no core computes them any more."""
        for request_id in list(self._streams):
            self._lose(request_id, error)

    # ---- messages of the core ---------------------------------------------------------------

    def on_output(self, replica: int, message: CoreOutput) -> None:
        """Pass the outputs of a step to the streams."""
        output = message.output
        if output.scheduled_times:
            self._admission.begin(output.scheduled_times)
        if output.finished:
            self._admission.end(output.finished)
        outputs, stopped = self._outputs.process(output)
        self._recorder.end_message(message.stats, replica)
        if stopped:
            self._send_aborts(stopped)
        for request_output in outputs:
            self._deliver(request_output)

    def on_refused(self, message: Refused) -> None:
        """Fail a request that the core has refused, with the error of the refusal."""
        self._core.end([message.request_id])
        request_id = self._outputs.request_id_of(message.request_id)
        if request_id is None:
            return  # another sample of the same request was refused before
        error: Exception = RequestError(message.message, param=message.param)
        if message.is_capacity:
            error = CapacityError(message.message, status=message.status)
        self._fail(request_id, error)

    def on_lost(self, core_ids: Iterable[str], error: BaseException) -> None:
        """Fail the requests of a core that has died.

        Args:
            core_ids: ids of the requests in the core.
            error: the reason.
        """
        for core_id in core_ids:
            request_id = self._outputs.request_id_of(core_id)
            if request_id is not None:
                self._lose(request_id, error)

    # ---- ends -------------------------------------------------------------------------------

    def _time_out(self, request_id: str, timeout: float) -> None:
        error = RequestTimeoutError(
            f"the request took longer than the {timeout:g} s that this server allows "
            f"(request_timeout)"
        )
        self._fail(request_id, error)

    def _fail(self, request_id: str, error: Exception) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.fail(error)
        self.abort([request_id])

    def _lose(self, request_id: str, error: BaseException) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.fail(error)
        self._forget(request_id)
        _, core_ids = self._outputs.abort([request_id], FinishReason.ERROR)
        self._admission.end(core_ids)

    def _send_aborts(self, core_ids: list[str]) -> None:
        self._admission.end(core_ids)
        self._core.abort(core_ids)

    def _deliver(self, output: AnyRequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if output.finished:
            self._forget(output.request_id)
        if stream is not None and not stream.is_finished:
            stream.put(output, is_last=output.finished)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()
