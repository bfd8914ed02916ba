"""Render the chat templates of requests, in the process of a `DeadlineWorker`.

Imports jinja2 and nothing of the engine. The sandbox protects Python's internals; the deadline and
the memory limit of the process protect the rest.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from vllm.entrypoints.conversation.render import Rendering, render_conversation
from vllm.errors import RequestError

_MAX_TEXT_CHARS = 64 * 2**20


def start(_setup: bytes) -> Callable[[bytes], bytes]:
    """Create the handler of the worker. Its input is JSON of the arguments, its output JSON of a
    `Rendering`.
    """
    return lambda argument: msgspec.json.encode(render(msgspec.json.decode(argument)))


def render(arguments: dict[str, Any]) -> Rendering:
    """Render the text of a conversation.

    Args:
        arguments: arguments of `render_conversation`.

    Raises:
        RequestError: rendering needs too much memory, or the text is too long.
        CannotRenderError: the template is wrong, or refuses the conversation.
    """
    try:
        rendering = render_conversation(**arguments)
    except MemoryError:
        raise RequestError("rendering needs too much memory") from None
    if (length := len(rendering.text)) > _MAX_TEXT_CHARS:
        raise RequestError(
            f"the rendered text has {length} characters; at most {_MAX_TEXT_CHARS} are allowed"
        )
    return rendering
