"""Create the choices of a completion: the text of one sample, after the prompt if `echo` is set."""

import functools
from collections.abc import Collection, Sequence
from typing import Any, cast

from vllm.engine.input.prompt_embeds import PLACEHOLDER_TOKEN_ID
from vllm.entrypoints.openai.protocol.completion import CompletionRequest
from vllm.entrypoints.openai.shared.logprob_formats import (
    BytesOf,
    CompletionLogprobs,
    bytes_of_tokens,
)
from vllm.entrypoints.shared.context import ServerContext
from vllm.inputs import EmbedsPrompt, TokensPrompt
from vllm.messages import TokenEmbeddings
from vllm.outputs import CompletionOutput, Logprob
from vllm.transformers_utils.special_tokens import SpecialTokens


class CompletionPrompt:
    """One prompt of a completion request.

    Attributes:
        token_ids: tokens that are sent to the engine; placeholders if the prompt is embeddings.
        for_engine: the prompt without its text, which the engine does not need.
        is_echo_only: no output is requested, only the prompt and its log-probabilities.
        logprobs: log-probabilities of the prompt tokens, after they are known.
    """

    def __init__(
        self, context: ServerContext, body: CompletionRequest, prompt: TokensPrompt | EmbedsPrompt
    ) -> None:
        self.body = body
        self.for_engine: TokensPrompt | EmbedsPrompt
        self._text: str | None = None
        embeds = prompt.get("prompt_embeds")
        if isinstance(embeds, TokenEmbeddings):
            self.token_ids = [PLACEHOLDER_TOKEN_ID] * embeds.shape[0]
            self.for_engine = {"prompt_embeds": embeds}
        else:
            tokens = cast(TokensPrompt, prompt)
            self.token_ids = tokens["prompt_token_ids"]
            self.for_engine = {"prompt_token_ids": self.token_ids}
            self._text = tokens.get("prompt")
        if "cache_salt" in prompt:
            self.for_engine["cache_salt"] = prompt["cache_salt"]
        self.is_echo_only = bool(body.echo) and body.max_tokens == 0
        self.logprobs: Sequence[dict[int, Logprob] | None] | None = None
        self._is_text = self._text is not None
        self._context = context

    @property
    def text(self) -> str:
        """The text of the prompt as it was given, or its decoded tokens."""
        if self._text is None:
            self._text = self.text_of(self.token_ids)
        return self._text

    @property
    def is_waiting(self) -> bool:
        """Whether the output has to wait for the log-probabilities of the prompt."""
        return bool(self.body.echo) and self.body.logprobs is not None and self.logprobs is None

    @property
    def shows_token_ids(self) -> bool:
        """Whether tokens are written as `token_id:7` instead of their text."""
        if self.body.return_tokens_as_token_ids is None:
            return self._context.args.return_tokens_as_token_ids
        return self.body.return_tokens_as_token_ids

    @functools.cached_property
    def hidden_tokens(self) -> Collection[int]:
        """Special tokens of the prompt that are not part of its text.

        Empty if the prompt was given as tokens, and without log-probabilities, for which only these
        are needed. Special tokens that the text names are not included.
        """
        tokenizer = self._context.engine.tokenizer
        if tokenizer is None or not self._is_text or self.body.logprobs is None:
            return ()
        special = SpecialTokens.of(tokenizer).texts
        return {token_id for token_id, text in special.items() if text not in self.text}

    @functools.cached_property
    def skipped_tokens(self) -> Collection[int]:
        """The tokens that are left out of the output text."""
        tokenizer = self._context.engine.tokenizer
        if tokenizer is None or self.body.logprobs is None or not self.body.skip_special_tokens:
            return ()
        return SpecialTokens.of(tokenizer).ids

    @property
    def bytes_of(self) -> BytesOf | None:
        """Function that returns the bytes of tokens, for log-probabilities; None if it is not
        needed.
        """
        tokenizer = self._context.engine.tokenizer
        if tokenizer is None or self.body.logprobs is None:
            return None
        return bytes_of_tokens(tokenizer)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of some tokens, including special ones; an empty string if the engine has
        no tokenizer.
        """
        tokenizer = self._context.engine.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(list(token_ids)))


class CompletionText:
    """Converts the outputs of one sample to the fields of its choice, at once or piece by piece."""

    def __init__(self, prompt: CompletionPrompt) -> None:
        self._prompt = prompt
        self._body = prompt.body
        self._is_begun = False
        self._logprobs = CompletionLogprobs(
            as_token_ids=prompt.shows_token_ids,
            text_of=lambda token_id: prompt.text_of([token_id]),
            bytes_of=prompt.bytes_of,
            prompt=prompt.text if prompt.body.echo and prompt.body.logprobs is not None else "",
            hidden=prompt.hidden_tokens,
            skipped=prompt.skipped_tokens,
        )

    def read(self, sample: CompletionOutput) -> dict[str, Any]:
        """Return the fields text, logprobs, finish_reason and stop_reason for new output."""
        is_echo = bool(self._body.echo) and not self._is_begun
        self._is_begun = True
        token_ids: list[int] = []
        positions: list[dict[int, Logprob] | None] = []
        text = ""
        if is_echo:
            text = self._prompt.text
            token_ids += self._prompt.token_ids
            positions += self._prompt.logprobs or [None] * len(token_ids)
        if not self._prompt.is_echo_only:
            text += sample.text
            token_ids += sample.token_ids
            positions += sample.logprobs or []
        shown: dict[str, Any] = {
            "text": text,
            "logprobs": None,
            "finish_reason": sample.finish_reason,
        }
        if self._body.logprobs is not None:
            num_prompt_tokens = len(self._prompt.token_ids) if is_echo else 0
            shown["logprobs"] = self._logprobs.make(token_ids, positions, num_prompt_tokens)
        if sample.finish_reason is not None:
            if self._prompt.is_echo_only:
                shown["finish_reason"] = "length"
            shown["stop_reason"] = None if self._prompt.is_echo_only else sample.stop_reason
        return shown
