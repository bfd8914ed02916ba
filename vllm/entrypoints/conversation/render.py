"""Renders a conversation with a chat template: the same for templates of models and of requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.conversation.messages import ContentFormat, Message
from vllm.entrypoints.conversation.rules import fit, fit_tools
from vllm.entrypoints.conversation.template import load_template

_END_MARK = "\ue000vllm-end-of-final-message\ue000"
"""Marks the end of the message that is to be continued; the text is cut there. A space follows it,
which shows whether the template keeps white space at the end of a message."""


class CannotRenderError(Exception):
    """The template is wrong or refuses the conversation; the text is its reason, in one line."""


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
) -> str:
    """Return the text of a conversation.

    Args:
        source: the template.
        messages: of `read_messages`.
        special_tokens: of the tokenizer: name -> text.
        tools: functions that the model may call.
        content_format: see `rules.fit`.
        add_generation_prompt: begin the answer of the assistant.
        continue_final_message: cut the text after the content of the last message.
        variables: further ones of the template.

    Raises:
        CannotRenderError: the template raised something, or leaves out the message that is to be
            continued.
        MemoryError: as it is.
    """
    try:
        template = load_template(source, tuple(special_tokens.items()), has_tools=bool(tools))
        fitted = fit(messages, template, content_format)
        if continue_final_message:
            _mark_end(fitted[-1])
        text = template.render(
            fitted,
            fit_tools(tools, template),
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
    except MemoryError:
        raise
    except Exception as error:  # a template is foreign code, which may raise anything
        lines = str(error).strip().splitlines()
        raise CannotRenderError(lines[0] if lines else type(error).__name__) from error
    return _cut_at_mark(text) if continue_final_message else text


def _mark_end(message: Message) -> None:
    content = message["content"]
    mark = _END_MARK + " "
    if isinstance(content, str):
        message["content"] = content + mark
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
