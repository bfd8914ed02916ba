"""The results for users: one `RequestOutput` per request, one `CompletionOutput` per sample."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm, of the raw distribution of the model.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: text of the token; None without a tokenizer, or with `detokenize=False`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sampled continuation.

    Attributes:
        index: 0 to n - 1.
        text: detokenised output.
        token_ids: output tokens, the end token included.
        cumulative_logprob: sum over the sampled tokens, or None when not asked for.
        logprobs: per position, token id -> Logprob, the sampled token first.
        finish_reason: "stop", "length", "abort", "error", or None while running.
        stop_reason: the stop string or stop token id that ended it, or the message of an error;
            None for the tokenizer's end token. End tokens from generation_config.json are reported
            like stop token ids.
        is_refused: the error is a mistake in the request, such as an adapter that does not fit the
            model.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    is_refused: bool = field(default=False, repr=False)

    def finished(self) -> bool:
        """Return whether the output has a finish reason."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request, in seconds of `time.time()`; None: not reached yet."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    first_scheduled_time: float | None = None
    """When the engine began to compute it."""
    last_token_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds between arrival and the first step."""
        return self._since_arrival(self.first_scheduled_time)

    @property
    def first_token_latency(self) -> float | None:
        """Seconds between arrival and the first token."""
        return self._since_arrival(self.first_token_time)

    def _since_arrival(self, time: float | None) -> float | None:
        return None if time is None else time - self.arrival_time


class RequestOutput:
    """The state of one request as the user sees it.

    Attributes:
        request_id: the id the request was added with.
        prompt: the prompt text, or None when token ids were given.
        prompt_token_ids: tokens of the prompt as it was run; None for a prompt of embeddings.
        prompt_logprobs: per prompt position, None for the first, or None when not asked for.
        outputs: one per sample, ordered by index.
        finished: every sample has ended.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_dropped_tokens: output tokens of the samples that `best_of` has left out.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestMetrics | None = None,
        lora_request: Any = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        *,
        multi_modal_placeholders: dict[str, Any] | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        **_future: Any,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.num_dropped_tokens = 0
        self.multi_modal_placeholders = multi_modal_placeholders or {}
        self.kv_transfer_params = kv_transfer_params

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, outputs={self.outputs}, "
            f"finished={self.finished}, num_cached_tokens={self.num_cached_tokens})"
        )


@dataclass
class BeamSearchSequence:
    """One beam of a beam search.

    Attributes:
        tokens: prompt and output.
        logprobs: log-probabilities of the output, per position.
        cum_logprob: sum over the output tokens, the end token included.
        text: text of prompt and output, special tokens included; None without a tokenizer.
        finish_reason: "stop" or "length".
        stop_reason: the end token.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


@dataclass
class PoolingOutput:
    """The result of a pooling model for one prompt.

    Attributes:
        data: [size] float32, or [tokens, size] with one result per token. A numpy array
            from an engine, a torch tensor from `LLM.encode`.
    """

    data: Any

    def __eq__(self, other: object) -> bool:
        """Return whether shape and values are equal."""
        if not isinstance(other, PoolingOutput):
            return NotImplemented
        return np.array_equal(self.data, other.data)


@dataclass
class EmbeddingOutput:
    """The embedding of a prompt.

    Attributes:
        embedding: values of the embedding.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Size of the embedding."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probabilities of the classes.

    Attributes:
        probs: one per class.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The score of a pair of texts.

    Attributes:
        score: cosine of two embeddings, or output of a cross-encoder, 0 to 1.
    """

    score: float


_Pooled = TypeVar("_Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass
class PoolingRequestOutput(Generic[_Pooled]):
    """The result of a pooling model for one prompt, with its request.

    Attributes:
        request_id: the id the request was added with.
        outputs: the result.
        prompt_token_ids: tokens of the prompt as it was run.
        finished: always true.
        num_cached_tokens: prompt tokens found in the prefix cache.
        error: why there is no result; the data are empty then.
    """

    request_id: str
    outputs: _Pooled
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    error: str | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of a prompt, with its request."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classification of a prompt, with its request."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of a pair of texts, with its request."""


AnyRequestOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]
"""The output of a request to a generative model or to a pooling model."""
