"""Encodes messages with numpy arrays as msgpack, to send them to another process.

An array is sent as (dtype, shape, bytes), and received read-only. Arguments and results of calls by
name can only be msgpack values, because their types are not declared. Independent of the messages
themselves.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from vllm.errors import CapacityError, RequestError, VllmError, WorkerCallError

_Type = TypeVar("_Type")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base class of messages between processes; the name of the class is the tag."""


def encode_array(value: Any) -> Any:
    """Encode an array for msgpack; used as `enc_hook` of an encoder.

    Raises:
        TypeError: the value is not an array.
    """
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def decode_array(kind: Any, value: Any) -> Any:
    """Decode an array that `encode_array` has encoded; used as `dec_hook` of a decoder.

    Args:
        kind: type that the message declares, an `npt.NDArray` of some dtype.
        value: dtype, shape and bytes.

    Raises:
        ValueError: the array has another dtype than the message declares.
        TypeError: the message declares something other than an array.
    """
    if get_origin(kind) is not np.ndarray:
        raise TypeError(f"{kind} cannot be received from another process")
    dtype, shape, data = value
    array = np.frombuffer(data, dtype).reshape(shape)
    (expected,) = get_args(get_args(kind)[1])
    if array.dtype != expected:
        raise ValueError(f"expected an array of {expected.__name__}, got {array.dtype}")
    return array


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)

encode = _encoder.encode
"""A message as bytes. Raises TypeError when it holds code."""

encode_into = _encoder.encode_into
"""Encode a message into a bytearray from an offset on. Raises TypeError when it holds code."""


def decoder(kind: type[_Type]) -> msgspec.msgpack.Decoder[_Type]:
    """Make a decoder for messages of one type. Make it once and keep it."""
    return msgspec.msgpack.Decoder(kind, dec_hook=decode_array)


class CallError(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The reason why a call has failed; the engine continues."""

    message: str
    kind: Literal["request", "capacity", "worker"]
    """RequestError, CapacityError or WorkerCallError."""
    status: int = 500
    """HTTP status."""

    @classmethod
    def of(cls, error: Exception) -> "CallError":
        """Convert an exception of the call to a message."""
        if isinstance(error, RequestError):
            return cls(message=str(error), kind="request", status=error.status)
        if isinstance(error, CapacityError):
            return cls(message=str(error), kind="capacity", status=error.status)
        return cls(message=f"{type(error).__name__}: {error}", kind="worker")

    def exception(self) -> VllmError:
        """Convert the message back to an exception, for the caller."""
        if self.kind == "request":
            return RequestError(self.message)
        if self.kind == "capacity":
            return CapacityError(self.message, status=self.status)
        return WorkerCallError(self.message)


class CallResult(Message, frozen=True, kw_only=True):
    """The result of a call of another process."""

    call_id: int
    value: bytes = b"\xc0"
    """The result as msgpack; None unless set."""
    error: CallError | None = None
    """Error of the call; the other process continues."""


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
            f"{what} cannot be sent between processes ({error}); use None, numbers, strings, "
            "bytes, and lists and dicts of these"
        ) from None


def encode_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Encode the arguments of a call; raises like `encode_value`."""
    return encode_value("arguments", [list(args), dict(kwargs)])


def decode_arguments(data: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Decode the result of `encode_arguments`; empty bytes mean no arguments."""
    return msgspec.msgpack.decode(data, type=_Arguments) if data else ([], {})


_Arguments = tuple[list[Any], dict[str, Any]]

decode_value = msgspec.msgpack.decode
"""Decode a value that `encode_value` has made."""
