"""Define the bodies of POST /v1/embeddings, /pooling, /classify, /score and /rerank."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from vllm.entrypoints.http.request_limits import DOCUMENTS, MESSAGES, PROMPTS, TEXTS, Limits
from vllm.entrypoints.http.validation_text import describe_missing
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
    read_other_names,
)
from vllm.entrypoints.openai.protocol.chat import TemplateFields
from vllm.utils.text.json_words import show_value

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
    user: Json = None
    truncate_prompt_tokens: Truncation | None = None
    additional_data: Json | None = None
    priority: Int64 = 0

    @model_validator(mode="before")
    @classmethod
    def _read_truncation(cls, data: Any) -> Any:
        """Read whether to truncate long texts, as Voyage, Cohere, NVIDIA and TEI write it."""
        if not isinstance(data, dict):
            return data
        for name in ("truncation", "truncate"):
            value = data.get(name)
            if isinstance(value, str) and value.upper() in ("NONE", "END"):
                value = value.upper() == "END"
            if not isinstance(value, bool | None):
                raise field_error(
                    name,
                    f"must be true, false, END or NONE, got {show_value(value)}. A text keeps its "
                    "beginning when it is truncated",
                )
            if value and data.get("truncate_prompt_tokens") is None:
                data = {**data, "truncate_prompt_tokens": -1}
        return {key: data[key] for key in data if key not in ("truncation", "truncate")}


def _read_text(given: Any) -> Any:
    """Return the text of an object such as `{"text": ...}`; anything else unchanged. Other fields
    of the object are not read.
    """
    return given.get("text", given) if isinstance(given, dict) else given


def _read_texts(given: Any) -> Any:
    """Return a text or a list of texts, in which each may be an object with `text`."""
    return list(map(_read_text, given)) if isinstance(given, list) else _read_text(given)


_NUMBERS = ("float", "base64")
_NOT_MADE = ("late_chunking", "return_multivector")
"""Switches that would change the vectors."""


class EmbeddingRequest(TemplateFields, PoolingFields):
    """Texts, or one conversation, to embed: `input` or `messages`."""

    input: Inputs | None = None
    messages: ListOf[JsonObject] | None = Field(default=None, min_length=1)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int32 | None = None
    add_special_tokens: bool | None = None
    """Not set: true for `input`, false for `messages`, whose template brings them."""
    add_generation_prompt: bool = False
    normalize: bool | None = None
    """Whether vectors have length 1. Not set: as the model's files say."""

    LIMITS: ClassVar[Limits] = {"input": PROMPTS, "messages": MESSAGES}

    @model_validator(mode="before")
    @classmethod
    def _read_dialects(cls, data: Any) -> Any:
        """Read fields as Jina, Voyage and Cohere name them, and refuse what would change the
        vectors.
        """
        names = {"output_dimension": "dimensions", "normalized": "normalize"}
        data = read_other_names(data, names)
        if not isinstance(data, dict):
            return data
        for name in _NOT_MADE:
            if data.get(name):
                raise field_error(name, "must be false or left out: this server does not have it")
        for name in ("embedding_type", "embedding_types", "output_dtype"):
            given = data.pop(name, None)
            wanted = given[0] if isinstance(given, list) and len(given) == 1 else given
            if wanted is None:
                continue
            if wanted not in _NUMBERS:
                raise field_error(
                    name,
                    f"must be {' or '.join(_NUMBERS)}, got {show_value(given)}: this server does "
                    "not quantize embeddings",
                )
            if wanted == "base64" or data.get("encoding_format") is None:
                data["encoding_format"] = wanted
        return data

    @field_validator("input", mode="before")
    @classmethod
    def _read_objects(cls, given: Any) -> Any:
        return _read_texts(given)

    @model_validator(mode="after")
    def _check_one_kind(self) -> "EmbeddingRequest":
        if self.input is None and self.messages is None:
            raise field_error("input", describe_missing("input", self.model_extra))
        if self.input is not None and self.messages is not None:
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

    LIMITS: ClassVar[Limits] = dict.fromkeys(
        ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"), TEXTS
    )

    @model_validator(mode="before")
    @classmethod
    def _read_dialects(cls, data: Any) -> Any:
        """Read the names that newer versions accept as well."""
        first = dict.fromkeys(("queries", "data_1"), "text_1")
        return read_other_names(
            data, {**first, **dict.fromkeys(("documents", "items", "data_2"), "text_2")}
        )

    @field_validator("text_1", "text_2", mode="before")
    @classmethod
    def _read_objects(cls, given: Any) -> Any:
        return _read_texts(given)


class RerankRequest(PoolingFields):
    """Documents to sort by how well they answer a query."""

    query: Annotated[str, accepts("text, or an object with text")]
    documents: ListOf[str] = Field(min_length=1)
    """Texts, or objects with `text`."""
    top_n: Count | None = 0
    """Number of the best results to return; 0: all."""
    return_documents: bool | None = True
    """Whether each result has its document."""

    LIMITS: ClassVar[Limits] = {"documents": DOCUMENTS}

    @model_validator(mode="before")
    @classmethod
    def _read_dialects(cls, data: Any) -> Any:
        """Read the name that Voyage uses."""
        return read_other_names(data, {"top_k": "top_n"})

    @field_validator("query", mode="before")
    @classmethod
    def _read_query(cls, query: Any) -> Any:
        return _read_text(query)

    @field_validator("documents", mode="before")
    @classmethod
    def _read_documents(cls, documents: Any) -> Any:
        read = _read_texts(documents)
        for index, text in enumerate(read if isinstance(read, list) else ()):
            if not isinstance(text, str):
                raise field_error(
                    str(index), f"must be a string or an object with text, got {show_value(text)}"
                )
        return read


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
