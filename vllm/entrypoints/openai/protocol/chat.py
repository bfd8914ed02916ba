"""Define the bodies of POST /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from vllm.entrypoints.http.request_limits import DOCUMENTS, MESSAGES, TOOLS, Limits
from vllm.entrypoints.openai.protocol.accepts import accepts
from vllm.entrypoints.openai.protocol.base import (
    Int32,
    Int64,
    JsonObject,
    ListOf,
    RequestModel,
    ResponseModel,
    UsageInfo,
    field_error,
    now,
    random_id,
)
from vllm.entrypoints.openai.protocol.sampling import SamplingFields
from vllm.entrypoints.openai.protocol.tools import (
    ChatCompletionNamedFunction,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolsParam,
    CustomToolDefinition,
    FunctionChoice,
    FunctionDefinition,
    ToolChoice,
    ToolParam,
    as_functions,
    plain_choice,
    read_choice,
    read_dialects,
)


class TemplateFields(RequestModel):
    """Options for the chat template, for all routes with conversations."""

    chat_template: str | None = Field(default=None, max_length=2**20)
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    mm_processor_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _check_generation_prompt(self) -> "TemplateFields":
        if self.continue_final_message and self.add_generation_prompt:
            is_default = type(self).model_fields["add_generation_prompt"].default
            raise field_error(
                "continue_final_message",
                "cannot be true when add_generation_prompt is"
                + (", which is its default" if is_default else ""),
            )
        return self


class ThinkingSwitch(RequestModel):
    """Whether the model should reason, in the form of some other APIs."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    """All but disabled let the model think."""


class ReasoningOptions(RequestModel):
    """Amount of reasoning, in the form of OpenRouter's API."""

    effort: str | None = Field(default=None, max_length=32)
    enabled: bool | None = None
    exclude: bool | None = None
    """Whether to leave the reasoning out of the answer."""


class ChatFields(TemplateFields):
    """The fields that determine the prompt of a conversation."""

    messages: ListOf[JsonObject] = Field(min_length=1)
    reasoning_effort: str | None = Field(default=None, max_length=32)
    enable_thinking: bool | None = None
    thinking: Annotated[
        bool | ThinkingSwitch | None,
        accepts("true, false or an object whose type is enabled, disabled, adaptive or auto"),
    ] = None
    reasoning: ReasoningOptions | None = None
    tools: ListOf[ToolParam] | None = None
    documents: ListOf[JsonObject] | None = None
    add_special_tokens: bool = False

    LIMITS: ClassVar[Limits] = {"messages": MESSAGES, "tools": TOOLS, "documents": DOCUMENTS}

    _custom_tools: dict[str, CustomToolDefinition] = PrivateAttr(default_factory=dict)

    @field_validator("tools", mode="before")
    @classmethod
    def _read_dialects(cls, tools: Any) -> Any:
        return read_dialects(tools)

    @model_validator(mode="after")
    def _read_custom_tools(self) -> "ChatFields":
        """Convert custom tools to functions, and remember which tools are custom."""
        if self.tools is not None:
            functions, custom = as_functions(self.tools)
            self.tools = list(functions)
            self._custom_tools.update(custom)
        return self

    @property
    def thinking_kwargs(self) -> dict[str, Any]:
        """The thinking fields of the request, as arguments for the chat template."""
        thinking = self.thinking
        if isinstance(thinking, ThinkingSwitch):
            thinking = thinking.type != "disabled"
        other = self.reasoning or ReasoningOptions()
        effort, is_on = self.reasoning_effort, self.enable_thinking
        given = {
            "reasoning_effort": other.effort if effort is None else effort,
            "enable_thinking": other.enabled if is_on is None else is_on,
            "thinking": thinking,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def function_tools(self) -> list[ChatCompletionToolsParam]:
        """The tools of the request, with custom tools converted to functions."""
        return [tool for tool in self.tools or () if isinstance(tool, ChatCompletionToolsParam)]

    @property
    def custom_tools(self) -> dict[str, CustomToolDefinition]:
        """The custom tools by name."""
        return self._custom_tools


class ChatCompletionRequest(ChatFields, SamplingFields):
    """A conversation to be continued."""

    logprobs: bool | None = False
    top_logprobs: Int32 | None = 0
    max_tokens: Int64 | None = None
    max_completion_tokens: Annotated[Int64, Field(ge=1)] | None = None
    tool_choice: ToolChoice | None = None
    functions: ListOf[FunctionDefinition] | None = None
    """Tools in the form of the API before tools. The answer then has a `function_call`."""
    function_call: FunctionChoice | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True
    """Whether the answer has the reasoning of the model."""
    _is_choice_read: bool = PrivateAttr(default=False)
    _has_functions: bool = PrivateAttr(default=False)

    LIMITS: ClassVar[Limits] = {"functions": TOOLS}

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _read_choice(cls, choice: Any) -> Any:
        return read_choice(choice)

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise field_error("top_logprobs", "must be at least 0")
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs=true")
        return self

    @model_validator(mode="after")
    def _read_functions(self) -> "ChatCompletionRequest":
        """Convert functions of the older API to tools, of which one is called at a time."""
        if self.functions and not self.tools:
            self.tools = [ChatCompletionToolsParam(function=each) for each in self.functions]
            self.parallel_tool_calls, self._has_functions = False, True
            choice = self.function_call
            self.tool_choice = (
                ChatCompletionNamedToolChoiceParam(function=choice)
                if isinstance(choice, ChatCompletionNamedFunction)
                else choice
            )
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatCompletionRequest":
        """Set the documented default of tool_choice: auto if there are tools, else none."""
        if self.tool_choice is None or (self.tool_choice == "auto" and not self.tools):
            self.tool_choice = "auto" if self.tools else "none"
        if self.tool_choice == "none":
            return self
        if not self.tools:
            raise field_error("tool_choice", "needs tools")
        if not self._is_choice_read:  # pydantic runs validators again if a body is reused
            choice, tools = plain_choice(self.tool_choice, self.function_tools, self.custom_tools)
            self.tool_choice, self.tools = choice, list(tools)
            self._is_choice_read = True
        # A response format applies to text answers only, so it does not conflict with a required
        # tool call.
        others = self.constraints()[: -1 if self.has_response_format else None]
        if self.tool_choice != "auto" and others:
            raise field_error(
                others[0], "cannot be combined with this tool_choice, which sets the output format"
            )
        return self

    @property
    def has_functions(self) -> bool:
        """Whether the client knows calls only as `function_call`, in the older API."""
        return self._has_functions

    @property
    def hides_reasoning(self) -> bool:
        """Whether to leave the reasoning out of the answer."""
        is_excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is False or bool(is_excluded)

    @property
    def wanted_tokens(self) -> int | None:
        """The requested maximum number of output tokens, or None."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def only_call(self) -> str | None:
        """The tool whose arguments or input are the whole output; None if there is no such tool."""
        if self.tool_choice == "required" and len(self.function_tools) == 1:
            name = self.function_tools[0].function.name
            return name if name in self.custom_tools else None
        return self.named_tool

    @property
    def named_tool(self) -> str | None:
        """The function that the request requires by name, or None."""
        if isinstance(self.tool_choice, ChatCompletionNamedToolChoiceParam):
            return self.tool_choice.function.name
        return None


# ---- responses --------------------------------------------------------------------------------


class FunctionCall(ResponseModel):
    """A function call as the model wrote it; `arguments` is JSON text that may be invalid."""

    name: str
    arguments: str


def random_tool_call_id() -> str:
    """Return a random id for a tool call."""
    return f"chatcmpl-tool-{random_id()}"


class ToolCall(ResponseModel):
    """One call of a function."""

    id: str = Field(default_factory=random_tool_call_id)
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomCall(ResponseModel):
    """The input that the model wrote for a custom tool."""

    name: str
    input: str


class CustomToolCall(ResponseModel):
    """One call of a custom tool."""

    id: str = Field(default_factory=random_tool_call_id)
    type: Literal["custom"] = "custom"
    custom: CustomCall


class DeltaFunctionCall(ResponseModel):
    """A delta of a function call: the name comes once, the arguments piece by piece."""

    name: str | None = None
    arguments: str | None = None


class DeltaCustomCall(ResponseModel):
    """A delta of a custom tool call: the name comes once, the input piece by piece."""

    name: str | None = None
    input: str | None = None


class DeltaToolCall(ResponseModel):
    """A delta of the tool call with this index; the first delta has its id and type."""

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    index: int
    function: DeltaFunctionCall | None = None
    custom: DeltaCustomCall | None = None


class ExtractedToolCallInformation(ResponseModel):
    """The result of a tool parser for a complete output."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class ChatMessage(ResponseModel):
    """The answer of the model."""

    role: str
    reasoning_content: str | None = None
    content: str | None = None
    refusal: None = None
    """Always null; strict clients require the field."""
    tool_calls: list[ToolCall | CustomToolCall] = Field(default_factory=list)
    function_call: FunctionCall | None = None
    """The call, if the request has `functions`."""


class ChatCompletionLogProb(ResponseModel):
    """Log-probability of a token; `bytes` are the bytes of its text."""

    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None


class ChatCompletionLogProbsContent(ChatCompletionLogProb):
    """Log-probabilities of one position: the token there, and the most likely tokens."""

    top_logprobs: list[ChatCompletionLogProb] = Field(default_factory=list)


class ChatCompletionLogProbs(ResponseModel):
    """Log-probabilities of the output."""

    content: list[ChatCompletionLogProbsContent] | None = None
    refusal: None = None
    """Always null; strict clients require the field."""


class ChatCompletionResponseChoice(ResponseModel):
    """One of the answers."""

    index: int
    message: ChatMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None


class ChatCompletionResponse(ResponseModel):
    """The answers to a conversation."""

    id: str = Field(default_factory=lambda: f"chatcmpl-{random_id()}")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=now)
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class DeltaMessage(ResponseModel):
    """The new fields of an answer; unchanged ones are left out."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)
    function_call: DeltaFunctionCall | None = None


class ChatCompletionResponseStreamChoice(ResponseModel):
    """A delta of one of the answers."""

    index: int
    delta: DeltaMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletionStreamResponse(ResponseModel):
    """One chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | None = None
