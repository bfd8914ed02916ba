"""Define the messages between the engine's process and the processes of other ranks.

They are msgpack, or plain arrays, over a socket pair. No pickle, no code.

engine -> rank     StartRank, then RunStep, RecordTokens, CallRank, PrepareRequest,
                   ReleaseRequests
rank -> engine     CallResult for each CallRank and PrepareRequest, StepResult from the last stage
                   of a pipeline, RankFailed at the end
"""

import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from vllm.config import VllmConfig
from vllm.message_codec import CallResult, Message, decode_array, decoder, encode_into
from vllm.messages import EngineRequest, ModelRunnerOutput, RunnerStats, SchedulerOutput, StepTokens
from vllm.utils.process.frames import begin_frame, end_frame, frame_header

MESSAGE, NUMBERS = 0, 1
"""Kinds of frames: msgpack, or the numbers of a step."""
_NUMBERS = struct.Struct("<iiiq")
"""Before the arrays of a step: `num_decodes`, number of rows and of `block_rows`, and `step_id`.
The arrays are int32 in the byte order of the machine."""
_IN_NUMBERS = (
    *("step_id", "num_decodes", "rows", "num_computed_tokens", "num_scheduled_tokens"),
    *("block_rows", "block_ids"),
)
_NOT_IN_NUMBERS = tuple(f for f in SchedulerOutput.__struct_fields__ if f not in _IN_NUMBERS)
"""Fields of a step that only msgpack carries, so also every field that a step gets later."""


class RankAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a rank if the ranks are on several machines."""

    index: int
    """Index of the rank among the ranks of the machine."""
    count: int
    """Number of ranks of the machine."""
    has_own_devices: bool
    """Whether the rank sees only its own devices, not the devices of all ranks of the machine."""
    has_whole_stage: bool = False
    """Whether all ranks that share layers with it are on the same machine."""


class StartRank(Message, frozen=True, kw_only=True):
    """The first message: create the worker."""

    config: VllmConfig
    rank: int
    models: dict[str, str]
    """Architectures that plug-ins have registered: name -> "module:Class"."""
    assignment: RankAssignment | None = None
    """Assignment of the rank on its machine; None: all ranks are on one machine."""


class RunStep(Message, frozen=True, kw_only=True):
    """Run a step.

    There is no answer, except a StepResult from the first rank of the last pipeline stage. Without
    a pipeline the engine uses the result of rank 0.
    """

    step: SchedulerOutput


class RecordTokens(Message, frozen=True, kw_only=True):
    """Record the tokens that the last stage sampled. Sent to all other stages before the same
    requests run again.
    """

    tokens: StepTokens


class CallRank(Message, frozen=True, kw_only=True):
    """Call a method of the worker, after the steps that were sent before."""

    call_id: int
    method: str
    arguments: bytes
    """Arguments of the call, from `encode_arguments`."""
    is_user: bool
    """The caller is not the engine: the method and the arguments are checked first."""


class PrepareRequest(Message, frozen=True, kw_only=True):
    """Load in the background what a request needs."""

    request: EngineRequest
    call_id: int | None = None
    """Id of the `CallResult` that reports when the grammar is loaded, or why it cannot be loaded;
    None: there is no answer."""


class ReleaseRequests(Message, frozen=True, kw_only=True):
    """Release what finished requests needed."""

    request_ids: list[str]


class StepResult(Message, frozen=True, kw_only=True):
    """The result of a step."""

    output: ModelRunnerOutput
    stats: RunnerStats
    """Counters of the rank that sends it."""


class RankFailed(Message, frozen=True, kw_only=True):
    """The rank has failed and ends."""

    message: str
    is_config_error: bool
    """The settings are wrong, so another start will not help."""
    is_of_another: bool = False
    """An exchange with another rank has failed, which may have failed itself."""


ToRank = StartRank | RunStep | RecordTokens | CallRank | PrepareRequest | ReleaseRequests
FromRank = CallResult | StepResult | RankFailed

_decode_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=decode_array).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=decode_array).decode


def framed(message: ToRank | FromRank) -> bytes | bytearray:
    """Encode a message as a frame for sending."""
    if isinstance(message, RunStep) and (numbers := _framed_numbers(message.step)):
        return numbers
    data = begin_frame()
    encode_into(message, data, len(data))
    return end_frame(data, MESSAGE)


def _framed_numbers(step: SchedulerOutput) -> bytes | None:
    """Encode a step that has only batch indices, tokens and blocks, as most steps do; None if it
    has more.

    When a step is sent, weights have filled the processor's caches, so each object and each call
    has to wait for memory. So the arrays are concatenated, preceded by their sizes.
    """
    if not all(_is_empty(getattr(step, name)) for name in _NOT_IN_NUMBERS):
        return None
    rows, block_rows, block_ids = step.rows, step.block_rows, step.block_ids
    n, m = len(rows), len(block_rows)
    size = _NUMBERS.size + 4 * (3 * n + m + len(block_ids))
    sizes = _NUMBERS.pack(step.num_decodes, n, m, step.step_id)
    parts: Any = rows, step.num_computed_tokens, step.num_scheduled_tokens, block_rows, block_ids
    return b"".join((frame_header(NUMBERS, size), sizes, *parts))


def _is_empty(value: Any) -> bool:
    """Return whether a field of a step is None or an empty list."""
    return value is None or (isinstance(value, list) and not value)


def decode_to_rank(data: bytes, kind: int = MESSAGE) -> ToRank:
    """Decode a message that `framed` encoded.

    Args:
        data: content of the frame.
        kind: kind of the frame.

    Raises:
        msgspec.ValidationError: the data is not such a message.
    """
    if kind != NUMBERS:
        return _decode_to_rank(data)
    num_decodes, n, m, step_id = _NUMBERS.unpack_from(data)
    numbers = np.frombuffer(data, np.int32, offset=_NUMBERS.size)
    step = SchedulerOutput(
        step_id=step_id,
        num_decodes=num_decodes,
        freed_rows=[],
        new_requests=[],
        rows=numbers[:n],
        num_computed_tokens=numbers[n : 2 * n],
        num_scheduled_tokens=numbers[2 * n : 3 * n],
        block_rows=numbers[3 * n : 3 * n + m],
        block_ids=numbers[3 * n + m :],
    )
    return RunStep(step=step)


def typed_arguments(method: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """Convert the decoded arguments of a method of `Worker` to the types of its parameters."""
    kinds = [kind for name, kind in method.__annotations__.items() if name != "return"]
    return [msgspec.convert(arg, kind) for arg, kind in zip(args, kinds, strict=False)]


@cache
def result_decoder(method: Callable[..., Any]) -> Any:
    """Return a decoder for the results of a method of `Worker`, from its return annotation."""
    return decoder(method.__annotations__["return"]).decode
