"""Messages between the API process and the engine core, as msgpack. No pickle, no code.

    API process -> core     StartCore, AddRequests, AbortRequests, CallCore, StopCore
    core -> API process     CoreProgress, CoreReady, CoreFailed, CoreOutput, Refused, CallResult

Arrays travel as (dtype, shape, bytes).
"""

import struct
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from vllm.config import VllmConfig
from vllm.errors import RequestError
from vllm.messages import EngineOutput, EngineRequest, SchedulerStats, TokenEmbeddings

START_LENGTH = struct.Struct("<Q")
"""On standard input, before `StartCore`: its length in bytes. Other messages have frames of ZMQ."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Told apart by the name of the class."""


class StartCore(_Message, frozen=True, kw_only=True):
    """The first message: load the model."""

    config: VllmConfig
    models: dict[str, str] = {}
    """Architectures that plug-ins have registered: name -> "module:Class"."""


class AddRequests(_Message, frozen=True, kw_only=True):
    """Queue requests; those that are refused are told by `Refused`."""

    requests: list[EngineRequest]
    embeddings: tuple[TokenEmbeddings, ...] = ()
    """Of each of the requests, which are then without: samples of one prompt share them."""


class AbortRequests(_Message, frozen=True, kw_only=True):
    """Forget requests; unknown ids are passed over."""

    request_ids: list[str]


class CallCore(_Message, frozen=True, kw_only=True):
    """Run one of `core_process.CALLS`."""

    call_id: int
    name: str


class StopCore(_Message, frozen=True, kw_only=True):
    """End the process."""


class CoreProgress(_Message, frozen=True, kw_only=True):
    """The start has come this far."""

    phase: str
    done: int
    total: int
    """0: not known."""


class CoreReady(_Message, frozen=True, kw_only=True):
    """Requests are computed from now on."""

    stats: SchedulerStats


class CoreFailed(_Message, frozen=True, kw_only=True):
    """The core ends."""

    message: str
    is_config_error: bool
    """The settings are wrong: starting again will not help."""


class CoreOutput(_Message, frozen=True, kw_only=True):
    """One step."""

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


class CallResult(_Message, frozen=True, kw_only=True):
    """What came of a `CallCore`."""

    call_id: int
    value: bool | None = None
    error: str | None = None


ToCore = StartCore | AddRequests | AbortRequests | CallCore | StopCore
FromCore = CoreProgress | CoreReady | CoreFailed | CoreOutput | Refused | CallResult


def _encode_extra(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if callable(value):
        raise RequestError(
            "logits_processors are code and cannot be sent to the engine's own process; send their "
            "qualified names, or use the offline engine (LLM)",
            param="logits_processors",
        )
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decode_extra(kind: Any, value: Any) -> Any:
    if get_origin(kind) is np.ndarray:
        dtype, shape, data = value
        array = np.frombuffer(data, dtype).reshape(shape)
        (expected,) = get_args(get_args(kind)[1])
        if array.dtype != expected:
            raise ValueError(f"expected an array of {expected.__name__}, got {array.dtype}")
        return array
    raise TypeError(f"{kind} cannot be received")


encode = msgspec.msgpack.Encoder(enc_hook=_encode_extra).encode
"""A message as bytes. Raises RequestError when it holds code of a user."""

decode_to_core = msgspec.msgpack.Decoder(ToCore, dec_hook=_decode_extra).decode
"""Bytes as a message to the core."""

decode_from_core = msgspec.msgpack.Decoder(FromCore, dec_hook=_decode_extra).decode
"""Bytes as a message of the core."""
