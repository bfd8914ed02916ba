"""Define request bodies in Anthropic's format: POST /v1/messages and /v1/messages/count_tokens.

The content of blocks is checked in `input`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from vllm.entrypoints.http.request_limits import MESSAGES, STOP, TOOLS, Limits
from vllm.entrypoints.openai.protocol.accepts import accepts
from vllm.entrypoints.openai.protocol.base import (
    Int32,
    Int64,
    JsonObject,
    ListOf,
    RequestBody,
    RequestModel,
    read_other_names,
)
from vllm.entrypoints.openai.protocol.sampling import BoundedNumberFields, SharedFields
from vllm.entrypoints.openai.protocol.tools import CHOICE_WORDS


class InputMessage(RequestModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        str | ListOf[JsonObject], accepts("text or a list of content blocks (objects)")
    ]
    """Text, or blocks such as text, document, thinking, tool_use and tool_result."""


class MessagesMetadata(RequestModel):
    """Information about the request, which has no effect."""

    user_id: str | None = None


class ThinkingConfig(RequestModel):
    """Whether the model should reason first. The effect depends on the chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Int64, Field(ge=1)] | None = None


class OutputConfig(RequestModel):
    """Format of the answer."""

    format: JsonObject | None = None
    """{"type": "json_schema", "schema": ...}"""
    effort: Annotated[str, StringConstraints(max_length=32)] | None = None


class Conversation(RequestBody):
    """Fields that determine the prompt."""

    messages: ListOf[InputMessage] = Field(min_length=1)
    model: str | None = None
    system: (
        Annotated[str | ListOf[JsonObject], accepts("text or a list of text blocks (objects)")]
        | None
    ) = None
    tools: ListOf[JsonObject] | None = None
    """Functions that the model may call; tools of Anthropic's servers are left out."""
    tool_choice: JsonObject | None = None
    """{"type": "auto" | "any" | "none"} or {"type": "tool", "name": ...}"""
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonObject | None = None
    """An older name of `output_config.format`."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the chat template; not part of Anthropic's API."""
    thread: JsonObject | None = None
    """A conversation that the server holds, which this one does not."""

    LIMITS: ClassVar[Limits] = {"messages": MESSAGES, "tools": TOOLS}

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _read_word(cls, choice: Any) -> Any:
        """Read a choice that is only a word, as in OpenAI's APIs."""
        return {"type": choice} if isinstance(choice, str) and choice in CHOICE_WORDS else choice


class CountTokensRequest(Conversation):
    """Body of POST /v1/messages/count_tokens."""


class MessagesRequest(BoundedNumberFields, SharedFields, Conversation):
    """Body of POST /v1/messages.

    The last group of fields is not part of Anthropic's API; they have the same meaning as in the
    other APIs of this server, as do the inherited ones.
    """

    max_tokens: Annotated[Int64, Field(ge=1)]
    stop_sequences: ListOf[Annotated[str, StringConstraints(min_length=1)]] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Int32 | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    priority: Int32 = 0
    cache_salt: str | None = None

    LIMITS: ClassVar[Limits] = {"stop_sequences": STOP, "stop": STOP}

    @model_validator(mode="before")
    @classmethod
    def _read_dialects(cls, data: Any) -> Any:
        """Read stop strings under their name in OpenAI's APIs."""
        data = read_other_names(data, {"stop": "stop_sequences"})
        if isinstance(data, dict) and isinstance(data.get("stop_sequences"), str):
            data["stop_sequences"] = [data["stop_sequences"]]
        return data


class ErrorDetail(RequestModel):
    """Type and message of an error."""

    type: str
    message: str
    code: str | None = None
    """Kind of an error in the server, such as EngineDeadError; only with type api_error."""
    details: JsonObject | None = None
    """For programs: `error_code`, and the fields that are `unsupported`."""


class AnthropicError(RequestModel):
    """Body of every error response of these routes."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str | None = None
