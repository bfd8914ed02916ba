"""Define the bodies of POST /v1/embeddings, /pooling, /classify, /score and /rerank."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from vllm.entrypoints.http.request_limits import DOCUMENTS, MESSAGES, PROMPTS, TEXTS, Limits
from vllm.entrypoints.openai.protocol.accepts import accepts
from vllm.entrypoints.openai.protocol.base import (
    Int32,
    Int64,
    Json,
    JsonObject,
    ListOf,
    RequestBody,
    ResponseModel,
    TokenId,
    UsageInfo,
    field_error,
)
from vllm.entrypoints.openai.protocol.chat import TemplateFields

Truncation = Annotated[int, Field(ge=-1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Texts = Annotated[str | ListOf[str], accepts("a string or a list of strings")]
Inputs = Annotated[
    str | ListOf[str] | ListOf[TokenId] | ListOf[ListOf[TokenId]],
    accepts("text, token ids, or a list of either"),
]
"""One text or several, or the token ids of one or several."""


class PoolingFields(RequestBody):
    """Fields that all requests to pooling models share."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    additional_data: Json | None = None
    priority: Int64 = 0


class EmbeddingRequest(TemplateFields, PoolingFields):
    """Texts, or one conversation, to embed: `input` or `messages`."""

    input: Inputs | None = None
    messages: ListOf[JsonObject] | None = Field(default=None, min_length=1)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int32 | None = None
    add_special_tokens: bool | None = None
    """Not set: true for `input`, false for `messages`, whose template brings them."""
    add_generation_prompt: bool = False

    LIMITS: ClassVar[Limits] = {"input": PROMPTS, "messages": MESSAGES}

    @model_validator(mode="after")
    def _check_one_kind(self) -> "EmbeddingRequest":
        if (self.input is None) == (self.messages is None):
            raise field_error("input", "give either input or messages")
        return self


class EmbeddingCompletionRequest(EmbeddingRequest):
    """Texts to embed."""

    input: Inputs


class EmbeddingChatRequest(EmbeddingRequest):
    """One conversation to embed."""

    messages: ListOf[JsonObject] = Field(min_length=1)


class ClassificationRequest(PoolingFields):
    """Texts to classify."""

    input: Inputs

    LIMITS: ClassVar[Limits] = {"input": PROMPTS}


class ScoreRequest(PoolingFields):
    """Pairs of texts to score: one text with each of several, or pair by pair."""

    text_1: Texts
    text_2: Texts

    LIMITS: ClassVar[Limits] = {"text_1": TEXTS, "text_2": TEXTS}


class RerankRequest(PoolingFields):
    """Documents to sort by how well they answer a query."""

    query: str
    documents: ListOf[str] = Field(min_length=1)
    """Texts, or objects with `text`."""
    top_n: Count | None = 0
    """Number of the best results to return; 0: all."""
    return_documents: bool | None = True
    """Whether each result has its document."""

    LIMITS: ClassVar[Limits] = {"documents": DOCUMENTS}

    @field_validator("documents", mode="before")
    @classmethod
    def _read_texts(cls, documents: Any) -> Any:
        """Replace objects by their texts. Their other fields are not read."""
        if not isinstance(documents, list):
            return documents
        return [each.get("text", each) if isinstance(each, dict) else each for each in documents]


# ---- responses --------------------------------------------------------------------------------


class ListResponse(ResponseModel):
    """Results of a request, one for each input."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: UsageInfo


class EmbeddingResponseData(ResponseModel):
    """One vector: numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(ListResponse):
    """The embedding vectors of a request."""

    data: list[EmbeddingResponseData]


class PoolingResponseData(ResponseModel):
    """One result: numbers, numbers per token, or base64 of little-endian float32."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[list[float]] | list[float] | str


class PoolingResponse(ListResponse):
    """The pooled results of a request."""

    data: list[PoolingResponseData]


class ClassificationData(ResponseModel):
    """Result for one text: the most likely label, and a probability per label."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(ListResponse):
    """The classes of a request."""

    data: list[ClassificationData]


class ScoreResponseData(ResponseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(ListResponse):
    """The scores of a request."""

    data: list[ScoreResponseData]


class RerankDocument(ResponseModel):
    """A document, unchanged."""

    text: str


class RerankResult(ResponseModel):
    """The score of one document; `index` is its index in the request."""

    index: int
    document: RerankDocument | None = None
    """Left out if the request says so."""
    relevance_score: float


class RerankUsage(ResponseModel):
    """Token counts of a request."""

    total_tokens: int


class RerankResponse(ResponseModel):
    """The best documents with their scores, best first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]
