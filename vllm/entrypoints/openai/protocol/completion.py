"""POST /v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

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

DEFAULT_MAX_TOKENS = 16


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
    max_tokens: Int64 | None = DEFAULT_MAX_TOKENS
    logprobs: Int32 | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.logprobs is not None and self.logprobs < 0:
            raise field_error("logprobs", "must be at least 0")
        if self.prompt_embeds is not None:
            self._check_embeds()
        elif self.prompt is None:
            raise field_error("prompt", "is missing")
        if self.suffix:
            raise field_error("suffix", "suffix is not currently supported")
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "must be at least 1, except with echo=true")
        return self

    def _check_embeds(self) -> None:
        for name in ("echo", "use_beam_search"):
            if getattr(self, name):
                raise field_error(name, "not available with prompt_embeds, which has no tokens")

    def embeds(self) -> list[str]:
        """The prompts that are embeddings, one by one; their choices come first."""
        embeds = self.prompt_embeds
        return [embeds] if isinstance(embeds, str) else list(embeds or ())

    def prompts(self) -> list[str | list[int]]:
        """The prompts that are text or tokens, one by one."""
        prompt = self.prompt
        if self.prompt_embeds is not None and prompt in ("", None):
            return []  # OpenAI's clients always send the field
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
    """One continuation; `index` is that of its prompt times n, plus that of the sample."""

    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionResponse(ResponseModel):
    """The continuations."""

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
