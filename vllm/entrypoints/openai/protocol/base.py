"""Define the base classes of the bodies of all routes."""

import functools
import json
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from vllm.entrypoints.http.ignored import note_ignored
from vllm.entrypoints.http.request_limits import LimitedBody
from vllm.entrypoints.http.validation_text import TAG_SIGN
from vllm.utils import random_uuid

random_id = random_uuid


def now() -> int:
    """Return the Unix time in seconds as an integer."""
    return int(time.time())


Json = JsonValue
"""Any JSON without NaN, with a limit of some hundred levels."""
JsonObject = dict[str, JsonValue]
T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation stops at the first wrong item, because a body can have millions."""
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]


class RequestModel(BaseModel, LimitedBody):
    """Body of a request, or a part of it. Unknown fields are accepted and ignored."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, data: Any) -> Any:
        """Treat null as a missing field if the field has a default and null has no meaning.

        Some clients send all fields that they know, such as LiteLLM.
        """
        if not isinstance(data, dict):
            return data
        nulls = [name for name in _never_null(cls) if name in data and data[name] is None]
        return {k: v for k, v in data.items() if k not in nulls} if nulls else data

    @model_validator(mode="after")
    def _log_unknown_fields(self) -> "RequestModel":
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                note_ignored("the field", name, "not known to this server; it has no effect")
        return self


@functools.cache
def _never_null(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the fields with a default that do not accept null, by their names in a body."""
    return tuple(
        field.alias or name
        for name, field in kind.model_fields.items()
        if not field.is_required()
        and field.default is not None
        and type(None) not in get_args(field.annotation)
    )


def read_other_names(data: Any, names: Mapping[str, str]) -> Any:
    """Return an unvalidated body with fields renamed that other APIs have under other names.

    Args:
        data: the body.
        names: name in another API -> own name. A field under its own name has priority.
    """
    if not isinstance(data, dict):
        return data
    found = {own: data[other] for other, own in names.items() if data.get(other) is not None}
    given = {name: value for name, value in data.items() if name not in names}
    return {**found, **{k: v for k, v in given.items() if v is not None or k not in found}}


_AS_PARTS = (
    "send images, sounds and videos as parts of messages to /v1/chat/completions, such as "
    '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
)
_ELSEWHERE = {
    "multi_modal_data": _AS_PARTS,
    "multi_modal_uuids": "send a uuid in the part of the image, sound or video",
    "mm_processor_kwargs": "send it to /v1/chat/completions, or start the server with "
    "--mm-processor-kwargs",
    "media_io_kwargs": "start the server with --media-io-kwargs",
    "encoder_prompt": "send a file of sound to /v1/audio/transcriptions",
    "decoder_prompt": "send a file of sound to /v1/audio/transcriptions",
    "prompt_token_ids": "send token ids as prompt to /v1/completions",
    "prompt_embeds": "send it to /v1/completions",
    "sampling_params": "send its fields at the top of the body, such as temperature",
    "lora_request": "send the name of the adapter as model",
    **dict.fromkeys(
        ("n", "best_of", "use_beam_search"),
        "send it to /v1/chat/completions or /v1/completions, or send several requests",
    ),
}
"""Arguments and keys of `LLM.generate`, and fields of other routes, that would change the answer ->
what to do instead. A route whose body has a field of this name accepts it."""
_ONE_ANSWER = ("n", "best_of")
"""Fields whose value 1 changes nothing."""


class RequestBody(RequestModel):
    """A complete request body. All its numbers must be finite."""

    @model_validator(mode="after")
    def _check_elsewhere(self) -> "RequestBody":
        for name, value in (self.model_extra or {}).items():
            changes_nothing = not value or (name in _ONE_ANSWER and value == 1)
            if name in _ELSEWHERE and not changes_nothing:
                raise field_error(
                    name,
                    f"must be left out, because this route has no such field: {_ELSEWHERE[name]}",
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, data: Any) -> Any:
        """Refuse values that Python's JSON reader accepts but that cannot be encoded later: NaN and
        Infinity. Lone surrogates become U+FFFD.

        Programs in JavaScript send half of a pair if they cut a text within an emoji, and they send
        it again with every later request, so a refusal would end the conversation.
        """
        if not isinstance(data, dict):
            return data
        try:
            _check_encodable_fields(data)
        except UnicodeEncodeError:
            data = _without_surrogates(data)
            _check_encodable_fields(data)
        return data


def _check_encodable_fields(data: dict[str, Any]) -> None:
    """Raise an error if a field cannot be encoded as JSON.

    Raises:
        PydanticCustomError: it has a number that is not finite, or is nested too deeply; names the
            field.
        UnicodeEncodeError: it has a lone surrogate.
    """
    for name, value in data.items():
        try:
            name.encode()
            _check_encodable(value)
        except UnicodeEncodeError:
            raise
        except (ValueError, TypeError):
            raise _wrong("finite_number", name, "contains NaN or an infinite number") from None
        except RecursionError:
            raise _wrong("nested_too_deeply", name, "is nested too deeply") from None


_ALWAYS_ENCODABLE = {int, bool, type(None)}
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _check_encodable(value: Any) -> None:
    """Raise an error if the value cannot be encoded as JSON. Fast for frequent types.

    Strings are not copied, because one may be a file of several megabytes.
    """
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_encodable(key)
            _check_encodable(item)
    elif isinstance(value, (list, tuple)):
        kinds = set(map(type, value))
        if not kinds.isdisjoint((dict, list, str)):
            for item in value:
                _check_encodable(item)
        elif kinds - _ALWAYS_ENCODABLE:
            _encode(value)
    elif type(value) not in _ALWAYS_ENCODABLE:
        _encode(value)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _without_surrogates(data: dict[str, Any]) -> dict[str, Any]:
    """Return a body with U+FFFD instead of each lone surrogate."""
    whole = {}
    for name, value in data.items():
        try:
            whole[_SURROGATE.sub("\ufffd", name)] = _replace_surrogates(value)
        except RecursionError:
            raise _wrong("nested_too_deeply", name, "is nested too deeply") from None
    return whole


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        pairs = value.items()
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in pairs}
    return [_replace_surrogates(item) for item in value] if isinstance(value, list) else value


def tag_by_type(value: Any, kinds: tuple[str, ...], other: str) -> str:
    """Return the tag of a body that may have several types, from its `type`, so that error messages
    are about only one of them.

    Args:
        value: the body, or an object created from it.
        kinds: types that have their own tag.
        other: tag for every other type, and for a body without a type.
    """
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"{TAG_SIGN}{kind if kind in kinds else other}"


def field_error(name: str, message: str) -> PydanticCustomError:
    """Return an error for a validator, for checks that pydantic does not have."""
    return _wrong("value_error", name, message)


def _wrong(kind: str, name: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{field}: {problem}", {"field": name, "problem": message})


OpenAIBaseModel = RequestModel
"""The name that programs written for vLLM use."""


class ResponseModel(BaseModel):
    """Body of a response, or a part of it."""

    model_config = ConfigDict(protected_namespaces=())


class ErrorInfo(ResponseModel):
    """The message and the kind of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(ResponseModel):
    """Body of every response that is an error."""

    error: ErrorInfo


def error_responses(
    *statuses: int, body: type[BaseModel] = ErrorResponse
) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of a route's errors, for `responses` of FastAPI."""
    return {status: {"model": body} for status in statuses}


STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""The documentation of a route whose answer may be a stream."""


class PromptTokenUsageInfo(ResponseModel):
    """Number of prompt tokens that were found in the prefix cache."""

    cached_tokens: int | None = None


class CompletionTokenUsageInfo(ResponseModel):
    """Numbers of output tokens of special kinds."""

    reasoning_tokens: int


class UsageInfo(ResponseModel):
    """Token counts of a request, over all its prompts and outputs."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokenUsageInfo | None = None
    completion_tokens_details: CompletionTokenUsageInfo | None = None


class RequestResponseMetadata(ResponseModel):
    """Metadata of a request, stored next to its response: its id and its token counts."""

    request_id: str
    final_usage_info: UsageInfo | None = None


class ModelPermission(ResponseModel):
    """Permissions for a model; the same for all models."""

    id: str = Field(default_factory=lambda: f"modelperm-{random_id()}")
    object: Literal["model_permission"] = "model_permission"
    created: int = Field(default_factory=now)
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(ResponseModel):
    """One name under which the model is served."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=now)
    owned_by: str = "vllm"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[ModelPermission] = Field(default_factory=list)


class ModelList(ResponseModel):
    """All names under which the model is served."""

    object: Literal["list"] = "list"
    data: list[ModelCard] = Field(default_factory=list)


class AnthropicModel(ResponseModel):
    """One name under which the model is served, in Anthropic's format."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    """When the server started, as in RFC 3339."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(ResponseModel):
    """All names under which the model is served, in Anthropic's format."""

    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


def usage_dict(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Return `UsageInfo` as a plain dict, which is faster.

    Args:
        prompt_tokens, completion_tokens: token counts.
        cached_tokens, reasoning_tokens: token counts; None leaves out the details of the prompt or
            the output.
    """
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


class LoadLoRAAdapterRequest(RequestBody):
    """An adapter to serve under its own name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Whether the adapter may replace an adapter of this name."""


class UnloadLoRAAdapterRequest(RequestBody):
    """An adapter to stop serving."""

    lora_name: str
    lora_int_id: Int32 | None = None
