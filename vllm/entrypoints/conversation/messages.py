"""Check messages as clients send them, and convert them to one normal form.

In this form:

- content is a string or a list of `{"type": "text", "text": ...}` and, for an image, a sound or a
  video, `{"type": "image", "index": ...}` or similar, never None;
- tool calls are functions with id, type and name; their arguments are unchanged;
- tool results have the role `tool`, and the id and name of the call that they answer;
- the reasoning of the assistant has all three names that templates read;
- fields that are None or empty lists are absent.

Independent of the template.
"""

import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vllm.entrypoints.conversation.files import OPENAI_FILES, read_file
from vllm.entrypoints.conversation.media import (
    MEDIA_TYPES,
    MediaParts,
    is_media,
    media_type,
    modality_of,
)
from vllm.errors import RequestError
from vllm.utils.text.json_words import show_value

Message = dict[str, Any]
Part = dict[str, Any]
Content = str | list[Part]
ContentFormat = Literal["auto", "string", "openai"]
"""The form of content for a template: a string, a list of parts, or the result of its probes."""

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names of the assistant's thoughts: of this server, of newer ones, and of GPT-OSS' template."""
_REASONING_FIELDS = frozenset(REASONING_NAMES)
_CALL_FIELDS = frozenset(("tool_calls", "function_call"))
_MEDIA_FIELDS = frozenset(("images", "image_url", "audios", "videos"))
"""Fields of a message in which other servers, such as Ollama, take media."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part -> the key of its text."""
_THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "text", "redacted_thinking": ""}
"""Type of a content part that is a thought, in other APIs -> the key of its text; "": it has
none."""
FILE_PARTS = (*OPENAI_FILES, "document")
"""Types of content parts with a file, such as a PDF. Only text can be read."""
_RESULT_ROLES = ("tool", "function")
_MAY_BE_SILENT = ("assistant", *_RESULT_ROLES)
"""Roles whose messages may have no content: a call needs none, and a tool may return nothing."""


def read_messages(messages: object, media: MediaParts | None = None) -> list[Message]:
    """Return copies of the messages in the normal form of this module.

    Args:
        messages: messages as the client sent them.
        media: collects the images, audio and videos. None: the model reads only text.

    Raises:
        RequestError: it is not a conversation, or has media that the model cannot read; names the
            message and the field.
    """
    media = MediaParts() if media is None else media
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages must be a list of messages, got {show_value(messages)}",
            param="messages",
        )
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    conversation = [_read_message(f"messages[{i}]", m, media) for i, m in enumerate(messages)]
    _leave_out_surplus(conversation, media)
    media.check_count()
    link_results(conversation)
    return conversation


def _leave_out_surplus(conversation: Sequence[Message], media: MediaParts) -> None:
    """Replace images, sounds and videos in results of tools by text if there are more than a
    request may have. The newest ones remain.

    A client sends the results again with every later request, so a refusal would end the
    conversation after some pictures of a screen.
    """
    in_results = [
        part
        for message in conversation
        if message["role"] in _RESULT_ROLES and isinstance(message["content"], list)
        for part in message["content"]
    ]
    dropped: set[int] = set()
    for modality, surplus in media.surplus().items():
        for part in [part for part in in_results if part["type"] == modality][:surplus]:
            dropped.add(part.pop("index"))
            part.update(type="text", text=f"[{modality} left out: newer ones follow]")
    if not dropped:
        return
    indices = media.leave_out(dropped)
    for message in conversation:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if is_media(part):
                part["index"] = indices[part["index"]]


def check_continued(messages: Sequence[Message]) -> None:
    """Refuse to continue a final message without content, because its tool calls would be cut off.

    Raises:
        RequestError: names the field.
    """
    if "tool_calls" in messages[-1] and not messages[-1]["content"]:
        raise RequestError(
            "continue_final_message: the final message has no text", param="continue_final_message"
        )


def _read_message(where: str, given: Any, media: MediaParts) -> Message:
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{where} must be an object with role and content, got {show_value(given)}",
            param="messages",
        )
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} needs a role, got {show_value(role)}", param="messages")
    message = {key: value for key, value in given.items() if value is not None}
    for name in _MEDIA_FIELDS & message.keys():
        if message[name]:
            raise RequestError(
                f"{where}.{name} must be left out, because only content is read: send images, "
                "sounds and videos as parts of content, such as "
                '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}',
                param="messages",
            )
    if role == "assistant" and isinstance(message.get("content"), list):
        _take_thoughts(message)
    if role in _RESULT_ROLES and "content" in message:
        content = result_content(message["content"])
        message["content"] = content
        if not isinstance(content, str):
            message["content"] = [_result_part(part, media) for part in content]
    if "content" in message:
        message["content"] = _read_content(f"{where}.content", message["content"], media)
    elif role in _MAY_BE_SILENT:
        message["content"] = silent_content(message)
    else:
        raise RequestError(f"{where} has no content", param="messages")
    if not _CALL_FIELDS.isdisjoint(message) and (calls := _read_calls(where, message)):
        message["tool_calls"] = calls
    if role == "assistant" and not _REASONING_FIELDS.isdisjoint(message):
        name_reasoning(message)
    return message


def _take_thoughts(message: Message) -> None:
    """Move thoughts from the content of a message to its reasoning.

    Mistral's API returns thoughts as parts of the type `thinking`, and programs that use several
    APIs send back Anthropic's thoughts or their own `reasoning`.
    """
    content, thoughts = [], []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _THOUGHT_PARTS:
            content.append(part)
        elif text := _text_of(part.get(_THOUGHT_PARTS[kind])):
            thoughts.append(text)
    message["content"] = content
    if thoughts and _REASONING_FIELDS.isdisjoint(message):
        message["reasoning_content"] = "\n".join(thoughts)


def silent_content(message: Message) -> str:
    """Return the content of a message without content, such as tool calls that the official clients
    send back.

    It is a string, because a third of real templates fail if content is missing (DeepSeek R1 and
    V3.1 and QwQ, for example), and no template needs None. The text of a refusal is in a separate
    field.
    """
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) else ""


def name_reasoning(message: Message) -> None:
    """Store the reasoning of a message under all names that templates read.

    Qwen, GLM and MiniMax read `reasoning_content`, GPT-OSS `thinking`, others `reasoning`.
    """
    found = [text for name in REASONING_NAMES if (text := _text_of(message.get(name))) is not None]
    for name in REASONING_NAMES:
        message.pop(name, None)
    if found:
        message.update(dict.fromkeys(REASONING_NAMES, next(filter(None, found), "")))


def _text_of(value: Any) -> str | None:
    """Return a string, or the joined texts of parts; None for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        return "\n".join(text for text in texts if isinstance(text, str))
    return value if isinstance(value, str) else None


def link_results(conversation: Sequence[Message]) -> None:
    """Connect the results of tools with their calls: ids, names, and the role `tool`.

    Templates of Mistral and Kimi K2 read the name of the function in a result, which the chat API
    does not have. Results of the older function API have the role `function`, and a name instead of
    an id.
    """
    names: dict[str, str] = {}
    waiting: dict[str, None] = {}
    by_name: dict[str | None, deque[str]] = defaultdict(deque)
    for message in conversation:
        for call in message.get("tool_calls") or ():
            call.setdefault("id", f"call_{len(names)}")
            names[call["id"]] = call["function"]["name"]
            waiting[call["id"]] = None
            for name in (None, call["function"]["name"]):
                by_name[name].append(call["id"])
        if message["role"] not in _RESULT_ROLES:
            continue
        message["role"] = "tool"
        call_id = message.get("tool_call_id")
        if call_id is None:
            candidates = by_name[message.get("name")]
            while candidates and candidates[0] not in waiting:
                candidates.popleft()
            call_id = candidates[0] if candidates else f"call_{len(names)}"
        message["tool_call_id"] = call_id = str(call_id)
        waiting.pop(call_id, None)
        if call_id in names:
            message.setdefault("name", names[call_id])


def without_media(content: Content) -> Content:
    """Return content in the normal form without its images, audio and videos."""
    return content if isinstance(content, str) else [p for p in content if not is_media(p)]


def join_texts(parts: Sequence[Part]) -> Content:
    """Join content parts to a string of lines if all of them are text; otherwise return them
    unchanged.
    """
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)


def result_content(content: Any) -> str | list[Any]:
    """Return the content of a tool's result: text, or parts that are not checked yet. A result that
    is neither becomes JSON text, because clients send what their function returned.
    """
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else None
    if parts is None and _is_part(content) and content.get("type") in _TEXT_PARTS:
        parts = [content]
    if parts is None or not all(isinstance(part, str) or _is_part(part) for part in parts):
        return _as_json(content)
    return parts


def result_text(part: Mapping[str, Any]) -> str | None:
    """Return the text that the model sees instead of a part of a tool's result that it cannot read.
    None: it is a part of text or media.

    Clients send a result again with every later request, so a refusal would end the conversation.
    """
    kind = part.get("type")
    if kind in OPENAI_FILES:
        try:
            return read_file("", part)
        except RequestError:
            return left_out("file")
    if kind in FILE_PARTS:
        return left_out("file")
    known = kind is None or kind in _TEXT_PARTS or kind in MEDIA_TYPES
    return None if known else _as_json(part)


def left_out(what: str) -> str:
    """Return the text that tells the model about content of a tool's result that it cannot read."""
    return f"[{what} left out: this model cannot read it]"


def _result_part(part: Any, media: MediaParts) -> Any:
    """Return a part of a tool's result, with text instead of what the model cannot read."""
    if not isinstance(part, Mapping):
        return part
    if (text := result_text(part)) is not None:
        return {"type": "text", "text": text}
    kind = part.get("type", media_type(part))
    if kind not in MEDIA_TYPES:
        return part
    if not media.reads(kind):
        return {"type": "text", "text": left_out(modality_of(kind))}
    url = mcp_image_url(part)
    return part if url is None else {"type": "image_url", "image_url": {"url": url}}


def mcp_image_url(part: Mapping[str, Any]) -> str | None:
    """Return the URL of an image in the form of MCP servers; None for any other part."""
    if part.get("type") != "image" or not isinstance(part.get("data"), str):
        return None
    return f"data:{part.get('mimeType') or 'image/png'};base64,{part['data']}"


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_part(given: Any) -> bool:
    if not isinstance(given, Mapping):
        return False
    return isinstance(given.get("type", media_type(given)), str) or given.keys() == {"text"}


def _read_content(where: str, content: Any, media: MediaParts) -> Content:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where} must be a string or a list of parts, got {show_value(content)}",
            param="messages",
        )
    return [_read_part(f"{where}[{i}]", part, media) for i, part in enumerate(content)]


def _read_part(where: str, part: Any, media: MediaParts) -> Part:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = None
    if isinstance(part, Mapping):
        kind = part.get("type", "text" if "text" in part else media_type(part))
    if not isinstance(kind, str):
        got = f"the type {show_value(kind)}" if isinstance(part, Mapping) else show_value(part)
        raise RequestError(
            f"{where} must be an object with a type, such as "
            f'{{"type": "text", "text": ...}}, got {got}',
            param="messages",
        )
    if kind in MEDIA_TYPES:
        return media.read(where, kind, part)
    if kind in OPENAI_FILES:
        return {"type": "text", "text": read_file(where, part, "messages")}
    if kind not in _TEXT_PARTS:
        raise RequestError(
            f"{where} has the type {show_value(kind)}, which is not known. Send parts of the type "
            '"text", or "image_url", "input_audio" or "video_url" to a model that reads these',
            param="messages",
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(
            f"{where}.{_TEXT_PARTS[kind]} must be a string, got {show_value(text)}",
            param="messages",
        )
    return {"type": "text", "text": text}


def _read_calls(where: str, message: Message) -> list[dict[str, Any]]:
    """Read the tool calls of a message. The older function API has a single `function_call`."""
    given = message.pop("tool_calls", ())
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        raise RequestError(
            f"{where}.tool_calls must be a list, got {show_value(given)}", param="messages"
        )
    calls = [_read_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(given)]
    single = message.pop("function_call", None)
    if single is not None and not calls:
        calls = [_read_function(f"{where}.function_call", {}, single)]
    return calls


def _read_call(where: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError(f"{where} must be an object with a function", param="messages")
    if call.get("type") == "custom":
        call = _as_function_call(where, call)
    return _read_function(f"{where}.function", call, call.get("function"))


def _read_function(where: str, call: Mapping[str, Any], function: Any) -> dict[str, Any]:
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} must be an object with name and arguments", param="messages")
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{where} needs a name", param="messages")
    read = {key: value for key, value in call.items() if value is not None}
    read.update(type="function", function={"arguments": None, **function})
    if "id" in read:
        read["id"] = str(read["id"])
    return read


def _as_function_call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a call of a custom tool to a call of a function with the argument `input`."""
    custom = call.get("custom")
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        raise RequestError(f"{where}.custom must have a name and an input", param="messages")
    function = {"name": custom.get("name"), "arguments": {"input": custom["input"]}}
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "function": function}
