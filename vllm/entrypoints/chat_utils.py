"""Checks conversations, converts them for the chat template, and renders them as text.

Shared by `LLM.chat` and the server. The text already contains the model's special tokens: tokenise
it with `add_special_tokens=False`.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from vllm.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ContentFormat = Literal["auto", "string", "openai"]
Message = Mapping[str, Any]
"""Role, content and what else the template reads, as in the OpenAI API."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part -> the key of its text."""
_OWN_ARGUMENTS = (
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "conversation",
    "messages",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "processor_kwargs",
)
"""Parameters of the rendering function, which variables of a template must not override."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options for rendering a conversation as a prompt."""

    chat_template: str | None = None
    """Jinja template, or the name of one of the tokenizer's. None: the tokenizer's own."""
    content_format: ContentFormat = "auto"
    """How the template expects content: as a string, or as a list of parts (openai)."""
    add_generation_prompt: bool = True
    """Add the beginning of the assistant's answer at the end."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model continues it."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions the model may call, as JSON schemas."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the template."""

    def __post_init__(self) -> None:
        if self.content_format not in ("auto", "string", "openai"):
            raise RequestError(
                f"chat_template_content_format must be auto, string or openai, "
                f"got {self.content_format!r}",
                param="chat_template_content_format",
            )
        if self.chat_template is not None and not self.chat_template.strip():
            raise RequestError(
                "chat_template is empty: leave it out to use the template of the model",
                param="chat_template",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true: "
                "set add_generation_prompt=False to continue the last message",
                param="continue_final_message",
            )
        if taken := [name for name in self.template_kwargs if name in _OWN_ARGUMENTS]:
            raise RequestError(
                f"chat_template_kwargs must not contain {', '.join(taken)}: set the request fields "
                f"of these names",
                param="chat_template_kwargs",
            )


def render_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], options: ChatOptions
) -> str:
    """The text of a conversation.

    Raises:
        RequestError: there is no template, a message is malformed, or the template refuses the
            conversation.
    """
    template = _find_template(tokenizer, options)
    is_parts = options.content_format == "openai" or (
        options.content_format == "auto" and reads_content_parts(template)
    )
    conversation = parse_messages(messages, as_parts=is_parts)
    try:
        text = tokenizer.apply_chat_template(
            cast(list[dict[str, str]], conversation),
            tools=cast(Any, None if options.tools is None else list(options.tools)),
            chat_template=template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tokenize=False,
            **options.template_kwargs,
        )
    except Exception as error:  # a template is foreign code, which may raise anything
        reason = str(error).strip().splitlines()
        raise RequestError(
            f"the chat template cannot render this conversation: "
            f"{reason[0] if reason else type(error).__name__}",
            param="messages",
        ) from error
    return cast(str, text)


def parse_messages(messages: Sequence[Message], *, as_parts: bool) -> list[dict[str, Any]]:
    """Copies of the messages as the template expects them.

    Args:
        messages: one conversation.
        as_parts: content as a list of `{"type": "text", "text": ...}`; else as one string, the
            texts of several parts joined by newlines.

    Raises:
        RequestError: not a conversation; names message and field.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages must be a list of messages, got {type(messages).__name__}",
            param="messages",
        )
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    return [_parse_message(f"messages[{i}]", m, as_parts) for i, m in enumerate(messages)]


def _parse_message(where: str, message: Message, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} must be a dict with role and content, got {type(message).__name__}",
            param="messages",
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} needs a role, got {role!r}", param="messages")
    parsed = dict(message)
    content = message.get("content")
    if content is not None:
        texts = _read_content(f"{where}.content", content)
        parsed["content"] = (
            [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
        )
    elif role != "assistant":
        raise RequestError(f"{where} has no content", param="messages")
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], Sequence):
            raise RequestError(
                f"{where}.tool_calls must be a list, got {type(message['tool_calls']).__name__}",
                param="messages",
            )
        parsed["tool_calls"] = [
            _parse_tool_call(f"{where}.tool_calls[{i}]", call)
            for i, call in enumerate(message["tool_calls"])
        ]
    return parsed


def _read_content(where: str, content: Any) -> list[str]:
    """The texts of a message."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where} must be a string or a list of parts, got {type(content).__name__}",
            param="messages",
        )
    return [_read_part(f"{where}[{i}]", part) for i, part in enumerate(content)]


def _read_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text" if "text" in part else None) if _is_mapping(part) else None
    if not isinstance(kind, str):
        raise RequestError(
            f"{where} must be a dict with a type, such as {{'type': 'text', 'text': ...}}",
            param="messages",
        )
    if kind not in _TEXT_PARTS:
        raise RequestError(
            f"{where} has the type {kind!r}: this version reads text only. Send parts of the "
            f"type 'text'",
            param="messages",
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(
            f"{where}.{_TEXT_PARTS[kind]} must be a string, got {type(text).__name__}",
            param="messages",
        )
    return text


def _parse_tool_call(where: str, call: Any) -> dict[str, Any]:
    """Parse the arguments of a tool call: the API has them as JSON text, templates expect an
    object.

    A call of a custom tool becomes a function call with the argument `input`.
    """
    if _is_mapping(call) and call.get("type") == "custom":
        call = _as_function_call(where, call)
    function = call.get("function") if _is_mapping(call) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} must be a dict with a function", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{where}.function.arguments is not JSON: {error}", param="messages"
            ) from None
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function needs a name", param="messages")
    return {**call, "function": {**function, "arguments": arguments}}


def _as_function_call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    custom = call.get("custom")
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        raise RequestError(f"{where}.custom must have a name and an input", param="messages")
    function = {"name": custom.get("name"), "arguments": {"input": custom["input"]}}
    rest = {key: value for key, value in call.items() if key not in ("type", "custom")}
    return {**rest, "type": "function", "function": function}


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _find_template(tokenizer: "PreTrainedTokenizerBase", options: ChatOptions) -> str:
    if options.chat_template is None and not tokenizer.chat_template:
        raise RequestError(
            "the tokenizer of this model has no chat template: you must provide a chat template "
            "(chat_template)",
            param="chat_template",
        )
    tools = None if options.tools is None else [dict(tool) for tool in options.tools]
    try:
        template: str = tokenizer.get_chat_template(options.chat_template, tools)
    except ValueError as error:  # several templates, and none is the default
        raise RequestError(str(error), param="chat_template") from error
    return template


@functools.lru_cache(maxsize=32)
def reads_content_parts(template: str) -> bool:
    """Whether a template loops over the content of a message, so that it expects a list of parts.

    >>> reads_content_parts("{% for m in messages %}{{ m.content }}{% endfor %}")
    False
    >>> reads_content_parts("{% for part in messages[0]['content'] %}{{ part.text }}{% endfor %}")
    True
    """
    import jinja2
    from jinja2 import nodes

    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            without_generation_tags(template)
        )
    except jinja2.TemplateSyntaxError:
        return False  # rendering will say what is wrong
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set())
    }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def without_generation_tags(template: str) -> str:
    """Remove the `generation` tag of transformers, which jinja2 does not know and which changes no
    text."""
    return re.sub(r"\{%[-+]?\s{0,9}(end)?generation\s{0,9}[-+]?%\}", "", template)


def _is_content(node: Any, names: set[str]) -> bool:
    """`message.content`, `message['content']`, or one of the names it was given."""
    from jinja2 import nodes

    while isinstance(node, (nodes.Filter, nodes.Test)):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
