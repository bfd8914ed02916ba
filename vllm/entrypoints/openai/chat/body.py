"""Define the body of POST /v1/chat/completions, which may also have the form of the Responses API.

Cursor's agent sends `input` instead of `messages` to this route, and expects an answer of the chat
API. Tools and tool choices may have either form in any body (`read_dialects`).
"""

from typing import Any, ClassVar

from pydantic import ValidationError, model_validator

from vllm.entrypoints.http.request_limits import STOP, Limit, Limits
from vllm.entrypoints.http.validation_text import describe_validation
from vllm.entrypoints.openai.protocol.base import read_other_names
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.responses import ResponsesRequest
from vllm.entrypoints.openai.shared.response_items import as_messages, read_input
from vllm.errors import RequestError
from vllm.utils.text.json_words import show_value

_READ = ("input", "instructions", "text", "max_output_tokens")
"""Fields of the Responses API that the chat API has under other names."""
_OTHER_NAMES = {
    **dict.fromkeys(("max_output_tokens", "max_new_tokens"), "max_completion_tokens"),
    "stop_sequences": "stop",
    "random_seed": "seed",
}
"""Name of a field in other APIs (OpenAI's Responses, Anthropic, Cohere, Mistral) -> own name."""
_SYSTEM = ("instructions", "system")
"""Fields of the Responses API and of Anthropic's API with the system prompt."""
_CONTINUED = ("prefix", "partial")
"""Fields of a last message that is to be continued, in the APIs of DeepSeek, Mistral and
Moonshot."""
_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")


class ChatBody(ChatCompletionRequest):
    """A conversation to be continued, as `messages`, or as `input` of the Responses API."""

    LIMITS: ClassVar[Limits] = {"input": (Limit("max_messages", "items"),), "stop_sequences": STOP}

    @model_validator(mode="before")
    @classmethod
    def _read_other_apis(cls, data: Any) -> Any:
        """Read a body in the form of another API."""
        if not isinstance(data, dict):
            return data
        _check_modalities(data.get("modalities"))
        if not data.get("messages") and data.get("input") is not None:
            data = cls._read_input(data)
        return _read_messages(read_other_names(data, _OTHER_NAMES))

    @classmethod
    def _read_input(cls, data: dict[str, Any]) -> dict[str, Any]:
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


def _check_modalities(given: Any) -> None:
    """Refuse answers in images or sounds.

    Raises:
        RequestError: another modality than text is asked for.
    """
    others = [each for each in (given if isinstance(given, list) else [given]) if each != "text"]
    if given is not None and others:
        raise RequestError(
            f"modalities has {show_value(others[0])}, but this server answers in text only: leave "
            f'modalities out, or set it to ["text"]',
            param="modalities",
        )


def _read_messages(data: Any) -> Any:
    """Return an unvalidated body whose system prompt is the first message, and which says whether
    the last message is to be continued.
    """
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        return data
    for name in _SYSTEM:
        if (text := data.get(name)) and isinstance(text, (str, list)):
            messages = [{"role": "system", "content": text}, *messages]
            data = {key: value for key, value in data.items() if key != name}
    last = messages[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        if any(last.get(name) is True for name in _CONTINUED):
            data = {"continue_final_message": True, "add_generation_prompt": False, **data}
        kept = {name: value for name, value in last.items() if name not in _CONTINUED}
        messages = [*messages[:-1], kept]
    return {**data, "messages": messages}
