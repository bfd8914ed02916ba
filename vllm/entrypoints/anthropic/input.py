"""Check conversations and tools in Anthropic's format, and convert them to the chat API.

Pure functions, independent of engine and framework.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from vllm.entrypoints.anthropic.protocol import Conversation, InputMessage
from vllm.entrypoints.conversation.media import image_part
from vllm.entrypoints.conversation.messages import (
    FILE_PARTS,
    Part,
    join_texts,
    left_out,
    mcp_image_url,
    result_content,
)
from vllm.entrypoints.http.ignored import note_ignored
from vllm.entrypoints.openai.shared.response_items import read_string
from vllm.errors import RequestError
from vllm.utils.text.json_words import show_value

Message = dict[str, Any]
Tool = dict[str, Any]
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any]

_BLOCKS = {
    "user": ("text", "image", "document", "search_result", "tool_reference", "tool_result"),
    "assistant": ("text", "compaction", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text", "document", "search_result", "tool_reference"),
}
"""Role -> types of content blocks that its messages may have."""
_RESULT_BLOCKS = (*_BLOCKS["system"], "image")
"""Types of content blocks that the result of a tool may have."""
_TEXT_BLOCKS = ("text", "document", "search_result", "tool_reference", "compaction")
_OTHER_NAMES = {"input_text": "text", "output_text": "text"}
"""Type of a text part in OpenAI's APIs -> type of the block."""
_OTHER_IMAGES = ("image_url", "input_image")
_UNREADABLE = (
    *("image", "audio", "video", "input_audio", "audio_url", "input_video", "video_url"),
    *("file", "input_file"),
)
"""Types of content that matters, which is never left out."""
_KNOWN = frozenset(kind for kinds in _BLOCKS.values() for kind in kinds).union(_UNREADABLE)
_CHOICES: dict[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "any": "required",
    "required": "required",
}
_IMAGE_TYPE = re.compile(r"image/[A-Za-z0-9.+-]{1,32}")
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def as_messages(conversation: Conversation) -> list[Message]:
    """Return the system prompt and the turns as chat messages.

    Raises:
        RequestError: a block is malformed or cannot be read; names its position.
    """
    messages: list[Message] = []
    if text := _read_system("system", conversation.system or ""):
        messages.append({"role": "system", "content": text})
    names: dict[str, str] = {}
    for i, message in enumerate(conversation.messages):
        where = f"messages.{i}.content"
        if message.role in ("system", "developer"):
            text = _read_system(where, message.content)
            messages.append({"role": "system", "content": text})
        else:
            messages += _read_turn(where, message, names)
    return messages


def as_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool] | None:
    """Return tools in the format of the chat API; None if there are none.

    A tool that Anthropic's servers run, or whose schema only Anthropic's models know, is left out.

    Raises:
        RequestError: a tool is malformed.
    """
    found = [_read_tool(f"tools.{i}", tool) for i, tool in enumerate(tools or ())]
    return [tool for tool in found if tool is not None] or None


def as_tool_choice(
    choice: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None = None
) -> tuple[ToolChoice | None, bool]:
    """Return the tool choice in the format of the chat API, and whether parallel calls are allowed.

    Args:
        choice: tool choice of the request.
        tools: tools of the request, as the client sent them.

    Raises:
        RequestError: it is malformed, or names a tool that is left out.
    """
    if choice is None:
        return None, True
    is_parallel = choice.get("disable_parallel_tool_use") is not True
    kind = choice.get("type")
    if kind in ("function", "custom"):  # in the form of OpenAI's APIs
        choice, kind = {"name": choice.get("name"), **(choice.get(kind) or {})}, "tool"
    if kind == "tool":
        name = read_string("tool_choice", choice, "name")
        for tool in tools or ():
            if tool.get("name") == name and not _is_function(tool):
                raise RequestError(
                    f"tool_choice names the tool {show_value(name)} of the type "
                    f"{show_value(tool['type'])}, which this server does not run: name a tool with "
                    f"an input_schema",
                    param="tool_choice",
                )
        return {"type": "function", "function": {"name": name}}, is_parallel
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(
            f"tool_choice.type must be auto, any, tool or none, got {show_value(kind)}",
            param="tool_choice",
        )
    return _CHOICES[kind], is_parallel


def _read_system(where: str, content: Any) -> str:
    """Return the text of a system prompt, without the accounting line that Claude Code adds at its
    beginning.

    This line differs in each request, so no two requests could share a cached prefix.
    """
    texts = (
        [content] if isinstance(content, str) else _read_texts(where, content, _BLOCKS["system"])
    )
    kept = [(text, _BILLING.sub("", text)) for text in texts]
    return "\n".join(rest for text, rest in kept if rest or not text)


def _read_turn(where: str, turn: InputMessage, names: dict[str, str]) -> list[Message]:
    """Return the messages of one turn. Tool results become separate messages before the user's.

    Args:
        where: position in the request, for errors.
        turn: the turn.
        names: id of a call -> name of its function; calls of this turn are added.
    """
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[Message] = []
    parts: list[Part] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    blocks = list(map(_in_own_form, turn.content))
    # Claude Code sends a PDF that a tool has read after the result of the tool.
    has_results = any(_type_of(block) == "tool_result" for block in blocks)
    for i, block in enumerate(blocks):
        place = f"{where}.{i}"
        kind = _block_type(place, block, _BLOCKS[turn.role])
        if has_results and kind == "document" and not _has_text(block):
            parts.append({"type": "text", "text": left_out("file")})
        elif kind in _TEXT_BLOCKS:
            parts.append({"type": "text", "text": _READERS[kind](place, block)})
        elif kind == "image":
            parts.append(_read_image(place, block))
        elif kind == "thinking":
            thoughts.append(read_string(place, block, "thinking", may_be_empty=True))
        elif kind == "tool_use":
            calls.append(_read_call(place, block))
            names[calls[-1]["id"]] = calls[-1]["function"]["name"]
        elif kind == "tool_result":
            results.append(_read_result(place, block, names))
    message: Message = {"role": turn.role, "content": join_texts(parts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    has_only_results = bool(results) and not parts
    return results if has_only_results else [*results, message]


def _read_call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if arguments is None or isinstance(arguments, Mapping):
        arguments = json.dumps(arguments or {})
    elif not isinstance(arguments, str):  # some clients send the JSON text, damaged or not
        raise RequestError(
            f"{where}.input must be an object, got {show_value(arguments)}", param=f"{where}.input"
        )
    function = {"name": read_string(where, block, "name"), "arguments": arguments}
    return {"id": read_string(where, block, "id"), "type": "function", "function": function}


def _read_result(where: str, block: Mapping[str, Any], names: Mapping[str, str]) -> Message:
    call_id = read_string(where, block, "tool_use_id")
    if call_id not in names:
        raise RequestError(
            f"{where}.tool_use_id {show_value(call_id)} is not the id of an earlier tool_use block",
            param=f"{where}.tool_use_id",
        )
    content = block.get("content")
    parts = [] if content is None else _read_parts(f"{where}.content", content)
    result = join_texts(parts)
    if block.get("is_error") is True:
        mark: Part = {"type": "text", "text": "Error:"}
        result = f"Error: {result}" if isinstance(result, str) else [mark, *result]
    return {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": result}


def _is_function(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool is declared by its own schema, so is not a tool of Anthropic's
    servers.
    """
    return tool.get("type") in (None, "custom", "function")


def _read_tool(where: str, tool: Mapping[str, Any]) -> Tool | None:
    """Return one tool; None if it is left out."""
    if tool.get("type") == "function":  # in the form of OpenAI's APIs
        inner = tool.get("function")
        tool = {"input_schema": tool.get("parameters"), **tool, "type": None}
        if isinstance(inner, Mapping):
            tool = {**inner, "input_schema": inner.get("parameters")}
    if not _is_function(tool):
        kind = read_string(where, tool, "type")
        note_ignored("tools of the type", kind, "not run by this server; the model does not see it")
        return None
    function: dict[str, Any] = {"name": read_string(where, tool, "name")}
    schema = tool.get("input_schema")
    if isinstance(schema, Mapping):
        function["parameters"] = dict(schema)
    elif schema is not None:  # without a schema, the tool has no arguments
        raise RequestError(
            f"{where}.input_schema must be a JSON schema (an object), got {show_value(schema)}",
            param=f"{where}.input_schema",
        )
    if tool.get("description") is not None:
        function["description"] = read_string(where, tool, "description", may_be_empty=True)
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _read_text(where: str, content: Any) -> str:
    """Return the text of content that may contain only text."""
    if isinstance(content, str):
        return content
    return "\n".join(_read_texts(where, content, _BLOCKS["system"]))


def _as_blocks(where: str, content: Any) -> Sequence[Any]:
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where} must be a string or a list of blocks, got {show_value(content)}", param=where
        )
    return content


def _read_texts(where: str, content: Any, known: Sequence[str]) -> list[str]:
    content = list(map(_in_own_form, _as_blocks(where, content)))
    kinds = [_block_type(f"{where}.{i}", block, known) for i, block in enumerate(content)]
    return [
        _READERS[kind](f"{where}.{i}", block)
        for i, (kind, block) in enumerate(zip(kinds, content, strict=True))
        if kind is not None
    ]


def _read_parts(where: str, content: Any) -> list[Part]:
    """Return the text and image parts of a tool result, with a text instead of a file that the
    model cannot read.
    """
    content = result_content(content)
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts: list[Part] = []
    for i, block in enumerate(map(_in_own_form, content)):
        place = f"{where}.{i}"
        if isinstance(block, str):
            parts.append({"type": "text", "text": block})
            continue
        is_file = block.get("type") in FILE_PARTS and not _has_text(block)
        kind = None if is_file else _block_type(place, block, _RESULT_BLOCKS)
        if is_file:
            parts.append({"type": "text", "text": left_out("file")})
        elif kind == "image":
            parts.append(_read_image(place, block))
        elif kind is not None:
            parts.append({"type": "text", "text": _READERS[kind](place, block)})
    return parts


def _type_of(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _in_own_form(block: Any) -> Any:
    """Return a part of OpenAI's APIs, or an image of an MCP server, as a block; anything else
    unchanged.
    """
    kind = _type_of(block)
    if kind == "image" and (url := mcp_image_url(block)) is not None:
        return {"type": "image", "source": {"type": "url", "url": url}}
    if kind in _OTHER_NAMES:
        return {**block, "type": _OTHER_NAMES[kind]}
    if kind not in _OTHER_IMAGES:
        return block
    url = block.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    return {"type": "image", "source": {"type": "url", "url": url}}


def _read_image(where: str, block: Mapping[str, Any]) -> Part:
    """Return an image as a part of the chat API. Whether the model reads images is checked
    later.
    """
    where, source = f"{where}.source", block.get("source")
    if not isinstance(source, Mapping):
        raise RequestError(
            f'{where} must be an object such as {{"type": "url", "url": ...}}, got '
            f"{show_value(source)}",
            param=where,
        )
    kind = source.get("type")
    if kind == "url":
        return image_part(read_string(where, source, "url"), where)
    if kind != "base64":
        raise RequestError(
            f"{where}.type must be base64 or url, "
            f"got {show_value(kind)}: this server stores no files",
            param=f"{where}.type",
        )
    media_type = read_string(where, source, "media_type")
    if not _IMAGE_TYPE.fullmatch(media_type):
        raise RequestError(
            f"{where}.media_type must be the type of an image, such as image/png, got "
            f"{media_type!r:.80}",
            param=f"{where}.media_type",
        )
    data = read_string(where, source, "data")
    if data[:5].lower() == "data:":
        raise RequestError(
            f"{where}.data must be base64, got a data: URL: leave out its beginning, or send it as "
            "url with the type url",
            param=f"{where}.data",
        )
    return image_part(f"data:{media_type};base64,{data}", where)


def _read_document(where: str, block: Mapping[str, Any]) -> str:
    given = block.get("source")
    source: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    kind = source.get("type")
    if kind == "text":
        text = read_string(f"{where}.source", source, "data", may_be_empty=True)
    elif kind == "base64" and _is_text_file(source):
        text = _decode(f"{where}.source", read_string(f"{where}.source", source, "data"))
    elif kind == "content":
        text = _read_text(f"{where}.source.content", source.get("content"))
    else:
        raise RequestError(
            f"{where}.source.type must be text or content, "
            f"got {show_value(kind)}: this server reads "
            f"documents as text only; send the text of the document",
            param=f"{where}.source.type",
        )
    return _with_heads(block, ("title", "context"), text)


def _is_text_file(source: Mapping[str, Any]) -> bool:
    return str(source.get("media_type")).startswith("text/")


def _has_text(block: Mapping[str, Any]) -> bool:
    """Return whether a document is text, and not a file such as a PDF."""
    source = block.get("source")
    if not isinstance(source, Mapping):
        return False
    kind = source.get("type")
    return kind in ("text", "content") or (kind == "base64" and _is_text_file(source))


def _decode(where: str, data: str) -> str:
    try:
        return base64.b64decode(data, validate=True).decode()
    except ValueError:
        raise RequestError(
            f"{where}.data must be UTF-8 text in base64", param=f"{where}.data"
        ) from None


def _read_search_result(where: str, block: Mapping[str, Any]) -> str:
    text = _read_text(f"{where}.content", block.get("content"))
    return _with_heads(block, ("title", "source"), text)


def _with_heads(block: Mapping[str, Any], keys: Sequence[str], text: str) -> str:
    """Return a text with the title and other fields of its block before it."""
    heads = [head for key in keys if isinstance(head := block.get(key), str) and head]
    return "\n".join([*heads, text])


def _read_plain(where: str, block: Mapping[str, Any]) -> str:
    return read_string(where, block, "text", may_be_empty=True)


def _read_reference(where: str, block: Mapping[str, Any]) -> str:
    return read_string(where, block, "tool_name")


def _read_compaction(where: str, block: Mapping[str, Any]) -> str:
    """Return the summary of the earlier conversation in a compaction block; empty if the compaction
    failed.
    """
    if block.get("content") is None:
        return ""
    return read_string(where, block, "content", may_be_empty=True)


_READERS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "text": _read_plain,
    "document": _read_document,
    "search_result": _read_search_result,
    "tool_reference": _read_reference,
    "compaction": _read_compaction,
}
"""Type of a block -> the function that reads its text."""


def _block_type(where: str, block: Any, known: Sequence[str]) -> str | None:
    """Return the type of a block; None if it is left out.

    Blocks of unknown types are left out, because they are about tools and services of Anthropic's
    servers.
    """
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where} must be an object with a type", param=where)
    if kind in known:
        return kind
    if kind in _KNOWN:
        raise RequestError(
            f"{where}: a block of type "
            f"{show_value(kind)} is not supported by this server; supported: "
            f"{', '.join(known)}",
            param=f"{where}.type",
        )
    note_ignored("content blocks of the type", kind, "left out; the model does not see them")
    return None
