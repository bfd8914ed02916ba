"""Execute the messages to a rank in order. Independent of how messages are transported."""

from collections.abc import Callable
from typing import Any

from vllm.distributed import RankLayout, Rendezvous
from vllm.errors import CollectiveError, ConfigError, VllmError
from vllm.executor.ranks.rank_wire import (
    CallRank,
    FromRank,
    PrepareRequest,
    RankFailed,
    RecordTokens,
    ReleaseRequests,
    RunStep,
    StartRank,
    StepResult,
    ToRank,
    typed_arguments,
)
from vllm.executor.ranks.worker_call import call_worker, make_worker
from vllm.message_codec import CallError, CallResult, decode_arguments, encode, encode_value
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.plugins import load_general_plugins
from vllm.utils.process.process_memory import keep_for_good
from vllm.worker.interface import StepHandleLike, Worker


class RankServer:
    """One worker, and the step that it runs.

    Args:
        start: the first message.
        send: sends answers; may be called from any thread.
        meet: creates the rendezvous with the other ranks.
        sends_results: whether the engine waits for step results from this rank.
    """

    def __init__(
        self,
        start: StartRank,
        send: Callable[[FromRank], None],
        meet: Callable[[], Rendezvous],
        *,
        sends_results: bool,
    ) -> None:
        load_general_plugins()
        for name, path in start.models.items():
            ModelRegistry.register_model(name, path)
        self._rank = start.rank
        self._send = send
        self._meet = meet
        self._sends_results = sends_results
        self._has_stages = start.config.parallel.pipeline_parallel_size > 1
        self._worker: Worker = make_worker(start.config, start.rank, start.assignment)
        self._last_step: StepHandleLike | None = None

    @property
    def has_step(self) -> bool:
        """Whether a step is in flight."""
        return self._last_step is not None

    @property
    def expects_step(self) -> bool:
        """Whether the next step usually arrives right after the last one. False in a pipeline,
        where a stage waits for other stages, perhaps on the same cores.
        """
        return not self._has_stages

    def handle(self, message: ToRank) -> None:
        """Execute a message."""
        if isinstance(message, RunStep):
            handle = self._worker.execute_model(message.step)
            self.finish_step()  # waits for the step before; at most one other step is in flight
            self._last_step = handle
            if self._has_stages:
                # With stages, do not run ahead: the next step may wait for another stage, while the
                # engine waits for the tokens of this step.
                self.finish_step()
        elif isinstance(message, RecordTokens):
            self._worker.record_tokens(message.tokens)
        elif isinstance(message, CallRank):
            self.finish_step()
            self._send(self._call(message))
        elif isinstance(message, PrepareRequest):
            self._prepare(message)
        elif isinstance(message, ReleaseRequests):
            self.finish_step()
            self._worker.release(message.request_ids)

    def finish_step(self) -> None:
        """Wait for the step in flight, if there is one, and record its tokens."""
        if self._last_step is None:
            return
        output = self._last_step.result()
        self._last_step = None
        if self._sends_results:
            self._send(StepResult(output=output, stats=self._worker.stats()))

    def _prepare(self, message: PrepareRequest) -> None:
        future, call_id = self._worker.prepare(message.request), message.call_id
        if call_id is None:
            return
        if future is None:
            self._send(CallResult(call_id=call_id))
            return
        future.add_done_callback(
            lambda done: self._send(CallResult(call_id=call_id, value=encode(done.result())))
        )

    def _call(self, message: CallRank) -> CallResult:
        args, kwargs = decode_arguments(message.arguments)
        method = message.method
        if not message.is_user:
            # If a call of the engine itself fails, as at the start, the rank exits.
            return CallResult(call_id=message.call_id, value=encode(self._own(method, args)))
        try:
            value = encode_value(
                f"the result of {method}", call_worker(self._worker, method, args, kwargs)
            )
        except Exception as error:  # reported to the caller; the rank continues
            return CallResult(call_id=message.call_id, error=CallError.of(error))
        return CallResult(call_id=message.call_id, value=value)

    def _own(self, method: str, args: list[Any]) -> Any:
        """Execute a call of the start sequence."""
        if method == Worker.join.__name__:
            # Kept open: other ranks may still use the store that it serves.
            self._rendezvous = self._meet()
            return self._worker.join(self._rendezvous)
        if method == Worker.load.__name__:
            return self._worker.load(self._rank)
        result = getattr(self._worker, method)(*typed_arguments(getattr(Worker, method), args))
        if method == Worker.allocate.__name__:
            keep_for_good()
        return result


def failure_of(error: Exception) -> RankFailed:
    """Return the message that reports to the engine the error that ended a rank."""
    if isinstance(error, ConfigError):
        return RankFailed(message=str(error), is_config_error=True)
    # Messages of the engine's own errors need no exception name.
    text = str(error) if isinstance(error, VllmError) else f"{type(error).__name__}: {error}"
    return RankFailed(
        message=text, is_config_error=False, is_of_another=isinstance(error, CollectiveError)
    )


def is_result_rank(start: StartRank) -> bool:
    """Return whether this rank is the first of the ranks that sample."""
    return start.rank == RankLayout.of(start.config.parallel).result_rank
