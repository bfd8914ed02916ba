"""Define the messages between the API process and the engine core, as msgpack. No pickle, no code.

API process -> core     StartCore, AddRequests, AbortRequests, CallCore
core -> API process     CoreProgress, CoreReady, CoreFailed, CoreOutput, Refused, CallResult

`StartCore` is a frame on standard input (`utils/frames`), the others are ZMQ frames.
"""

from typing import Any

import msgspec

from vllm.config import VllmConfig
from vllm.errors import RequestError
from vllm.message_codec import CallResult, Message, decode_array, encode_array
from vllm.messages import EngineOutput, EngineRequest, SchedulerStats

START = 0
"""Kind of the frame of `StartCore`."""


class StartCore(Message, frozen=True, kw_only=True):
    """The first message: load the model."""

    config: VllmConfig
    models: dict[str, str] = msgspec.field(default_factory=dict)
    """Architectures that plug-ins have registered: name -> "module:Class"."""
    log_format: str = "text"
    """Format of the log lines; see `logger.use_format`."""


class AddRequests(Message, frozen=True, kw_only=True):
    """Queue requests.

    A request is sent once for all its samples; the core splits it (`fan_out`). The core answers
    `Refused` for each request that it refuses.
    """

    requests: list[EngineRequest]


class AbortRequests(Message, frozen=True, kw_only=True):
    """Abort requests; unknown ids are ignored."""

    request_ids: list[str]


class CallCore(Message, frozen=True, kw_only=True):
    """Run one of `core_process.CALLS`."""

    call_id: int
    name: str
    arguments: bytes = b""
    """Arguments from `encode_arguments`; empty: none."""


class CoreProgress(Message, frozen=True, kw_only=True):
    """Progress of the start."""

    phase: str
    done: int
    total: int
    """Units of the phase; 0: not known."""
    eta_seconds: float | None = None
    """Estimated seconds until the core is ready; None: not known."""


class CoreReady(Message, frozen=True, kw_only=True):
    """The core is ready to compute requests."""

    stats: SchedulerStats


class CoreFailed(Message, frozen=True, kw_only=True):
    """The core has failed and exits."""

    message: str
    is_config_error: bool
    """The settings are wrong, so a restart will not help."""


class CoreOutput(Message, frozen=True, kw_only=True):
    """The output of one step."""

    output: EngineOutput
    stats: SchedulerStats


class Refused(Message, frozen=True, kw_only=True):
    """A request was not queued."""

    request_id: str
    message: str
    status: int
    """HTTP status."""
    is_capacity: bool
    """Whether the error is a CapacityError; False: it is a RequestError."""
    param: str | None = None
    """Field of the request that is at fault."""


def requests_apart(data: bytes) -> dict[str, bytes]:
    """Split an AddRequests message that cannot be decoded into one message per request, by request
    id. Empty for other messages.
    """
    name, *fields = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
    if msgspec.msgpack.decode(name) != AddRequests.__name__:
        return {}
    requests = msgspec.msgpack.decode(fields[0], type=list[msgspec.Raw])
    return {
        msgspec.msgpack.decode(request)["request_id"]: encode([name, [request]])
        for request in requests
    }


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
"""Decode bytes to a message to the core."""

decode_from_core = msgspec.msgpack.Decoder(FromCore, dec_hook=decode_array).decode
"""Decode bytes to a message of the core."""
