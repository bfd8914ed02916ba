"""Change a conversation to the form that its template reads.

Each rule is a function whose docstring names the templates that need it. A rule examines the
template only if the conversation contains what the rule is about, so a plain conversation costs no
more than a look at its messages.
"""

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from vllm.entrypoints.conversation.media import is_media
from vllm.entrypoints.conversation.messages import (
    REASONING_NAMES,
    Content,
    ContentFormat,
    Message,
    Part,
)
from vllm.entrypoints.conversation.template import MessageKind, Template

Tool = Mapping[str, Any]

_BETWEEN = "\n\n"
"""Separates texts that were messages of their own."""
_JOINABLE = (("user", "user"), ("assistant", "assistant"), ("tool", "user"))
"""Roles of messages that may be joined, the first one's remains."""
_LETTERS = string.digits + string.ascii_letters
_NINE_LETTERS = re.compile(r"[0-9A-Za-z]{9}")


def fit(
    messages: Sequence[Message],
    template: Template,
    content_format: ContentFormat,
    placeholders: Mapping[str, str] = MappingProxyType({}),
) -> list[Message]:
    """Return the messages in the form that a template reads.

    Args:
        messages: result of `read_messages`, which is not changed. Media parts also have a text, for
            templates that do not read such parts.
        template: template of the model or the request.
        content_format: auto decides for each kind of message; string and openai (lists of parts)
            apply to all messages.
        placeholders: text that the template must write for an item, by modality.
    """
    fitted = [dict(message) for message in messages]
    for rule in _RULES:
        fitted = rule(fitted, template)
    return fit_content(fitted, template, content_format, placeholders)


# ---- roles ------------------------------------------------------------------------------------


def rename_developer(messages: list[Message], template: Template) -> list[Message]:
    """Rename the role `developer` to `system` if the template would not show its text.

    Few templates know the role. Qwen 2 to 3, DeepSeek, GLM, Phi-3 and MiniMax drop its messages;
    Qwen 3.5, Gemma and Mistral refuse them.
    """
    for index, message in enumerate(messages):
        if message["role"] == "developer" and not _is_shown(messages, index, template):
            message["role"] = "system"
    return messages


def rename_results(messages: list[Message], template: Template) -> list[Message]:
    """Rename the role `tool` to an older name if the template shows only that.

    The role of results was `function` in the first API, `ipython` in Llama 3 and `observation` in
    GLM 4.
    """
    for index, message in enumerate(messages):
        if message["role"] != "tool" or _is_shown(messages, index, template):
            continue
        for role in ("function", "ipython", "observation"):
            message["role"] = role
            if _is_shown(messages, index, template):
                break
        else:
            message["role"] = "tool"
    return messages


def join_systems(messages: list[Message], template: Template) -> list[Message]:
    """Join the system messages at the beginning if the template shows only the first one.

    Qwen 3.5, Gemma, Mistral and Llama 2 refuse a second one.
    """
    count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if count < 2 or template.shows_two_systems():
        return messages
    joined = join_contents([message["content"] for message in messages[:count]])
    return [{**messages[0], "content": joined}, *messages[count:]]


def place_systems(messages: list[Message], template: Template) -> list[Message]:
    """Join a system message to its neighbour if the template refuses or drops it.

    Qwen 3.5, Gemma and Mistral refuse system messages after the first message, and GLM 4 or GPT-OSS
    drop them; Gemma 2 and the first Mistral do not support them at all. The text is put before the
    next user message, or else after the previous message. So the order of texts does not change,
    and cached prefixes remain valid.
    """
    placed: list[Message] = []
    waiting: list[Content] = []
    for index, message in enumerate(messages):
        if message["role"] == "system" and not _is_shown(messages, index, template):
            waiting.append(message["content"])
            continue
        if message["role"] == "user":
            message["content"] = join_contents([*waiting, message["content"]])
        else:
            _append_waiting(placed, waiting, template)
        waiting = []
        placed.append(message)
    _append_waiting(placed, waiting, template)
    return placed


def _append_waiting(placed: list[Message], waiting: list[Content], template: Template) -> None:
    """Add the waiting contents to the last message, or as a new user message if the last one is
    from the assistant.
    """
    if not waiting:
        return
    last = placed[-1] if placed else None
    if last and last["role"] != "assistant" and _is_shown(placed, len(placed) - 1, template):
        last["content"] = join_contents([last["content"], *waiting])
    else:
        placed.append({"role": "user", "content": join_contents(waiting)})


def begin_with_user(messages: list[Message], template: Template) -> list[Message]:
    """Let a conversation have a message of the user where the template requires one.

    Chat programs begin with a greeting of the assistant: Gemma, Mistral and Llama 2 refuse that, so
    an empty message comes before it. Some programs send only a system message, which these
    templates drop, and Qwen 3.5 refuses: it becomes a message of the user.
    """
    roles = [message["role"] for message in messages]
    if set(roles) == {"system"}:
        if not template.shows_lone_system():
            messages[-1]["role"] = "user"
        return messages
    first = next((index for index, role in enumerate(roles) if role != "system"), 0)
    if roles[first] == "assistant" and template.refuses_greetings():
        return [*messages[:first], {"role": "user", "content": ""}, *messages[first:]]
    return messages


def join_neighbours(messages: list[Message], template: Template) -> list[Message]:
    """Join consecutive messages if the template requires that roles alternate.

    Gemma, Mistral and Llama 2 refuse two messages of the user or of the assistant in succession.
    Mistral also refuses a user message after a tool result; its text is added to the result.
    """
    groups: list[list[Message]] = []
    for message in messages:
        last = groups[-1][0]["role"] if groups else ""
        roles = last, message["role"]
        if roles in _JOINABLE and template.refuses_in_a_row(*roles):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [group[0] if len(group) == 1 else _join_group(group) for group in groups]


def _join_group(group: Sequence[Message]) -> Message:
    joined = {**group[0], "content": join_contents([message["content"] for message in group])}
    if calls := [call for message in group for call in message.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


# ---- calls ------------------------------------------------------------------------------------


def spell_out_calls(messages: list[Message], template: Template) -> list[Message]:
    """Write calls and their results as ordinary text if the template would drop or refuse them.

    Templates of models without tools drop results (Phi-3 and others) or calls (Yi, Qwen 2.5 Omni),
    and some templates refuse calls of earlier turns in a request without tools, which clients send
    to get a title or a summary. The text of a client is never dropped in silence.
    """
    has_results = any(message["role"] == "tool" for message in messages)
    if not has_results and not any("tool_calls" in message for message in messages):
        return messages
    is_refused = template.refuses_calls_without_tools()
    hides_results = is_refused or (has_results and template.hides_results())
    hides_calls = is_refused or template.hides_calls()
    for message in messages:
        if message["role"] == "tool" and hides_results:
            name = message.get("name")
            heading = "Result of the tool:" if name is None else f"Result of the tool {name}:"
            message.update(role="user", content=join_contents([heading, message["content"]]))
            message.pop("tool_call_id", None)
            message.pop("name", None)
        elif "tool_calls" in message and hides_calls:
            calls = [_as_text_call(call["function"]) for call in message["tool_calls"]]
            message["content"] = join_contents([message["content"], "\n".join(calls)])
            if hides_results:
                del message["tool_calls"]
    return messages


def _as_text_call(function: Mapping[str, Any]) -> str:
    parsed = _parse_object(function["arguments"] or {})
    arguments = function["arguments"] if parsed is None else parsed
    return _as_json({"name": function["name"], "arguments": arguments})


def answer_calls(messages: list[Message], template: Template) -> list[Message]:
    """Add an empty result after a call without a result, if the template requires one.

    A user may cancel a call and continue. Templates of Mistral refuse such a conversation.
    """
    answered = {message.get("tool_call_id") for message in messages if message["role"] == "tool"}
    asked = [call for message in messages[:-1] for call in message.get("tool_calls", ())]
    if all(call["id"] in answered for call in asked) or not template.refuses_unanswered_calls():
        return messages
    complete: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message["role"] != "tool":
            complete += waiting
            waiting = []
        complete.append(message)
        waiting += [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": "",
            }
            for call in message.get("tool_calls", ())
            if call["id"] not in answered
        ]
    return complete


def split_calls(messages: list[Message], template: Template) -> list[Message]:
    """Split a message with several tool calls into one message per call, each followed by its
    result, if the template refuses several or shows only one.

    Templates of Llama 3.1 and 3.3 refuse two calls in one message, although the models write them.
    GPT-OSS shows only the first one.
    """
    has_several = any(len(message.get("tool_calls", ())) > 1 for message in messages)
    if not has_several or not template.needs_single_calls():
        return messages
    split: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        results: dict[str, list[Message]] = {call["id"]: [] for call in calls}
        others: list[Message] = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.get(messages[index]["tool_call_id"], others).append(messages[index])
            index += 1
        for number, call in enumerate(calls):
            content = "" if number else message["content"]
            split.append({**message, "content": content, "tool_calls": [call]})
            split += results.pop(call["id"], ())
        split += others
    return split


def translate_ids(messages: list[Message], template: Template) -> list[Message]:
    """Replace the ids of calls and results if the template requires another format.

    Templates of Mistral accept only nine letters and digits, and histories have ids of other
    servers. An id is always replaced by the same one, so that prefixes remain equal.
    """
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    ids += [message["tool_call_id"] for message in messages if "tool_call_id" in message]
    if all(map(_NINE_LETTERS.fullmatch, ids)) or not template.needs_nine_letters():
        return messages
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = nine_letters(message["tool_call_id"])
        if "tool_calls" in message:
            calls = message["tool_calls"]
            message["tool_calls"] = [{**call, "id": nine_letters(call["id"])} for call in calls]
    return messages


def nine_letters(given: str) -> str:
    """Return an id of nine letters and digits for any id; an id that has this form is kept.

    >>> nine_letters("aB3dE6gH9")
    'aB3dE6gH9'
    >>> len(nine_letters("call_abc123"))
    9
    """
    if _NINE_LETTERS.fullmatch(given):
        return given
    number = int.from_bytes(hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest(), "big")
    digits = []
    for _ in range(9):
        number, digit = divmod(number, len(_LETTERS))
        digits.append(_LETTERS[digit])
    return "".join(digits)


def fit_arguments(messages: list[Message], template: Template) -> list[Message]:
    """Convert the arguments of calls to the type that the template reads, and never refuse any.

    Most templates expect an object. Templates of DeepSeek V3 and R1 append the arguments to a text,
    and some print them, which would give Python instead of JSON: these get JSON text. Models write
    damaged arguments, and an output may end inside of them, so a history may contain text that is
    not an object. It is shown unchanged, or as the value of `arguments` if the template reads the
    members of an object.
    """
    for message in messages:
        if "tool_calls" not in message:
            continue
        calls = []
        for call in message["tool_calls"]:
            function = call["function"]
            arguments = _fit_argument(function["arguments"], template)
            calls.append({**call, "function": {**function, "arguments": arguments}})
        message["tool_calls"] = calls
    return messages


def _fit_argument(given: Any, template: Template) -> Any:
    if given is None or (isinstance(given, str) and not given.strip()):
        given = {}
    if template.needs_text_arguments():
        return given if isinstance(given, str) else _as_json(given)
    parsed = _parse_object(given)
    if parsed is not None:
        return parsed
    text = given if isinstance(given, str) else _as_json(given)
    return text if template.reads_damaged_arguments() else {"arguments": text}


def _parse_object(given: Any) -> dict[str, Any] | None:
    """Return arguments as an object; None if they are not a JSON object."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return dict(given) if isinstance(given, Mapping) else None


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def split_thoughts(messages: list[Message], template: Template) -> list[Message]:
    """Move the content of a message with calls into its reasoning, if the template refuses both.

    GPT-OSS writes one text before a call, and its template refuses two.
    """
    for message in messages:
        thoughts = message.get(REASONING_NAMES[0])
        if not (thoughts and message.get("tool_calls") and message["content"]):
            continue
        if template.refuses_thoughts_and_text():
            both = join_contents([thoughts, as_text(message["content"])])
            message.update(dict.fromkeys(REASONING_NAMES, both), content="")
    return messages


# ---- content ----------------------------------------------------------------------------------


def fit_content(
    messages: list[Message],
    template: Template,
    content_format: ContentFormat,
    placeholders: Mapping[str, str] = MappingProxyType({}),
) -> list[Message]:
    """Convert each content to the form that the template reads in messages of this kind.

    Content that was sent as a string remains a string, unless the template would not show it: some
    templates for models with images do not handle strings. Lists become strings if the template
    does not handle lists, or prints them: Gemma 4, GLM 4.6 and Mistral Small 3.2 read lists of the
    user, and print lists of other roles as Python. Media remain parts where the template writes
    their placeholder, such as in messages of the user, and become text elsewhere.
    """
    for index, message in enumerate(messages):
        content = message["content"]
        if content_format == "string":
            message["content"] = as_text(content)
        elif content_format == "openai":
            message["content"] = as_parts(content)
        elif isinstance(content, list) and content:
            kind = kind_of(messages, index)
            if modalities := {part["type"] for part in content if is_media(part)}:
                hidden = {
                    modality
                    for modality in modalities
                    if not template.shows_media(kind, modality, placeholders[modality])
                }
                if not hidden:
                    continue
                content = [
                    {"type": "text", "text": part["text"]} if part["type"] in hidden else part
                    for part in content
                ]
            message["content"] = content if template.reads_parts(kind) else as_text(content)
        else:
            form = template.content_form(kind_of(messages, index))
            message["content"] = (as_parts if form == "parts" else as_text)(content)
    return messages


def kind_of(messages: Sequence[Message], index: int) -> MessageKind:
    """Return the kind of the message at an index."""
    message, last = messages[index], len(messages) - 1
    return MessageKind(message["role"], "tool_calls" in message, index == 0, index == last)


def _is_shown(messages: Sequence[Message], index: int, template: Template) -> bool:
    return template.shows_role(kind_of(messages, index))


def as_text(content: Content) -> str:
    """Return content as a string; parts become lines."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def as_parts(content: Content) -> list[Part]:
    """Return content as a list with at least one part."""
    if isinstance(content, list) and content:
        return content
    return [{"type": "text", "text": as_text(content)}]


def join_contents(contents: Sequence[Content]) -> Content:
    """Join the contents of several messages."""
    filled = [content for content in contents if content]
    texts = [content for content in filled if isinstance(content, str)]
    if len(texts) == len(filled):
        return _BETWEEN.join(texts)
    return [part for content in filled for part in as_parts(content)]


# ---- tools ------------------------------------------------------------------------------------


def fit_tools(tools: Sequence[Tool] | None, template: Template) -> list[Tool] | None:
    """Add missing fields to tools if the template needs them.

    Description and parameters are optional, and an object may have no properties. Templates of
    DeepSeek V3.1, GPT-OSS, Qwen 2 and Seed-OSS read them.
    """
    return [_fit_tool(tool, template) for tool in tools] if tools else None


def _fit_tool(tool: Tool, template: Template) -> Tool:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    added: dict[str, Any] = {}
    parameters = function.get("parameters")
    lacks = [key for key in ("description", "parameters") if function.get(key) is None]
    if lacks and not template.can_show_tool(*lacks):
        added = {"description": function.get("description") or ""}
        if parameters is None:
            added["parameters"] = {"type": "object", "properties": {}}
    elif (
        isinstance(parameters, Mapping)
        and "properties" not in parameters
        and not template.can_show_tool("properties")
    ):
        added["parameters"] = {**parameters, "properties": {}}
    return {**tool, "function": {**function, **added}} if added else tool


_RULES: tuple[Callable[[list[Message], Template], list[Message]], ...] = (
    rename_developer,
    answer_calls,
    split_calls,
    spell_out_calls,
    rename_results,
    join_systems,
    begin_with_user,
    place_systems,
    join_neighbours,
    translate_ids,
    fit_arguments,
    split_thoughts,
)
