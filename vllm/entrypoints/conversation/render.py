"""Render a conversation with a chat template, in the same way for templates of models and of
requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.conversation.media import MediaText, is_media
from vllm.entrypoints.conversation.media_marks import MediaMarks, without_index
from vllm.entrypoints.conversation.messages import ContentFormat, Message
from vllm.entrypoints.conversation.rules import fit, fit_tools
from vllm.entrypoints.conversation.template import load_template
from vllm.inputs import plural

_END_MARK = "\ue000vllm-end-of-final-message\ue000"
"""Marks the end of the message that is to be continued; the text is cut there. A space follows it,
which shows whether the template keeps white space at the end of a message."""


class CannotRenderError(Exception):
    """The template is wrong or refuses the conversation. str() is the reason, in one line."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation that was rendered as text."""

    text: str
    order: list[int] = field(default_factory=list)
    """Indices of the media in the order of their placeholders."""
    literals: list[int] = field(default_factory=list)
    """Indices of the placeholders, of all in the text, that a user has written."""


def render_conversation(
    source: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    content_format: ContentFormat = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    media: Mapping[str, Mapping[str, str]] | None = None,
) -> Rendering:
    """Return the text of a conversation.

    Args:
        source: the template.
        messages: result of `read_messages`.
        special_tokens: special tokens of the tokenizer: name -> text.
        tools: functions that the model may call.
        content_format: form of content that the template reads; see `rules.fit`.
        add_generation_prompt: begin the answer of the assistant.
        continue_final_message: cut the text after the content of the last message.
        variables: other variables for the template.
        media: fields of a `MediaText`, by modality. None: the model reads only text.

    Raises:
        CannotRenderError: the template raises an error, or leaves out an item or the message to
            continue.
        MemoryError: the template needs too much memory.
    """
    try:
        template = load_template(source, tuple(special_tokens.items()), has_tools=bool(tools))
        marks = None
        texts = {kind: MediaText(**fields) for kind, fields in (media or {}).items()}
        if texts:
            marks = MediaMarks(texts, [messages, tools, variables])
            messages = marks.with_texts(messages)
        placeholders = {kind: each.placeholder for kind, each in texts.items()}
        fitted = fit(messages, template, content_format, placeholders)
        fitted_tools: Any = fit_tools(tools, template)
        order: list[int] = []
        if marks is not None:
            order = marks.order_of(fitted)
            fitted = marks.protect(without_index(fitted))
            fitted_tools, variables = marks.protect(fitted_tools), marks.protect(variables)
        if continue_final_message:
            _mark_end(fitted[-1])
        text = template.render(
            fitted, fitted_tools, add_generation_prompt=add_generation_prompt, variables=variables
        )
    except MemoryError:
        raise
    except Exception as error:  # a template is foreign code, which may raise anything
        lines = str(error).strip().splitlines()
        raise CannotRenderError(lines[0] if lines else type(error).__name__) from error
    if continue_final_message:
        text = _cut_at_mark(text)
    if marks is None:
        return Rendering(text)
    text, literals, written = marks.remove(text)
    if not order:  # without media, text that looks like a placeholder is ordinary text of the user
        return Rendering(text, literals=list(range(len(literals) + written.total())))
    expected = marks.count(order)
    for kind in texts:
        if written[kind] != expected[kind]:
            raise CannotRenderError(
                f"it must write one placeholder for each of the {expected[kind]} {plural(kind)}, "
                f"but it writes {written[kind]}"
            )
    return Rendering(text, order, literals)


def _mark_end(message: Message) -> None:
    content = message["content"]
    mark = _END_MARK + " "
    if isinstance(content, str):
        message["content"] = content + mark
    elif is_media(content[-1]):
        message["content"] = [*content, {"type": "text", "text": mark}]
    else:
        last = {**content[-1], "text": content[-1]["text"] + mark}
        message["content"] = [*content[:-1], last]


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(_END_MARK)
    if not mark:
        raise CannotRenderError(
            "it does not render the final message, so continue_final_message cannot work"
        )
    return before if after.startswith(" ") else before.rstrip()
