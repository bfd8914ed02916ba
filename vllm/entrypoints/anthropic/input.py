"""Checks conversations and tools in Anthropic's format, and converts them to the chat API.

Pure functions, independent of engine and framework.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vllm.entrypoints.anthropic.protocol import Conversation, InputMessage
from vllm.entrypoints.openai.responses.input import read_string
from vllm.errors import RequestError

Message = dict[str, Any]
Tool = dict[str, Any]
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any]

_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""Role -> types of content blocks that its messages may have."""
_CHOICES: dict[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "any": "required",
}


def as_messages(conversation: Conversation) -> list[Message]:
    """System prompt and turns as chat messages.

    Raises:
        RequestError: a block is malformed or of a type that is not served; names the place.
    """
    messages: list[Message] = []
    if conversation.system:
        messages.append({"role": "system", "content": _read_text("system", conversation.system)})
    names: dict[str, str] = {}
    for i, message in enumerate(conversation.messages):
        messages += _read_turn(f"messages.{i}.content", message, names)
    return messages


def as_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool] | None:
    """Tools in the format of the chat API; None when there are none.

    Raises:
        RequestError: a tool is malformed, or is a server-side tool.
    """
    return [_read_tool(f"tools.{i}", tool) for i, tool in enumerate(tools or ())] or None


def as_tool_choice(choice: Mapping[str, Any] | None) -> tuple[ToolChoice | None, bool]:
    """The tool choice in the format of the chat API, and whether parallel calls are allowed.

    Raises:
        RequestError: it is malformed.
    """
    if choice is None:
        return None, True
    is_parallel = choice.get("disable_parallel_tool_use") is not True
    kind = choice.get("type")
    if kind == "tool":
        name = read_string("tool_choice", choice, "name")
        return {"type": "function", "function": {"name": name}}, is_parallel
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(
            f"tool_choice.type must be auto, any, tool or none, got {kind!r:.80}",
            param="tool_choice",
        )
    return _CHOICES[kind], is_parallel


def _read_turn(where: str, turn: InputMessage, names: dict[str, str]) -> list[Message]:
    """The messages of one turn. Tool results become separate messages before the user's.

    Args:
        where: for errors.
        turn: the turn.
        names: id of a call -> name of its function; grows.
    """
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[Message] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(turn.content):
        place = f"{where}.{i}"
        kind = _block_type(place, block, _BLOCKS[turn.role])
        if kind == "text":
            texts.append(read_string(place, block, "text", may_be_empty=True))
        elif kind == "thinking":
            thoughts.append(read_string(place, block, "thinking", may_be_empty=True))
        elif kind == "tool_use":
            calls.append(_read_call(place, block))
            names[calls[-1]["id"]] = calls[-1]["function"]["name"]
        elif kind == "tool_result":
            results.append(_read_result(place, block, names))
    message: Message = {"role": turn.role, "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    has_only_results = bool(results) and not texts
    return results if has_only_results else [*results, message]


def _read_call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise RequestError(
            f"{where}.input must be an object, got {arguments!r:.80}", param=f"{where}.input"
        )
    function = {"name": read_string(where, block, "name"), "arguments": json.dumps(arguments)}
    return {"id": read_string(where, block, "id"), "type": "function", "function": function}


def _read_result(where: str, block: Mapping[str, Any], names: Mapping[str, str]) -> Message:
    call_id = read_string(where, block, "tool_use_id")
    if call_id not in names:
        raise RequestError(
            f"{where}.tool_use_id {call_id!r:.100} is not the id of an earlier tool_use block",
            param=f"{where}.tool_use_id",
        )
    content = block.get("content")
    text = "" if content is None else _read_text(f"{where}.content", content)
    if block.get("is_error") is True:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": text}


def _read_tool(where: str, tool: Mapping[str, Any]) -> Tool:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise RequestError(
            f"{where}.type {kind!r:.80} is not available: server-side tools are not supported; "
            f"declare a tool of the client with name and input_schema",
            param=f"{where}.type",
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"{where}.input_schema must be a JSON schema, got {schema!r:.80}",
            param=f"{where}.input_schema",
        )
    function: dict[str, Any] = {
        "name": read_string(where, tool, "name"),
        "parameters": dict(schema),
    }
    if tool.get("description") is not None:
        function["description"] = read_string(where, tool, "description", may_be_empty=True)
    return {"type": "function", "function": function}


def _read_text(where: str, content: Any) -> str:
    """The text of content in which only text is allowed."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where} must be a string or a list of blocks, got {content!r:.80}", param=where
        )
    texts = []
    for i, block in enumerate(content):
        _block_type(f"{where}.{i}", block, ("text",))
        texts.append(read_string(f"{where}.{i}", block, "text", may_be_empty=True))
    return "\n".join(texts)


def _block_type(where: str, block: Any, known: Sequence[str]) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where} must be an object with a type", param=where)
    if kind not in known:
        raise RequestError(
            f"{where}: a block of type {kind!r:.80} is not supported here; supported: "
            f"{', '.join(known)}",
            param=f"{where}.type",
        )
    return kind
