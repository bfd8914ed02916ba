"""Renders the chat templates of requests, in the process of a `DeadlineWorker`.

Imports jinja2 and nothing of the engine. The sandbox protects Python's internals; the deadline and
the memory limit of the process protect the rest.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllm.entrypoints.chat_utils import parse_messages, reads_content_parts, without_generation_tags
from vllm.errors import RequestError

_MAX_TEXT_CHARS = 64 * 2**20
_END_MARK = "\ue000vllm-end-of-final-message\ue000"
"""Marks the end of the message that is to be continued; the text is cut there."""


def start(_setup: bytes) -> Callable[[bytes], bytes]:
    """Make the handler of the worker: input is JSON of the arguments, output is text."""
    return lambda argument: render(msgspec.json.decode(argument)).encode()


def render(argument: dict[str, Any]) -> str:
    """The text of a conversation.

    Args:
        argument: the fields of `ChatOptions`, `messages`, and `special_tokens`: name -> text.

    Raises:
        RequestError: a message is malformed, or the text too long.
        jinja2.TemplateError: the template is wrong, or refuses the conversation.
    """
    source: str = argument["chat_template"]
    content_format = argument["content_format"]
    as_parts = content_format == "openai" or (
        content_format == "auto" and reads_content_parts(source)
    )
    messages = parse_messages(argument["messages"], as_parts=as_parts)
    if argument["continue_final_message"]:
        _mark_end(messages[-1])
    values = {
        **argument["special_tokens"],
        **argument["template_kwargs"],
        "messages": messages,
        "tools": argument["tools"],
        "add_generation_prompt": argument["add_generation_prompt"],
    }
    try:
        text = make_environment().from_string(without_generation_tags(source)).render(**values)
    except MemoryError:
        raise RequestError("needs too much memory") from None
    if argument["continue_final_message"]:
        text, mark, _ = text.rpartition(_END_MARK)
        if not mark:
            raise RequestError(
                "it does not render the final message, so continue_final_message cannot work"
            )
    if len(text) > _MAX_TEXT_CHARS:
        raise RequestError(
            f"the rendered text has {len(text)} characters; at most {_MAX_TEXT_CHARS} are allowed"
        )
    return text


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        content[-1]["text"] += _END_MARK
    elif isinstance(content, str):
        message["content"] = content + _END_MARK
    else:
        raise RequestError("continue_final_message: the final message has no text")


def make_environment() -> jinja2.Environment:
    """The jinja2 environment that templates of the Hugging Face hub expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = time.strftime
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))
