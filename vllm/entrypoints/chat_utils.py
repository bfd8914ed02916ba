"""Check conversations, convert them for the chat template, and render them as text.

Shared by `LLM.chat` and the server. The text already contains the model's special tokens: tokenise
it with `add_special_tokens=False`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.conversation.media import MediaPart, MediaParts, MediaRules, RenderedChat
from vllm.entrypoints.conversation.messages import ContentFormat, check_continued, read_messages
from vllm.entrypoints.conversation.thinking import with_all_switches
from vllm.errors import RequestError
from vllm.utils.text.json_words import show_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.entrypoints.conversation.render import Rendering

Message = Mapping[str, Any]
"""Role, content and what else the template reads, as in the OpenAI API."""

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
    """Form of content that the template expects: a string, or a list of parts (openai)."""
    add_generation_prompt: bool = True
    """Add the beginning of the assistant's answer at the end."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model continues it."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions the model may call, as JSON schemas."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the template. A switch of thinking sets the switches of all names."""

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
                "continue_final_message and add_generation_prompt cannot both be true: set "
                "add_generation_prompt=False to continue the last message",
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
    """Return the text of a conversation without media.

    Raises:
        RequestError: there is no template, a message is malformed or has media, or the template
            refuses the conversation.
    """
    return render_with_media(tokenizer, messages, options, None).text


def render_with_media(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    options: ChatOptions,
    rules: MediaRules | None,
) -> RenderedChat:
    """Return the text of a conversation, and its media.

    Args:
        tokenizer: has the special tokens and, unless the options have one, the template.
        messages: the conversation.
        options: options for rendering it.
        rules: media that the model reads; None: the model reads only text.

    Raises:
        RequestError: there is no template, a message is malformed, or the template refuses the
            conversation.
    """
    from vllm.entrypoints.conversation.render import CannotRenderError, render_conversation

    arguments, media = rendering_arguments(tokenizer, messages, options, rules)
    try:
        rendering = render_conversation(**arguments)
    except (CannotRenderError, MemoryError) as error:
        raise RequestError(
            f"the chat template cannot render this conversation: {error or 'out of memory'}",
            param="messages",
        ) from error
    return with_media(rendering, media)


def with_media(rendering: "Rendering", media: Sequence[MediaPart]) -> RenderedChat:
    """Return a rendered text with its media, in the order in which the template shows them."""
    ordered = [media[index] for index in rendering.order]
    return RenderedChat(rendering.text, ordered, rendering.literals)


def rendering_arguments(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    options: ChatOptions,
    rules: MediaRules | None = None,
) -> tuple[dict[str, Any], list[MediaPart]]:
    """Return the arguments of `render_conversation`, and the media of the messages.

    The arguments are JSON values if the messages and variables are.

    Raises:
        RequestError: there is no template, or a message is malformed.
    """
    for index, tool in enumerate(options.tools or ()):
        if not isinstance(tool, Mapping):
            raise RequestError(
                f"tools[{index}] must be the description of a tool, such as "
                '{"type": "function", "function": {"name": ...}}, got '
                f"{show_value(tool)}",
                param="tools",
            )
    template = _find_template(tokenizer, options)
    media = MediaParts()
    if rules is not None:
        media = MediaParts(rules.limits, is_local=rules.is_local)
    conversation = read_messages(messages, media)
    if options.continue_final_message:
        check_continued(conversation)
    arguments = {
        "source": template,
        "messages": conversation,
        "special_tokens": {
            name: token
            for name, token in tokenizer.special_tokens_map.items()
            if isinstance(token, str)
        },
        "tools": None if options.tools is None else list(options.tools),
        "content_format": options.content_format,
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
        "variables": with_all_switches(options.template_kwargs),
        "media": rules and {kind: asdict(text) for kind, text in rules.texts.items()},
    }
    return arguments, media.parts


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
    except ValueError as error:  # there are several templates and no default
        raise RequestError(str(error), param="chat_template") from error
    return template
