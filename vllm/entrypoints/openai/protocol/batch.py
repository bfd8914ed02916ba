"""Define the lines of OpenAI's batch files, for programs that write them and read the results.

The server itself reads lines without these classes, and the routes check the bodies
(`batch/lines`).
"""

from typing import Annotated, Any

from pydantic import Field, model_validator

from vllm.entrypoints.openai.protocol.accepts import accepts
from vllm.entrypoints.openai.protocol.base import RequestModel, ResponseModel
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.protocol.completion import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.protocol.pooling import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from vllm.entrypoints.openai.protocol.transcription import (
    TranscriptionRequest,
    TranscriptionResponse,
    TranscriptionResponseVerbose,
    TranslationRequest,
)

_NO_FILE: Any = Field(default=None, exclude=True)


class BatchTranscriptionRequest(TranscriptionRequest):
    """An audio file to transcribe, given by its URL."""

    file: Any = _NO_FILE
    file_url: str


class BatchTranslationRequest(TranslationRequest):
    """An audio file to transcribe and translate to English, given by its URL."""

    file: Any = _NO_FILE
    file_url: str


BatchRequestInputBody = (
    ChatCompletionRequest
    | CompletionRequest
    | EmbeddingRequest
    | ScoreRequest
    | RerankRequest
    | BatchTranscriptionRequest
    | BatchTranslationRequest
)
_BODIES: dict[str, type[RequestModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/score": ScoreRequest,
    "/v1/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/v1/audio/transcriptions": BatchTranscriptionRequest,
    "/v1/audio/translations": BatchTranslationRequest,
}
"""Route -> the class of its bodies."""
URLS = tuple(_BODIES)
"""Routes that a line may name."""


class BatchRequestInput(RequestModel):
    """A request of a batch. Its body is read in the format of the route in `url`."""

    custom_id: str
    method: str
    url: str
    body: Annotated[BatchRequestInputBody, accepts("the body of a request to the route of url")]

    @model_validator(mode="before")
    @classmethod
    def _read_body(cls, data: Any) -> Any:
        """Read the body in the format of its route, because it may fit several classes."""
        url = data.get("url") if isinstance(data, dict) else None
        kind = _BODIES.get(url) if isinstance(url, str) else None
        if kind is None or not isinstance(data.get("body"), dict):
            return data
        return {**data, "body": kind.model_validate(data["body"])}


class BatchResponseData(ResponseModel):
    """The response of a route."""

    status_code: int = 200
    request_id: str
    body: (
        ChatCompletionResponse
        | CompletionResponse
        | EmbeddingResponse
        | ScoreResponse
        | RerankResponse
        | TranscriptionResponseVerbose
        | TranscriptionResponse
        | None
    ) = None


class BatchRequestOutput(ResponseModel):
    """The record of a request: its response or its error."""

    id: str
    custom_id: str
    response: BatchResponseData | None
    error: Any | None
