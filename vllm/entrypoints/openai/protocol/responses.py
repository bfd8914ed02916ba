"""Define the body of POST /v1/responses. The content of items and tools is checked where it is
read.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from vllm.entrypoints.http.request_limits import STOP, TOOLS, Limit, Limits
from vllm.entrypoints.openai.protocol.accepts import accepts
from vllm.entrypoints.openai.protocol.base import (
    Int32,
    Int64,
    Json,
    JsonObject,
    ListOf,
    RequestBody,
    RequestModel,
    read_other_names,
)
from vllm.entrypoints.openai.protocol.sampling import (
    BoundedNumberFields,
    SharedFields,
    StopStrings,
)
from vllm.entrypoints.openai.protocol.tools import CHOICE_WORDS, flat_tool
from vllm.errors import RequestError

MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]

ToolChoice = Annotated[
    Literal["none", "auto", "required"] | JsonObject,
    accepts('none, auto, required, or an object such as {"type": "function", "name": ...}'),
]


class TextFormat(RequestModel):
    """Format of the answer: text or JSON."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestModel):
    """Settings for the text of the answer."""

    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(RequestModel):
    """Amount of reasoning. The effect depends on the chat template."""

    effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(BoundedNumberFields, SharedFields, RequestBody):
    """A request of the Responses API.

    The last group of fields is not part of OpenAI's API; they have the same meaning as in the other
    APIs of this server.
    """

    input: Annotated[str | ListOf[JsonObject], accepts("text or a list of items (objects)")]
    """Text of one user message, or items: messages, calls, outputs of calls, reasoning."""
    model: str | None = None
    instructions: str | None = None
    """System message; the one of an earlier response is not carried over."""
    previous_response_id: str | None = None
    """Stored response that this one continues."""
    tools: ListOf[JsonObject] | None = None
    """Functions and custom tools that the model may call; tools of other types are left out."""
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: Annotated[Int64, Field(ge=1)] | None = None
    """Limits server-side tools, which are not supported: no effect."""
    text: TextConfig | None = None
    max_output_tokens: Annotated[Int64, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: ListOf[str] | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: leave out the oldest messages when the conversation is too long for the model."""
    stream: bool | None = False
    stream_options: JsonObject | None = None
    background: bool | None = False
    """Answer at once, and compute the response in the background."""
    store: bool | None = True
    """Keep the response, so that it can be retrieved and continued."""
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    conversation: Json = None
    moderation: Json = None
    prompt: Json = None
    """This field and the next two are refused, because they refer to what only OpenAI's servers
    keep or do."""

    stop: StopStrings | None = None
    chat_template_kwargs: JsonObject | None = None
    enable_thinking: bool | None = None
    priority: Int32 = 0
    cache_salt: str | None = None

    LIMITS: ClassVar[Limits] = {
        "input": (Limit("max_messages", "items"),),
        "messages": (Limit("max_messages", "messages"),),
        "tools": TOOLS,
        "stop": STOP,
        "include": (Limit("max_request_values", "names"),),
    }

    @model_validator(mode="before")
    @classmethod
    def _read_dialects(cls, data: Any) -> Any:
        """Read fields under the names that they have in the chat API."""
        names = dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens")
        data = read_other_names(data, {"messages": "input", **names})
        if not isinstance(data, dict):
            return data
        wanted, text = data.get("response_format"), data.get("text") or {}
        if isinstance(wanted, dict) and isinstance(text, dict) and not text.get("format"):
            nested = wanted.get("json_schema")
            nested = nested if isinstance(nested, dict) else {}
            data = {**data, "text": {**text, "format": {**wanted, **nested}}}
            del data["response_format"]
        if data.get("reasoning_effort") and not data.get("reasoning"):
            data = {**data, "reasoning": {"effort": data["reasoning_effort"]}}
            del data["reasoning_effort"]
        return data

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _read_choice(cls, choice: Any) -> Any:
        """Read a choice in another form: `any`, or an object instead of a word."""
        kind = choice.get("type") if isinstance(choice, dict) else choice
        return CHOICE_WORDS.get(kind, choice) if isinstance(kind, str) else choice

    def response_format(self) -> dict[str, Any] | None:
        """Return the format of the answer as `response_format` of the chat API; None: any text.

        Raises:
            RequestError: the format has no schema.
        """
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        if wanted.schema_ is None:
            raise RequestError(
                "text.format of type json_schema needs a schema", param="text.format.schema"
            )
        schema = {
            "name": wanted.name or "answer",
            "schema": wanted.schema_,
            "strict": wanted.strict,
        }
        return {"type": "json_schema", "json_schema": schema}


_REPEATED = (
    *("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls"),
    *("user", "safety_identifier", "prompt_cache_key"),
)


def echo_fields(request: ResponsesRequest) -> dict[str, Any]:
    """Return the request fields that the response repeats, in the form of the response."""
    text = request.text or TextConfig()
    reasoning = request.reasoning or ReasoningConfig()
    return {
        **{name: getattr(request, name) for name in _REPEATED},
        "background": bool(request.background),
        "store": request.store is not False,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "service_tier": "default",
        "text": text.model_dump(mode="json", by_alias=True, exclude_none=True),
        "tool_choice": _echoed_choice(request.tool_choice),
        "tools": [_echoed_tool(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
    }


def _echoed_choice(choice: str | JsonObject | None) -> Any:
    return flat_tool(choice) if isinstance(choice, dict) else choice or "auto"


def _echoed_tool(tool: JsonObject) -> Mapping[str, Any]:
    """Return a tool of a request as the response repeats it: clients with strict types require the
    fields of a function that requests may leave out.
    """
    flat = flat_tool(tool)
    if flat.get("type") != "function":
        return flat
    return {"parameters": None, "strict": None, **flat}
