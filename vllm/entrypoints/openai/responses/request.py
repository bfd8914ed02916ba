"""Convert a request of the Responses API to a request of the chat API: fields, tools, format of the
answer.

Pure functions, independent of the engine. Every error names the field as the client wrote it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from vllm.entrypoints.http.ignored import note_ignored
from vllm.entrypoints.http.validation_text import describe_validation
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.responses import ResponsesRequest
from vllm.entrypoints.openai.protocol.sampling import API_NUMBERS
from vllm.entrypoints.openai.protocol.tools import (
    FOREIGN_TOOL,
    flat_tool,
    is_foreign,
    wrong_type,
)
from vllm.entrypoints.openai.shared.response_items import Message, read_string
from vllm.errors import RequestError
from vllm.utils.text.json_words import show_value

_REFUSED_FIELDS = ("conversation", "moderation", "prompt")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
"""Values of `include`. Reasoning is never encrypted, so it is always included as text."""
_OF_FOREIGN_ITEMS = re.compile(r"\w+_call(_output)?\.[\w.]+|message\.input_\w+\.[\w.]+")
"""Values of `include` about items that a response of this server never has."""
_SAMPLING_FIELDS = (
    *API_NUMBERS,
    *("stop", "priority", "cache_salt", "user", "enable_thinking"),
)


def check_request(request: ResponsesRequest) -> None:
    """Refuse features that this server does not have.

    Raises:
        RequestError: names the field.
    """
    for name in _REFUSED_FIELDS:
        if getattr(request, name) is not None:
            raise RequestError(f"{name} is not available in this server", param=name)
    for what in request.include or ():
        if _OF_FOREIGN_ITEMS.fullmatch(what):
            note_ignored("the include", what, "no response of this server has such items")
        elif what not in _INCLUDABLE:
            raise RequestError(
                f"include accepts {' and '.join(_INCLUDABLE)}, got {show_value(what)}",
                param="include",
            )
    if request.background and request.store is False:
        raise RequestError(
            "background needs store=true: otherwise the response could not be retrieved",
            param="background",
        )


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Return whether log-probabilities are requested."""
    return bool(request.top_logprobs) or _LOGPROBS in (request.include or ())


def as_chat_request(
    request: ResponsesRequest, messages: Sequence[Message]
) -> ChatCompletionRequest:
    """Convert a request to the equivalent chat request.

    Args:
        request: request that `check_request` has checked.
        messages: the conversation.

    Raises:
        RequestError: a tool or a format is not available, or fields contradict each other.
    """
    given = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    tools, choice = _read_tools(request)
    if tools:
        fields.update(tools=tools, tool_choice=choice)
    fields.update(
        request.shared_fields(),
        model=request.model,
        messages=list(messages),
        max_completion_tokens=request.max_output_tokens,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        response_format=request.response_format(),
        chat_template_kwargs=_template_kwargs(request),
        logprobs=wants_logprobs(request),
        top_logprobs=request.top_logprobs or 0,
        stream=True,
    )
    return make_chat_request(fields, format_field="text.format")


def make_chat_request(fields: Mapping[str, Any], *, format_field: str) -> ChatCompletionRequest:
    """Return a chat request, created from fields of another API.

    Args:
        fields: fields of the chat API.
        format_field: name of `response_format` in the other API, for errors.

    Raises:
        RequestError: fields contradict each other.
    """
    try:
        request = ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        message, param = describe_validation(error.errors())
        if param is not None and param.partition(".")[0] == "response_format":
            param = format_field
            message = message.replace("response_format", format_field, 1)
        raise RequestError(message, param=param) from None
    request.rename_format(format_field)
    return request


def _read_tools(request: ResponsesRequest) -> tuple[list[dict[str, Any]], Any]:
    """Convert the tools and the tool choice to the chat API."""
    found = [_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(request.tools or ())]
    tools = [tool for tool in found if tool is not None]
    choice = request.tool_choice or "auto"
    if isinstance(choice, str):
        if choice == "required" and not tools:
            raise RequestError(
                "tool_choice required needs functions or custom tools in tools"
                + (", and this server runs no others" if request.tools else ""),
                param="tool_choice",
            )
        return tools, choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        name = flat_tool(choice).get("name")
        if (kind, name) not in map(_key_of, tools):
            raise RequestError(
                f"tool_choice names the {kind} {show_value(name)}, which is not in tools",
                param="tool_choice",
            )
        return tools, {"type": kind, kind: {"name": name}}
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(tools, flat_tool(choice))
    if is_foreign(kind):
        raise RequestError(
            f"tool_choice must name a function or a custom tool, got the type "
            f"{show_value(kind)}, which "
            f"this server does not run",
            param="tool_choice",
        )
    raise RequestError(
        f"tool_choice.type must be function, custom or allowed_tools, got {show_value(kind)}",
        param="tool_choice",
    )


def _allowed_tools(
    tools: list[dict[str, Any]], choice: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Any]:
    wanted, mode = choice.get("tools"), choice.get("mode")
    if mode not in ("auto", "required") or not isinstance(wanted, list):
        raise RequestError(
            "tool_choice of type allowed_tools needs mode (auto or required) and tools",
            param="tool_choice",
        )
    keys = [
        _named_in(f"tool_choice.tools[{i}]", flat_tool(tool) if isinstance(tool, Mapping) else tool)
        for i, tool in enumerate(wanted)
        if not (isinstance(tool, Mapping) and is_foreign(tool.get("type")))
    ]
    known = set(map(_key_of, tools))
    if missing := [key for key in keys if key not in known]:
        raise RequestError(
            f"tool_choice allows the {missing[0][0]} "
            f"{show_value(missing[0][1])}, which is not in tools",
            param="tool_choice",
        )
    if not keys:
        raise RequestError(
            "tool_choice.tools must have a function or a custom tool", param="tool_choice"
        )
    allowed = set(keys)
    return [tool for tool in tools if _key_of(tool) in allowed], mode


def _named_in(where: str, tool: Any) -> tuple[str, str]:
    """Return the type and the name of a tool that a tool choice allows."""
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    name = tool.get("name") if isinstance(tool, Mapping) else None
    if kind not in ("function", "custom") or not isinstance(name, str):
        raise RequestError(
            f"{where} must be such as {{'type': 'function', 'name': ...}} or {{'type': 'custom', "
            f"'name': ...}}, got {show_value(tool)}",
            param="tool_choice",
        )
    return kind, name


def _key_of(tool: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the type and the name of a tool in the format of the chat API."""
    return tool["type"], tool[tool["type"]]["name"]


def _read_tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert one tool; None if it is left out."""
    tool = flat_tool(tool)
    kind = tool.get("type")
    if kind == "custom":
        return _read_custom_tool(where, tool)
    if is_foreign(kind):
        note_ignored("tools of the type", kind, FOREIGN_TOOL)
        return None
    if kind != "function":
        raise RequestError(
            f"{where}.type {wrong_type(kind)}",
            param=f"{where}.type",
        )
    for key, expected in (("name", str), ("description", str), ("parameters", Mapping)):
        value = tool.get(key)
        if not isinstance(value, expected) and (value is not None or key == "name"):
            raise RequestError(
                f"{where}.{key} must be {'an object' if expected is Mapping else 'a string'}, "
                f"got {show_value(value)}",
                param=f"{where}.{key}",
            )
    if not isinstance(tool.get("strict"), bool | None):
        raise RequestError(
            f"{where}.strict must be true or false, got {show_value(tool['strict'])}",
            param=f"{where}.strict",
        )
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _read_custom_tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    custom: dict[str, Any] = {"name": read_string(where, tool, "name")}
    if tool.get("description") is not None:
        custom["description"] = read_string(where, tool, "description", may_be_empty=True)
    wanted = tool.get("format")
    if wanted is None:
        return {"type": "custom", "custom": custom}
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "grammar":
        if wanted.get("syntax") not in ("lark", "regex"):
            raise RequestError(
                f"{where}.format.syntax must be lark or regex, "
                f"got {show_value(wanted.get('syntax'))}",
                param=f"{where}.format.syntax",
            )
        definition = read_string(f"{where}.format", wanted, "definition")
        grammar = {"syntax": wanted["syntax"], "definition": definition}
        custom["format"] = {"type": "grammar", "grammar": grammar}
    elif kind != "text":
        raise RequestError(
            f"{where}.format must be {{'type': 'text'}} or {{'type': 'grammar', 'syntax': ..., "
            f"'definition': ...}}, got {show_value(wanted)}",
            param=f"{where}.format",
        )
    return {"type": "custom", "custom": custom}


def _template_kwargs(request: ResponsesRequest) -> dict[str, Any] | None:
    """Return the reasoning effort under the name that chat templates use. Templates ignore unknown
    names.
    """
    kwargs: dict[str, Any] = {}
    if request.reasoning is not None and request.reasoning.effort is not None:
        kwargs["reasoning_effort"] = request.reasoning.effort
    return {**kwargs, **(request.chat_template_kwargs or {})} or None
