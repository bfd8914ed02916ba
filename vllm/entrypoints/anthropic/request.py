"""Convert a request in Anthropic's format to a request of the chat API.

Pure functions, independent of the engine. Every error names the field as the client wrote it.
"""

from typing import Any

from vllm.entrypoints.anthropic.input import as_messages, as_tool_choice, as_tools
from vllm.entrypoints.anthropic.protocol import Conversation, MessagesRequest
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.sampling import API_NUMBERS
from vllm.entrypoints.openai.responses.request import make_chat_request
from vllm.errors import RequestError

_SAMPLING_FIELDS = (*API_NUMBERS, "priority", "cache_salt")


def as_chat_request(request: MessagesRequest) -> ChatCompletionRequest:
    """Convert a request to the equivalent chat request.

    Raises:
        RequestError: a block, a tool or a format is not available, or fields contradict each other.
    """
    given = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    fields = {name: value for name, value in given.items() if value is not None}
    fields.update(
        request.shared_fields(),
        **prompt_fields(request),
        max_completion_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=True,
    )
    return make_chat_request(fields, format_field="output_config.format")


THREAD_UNSUPPORTED = "thread_unsupported_request"
"""The code with which Anthropic's clients send the request again, without a thread."""


def prompt_fields(conversation: Conversation) -> dict[str, Any]:
    """Return the fields of a chat request that determine its prompt.

    If the last turn is from the assistant, it is the beginning of the answer, and the model
    continues it.

    Raises:
        RequestError: a block or a tool is not available, or fields contradict each other.
    """
    if conversation.thread is not None:
        raise RequestError(
            "thread is not available: this server does not store conversations. Leave it out, and "
            "send all messages",
            param="thread",
            code=THREAD_UNSUPPORTED,
        )
    messages = as_messages(conversation)
    tools = as_tools(conversation.tools)
    choice, is_parallel = as_tool_choice(conversation.tool_choice, conversation.tools)
    fields: dict[str, Any] = {
        "model": conversation.model,
        "messages": messages,
        "chat_template_kwargs": _template_kwargs(conversation),
        "response_format": _response_format(conversation),
        "parallel_tool_calls": is_parallel,
    }
    if tools is not None:
        fields.update(tools=tools, tool_choice=choice)
    elif choice not in (None, "none", "auto"):
        raise RequestError(
            "tool_choice needs tools with an input_schema"
            + (": this server runs none of the tools in tools" if conversation.tools else ""),
            param="tool_choice",
        )
    last = messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        fields.update(continue_final_message=True, add_generation_prompt=False)
    return fields


def _response_format(conversation: Conversation) -> dict[str, Any] | None:
    config = conversation.output_config
    given = {
        "output_config.format": None if config is None else config.format,
        "output_format": conversation.output_format,
    }
    wanted = {name: value for name, value in given.items() if value is not None}
    if not wanted:
        return None
    name, value = wanted.popitem()
    if any(other != value for other in wanted.values()):
        raise RequestError(
            "output_format must be equal to output_config.format. Leave it out",
            param="output_format",
        )
    if value.get("type") != "json_schema" or not isinstance(value.get("schema"), dict):
        raise RequestError(
            f"{name} must be {{'type': 'json_schema', 'schema': {{...}}}}",
            param=name.partition(".")[0],
        )
    schema = {"name": "answer", "schema": value["schema"]}
    return {"type": "json_schema", "json_schema": schema}


def _template_kwargs(conversation: Conversation) -> dict[str, Any] | None:
    """Return the thinking and effort settings under the names that chat templates use. Templates
    ignore unknown names.
    """
    kwargs: dict[str, Any] = {}
    if conversation.thinking is not None:
        kwargs["enable_thinking"] = conversation.thinking.type != "disabled"
    if conversation.output_config is not None and conversation.output_config.effort is not None:
        kwargs["reasoning_effort"] = conversation.output_config.effort
    return {**kwargs, **(conversation.chat_template_kwargs or {})} or None
