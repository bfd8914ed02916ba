"""Messages between the process of the engine and those of its other ranks, as msgpack over a socket
pair, or numbers alone. No pickle, no code.

engine -> rank     StartRank, then RunStep, RecordTokens, CallRank, PrepareRequest,
                   ReleaseRequests
rank -> engine     RankResult for each CallRank and PrepareRequest, StepResult from the last stage
                   of a pipeline, RankFailed at the end
"""

import socket
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import numpy as np

from vllm.config import VllmConfig
from vllm.message_codec import CallError, decode_array, decoder, encode_array
from vllm.messages import (
    EngineRequest,
    ModelRunnerOutput,
    RunnerStats,
    SchedulerOutput,
    StepTokens,
)

_HEADER = struct.Struct("<Q")
_PART_BYTES = 2**16
_NUMBERS = struct.Struct("<B3xiiiq")
"""Before the arrays of a step: the mark, `num_decodes`, number of rows and of `block_rows`, and
`step_id`. They are int32 in the byte order of the machine."""
_FRAMED_NUMBERS = struct.Struct("<QB3xiiiq")
"""The same behind the length of the message."""
_NUMBERS_MARK = 0xC1
"""No message in msgpack begins with it."""

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base class of the messages; the name of the class is the tag."""


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a rank on one of several machines."""

    index: int
    """Among the ranks of the machine."""
    count: int
    """Ranks of the machine."""
    has_own_devices: bool
    """The rank sees its own devices alone, not those of all ranks of the machine."""
    has_whole_stage: bool = False
    """All ranks that share layers with it are on the machine, too."""


class StartRank(_Message, frozen=True, kw_only=True):
    """The first message: make the worker."""

    config: VllmConfig
    rank: int
    models: dict[str, str]
    """Architectures that plug-ins have registered: name -> "module:Class"."""
    place: RankPlace | None = None
    """On its machine; None: all ranks are on one machine."""


class RunStep(_Message, frozen=True, kw_only=True):
    """Run a step. There is no answer: the result of rank 0 counts, or of the first rank of the last
    stage, which answers with a StepResult."""

    step: SchedulerOutput


class RecordTokens(_Message, frozen=True, kw_only=True):
    """Note what the last stage has sampled; to all other stages, before the rows run again."""

    tokens: StepTokens


class CallRank(_Message, frozen=True, kw_only=True):
    """Call a method of the worker, after the steps before it."""

    call_id: int
    method: str
    arguments: bytes
    """From `encode_arguments`."""
    is_user: bool
    """The caller is not the engine: the method and the arguments are checked first."""


class PrepareRequest(_Message, frozen=True, kw_only=True):
    """Load in the background what a request needs."""

    request: EngineRequest
    call_id: int | None = None
    """Of the `RankResult` that says when it is loaded, and why it cannot be; None: there is no
    answer."""


class ReleaseRequests(_Message, frozen=True, kw_only=True):
    """Requests have ended; keep no longer what they have needed."""

    request_ids: list[str]


class RankResult(_Message, frozen=True, kw_only=True):
    """The answer to a `CallRank` or a `PrepareRequest`."""

    call_id: int
    value: bytes = b"\xc0"
    """The result as msgpack."""
    error: CallError | None = None
    """The call has failed; the rank goes on."""


class StepResult(_Message, frozen=True, kw_only=True):
    """The result of a step."""

    output: ModelRunnerOutput
    stats: RunnerStats
    """Of the rank that sends it."""


class RankFailed(_Message, frozen=True, kw_only=True):
    """The rank has failed and ends."""

    message: str
    is_config_error: bool
    """The settings are wrong, so another start will not help."""
    is_of_another: bool = False
    """An exchange with another rank has failed, which may have failed itself."""


ToRank = StartRank | RunStep | RecordTokens | CallRank | PrepareRequest | ReleaseRequests
FromRank = RankResult | StepResult | RankFailed

_decode_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=decode_array).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=decode_array).decode


def framed(message: _Message) -> bytes | bytearray:
    """A message as it is sent: its length before it."""
    if isinstance(message, RunStep) and (data := _framed_numbers(message.step)):
        return data
    framed = bytearray(_HEADER.size)
    _encoder.encode_into(message, framed, _HEADER.size)
    _HEADER.pack_into(framed, 0, len(framed) - _HEADER.size)
    return framed


def _framed_numbers(step: SchedulerOutput) -> bytes | None:
    """A step that has nothing but rows, tokens and blocks, as most have; None: another one.

    Weights have emptied the caches when a step is sent, and each object and each call waits for
    memory. So the arrays are put one behind the other, with their sizes before them."""
    if (
        step.freed_rows
        or step.new_requests
        or step.passed_blocks
        or step.shortened_tables
        or step.num_draft_tokens is not None
        or step.block_moves is not None
    ):
        return None
    rows, block_rows, block_ids = step.rows, step.block_rows, step.block_ids
    n, m = len(rows), len(block_rows)
    size = _NUMBERS.size + 4 * (3 * n + m + len(block_ids))
    sizes = _FRAMED_NUMBERS.pack(size, _NUMBERS_MARK, step.num_decodes, n, m, step.step_id)
    parts: Any = rows, step.num_computed_tokens, step.num_scheduled_tokens, block_rows, block_ids
    return b"".join((sizes, *parts))


def decode_to_rank(data: bytes) -> ToRank:
    """The message that `framed` was given, without its length.

    Raises:
        msgspec.ValidationError: the data are no such message.
    """
    if data[0] != _NUMBERS_MARK:
        return _decode_to_rank(data)
    _, num_decodes, n, m, step_id = _NUMBERS.unpack_from(data)
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


class FrameReader:
    """Cuts what a socket receives into messages.

    Args:
        connection: a stream.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()
        self._part = memoryview(bytearray(_PART_BYTES))

    def receive(self) -> bool:
        """Take what has arrived; waits for the first byte if the socket does. Returns False when
        the other end is closed."""
        count = self._connection.recv_into(self._part)
        self._data += self._part[:count]
        return count > 0

    def messages(self) -> Iterator[bytes]:
        """The messages that are complete; each is given once."""
        while len(self._data) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._data)
            end = _HEADER.size + length
            if len(self._data) < end:
                return
            message = bytes(self._data[_HEADER.size : end])
            del self._data[:end]
            yield message


@cache
def result_decoder(method: Callable[..., Any]) -> Any:
    """What decodes the result of a method of `Worker`, by its declared type."""
    return decoder(method.__annotations__["return"]).decode
