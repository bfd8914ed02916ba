"""Define the sampling fields of completions and chat, and convert them to the engine's
parameters.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    create_model,
    model_validator,
)

from vllm import sampling_params as engine_sampling
from vllm.entrypoints.http.request_limits import OUTPUTS, STOP, Limit, Limits, longest_text
from vllm.entrypoints.http.validation_text import TAG_SIGN
from vllm.entrypoints.openai.protocol.accepts import accepts
from vllm.entrypoints.openai.protocol.base import (
    Int32,
    Int64,
    Json,
    JsonObject,
    ListOf,
    RequestBody,
    RequestModel,
    StreamOptions,
    TokenId,
    field_error,
    random_id,
    tag_by_type,
)
from vllm.errors import RequestError
from vllm.guided_decoding_params import INTERNAL_FIELDS, KINDS, REQUEST_FIELDS, GuidedDecodingParams
from vllm.sampling_params import (
    BeamSearchParams,
    Interface,
    RequestOutputKind,
    SamplingParams,
    numbers_of,
)

StopStrings = Annotated[str | ListOf[str], accepts("a string or a list of strings")]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:+/=-]{1,128}$")]

API_NUMBERS = tuple(numbers_of(Interface.API))
"""Sampling parameters that all APIs accept under the same name."""
_PARAMS = (
    *("stop", "stop_token_ids", "bad_words", "ignore_eos"),
    *("min_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "logit_bias", "allowed_token_ids", "logits_processors"),
)


def _struct_fields(struct: type[msgspec.Struct], **types: Any) -> dict[str, Any]:
    """Return the fields of an engine class as body fields; `types` replaces the types of some."""
    return {
        field.name: (types.get(field.name, field.type), ... if field.required else field.default)
        for field in msgspec.structs.fields(struct)
    }


def _number_fields(*, are_bounded: bool) -> dict[str, Any]:
    """Return the fields of `API_NUMBERS` as body fields.

    Args:
        are_bounded: whether their ranges are part of the body's schema. If not, `SamplingParams`
            refuses values out of range.
    """
    fields = {}
    for name, number in numbers_of(Interface.API).items():
        accepted: Any = number.kind
        if number.kind is int and number.at_most is None:
            accepted = Int32
        elif number.kind is int or are_bounded:
            accepted = Annotated[
                number.kind, Field(ge=number.at_least, gt=number.above, le=number.at_most)
            ]
        default = None if Interface.MODEL in number.set_by else number.default
        fields[name] = (accepted | None, default)
    return fields


_CONSTRAINT = _struct_fields(GuidedDecodingParams, json=Json | None, choice=ListOf[str] | None)
_GUIDED_FIELDS = {name: field for name, field in REQUEST_FIELDS.items() if field != "json_object"}
"""A request's own field -> field of `GuidedDecodingParams`."""

_make_body = partial(create_model, __base__=RequestModel)
if TYPE_CHECKING:

    class NumberFields(RequestModel): ...

    class BoundedNumberFields(RequestModel): ...

    class GuidedFields(RequestModel): ...

    class ConstraintFields(RequestModel): ...
else:
    NumberFields = _make_body("NumberFields", **_number_fields(are_bounded=False))
    BoundedNumberFields = _make_body("BoundedNumberFields", **_number_fields(are_bounded=True))
    GuidedFields = _make_body(
        "GuidedFields", **{name: _CONSTRAINT[field] for name, field in _GUIDED_FIELDS.items()}
    )
    # "json" is declared below, because pydantic does not allow a field with this name.
    _OTHERS = [name for name in _CONSTRAINT if name not in ("json", "backend", *INTERNAL_FIELDS)]
    ConstraintFields = _make_body("ConstraintFields", **{k: _CONSTRAINT[k] for k in _OTHERS})


class StructuredOutputs(ConstraintFields):
    """The constraint for the output and its options, in one object."""

    model_config = ConfigDict(populate_by_name=True)

    json_schema: Json | None = Field(default=None, alias="json")

    def given(self) -> dict[str, Any]:
        """Return the fields of `GuidedDecodingParams` that are set."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values["json"] = values.pop("json_schema")
        return {name: value for name, value in values.items() if value not in (None, False)}


class JsonSchemaResponseFormat(RequestModel):
    """The schema of a `response_format`."""

    model_config = ConfigDict(populate_by_name=True)

    name: str | None = None
    description: str | None = None
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """Whether the request is refused if not all of the schema can be enforced."""


class ResponseFormat(RequestModel):
    """The format of the output: text, any JSON, or JSON with a schema."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        accepts("text, json_object, json_schema or structural_tag"),
    ]
    json_schema: JsonSchemaResponseFormat | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    """The schema, as in other APIs: with json_object in llama.cpp and Together, or with json_schema
    in the Responses API."""

    @property
    def given_schema(self) -> JsonObject | None:
        """The schema, wherever it was given."""
        named = None if self.json_schema is None else self.json_schema.json_schema
        return self.schema_ if named is None else named


class StructuralTag(RequestModel):
    """A part of the output: between `begin` and `end`, the output is JSON that matches a schema."""

    model_config = ConfigDict(populate_by_name=True)

    begin: str
    structural_tag_schema: JsonObject | None = Field(default=None, alias="schema")
    end: str


class StructuralTagResponseFormat(RequestModel):
    """Free text with tagged parts; a tag starts with one of the triggers."""

    type: Literal["structural_tag"]
    structures: ListOf[StructuralTag]
    triggers: ListOf[str]


def _kind_of_format(value: Any) -> str:
    return tag_by_type(value, ("structural_tag",), "plain")


AnyResponseFormat = Annotated[
    Annotated[ResponseFormat, Tag(f"{TAG_SIGN}plain")]
    | Annotated[StructuralTagResponseFormat, Tag(f"{TAG_SIGN}structural_tag")],
    Discriminator(_kind_of_format),
]


LogitsProcessorConstructor = _make_body(
    "LogitsProcessorConstructor",
    __doc__="A logits processor: its qualified name, and the arguments to create it.",
    **_struct_fields(
        engine_sampling.LogitsProcessorConstructor,
        args=ListOf[Json] | None,
        kwargs=JsonObject | None,
    ),
)


class SamplingFields(NumberFields, GuidedFields, RequestBody):
    """The sampling fields. None means the model's recommendation, or else the default."""

    model: str | None = None
    n: Int32 | None = 1
    best_of: Int32 | None = None
    stop: StopStrings | None = Field(default_factory=list)
    stop_token_ids: ListOf[TokenId] | None = Field(default_factory=list)
    bad_words: ListOf[str] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: Int64 | None = 0
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    truncate_prompt_tokens: Annotated[Int64, Field(ge=1)] | None = None
    logit_bias: JsonObject | None = None
    allowed_token_ids: ListOf[TokenId] | None = None
    prompt_logprobs: Int32 | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = 1.0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: Json = None
    echo: bool | None = False
    priority: Int32 | None = 0
    request_id: RequestId = Field(default_factory=random_id)
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    response_format: AnyResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    logits_processors: ListOf[Json] | None = None
    kv_transfer_params: JsonObject | None = None

    LIMITS: ClassVar[Limits] = {
        "n": OUTPUTS,
        "best_of": OUTPUTS,
        "stop": STOP,
        "stop_token_ids": (Limit("max_stop_token_ids", "tokens"),),
        "bad_words": (
            Limit("max_bad_words", "words"),
            Limit("max_word_chars", "characters in a word", longest_text),
        ),
        "logit_bias": (Limit("max_logit_bias", "tokens"),),
        "allowed_token_ids": (Limit("max_allowed_token_ids", "tokens"),),
        "logits_processors": (Limit("max_logits_processors", "entries"),),
        "guided_choice": (Limit("max_choices", "choices"),),
    }

    @model_validator(mode="after")
    def _check_pairs(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "needs stream=true: add it, or leave this out")
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            raise field_error("prompt_logprobs", "must be at least 0")
        if self.stream and self.prompt_logprobs is not None:
            raise field_error("prompt_logprobs", "not available with stream=true")
        if self.stream and self.best_of not in (None, self.num_samples):
            raise field_error("best_of", "must be equal to n with stream=true")
        group = self.structured_outputs
        for name, schema in (
            ("guided_json", self.own_constraint()["json"]),
            ("structured_outputs.json", group and group.json_schema),
        ):
            if schema is not None and not isinstance(schema, (str, dict)):
                raise field_error(name, "must be a JSON schema, as an object or as a string")
        if group is not None and not any(kind in KINDS for kind in group.given()):
            raise field_error("structured_outputs", f"must have one of {', '.join(KINDS)}")
        if len(given := self.constraints()) > 1:
            raise field_error(", ".join(given), "only one of these fields may be set")
        return self

    _format_field: str = PrivateAttr("response_format")
    """The name of `response_format` in the API of the request."""

    def rename_format(self, field: str) -> None:
        """Make errors about `response_format` name another field instead."""
        self._format_field = field

    def own_constraint(self) -> dict[str, Any]:
        """Return the fields of `GuidedDecodingParams` that are set by fields of the request body
        itself.
        """
        return {field: getattr(self, name) for name, field in _GUIDED_FIELDS.items()}

    def constraints(self) -> list[str]:
        """Return the names of the fields that ask for structured output; `response_format` is
        last.
        """
        given = [
            name
            for name, field in _GUIDED_FIELDS.items()
            if field in KINDS and getattr(self, name) is not None
        ]
        if self.structured_outputs is not None:
            options = self.structured_outputs.given()
            given += [f"structured_outputs.{kind}" for kind in KINDS if kind in options]
        if self.has_response_format:
            given.append(self._format_field)
        return given

    @property
    def has_response_format(self) -> bool:
        """Whether `response_format` asks for structured output."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def num_samples(self) -> int:
        """Number of outputs to return per prompt."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that contains the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk of a stream contains the usage so far."""
        options = self.stream_options
        return self.includes_usage and bool(options and options.continuous_usage_stats)


_SHARED = (
    *("stop_token_ids", "bad_words", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "allowed_token_ids"),
    *("structured_outputs", *_GUIDED_FIELDS),
)
"""Fields of the chat API that the Responses and Messages APIs of this server have as well."""

if TYPE_CHECKING:

    class _SharedFields(RequestModel): ...
else:
    _SharedFields = _make_body(
        "_SharedFields",
        **{
            name: (Annotated[SamplingFields.model_fields[name].annotation | None, Field()], None)
            for name in _SHARED
        },
    )


class SharedFields(_SharedFields):
    """Sampling fields of this server for the APIs that OpenAI and Anthropic define without them."""

    LIMITS: ClassVar[Limits] = {
        name: limits for name, limits in SamplingFields.LIMITS.items() if name in _SHARED
    }

    def shared_fields(self) -> dict[str, Any]:
        """Return the values of these fields that are set, for a chat request."""
        given = {name: getattr(self, name) for name in _SHARED}
        if (group := given["structured_outputs"]) is not None:
            given["structured_outputs"] = group.model_dump(by_alias=True, exclude_none=True)
        return {name: value for name, value in given.items() if value is not None}


def check_sampling_fields(body: SamplingFields) -> None:
    """Refuse values and combinations that are not possible for any model.

    Raises:
        RequestError: a value is refused; names the field.
    """
    if body.num_samples < 1:
        raise RequestError(f"n must be at least 1, got {body.n}", param="n")
    if body.best_of is not None and body.best_of < body.num_samples:
        raise RequestError(
            f"best_of must be at least n ({body.num_samples}), got {body.best_of}", param="best_of"
        )
    if body.kv_transfer_params:
        raise RequestError(
            "kv_transfer_params: not available in this server", param="kv_transfer_params"
        )


def guided_decoding(body: SamplingFields) -> GuidedDecodingParams | None:
    """Return the structured output that the request asks for, or None.

    Raises:
        RequestError: a `json_schema` format has no schema.
    """
    fields = body.constraints()
    if not fields:
        return None
    given = body.own_constraint() | _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        given |= body.structured_outputs.given()
    return GuidedDecodingParams(**given, field=fields[0])


def _of_response_format(
    wanted: ResponseFormat | StructuralTagResponseFormat | None,
) -> dict[str, Any]:
    if isinstance(wanted, StructuralTagResponseFormat):
        return {"structural_tag": json.dumps(wanted.model_dump(by_alias=True))}
    if wanted is None or wanted.type == "text":
        return {}
    schema = wanted.given_schema
    if schema is not None:
        is_strict = wanted.json_schema is not None and wanted.json_schema.strict is True
        return {"json": schema, "is_strict": is_strict}
    if wanted.type == "json_object":
        return {"json_object": True}
    raise RequestError(
        "response_format of type json_schema needs json_schema with name and schema, such as "
        '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}',
        param="response_format",
    )


def sampling_params(
    body: SamplingFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    output_kind: RequestOutputKind,
    guided: GuidedDecodingParams | None,
) -> SamplingParams:
    """Return the engine's sampling parameters for a request.

    Args:
        body: body that `check_sampling_fields` has checked.
        defaults: defaults of the model (`generation_defaults` of the engine).
        max_tokens: maximum number of output tokens, see `prompts.output_budget`.
        logprobs: number of log-probabilities per output token, or None.
        output_kind: which outputs the engine sends before the end.
        guided: constraint for the output, or None.

    Raises:
        RequestError: a value is out of range; names the field.
    """
    values = {name: getattr(body, name) for name in _PARAMS}
    values |= sampling_numbers(body, defaults)
    try:
        return SamplingParams.from_optional(
            **values,
            n=body.num_samples,
            best_of=body.best_of,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            output_kind=output_kind,
            guided_decoding=guided,
        )
    except (TypeError, OverflowError) as error:
        raise RequestError(str(error)) from error


def sampling_numbers(body: NumberFields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `API_NUMBERS` from the body, or else from the defaults of the model."""
    return {name: _number(body, name, defaults) for name in API_NUMBERS}


def _number(body: NumberFields, name: str, defaults: Mapping[str, Any]) -> Any:
    value = getattr(body, name)
    return defaults.get(name) if value is None else value


def _asks(body: SamplingFields, name: str) -> bool:
    value = getattr(body, name, None)
    return value is not None and value is not False and value != []


def beam_search_params(
    body: SamplingFields, defaults: Mapping[str, Any], max_tokens: int
) -> BeamSearchParams:
    """Return the parameters for a beam search; `n` is the beam width.

    Raises:
        RequestError: a value is out of range, or a field is set that beam search does not support.
    """
    unknown = ("stream", "logprobs", "prompt_logprobs", "logits_processors")
    refused = [name for name in unknown if _asks(body, name)]
    if body.best_of not in (None, body.num_samples):
        refused.append("best_of")
    if refused := [*refused, *body.constraints()]:
        raise RequestError(f"{refused[0]}: not available with use_beam_search", param=refused[0])
    temperature = _number(body, "temperature", defaults)
    return BeamSearchParams(
        beam_width=body.num_samples,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        temperature=1.0 if temperature is None else temperature,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )
