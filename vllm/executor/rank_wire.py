"""Messages between the process of the engine and those of its other ranks, as msgpack over a socket
pair. No pickle, no code.

engine -> rank     StartRank, then RunStep, RecordTokens, CallRank, PrepareRequest,
                   ReleaseRequests
rank -> engine     RankResult for each CallRank and PrepareRequest, StepResult from the last stage
                   of a pipeline, RankFailed at the end
"""

import socket
import struct
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from vllm.config import VllmConfig
from vllm.message_codec import CallError, decode_array, decoder
from vllm.messages import (
    EngineRequest,
    ModelRunnerOutput,
    RunnerStats,
    SchedulerOutput,
    StepTokens,
)

_HEADER = struct.Struct("<Q")
_PART_BYTES = 2**20


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

decode_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=decode_array).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=decode_array).decode


def frame(data: bytes) -> bytes:
    """A message as it is sent: its length before it."""
    return _HEADER.pack(len(data)) + data


class FrameReader:
    """Cuts what a socket receives into messages.

    Args:
        connection: a stream.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def receive(self) -> bool:
        """Take what has arrived; waits for the first byte if the socket does. Returns False when
        the other end is closed."""
        part = self._connection.recv(_PART_BYTES)
        self._data += part
        return bool(part)

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
def result_decoder(method: str) -> Any:
    """What decodes the result of a method of `Worker`, by its declared type."""
    from vllm.worker.interface import Worker  # here, as it loads torch, which takes seconds

    result: Any = typing.get_type_hints(getattr(Worker, method))["return"]
    return decoder(result).decode
