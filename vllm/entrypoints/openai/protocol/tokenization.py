"""Define the bodies of POST /tokenize and POST /detokenize."""

from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Tag

from vllm.entrypoints.http.request_limits import Limit, Limits
from vllm.entrypoints.http.validation_text import TAG_SIGN
from vllm.entrypoints.openai.protocol.base import ListOf, RequestBody, ResponseModel, TokenId
from vllm.entrypoints.openai.protocol.chat import ChatFields


class TokenizeCompletionRequest(RequestBody):
    """A text to be tokenised as a completion would."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatFields, RequestBody):
    """A conversation to be tokenised as a chat completion would."""

    model: str | None = None
    return_token_strs: bool | None = False


def _kind(body: Any) -> str:
    """Return which of the two types a body has, so that error messages are about only one of
    them.
    """
    has_messages = "messages" in body if isinstance(body, dict) else hasattr(body, "messages")
    return f"{TAG_SIGN}chat" if has_messages else f"{TAG_SIGN}completion"


TokenizeRequest = Annotated[
    Annotated[TokenizeCompletionRequest, Tag(f"{TAG_SIGN}completion")]
    | Annotated[TokenizeChatRequest, Tag(f"{TAG_SIGN}chat")],
    Discriminator(_kind),
]


class TokenizeResponse(ResponseModel):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Tokens to convert to text."""

    model: str | None = None
    tokens: ListOf[TokenId]

    LIMITS: ClassVar[Limits] = {"tokens": (Limit("max_detokenize_tokens", "tokens"),)}


class DetokenizeResponse(ResponseModel):
    """The text of some tokens."""

    prompt: str
