"""Check items of the Responses API, normalise them, and convert them to chat messages.

An item is a JSON object with `id` and `type`: a message, a function_call or custom_tool_call, the
output of a call, or reasoning. Clients also send back items that other servers have created. Items
of tools that the client runs become ordinary calls and outputs. Other items remain in the list, but
the model does not see them. Pure functions, independent of engine and framework.
"""

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from vllm.entrypoints.conversation.files import OPENAI_FILES, read_file
from vllm.entrypoints.conversation.media import WHERE, image_part
from vllm.entrypoints.conversation.messages import (
    Content,
    Part,
    join_texts,
    mcp_image_url,
    result_content,
    result_text,
)
from vllm.entrypoints.http.ignored import note_ignored
from vllm.errors import RequestError
from vllm.utils.text.json_words import show_value

Item = dict[str, Any]
Message = dict[str, Any]

_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
REFERENCE = "item_reference"
_CLIENT_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
"""Type of a call of a tool that the client runs -> name of the tool, key of the arguments."""
_CLIENT_OUTPUTS = tuple(f"{kind}_output" for kind in _CLIENT_CALLS)
_ROLES = ("user", "assistant", "system", "developer")
_OUTPUT_ROLES = ("tool", "function")
"""Roles of messages of the chat API that are outputs of calls."""
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""Type of a content part -> the key of its text."""
_IMAGE_PART = "input_image"
_IMAGE_KINDS = (_IMAGE_PART, "image_url")
"""Types of image parts; the second one is the type of the chat API."""
_AUDIO_PART = "input_audio"
_MAX_ID_LENGTH = 256


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed, such as `msg_0f3c...`."""
    return f"{prefix}_{uuid.uuid4().hex}"


def read_input(given: str | Sequence[Any]) -> list[Item]:
    """Convert the `input` of a request to items with ids. Does not change its argument.

    Args:
        given: the text of one user message, or a list of items. Content may be a string or text
            parts. Messages of the chat API, their calls and outputs are also read.

    Raises:
        RequestError: an item is malformed or its kind is not supported; names its position.
    """
    if isinstance(given, str):
        return [_message_item(new_id("msg"), "user", [{"type": "input_text", "text": given}])]
    if not given:
        raise RequestError("input must not be empty", param="input")
    return [
        _read_item(f"input[{i}]", item)
        for i, message in enumerate(given)
        for item in _items_of_message(f"input[{i}]", message)
    ]


def as_messages(
    instructions: str | None, items: Iterable[Item], *, num_earlier: int = 0
) -> list[Message]:
    """Convert the items of a conversation (results of `read_input`, or output of this server) to
    chat messages.

    The instructions and the first system messages become one system message, because templates do
    not accept a second one. Consecutive items of the assistant (reasoning, text, calls) become one
    message.

    Args:
        instructions: instructions of the request.
        items: items of the whole conversation.
        num_earlier: number of first items that come from earlier requests; for names in errors.

    Raises:
        RequestError: an output belongs to no call in the conversation, or there is nothing to read.
    """
    conversation = _Conversation(num_earlier)
    if instructions:
        conversation.add_system(instructions)
    for item in items:
        conversation.add(item)
    return conversation.finish()


def resolve_references(
    items: Sequence[Item],
    history: Sequence[Item],
    find: Callable[[Collection[str]], Mapping[str, Item]],
) -> list[Item]:
    """Replace references in the input by the stored items.

    Args:
        items: result of `read_input`.
        history: earlier items; a reference to one of them is dropped.
        find: ids -> the stored items with these ids.
    """
    wanted = {item["id"] for item in items if item["type"] == REFERENCE}
    if not wanted:
        return list(items)
    found, known = find(wanted), {item["id"] for item in history}
    return [
        found.get(item["id"], item) if item["type"] == REFERENCE else item
        for item in items
        if not (item["type"] == REFERENCE and item["id"] in known)
    ]


def read_string(
    where: str, given: Mapping[str, Any], key: str, *, may_be_empty: bool = False
) -> str:
    """Return the string in a field of an object.

    Args:
        where: position of the object in the request, for the error.
        given: the object.
        key: name of the field.
        may_be_empty: whether "" is accepted.

    Raises:
        RequestError: the field is not a string.
    """
    value = given.get(key)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise RequestError(
            f"{where}.{key} must be a {'' if may_be_empty else 'non-empty '}string, "
            f"got {show_value(value)}",
            param=f"{where}.{key}",
        )
    return value


class _Conversation:
    """Builds chat messages from items.

    Args:
        num_earlier: number of first items that come from earlier requests.
    """

    def __init__(self, num_earlier: int) -> None:
        self.messages: list[Message] = []
        self._system: list[str] = []
        """Texts of the system message, while no other message has followed."""
        self._names: dict[str, str] = {}
        """Id of a call -> name of its tool."""
        self._call_ids: dict[str, str] = {}
        """Id of an item of a call that the client runs -> id of the call."""
        self._add: dict[str, Callable[[Item], None]] = {
            "message": self._add_message,
            "function_call": self._add_call,
            "function_call_output": self._add_call_output,
            "custom_tool_call": self._add_call,
            "custom_tool_call_output": self._add_call_output,
            "reasoning": self._add_reasoning,
            "mcp_call": self._add_mcp_call,
            **dict.fromkeys(_CLIENT_CALLS, self._add_client_call),
            **dict.fromkeys(_CLIENT_OUTPUTS, self._add_client_output),
        }
        self._has_gap = False
        """Whether an item was left out, so that the call of an output may be missing."""
        self._num_items = 0
        self._num_earlier = num_earlier

    def add(self, item: Item) -> None:
        self._num_items += 1
        kind = item["type"]
        if kind in self._add:
            self._add[kind](item)
        else:
            self._leave_out(kind)

    def _leave_out(self, kind: str) -> None:
        self._has_gap = True
        why = "not stored in this server" if kind == REFERENCE else "not made by this server"
        note_ignored("input items of the type", kind, f"{why}; the model does not see them")

    def add_system(self, text: str) -> None:
        if not self.messages:
            self._system.append(text)
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self._system.append(text)
        else:
            self.messages.append({"role": "system", "content": text})

    def finish(self) -> list[Message]:
        """Return the messages. Called after all items were added."""
        if not self.messages:
            raise RequestError(
                "input must have a message or another item that the model can read", param="input"
            )
        if self._system:
            self.messages[0]["content"] = "\n\n".join(self._system)
        return self.messages

    def _add_message(self, item: Item) -> None:
        if item["role"] == "user":
            self.messages.append({"role": "user", "content": self._content(item, "content")})
            return
        text = "\n".join(_text_of(part) for part in item["content"])
        if item["role"] in ("system", "developer"):
            self.add_system(text)
        else:
            last = self._assistant(is_open=lambda m: not m["content"] and "tool_calls" not in m)
            last["content"] = text

    def _content(self, item: Item, key: str) -> Content:
        """Return the text, images and audio of an item."""
        if isinstance(item[key], str):
            return str(item[key])
        index = self._num_items - 1
        where = f"previous_response_id.input[{index}].{key}"
        if index >= self._num_earlier:
            where = f"input[{index - self._num_earlier}].{key}"
        return join_texts(
            [_as_chat_part(f"{where}[{i}]", part) for i, part in enumerate(item[key])]
        )

    def _add_reasoning(self, item: Item) -> None:
        parts = item.get("content") or item.get("summary") or []
        if text := "\n".join(_text_of(part) for part in parts):
            last = self._assistant(is_open=lambda m: False)
            last["reasoning_content"] = text

    def _add_call(self, item: Item) -> None:
        self._names[item["call_id"]] = item["name"]
        call: dict[str, Any] = {"id": item["call_id"]}
        if item["type"] == "custom_tool_call":
            call.update(type="custom", custom={"name": item["name"], "input": item["input"]})
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call.update(type="function", function=function)
        self._assistant(is_open=lambda m: True).setdefault("tool_calls", []).append(call)

    def _add_call_output(self, item: Item) -> None:
        name = self._names.get(item["call_id"])
        if name is None and self._has_gap:
            self._leave_out(item["type"])
            return
        if name is None:
            raise RequestError(
                f"no call has the call_id {item['call_id']!r} of this {item['type']}: the call "
                f"must come before it",
                param="input",
            )
        content = self._content(item, "output")
        self.messages.append(
            {"role": "tool", "tool_call_id": item["call_id"], "name": name, "content": content}
        )

    def _add_client_call(self, item: Item) -> None:
        name, key = _CLIENT_CALLS[item["type"]]
        arguments = item.get(key)
        self._add_foreign_call(
            item, name, _as_json(arguments if isinstance(arguments, Mapping) else {})
        )

    def _add_client_output(self, item: Item) -> None:
        """Add the output of a call. The output has the id of the call or of the call's item."""
        call_id = item.get("call_id") or self._call_ids.get(item["id"])
        if call_id not in self._names:
            self._leave_out(item["type"])
            return
        self._add_call_output(
            {"type": item["type"], "call_id": call_id, "output": _as_text(item.get("output"))}
        )

    def _add_mcp_call(self, item: Item) -> None:
        """Add a call that another server made, together with its output. Both are one item."""
        if not isinstance(item.get("name"), str):
            self._leave_out("mcp_call")
            return
        arguments = item.get("arguments")
        self._add_foreign_call(item, item["name"], _as_text(arguments) or "{}")
        output = item.get("output") if item.get("error") is None else item["error"]
        self._add_call_output(
            {
                "type": "mcp_call",
                "call_id": self._call_ids[item["id"]],
                "output": _as_text(output),
            }
        )

    def _add_foreign_call(self, item: Item, name: str, arguments: str) -> None:
        call_id = item.get("call_id") or item["id"]
        self._call_ids[item["id"]] = call_id
        self._add_call(
            {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
        )

    def _assistant(self, *, is_open: Callable[[Message], bool]) -> Message:
        """Return the last message if it is an open message of the assistant; otherwise add a new
        one.
        """
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or not is_open(last):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


def _items_of_message(where: str, given: Any) -> list[Any]:
    """Return the items that are equal to a message of the chat API; an item itself otherwise."""
    if not isinstance(given, Mapping) or given.get("type") not in (None, "message"):
        return [given]
    if given.get("role") in _OUTPUT_ROLES:
        key = "tool_call_id" if given["role"] == "tool" else "name"
        output = {"type": "function_call_output", "call_id": read_string(where, given, key)}
        return [{**output, "output": given.get("content")}]
    calls = given.get("tool_calls")
    if given.get("role") != "assistant" or not isinstance(calls, list) or not calls:
        return [given]
    message = {key: value for key, value in given.items() if key != "tool_calls"}
    found = [message] if message.get("content") else []
    return [*found, *(_item_of_call(f"{where}.tool_calls[{i}]", c) for i, c in enumerate(calls))]


def _item_of_call(where: str, call: Any) -> Item:
    if not isinstance(call, Mapping):
        raise RequestError(f"{where} must be an object, got {show_value(call)}", param=where)
    kind = "custom" if call.get("type") == "custom" else "function"
    details = call.get(kind)
    details = details if isinstance(details, Mapping) else {}
    return {
        "type": "custom_tool_call" if kind == "custom" else "function_call",
        "call_id": read_string(where, call, "id"),
        **details,
        "name": read_string(f"{where}.{kind}", details, "name"),
    }


def _read_item(where: str, given: Any) -> Item:
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be an object, got {show_value(given)}", param=where)
    kind = given.get("type")
    if kind is None:  # messages and item references may leave out their type
        kind = "message" if "role" in given else REFERENCE if "id" in given else None
    if not isinstance(kind, str) or not kind:
        raise RequestError(
            f"{where}.type must be a string such as {', '.join(_ID_PREFIXES)}, "
            f"got {show_value(kind)}",
            param=f"{where}.type",
        )
    item_id = given.get("id")
    if item_id is None and kind != REFERENCE:
        item_id = new_id(_ID_PREFIXES.get(kind, "item"))
    else:
        item_id = read_string(where, given, "id")
    if len(item_id) > _MAX_ID_LENGTH:
        raise RequestError(
            f"{where}.id must have at most {_MAX_ID_LENGTH} characters", param=f"{where}.id"
        )
    if kind not in _ID_PREFIXES:
        if given.get("call_id") is not None:
            read_string(where, given, "call_id")
        return {**given, "id": item_id, "type": kind}
    if kind == "message":
        return _read_message(where, given, item_id)
    item: Item = {"id": item_id, "type": kind, "status": "completed"}
    if kind == "reasoning":
        summary = _read_texts(f"{where}.summary", given.get("summary") or [])
        content = _read_texts(f"{where}.content", given.get("content") or [])
        item["summary"] = [{"type": "summary_text", "text": text} for text in summary]
        item["content"] = [{"type": "reasoning_text", "text": text} for text in content]
        return item
    item["call_id"] = read_string(where, given, "call_id")
    if kind == "function_call":
        item["name"] = read_string(where, given, "name")
        arguments = given.get("arguments")
        if arguments is None or isinstance(arguments, Mapping):  # not the JSON text of the object
            item["arguments"] = _as_text(arguments)
        else:
            item["arguments"] = read_string(where, given, "arguments", may_be_empty=True)
    elif kind == "custom_tool_call":
        item["name"] = read_string(where, given, "name")
        item["input"] = read_string(where, given, "input", may_be_empty=True)
    else:
        output = given.get("output")
        is_object = output is None or isinstance(output, Mapping)
        output = _as_text(output) if is_object else result_content(output)
        item["output"] = output
        if not isinstance(output, str):
            item["output"] = _read_input_parts(f"{where}.output", output, is_result=True)
    return item


def _read_message(where: str, given: Mapping[str, Any], item_id: str) -> Item:
    role = given.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {show_value(role)}",
            param=f"{where}.role",
        )
    where, content = f"{where}.content", given.get("content")
    if content is None and role == "assistant":
        content = []
    if role == "user":
        return _message_item(item_id, role, _read_input_parts(where, content))
    parts: list[Part] = [
        {"type": "input_text", "text": text} for text in _read_texts(where, content)
    ]
    if role == "assistant":
        parts = [{"type": "output_text", "text": p["text"], "annotations": []} for p in parts]
    return _message_item(item_id, role, parts)


def _message_item(item_id: str, role: str, parts: list[Part]) -> Item:
    return {
        "id": item_id,
        "type": "message",
        "status": "completed",
        "role": role,
        "content": parts,
    }


def _read_input_parts(where: str, given: Any, *, is_result: bool = False) -> list[Part]:
    """Return the text, images and audio of content as `input_text`, `input_image` and
    `input_audio`.

    Args:
        where: position of the content in the request, for errors.
        given: the content.
        is_result: whether it is the output of a tool, in which any part is accepted.
    """
    parts: list[Part] = []
    for i, part in enumerate(_as_parts(where, given)):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = url = None
        if is_result and isinstance(part, Mapping) and kind not in _TEXT_PARTS:
            text, url = result_text(part), mcp_image_url(part)
        if url is not None:
            parts.append({"type": _IMAGE_PART, "detail": "auto", "image_url": url})
        elif text is not None:
            parts.append({"type": "input_text", "text": text})
        elif kind in OPENAI_FILES:
            text = read_file(f"{where}[{i}]", part)
            parts.append({"type": "input_text", "text": text})
        elif kind in _IMAGE_KINDS:
            parts.append(_read_image(f"{where}[{i}]", part))
        elif kind == _AUDIO_PART:
            parts.append({"type": kind, kind: part.get(kind)})
        else:
            parts.append({"type": "input_text", "text": _read_text(f"{where}[{i}]", part)})
    return parts


def _read_texts(where: str, given: Any) -> list[str]:
    return [_read_text(f"{where}[{i}]", part) for i, part in enumerate(_as_parts(where, given))]


def _as_parts(where: str, given: Any) -> Sequence[Any]:
    if isinstance(given, str):
        return [{"type": "input_text", "text": given}]
    if not isinstance(given, Sequence):
        raise RequestError(
            f"{where} must be a string or a list of parts, got {show_value(given)}", param=where
        )
    return given


def _read_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where} must be a string or an object with a type", param=where)
    if kind not in _TEXT_PARTS:
        raise RequestError(
            f"{where}.type must be input_text, or input_image, input_audio or input_file in a "
            f"message of the user or an output; got {show_value(kind)}",
            param=f"{where}.type",
        )
    return read_string(where, part, _TEXT_PARTS[kind], may_be_empty=True)


def _read_image(where: str, part: Mapping[str, Any]) -> Part:
    """Return an image part. Whether the model reads images is checked later."""
    if part.get("file_id") is not None:
        raise RequestError(
            f"{where}.file_id is not supported, because this server stores no files: send "
            "image_url, a URL or a data: URL",
            param=f"{where}.file_id",
        )
    given, detail = part.get("image_url"), part.get("detail")
    if isinstance(given, Mapping):  # the form of the chat API, which some clients send
        url = read_string(f"{where}.image_url", given, "url")
        detail = given.get("detail") or detail
    else:
        url = read_string(where, part, "image_url")
    return {"type": _IMAGE_PART, "detail": detail or "auto", "image_url": url}


def _as_chat_part(where: str, part: Mapping[str, Any]) -> Part:
    """Return a part in the format of the chat API. Whether the model reads it is checked later."""
    if part["type"] == _IMAGE_PART:
        return image_part(part["image_url"], where, part.get("detail"))
    if part["type"] == _AUDIO_PART:
        return {**part, WHERE: where}
    return {"type": "text", "text": _text_of(part)}


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _as_text(value: Any) -> str:
    """Return a string unchanged, None as "", and any other value as JSON text."""
    if value is None:
        return ""
    return value if isinstance(value, str) else _as_json(value)


def _text_of(part: Mapping[str, Any]) -> str:
    return part[_TEXT_PARTS[part["type"]]]
