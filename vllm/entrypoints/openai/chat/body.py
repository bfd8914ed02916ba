"""Define the body of POST /v1/chat/completions, which may also have the form of the Responses API.

Cursor's agent sends `input` instead of `messages` to this route, and expects an answer of the chat
API. Tools and tool choices may have either form in any body (`read_dialects`).
"""

from typing import Any, ClassVar

from pydantic import ValidationError, model_validator

from vllm.entrypoints.http.request_limits import Limit, Limits
from vllm.entrypoints.http.validation_text import describe_validation
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.responses import ResponsesRequest
from vllm.entrypoints.openai.shared.response_items import as_messages, read_input
from vllm.errors import RequestError

_READ = ("input", "instructions", "text", "max_output_tokens")
"""Fields of the Responses API that the chat API has under other names."""
_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")


class ChatBody(ChatCompletionRequest):
    """A conversation to be continued, as `messages`, or as `input` of the Responses API."""

    LIMITS: ClassVar[Limits] = {"input": (Limit("max_messages", "items"),)}

    @model_validator(mode="before")
    @classmethod
    def _read_input(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("messages") or data.get("input") is None:
            return data
        for name in _STATEFUL:
            if data.get(name):
                raise RequestError(
                    f"{name} is not a field of /v1/chat/completions: send a body with input and "
                    f"{name} to /v1/responses",
                    param=name,
                )
        given = {name: data[name] for name in _READ if name in data}
        try:
            request = ResponsesRequest.model_validate(given)
        except ValidationError as error:
            message, param = describe_validation(error.errors())
            raise RequestError(message, param=param) from None
        rest = {name: value for name, value in data.items() if name not in _READ}
        rest["messages"] = as_messages(request.instructions, read_input(request.input))
        if request.max_output_tokens is not None:
            rest.setdefault("max_completion_tokens", request.max_output_tokens)
        if (wanted := request.response_format()) is not None:
            rest.setdefault("response_format", wanted)
        return rest
