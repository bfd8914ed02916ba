"""Define the tools of a chat request, and the choice of the tools that the model may or must call.

A tool is a function, whose arguments are JSON, or custom, whose input is text. Models, chat
templates and parsers see a custom tool as a function with one argument, `input` (`as_functions`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from vllm.entrypoints.http.ignored import note_ignored
from vllm.entrypoints.http.validation_text import TAG_SIGN
from vllm.entrypoints.openai.protocol.accepts import accepts
from vllm.entrypoints.openai.protocol.base import (
    JsonObject,
    ListOf,
    RequestModel,
    field_error,
    tag_by_type,
)
from vllm.utils.text.json_words import show_value

FOREIGN_TOOL = "not run by this server; the model does not see it"
_OWN_TYPES = ("function", "custom")
INPUT = "input"
"""The argument that holds the input of a custom tool."""
Name = Annotated[str, Field(min_length=1, max_length=256)]


def is_foreign(kind: Any) -> bool:
    """Return whether only OpenAI's servers can run a tool of this type, or only OpenAI's models
    know it.

    New types appear often, so this covers every type except the two that declare a tool.
    """
    return isinstance(kind, str) and kind not in ("", *_OWN_TYPES)


def read_dialects(tools: Any) -> Any:
    """Return the tools of an unvalidated body in the form of the chat API, without foreign ones,
    which are logged.

    Programs that use several APIs, such as Cursor, mix in the forms of the Responses API, where a
    tool is one flat object, and of Anthropic, where the schema is `input_schema`.
    """
    if not isinstance(tools, list):
        return tools
    kept = []
    for index, given in enumerate(tools):
        tool = _in_chat_form(given)
        kind = tool.get("type") if isinstance(tool, dict) else None
        if is_foreign(kind):
            note_ignored("tools of the type", kind, FOREIGN_TOOL)
        elif kind not in (None, *_OWN_TYPES):
            raise field_error(f"{index}.type", wrong_type(kind))
        else:
            kept.append(tool)
    return kept


def _in_chat_form(tool: Any) -> Any:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return tool
    kind = tool.get("type")
    has_schema = "input_schema" in tool
    if kind not in (None, *_OWN_TYPES) or "function" in tool or (kind is None and not has_schema):
        return tool
    rest = {key: value for key, value in tool.items() if key not in ("type", "input_schema")}
    if kind != "custom" or has_schema:
        schema = {"parameters": tool["input_schema"]} if has_schema else {}
        return {"type": "function", "function": {**rest, **schema}}
    form = rest.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar" and "grammar" not in form:
        grammar = {key: form[key] for key in ("syntax", "definition") if key in form}
        rest["format"] = {"type": "grammar", "grammar": grammar}
    return tool if "custom" in tool else {"type": "custom", "custom": rest}


def flat_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool or a tool choice with the fields at its top, which the chat API has one level
    deeper.
    """
    inner = tool.get(str(tool.get("type")))
    if not isinstance(inner, Mapping) or "name" in tool:
        return tool
    flat = {"type": tool["type"], **inner}
    form = flat.get("format")
    if isinstance(form, Mapping) and isinstance(form.get("grammar"), Mapping):
        flat["format"] = {"type": form.get("type"), **form["grammar"]}
    return flat


def wrong_type(kind: Any) -> str:
    """Describe the error in the type of a tool, as the end of a sentence that begins with the
    field.
    """
    return f"must be a string such as {' or '.join(_OWN_TYPES)}, got {show_value(kind)}"


@dataclass(frozen=True)
class CallForm:
    """JSON format of tool calls after a marker, for grammars: one object per call, or a list of
    calls.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    is_list: bool = False
    starts: tuple[str, ...] = ()
    """Texts after which the call comes; none: the markers of the parser."""


class FunctionDefinition(RequestModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(default=None, exclude=True)
    """Calls have to follow the schema. Not for the chat template."""


class ChatCompletionToolsParam(RequestModel):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class CustomToolGrammar(RequestModel):
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1)


class CustomToolFormat(RequestModel):
    """The format of a custom tool's input: any text, or text that matches a grammar."""

    type: Literal["text", "grammar"] = "text"
    grammar: CustomToolGrammar | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> "CustomToolFormat":
        if self.type == "grammar" and self.grammar is None:
            raise field_error("format", "of type grammar needs grammar with syntax and definition")
        return self


class CustomToolDefinition(RequestModel):
    """A custom tool, whose input is text."""

    name: Name
    description: str | None = None
    format: CustomToolFormat | None = None

    @property
    def grammar(self) -> CustomToolGrammar | None:
        """The grammar of the input; None: any text is allowed."""
        is_free = self.format is None or self.format.type == "text"
        return None if is_free or self.format is None else self.format.grammar


class ChatCompletionCustomToolParam(RequestModel):
    """A custom tool that the model may call."""

    type: Literal["custom"]
    custom: CustomToolDefinition


def _kind_of(value: Any) -> str:
    return tag_by_type(value, ("custom",), "function")


ToolParam = Annotated[
    Annotated[ChatCompletionToolsParam, Tag(f"{TAG_SIGN}function")]
    | Annotated[ChatCompletionCustomToolParam, Tag(f"{TAG_SIGN}custom")],
    Discriminator(_kind_of),
]


class ChatCompletionNamedFunction(RequestModel):
    """The name of a function."""

    name: str


FunctionChoice = Annotated[
    Literal["none", "auto"] | ChatCompletionNamedFunction,
    accepts('none, auto or {"name": ...}'),
]
"""The choice of a function in the API before tools."""


class ChatCompletionNamedToolChoiceParam(RequestModel):
    """The one function that the model has to call."""

    type: Literal["function"] = "function"
    function: ChatCompletionNamedFunction


class ChatCompletionNamedCustom(RequestModel):
    """The name of a custom tool."""

    name: str


class ChatCompletionNamedToolChoiceCustomParam(RequestModel):
    """The one custom tool that the model has to call."""

    type: Literal["custom"]
    custom: ChatCompletionNamedCustom


class AllowedTools(RequestModel):
    """The tools that the model may call, or of which it must call one."""

    mode: Literal["auto", "required"]
    tools: ListOf[JsonObject] = Field(min_length=1)


class ChatCompletionAllowedToolChoiceParam(RequestModel):
    """A tool choice that is limited to some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind_of(value: Any) -> str:
    if value is None or isinstance(value, (str, int, float, list)):
        return f"{TAG_SIGN}word"
    return tag_by_type(value, ("custom", "allowed_tools"), "function")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(f"{TAG_SIGN}word")]
    | Annotated[ChatCompletionNamedToolChoiceParam, Tag(f"{TAG_SIGN}function")]
    | Annotated[ChatCompletionNamedToolChoiceCustomParam, Tag(f"{TAG_SIGN}custom")]
    | Annotated[ChatCompletionAllowedToolChoiceParam, Tag(f"{TAG_SIGN}allowed_tools")],
    Discriminator(_choice_kind_of),
    accepts(
        'none, auto, required, {"type": "function", "function": {"name": ...}}, {"type": "custom", '
        '"custom": {"name": ...}}, or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" '
        'or "required", "tools": [...]}}'
    ),
]
_CHOICE_TYPES = (*_OWN_TYPES, "allowed_tools")
CHOICE_WORDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
"""Type of a tool choice that is a word -> the word of the chat API."""
PlainChoice = Literal["none", "auto", "required"] | ChatCompletionNamedToolChoiceParam


def read_choice(choice: Any) -> Any:
    """Return an unvalidated tool choice in the form of the chat API. Like tools, it may have the
    form of another API: flat objects, objects instead of words, and `any` instead of `required`.

    Raises:
        PydanticCustomError: it names a foreign tool.
    """
    if not isinstance(choice, dict):
        return "required" if choice == "any" else choice
    kind, name = choice.get("type"), choice.get("name")
    if isinstance(kind, str) and kind in CHOICE_WORDS and name is None:
        return CHOICE_WORDS[kind]
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    if kind in _OWN_TYPES:
        return _nested(choice)
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        own = {"mode": choice.get("mode"), "tools": list(map(_nested, choice["tools"]))}
        return {"type": kind, "allowed_tools": own}
    if isinstance(kind, str) and kind not in _CHOICE_TYPES:
        raise field_error(
            "type",
            f"must be {', '.join(_CHOICE_TYPES)}, got {show_value(kind)}, which this server does "
            "not run",
        )
    return choice


def _nested(tool: Any) -> Any:
    """Return the name of a tool in the form of the chat API. In the Responses API it is flat."""
    if not isinstance(tool, dict) or tool.get("type") not in _OWN_TYPES:
        return tool
    kind, name = tool["type"], tool.get("name")
    return {"type": kind, kind: {"name": name}} if name and kind not in tool else tool


ReadTools = tuple[list[ChatCompletionToolsParam], dict[str, CustomToolDefinition]]


def as_functions(tools: Sequence[Any]) -> ReadTools:
    """Return all tools as functions, and the custom tools by name."""
    custom = {
        tool.custom.name: tool.custom
        for tool in tools
        if isinstance(tool, ChatCompletionCustomToolParam)
    }
    functions = [
        _as_function(tool.custom) if isinstance(tool, ChatCompletionCustomToolParam) else tool
        for tool in tools
    ]
    names = [tool.function.name for tool in functions]
    for name in custom:
        if names.count(name) > 1:
            raise field_error("tools", f"two tools have the name {show_value(name)}")
    return functions, custom


def _as_function(tool: CustomToolDefinition) -> ChatCompletionToolsParam:
    schema: JsonObject = {"type": "string"}
    if tool.grammar is not None and tool.grammar.syntax == "regex":
        schema["pattern"] = f"^(?:{tool.grammar.definition})$"
    elif tool.grammar is not None:
        schema["description"] = f"A text of this Lark grammar:\n{tool.grammar.definition}"
    parameters: JsonObject = {
        "type": "object",
        "properties": {INPUT: schema},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function = FunctionDefinition(name=tool.name, parameters=parameters)
    if tool.description is not None:
        function.description = tool.description
    return ChatCompletionToolsParam(function=function)


def plain_choice(
    choice: Any,
    tools: list[ChatCompletionToolsParam],
    custom: dict[str, CustomToolDefinition],
) -> tuple[PlainChoice, list[ChatCompletionToolsParam]]:
    """Convert a tool choice of any format to the plain form.

    Returns:
        The choice, and the allowed tools; the model does not see other tools.

    Raises:
        PydanticCustomError: the choice names an unknown tool, or a tool of the other type.
    """
    names = {tool.function.name for tool in tools}
    if isinstance(choice, ChatCompletionAllowedToolChoiceParam):
        own = [tool for tool in choice.allowed_tools.tools if not is_foreign(tool.get("type"))]
        if not own:
            raise field_error(
                "tool_choice", "allowed_tools.tools must have a function or a custom tool"
            )
        allowed = {_allowed_name(i, tool, names, custom) for i, tool in enumerate(own)}
        return choice.allowed_tools.mode, [t for t in tools if t.function.name in allowed]
    if isinstance(choice, ChatCompletionNamedToolChoiceCustomParam):
        name = choice.custom.name
        if name not in custom:
            raise field_error("tool_choice", f"no custom tool has the name {show_value(name)}")
        named = ChatCompletionNamedFunction(name=name)
        return ChatCompletionNamedToolChoiceParam(function=named), tools
    if isinstance(choice, ChatCompletionNamedToolChoiceParam):
        name = choice.function.name
        if name in custom:
            raise field_error(
                "tool_choice",
                f"{show_value(name)} is a custom tool: name it with "
                '{"type": "custom", "custom": {"name": ...}}',
            )
        if name not in names:
            raise field_error("tool_choice", f"no tool has the name {show_value(name)}")
    return choice, tools


def _allowed_name(
    index: int, tool: JsonObject, names: set[str], custom: dict[str, CustomToolDefinition]
) -> str:
    where = f"allowed_tools.tools[{index}]"
    kind = tool.get("type", "function")
    if kind not in ("function", "custom"):
        raise field_error(
            "tool_choice", f"{where}.type must be function or custom, got {show_value(kind)}"
        )
    definition = tool.get(str(kind))
    name = definition.get("name") if isinstance(definition, dict) else None
    known = set(custom) if kind == "custom" else names - set(custom)
    if not isinstance(name, str) or name not in known:
        raise field_error(
            "tool_choice",
            f"{where} must name a {kind} tool of the request, such as "
            f'{{"type": "{kind}", "{kind}": {{"name": ...}}}}; got {show_value(name)}',
        )
    return name
