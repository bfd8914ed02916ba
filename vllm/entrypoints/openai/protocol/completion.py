"""Define the bodies of POST /v1/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from vllm.entrypoints.http.request_limits import (
    PROMPTS,
    Limit,
    Limits,
    count_entries,
    count_prompts,
    read_number,
)
from vllm.entrypoints.http.validation_text import describe_missing
from vllm.entrypoints.openai.protocol.accepts import accepts
from vllm.entrypoints.openai.protocol.base import (
    Int32,
    Int64,
    ListOf,
    ResponseModel,
    TokenId,
    UsageInfo,
    field_error,
    now,
    random_id,
)
from vllm.entrypoints.openai.protocol.sampling import SamplingFields
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import RequestError

DEFAULT_MAX_TOKENS = 16

_REPEATED = ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids")
"""Lists that the server checks and stores for each prompt of a request."""


class CompletionRequest(SamplingFields):
    """Prompts to be continued: one or several, as text or as token ids."""

    prompt: Annotated[
        ListOf[TokenId] | ListOf[ListOf[TokenId]] | str | ListOf[str] | None,
        accepts("text, token ids, or a list of either"),
    ] = None
    prompt_embeds: Annotated[
        str | ListOf[str] | None, accepts("a string of base64 or a list of such strings")
    ] = None
    """Base64 of files with one tensor each, of `torch.save` or safetensors: one prompt each."""
    suffix: str | None = None
    """Text that comes after the completion, for models that fill in the middle."""
    max_tokens: Int64 | None = DEFAULT_MAX_TOKENS
    logprobs: Int32 | None = None
    add_special_tokens: bool = True

    LIMITS: ClassVar[Limits] = {
        "prompt": PROMPTS,
        "prompt_embeds": (Limit("max_batch_prompts", "prompts"),),
    }

    @classmethod
    def check_totals(cls, body: Mapping[str, Any], args: ServerArgs) -> None:
        """Refuse too many sequences or list entries, counted over all prompts."""
        num_prompts = count_prompts(body.get("prompt"))
        num_prompts += count_entries(body.get("prompt_embeds") or [])
        num_outputs = max(1, read_number(body.get("n")), read_number(body.get("best_of")))
        if num_prompts * num_outputs > args.max_batch_sequences:
            raise RequestError(
                f"prompt: {num_prompts} prompts with {num_outputs} outputs each are "
                f"{num_prompts * num_outputs} sequences, more than the {args.max_batch_sequences} "
                f"that this server takes in one request (--max-batch-sequences). Send fewer "
                f"prompts, or lower n.",
                param="prompt",
            )
        num_entries = sum(count_entries(body[name]) for name in _REPEATED if body.get(name))
        if num_prompts * num_entries > args.max_request_values:
            raise RequestError(
                f"prompt: {num_prompts} prompts with {num_entries} entries each (of "
                f"{', '.join(name for name in _REPEATED if body.get(name))}) are "
                f"{num_prompts * num_entries} values, more than the {args.max_request_values} that "
                f"this server takes in one request (--max-request-values). Send fewer prompts, or "
                f"fewer entries.",
                param="prompt",
            )

    def check_prompt_logprobs(self, num_prompt_tokens: int, args: ServerArgs) -> None:
        """Refuse a request whose response would have too many prompt log-probabilities, because
        every output repeats them.

        Args:
            num_prompt_tokens: number of tokens of all prompts.
            args: arguments of the server.

        Raises:
            RequestError: names the field, the count, and the flag.
        """
        name, num_top = "prompt_logprobs", self.prompt_logprobs
        if num_top is None and self.echo:
            name, num_top = "logprobs", self.logprobs
        if num_top is None:
            return
        count = num_prompt_tokens * (num_top + 1) * self.num_samples
        if count > args.max_prompt_logprob_values:
            raise RequestError(
                f"{name}: {num_prompt_tokens} prompt tokens with {num_top + 1} log-probabilities "
                f"each, in {self.num_samples} outputs per prompt, are {count}, more than the "
                f"{args.max_prompt_logprob_values} that this server writes into one answer "
                f"(--max-prompt-logprob-values). Send fewer prompts, or lower {name} or n.",
                param=name,
            )

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.logprobs is not None and self.logprobs < 0:
            raise field_error("logprobs", "must be at least 0")
        if self.prompt_embeds is not None:
            self._check_embeds()
        elif self.prompt is None:
            raise field_error("prompt", describe_missing("prompt", self.model_extra))
        if self.suffix:
            self._check_suffix()
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "must be at least 1, except with echo=true")
        return self

    def _check_embeds(self) -> None:
        for name in ("echo", "use_beam_search"):
            if getattr(self, name):
                raise field_error(name, "not available with prompt_embeds, which has no tokens")

    @field_validator("logprobs", mode="before")
    @classmethod
    def _read_logprobs(cls, logprobs: Any) -> Any:
        """Read false as no log-probabilities, as in the chat API. As a number it would be 0."""
        return None if logprobs is False else logprobs

    def _check_suffix(self) -> None:
        for name in ("prompt_embeds", "echo", "use_beam_search", "truncate_prompt_tokens"):
            if getattr(self, name):
                raise field_error(name, "cannot be combined with suffix")
        if not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise field_error("prompt", "must be text together with suffix, got token ids")

    def embeds(self) -> list[str]:
        """Return the prompts that are embeddings, as a list. Their choices come first in the
        response.
        """
        embeds = self.prompt_embeds
        return [embeds] if isinstance(embeds, str) else list(embeds or ())

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts that are text or tokens, as a list."""
        prompt = self.prompt
        if self.prompt_embeds is not None and prompt in ("", None):
            return []  # OpenAI's clients always send the field, even without a value
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return list(prompt or ())  # type: ignore[arg-type]


# ---- responses --------------------------------------------------------------------------------


class CompletionLogProbs(ResponseModel):
    """Log-probabilities of a text, as parallel lists; the first token of a prompt has none."""

    text_offset: list[int] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)


class CompletionResponseStreamChoice(ResponseModel):
    """A delta of one continuation."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionResponseChoice(CompletionResponseStreamChoice):
    """One continuation. `index` is the index of its prompt times n, plus the index of the
    sample.
    """

    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionResponse(ResponseModel):
    """The continuations of the prompts."""

    id: str = Field(default_factory=lambda: f"cmpl-{random_id()}")
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=now)
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo
    kv_transfer_params: dict[str, Any] | None = None


class CompletionStreamResponse(ResponseModel):
    """One chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseStreamChoice]
    usage: UsageInfo | None = None
