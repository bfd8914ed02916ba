"""Messages between the API process and the engine core, as msgpack. No pickle, no code.

API process -> core     StartCore, AddRequests, AbortRequests, CallCore
core -> API process     CoreProgress, CoreReady, CoreFailed, CoreOutput, Refused, CallResult
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from vllm.config import VllmConfig
from vllm.errors import CapacityError, RequestError, WorkerCallError
from vllm.message_codec import decode_array, encode_array
from vllm.messages import EngineOutput, EngineRequest, SchedulerStats

START_LENGTH = struct.Struct("<Q")
"""Header of `StartCore` on standard input: its length in bytes. Other messages are frames of
ZMQ."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base class of the messages; the name of the class is the tag."""


class StartCore(_Message, frozen=True, kw_only=True):
    """The first message: load the model."""

    config: VllmConfig
    models: dict[str, str] = {}
    """Architectures that plug-ins have registered: name -> "module:Class"."""


class AddRequests(_Message, frozen=True, kw_only=True):
    """Queue requests. A request is sent once, for all its samples: the core splits it (`fan_out`).
    The core answers `Refused` for each request that it refuses."""

    requests: list[EngineRequest]


class AbortRequests(_Message, frozen=True, kw_only=True):
    """Abort requests; unknown ids are ignored."""

    request_ids: list[str]


class CallCore(_Message, frozen=True, kw_only=True):
    """Run one of `core_process.CALLS`."""

    call_id: int
    name: str
    arguments: bytes = b""
    """Arguments from `encode_arguments`; empty: none."""


class CoreProgress(_Message, frozen=True, kw_only=True):
    """Progress of the start."""

    phase: str
    done: int
    total: int
    """0: not known."""


class CoreReady(_Message, frozen=True, kw_only=True):
    """The core is ready to compute requests."""

    stats: SchedulerStats


class CoreFailed(_Message, frozen=True, kw_only=True):
    """The core has failed and ends."""

    message: str
    is_config_error: bool
    """The settings are wrong, so a restart will not help."""


class CoreOutput(_Message, frozen=True, kw_only=True):
    """The output of one step."""

    output: EngineOutput
    stats: SchedulerStats


class Refused(_Message, frozen=True, kw_only=True):
    """A request was not queued."""

    request_id: str
    message: str
    status: int
    """HTTP status."""
    is_capacity: bool
    """A CapacityError, else a RequestError."""
    param: str | None = None
    """Field of the request that is at fault."""


class CallError(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Why a call has failed; the engine continues."""

    message: str
    kind: Literal["request", "capacity", "worker"]
    """RequestError, CapacityError or WorkerCallError."""
    status: int = 500
    """HTTP status."""

    @classmethod
    def of(cls, error: Exception) -> "CallError":
        """Make one for an exception of the call."""
        if isinstance(error, RequestError):
            return cls(message=str(error), kind="request", status=error.status)
        if isinstance(error, CapacityError):
            return cls(message=str(error), kind="capacity", status=error.status)
        return cls(message=f"{type(error).__name__}: {error}", kind="worker")

    def exception(self) -> Exception:
        """The exception for the caller."""
        if self.kind == "request":
            return RequestError(self.message)
        if self.kind == "capacity":
            return CapacityError(self.message, status=self.status)
        return WorkerCallError(self.message)


class CallResult(_Message, frozen=True, kw_only=True):
    """The result of a `CallCore`."""

    call_id: int
    value: bytes = b"\xc0"
    """`encode_value` of the result."""
    error: CallError | None = None


def ids_of_requests(data: bytes) -> list[str]:
    """The ids in an `AddRequests` message with a value of a wrong type; none for other messages."""
    name, *fields = msgspec.msgpack.decode(data)
    if name != AddRequests.__name__:
        return []
    return [request["request_id"] for request in fields[0]]


def encode_value(what: str, value: Any) -> bytes:
    """Encode a user's value as msgpack.

    Args:
        what: name of the value, for the error message.
        value: None, numbers, text, bytes, and lists and dicts of these.

    Raises:
        RequestError: it contains something else.
    """
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(
            f"{what} cannot be sent between processes ({error}); use None, numbers, text, bytes, "
            f"and lists and dicts of these"
        ) from None


def encode_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Arguments of a call; raises as `encode_value`."""
    return encode_value("arguments", [list(args), dict(kwargs)])


def decode_arguments(data: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Decode the result of `encode_arguments`; empty bytes are no arguments."""
    return msgspec.msgpack.decode(data, type=_Arguments) if data else ([], {})


_Arguments = tuple[list[Any], dict[str, Any]]

decode_value = msgspec.msgpack.decode
"""What `encode_value` has made."""


ToCore = StartCore | AddRequests | AbortRequests | CallCore
FromCore = CoreProgress | CoreReady | CoreFailed | CoreOutput | Refused | CallResult


def _encode_extra(value: Any) -> Any:
    if callable(value):
        raise RequestError(
            "logits_processors are code and cannot be sent to the engine's own process; send their "
            "qualified names, or use the offline engine (LLM)",
            param="logits_processors",
        )
    return encode_array(value)


encode = msgspec.msgpack.Encoder(enc_hook=_encode_extra).encode
"""Encode a message. Raises RequestError if it contains a user's code."""

decode_to_core = msgspec.msgpack.Decoder(ToCore, dec_hook=decode_array).decode
"""Bytes as a message to the core."""

decode_from_core = msgspec.msgpack.Decoder(FromCore, dec_hook=decode_array).decode
"""Bytes as a message of the core."""
