"""Convert the conversation of a request to a prompt.

The template is the server's or the tokenizer's. A template in a request is foreign code, so it is
rendered in a separate process with a deadline.
"""

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from vllm.entrypoints.chat_utils import (
    ChatOptions,
    Message,
    render_with_media,
    rendering_arguments,
    with_media,
)
from vllm.entrypoints.conversation.media import MediaRules, RenderedChat
from vllm.entrypoints.conversation.thinking import merge_switches
from vllm.entrypoints.http import off_loop
from vllm.entrypoints.openai.chat.template_flag import load_chat_template
from vllm.entrypoints.openai.protocol.chat import ChatFields
from vllm.entrypoints.openai.shared.prompts import tokenize
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.media import fetch_media, media_prompt, media_rules, require_chat
from vllm.errors import RequestError
from vllm.inputs import TokensPrompt
from vllm.utils.process.deadline_worker import (
    CallFailed,
    DeadlineExceeded,
    DeadlineWorker,
    WorkerDied,
    make_server,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.entrypoints.shared.server_args import ServerArgs

TEMPLATE_DEADLINE_S = 2.0
_TEMPLATE_MEMORY_BYTES = 512 * 2**20


async def chat_prompt(
    context: ServerContext,
    body: ChatFields,
    *,
    with_tools: bool = True,
    truncate: int | None = None,
    cache_salt: str | None = None,
    max_tokens: int | None = None,
    fetched: dict[str, bytes] | None = None,
) -> TokensPrompt:
    """Render a conversation as the prompt of its next turn.

    Args:
        context: context of the server; its engine is ready.
        body: conversation, tools and options.
        with_tools: False hides the tools from the model.
        truncate, cache_salt, max_tokens: passed to `prompts.tokenize`.
        fetched: content of fetched media by URL; new media are added. None: fetch all media.

    Returns:
        Token ids; "prompt" is the rendered text, unless it was truncated.

    Raises:
        RequestError: the conversation cannot be rendered, or rendering takes too long.
    """
    require_chat(context.engine.input_processor)
    rules = media_rules(context.engine.input_processor)
    chat = await render(context, body, rules, with_tools=with_tools)
    media = chat.media
    if media:
        media = await fetch_media(context.media_fetcher, media, fetched)
    prompt = media_prompt(chat, media, rules, body.mm_processor_kwargs)
    prompt["add_special_tokens"] = body.add_special_tokens
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    return await tokenize(
        context.engine, prompt, truncate=truncate, cache_salt=cache_salt, max_tokens=max_tokens
    )


async def render(
    context: ServerContext, body: ChatFields, rules: MediaRules | None, *, with_tools: bool = True
) -> RenderedChat:
    """Render the text of a conversation, and collect its media. The arguments are the same as for
    `chat_prompt`.
    """
    tokenizer = await context.engine.get_tokenizer()
    is_foreign = body.chat_template is not None and not _is_name(tokenizer, body.chat_template)
    options = await off_loop.run(partial(chat_options, context, body, with_tools=with_tools))
    messages = cast(list[Message], body.messages)
    if is_foreign:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            _template_thread(), render_foreign, tokenizer, messages, options, rules
        )
    return await off_loop.run(partial(render_with_media, tokenizer, messages, options, rules))


def chat_options(context: ServerContext, body: ChatFields, *, with_tools: bool) -> ChatOptions:
    """Return the options for rendering the conversation of a request.

    Raises:
        RequestError: the options contradict each other.
    """
    tools = (
        [tool.model_dump(exclude_none=True) for tool in body.function_tools] if with_tools else []
    )
    kwargs = template_kwargs(context.args, body)
    if body.documents is not None:
        kwargs["documents"] = body.documents
    template = body.chat_template
    if template is None:
        template = load_chat_template(context.args.chat_template)
    return ChatOptions(
        chat_template=template,
        content_format=context.args.chat_template_content_format,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=tools or None,
        template_kwargs=kwargs,
    )


def template_kwargs(args: "ServerArgs", body: ChatFields) -> dict[str, Any]:
    """Return the arguments for the template: from the request, and from the server where the
    request has none.
    """
    given = {**body.thinking_kwargs, **(body.chat_template_kwargs or {})}
    return merge_switches(args.default_chat_template_kwargs, given)


def _is_name(tokenizer: "PreTrainedTokenizerBase", template: str) -> bool:
    """Return whether the tokenizer has a template with this name."""
    return isinstance(tokenizer.chat_template, dict) and template in tokenizer.chat_template


def render_foreign(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    options: ChatOptions,
    rules: MediaRules | None,
) -> RenderedChat:
    """Render a template of a request in a separate process. Blocks.

    Raises:
        RequestError: a message is malformed, or rendering takes too long, needs too much memory, or
            fails.
    """
    from vllm.entrypoints.conversation.render import Rendering

    arguments, media = rendering_arguments(tokenizer, messages, options, rules)
    try:
        answer = _template_worker().call(msgspec.json.encode(arguments), TEMPLATE_DEADLINE_S)
    except DeadlineExceeded:
        raise RequestError(
            f"chat_template: rendering took more than {TEMPLATE_DEADLINE_S:g} s",
            param="chat_template",
        ) from None
    except WorkerDied:
        raise RequestError(
            "chat_template: rendering needs too much memory", param="chat_template"
        ) from None
    except CallFailed as error:
        raise RequestError(f"chat_template: {error}", param="chat_template") from None
    return with_media(msgspec.json.decode(answer, type=Rendering), media)


@functools.cache
def _template_thread() -> ThreadPoolExecutor:
    """Create a separate thread, so that slow templates do not block other work."""
    return ThreadPoolExecutor(1, thread_name_prefix="template")


@functools.cache
def _template_worker() -> DeadlineWorker:
    """Create the worker that all requests share, so that calls wait for each other, at most two
    seconds each.
    """
    return DeadlineWorker(
        make_server("vllm.entrypoints.openai.chat.template_worker:start"),
        max_memory_bytes=_TEMPLATE_MEMORY_BYTES,
    )
