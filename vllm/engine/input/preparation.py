"""Prepare requests for the core without blocking the event loop.

Quick work is done at once. Long texts and lists are prepared in a thread. Texts that are certainly
too long are refused before they are tokenised, and huge texts are tokenised in a process.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from vllm.engine.input.audio_reader import AudioReader
from vllm.engine.input.background_tokenizer import (
    HUGE_TEXT_CHARS,
    BackgroundTokenizer,
    preparation_cost,
    split_at_spaces,
    text_of,
)
from vllm.engine.input.input_processor import LONG_TEXT_CHARS, InputProcessor
from vllm.engine.input.long_prompt_tokenizer import LongPromptTokenizer
from vllm.engine.input.media_reader import MediaReader
from vllm.engine.input.prompt_tokenizer import TokenizedPrompt
from vllm.errors import TextTooLongError
from vllm.inputs import PromptType, TokensPrompt
from vllm.messages import EngineRequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.token_bytes import USUAL_TOKEN_BYTES

_Result = TypeVar("_Result")
_Processed = tuple[str | None, EngineRequest]

_NO_PARAMS = PoolingParams()
_PIECE_CHARS = 64 * 1024
"""Size of the pieces in which the tokens of a possibly too long text are counted."""


class Preparation:
    """Tokenises and checks requests; cancelling a request stops its preparation.

    Args:
        source: returns the processor of the event loop, after it exists.
    """

    def __init__(self, source: Callable[[], InputProcessor]) -> None:
        self._source = source
        self._long_thread = BackgroundTokenizer("tokenise", source)
        self._huge_thread = BackgroundTokenizer("tokenise-huge", source)
        self._huge_texts = LongPromptTokenizer()
        self.media = MediaReader(source)
        self.sound = AudioReader()

    @property
    def _processor(self) -> InputProcessor:
        return self._source()

    def prepare(self) -> None:
        """Create what the first long text and the first recording need. Call this in any thread,
        before the first request.

        The resources for huge texts, which are rare and need memory, are created later.
        """
        family = self._processor.media.family
        if family is not None and family.required == "audio":  # it transcribes recordings
            self.sound.prepare(family.sampling_rate)
        self._long_thread.prepare()

    def shutdown(self) -> None:
        """Accept no more requests."""
        self._long_thread.shutdown()
        self._huge_thread.shutdown()
        self._huge_texts.shutdown()
        self.media.shutdown()
        self.sound.shutdown()

    async def process(
        self,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        process: Callable[[PromptType, InputProcessor], _Processed],
    ) -> _Processed:
        """Run `process` on a prompt, in a thread if it takes long.

        Args:
            prompt: prompt of any type.
            params: parameters of the request.
            process: gets the prompt, perhaps with its token ids, and the processor to use.

        Raises:
            RequestError: `process` raised it, or the text is too long.
        """
        prompt = await self.media.read(prompt)
        cost = preparation_cost(prompt, params)
        if cost < LONG_TEXT_CHARS:
            return process(prompt, self._processor)
        is_truncated = params.truncate_prompt_tokens is not None
        is_pooling = isinstance(params, PoolingParams)
        if not is_truncated:
            num_output = 0 if is_pooling else 1  # a generated output has at least one token
            max_model_len = self._processor.max_model_len
            await self._refuse_long_text(prompt, max_model_len - num_output)
        # Truncation of pooling prompts keeps their special tokens.
        if not (is_truncated and is_pooling):
            prompt = await self._encode_huge_text(prompt)
        return await self.run_in_background(partial(process, prompt), cost)

    async def _encode_huge_text(self, prompt: PromptType) -> PromptType:
        """Return the prompt with its token ids, if its text is huge and can be tokenised in a
        process.
        """
        text = text_of(prompt)
        if text is None or len(text) < HUGE_TEXT_CHARS:
            return prompt
        tokenizer = self._processor.tokenizer
        if tokenizer is None or not tokenizer.is_fast:
            return prompt
        self._processor.prompts.check_length(text, None)
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        usual = self._processor.prompts.adds_special_tokens
        token_ids = await self._huge_texts.encode(
            tokenizer, text, add_special_tokens=bool(given.get("add_special_tokens", usual))
        )
        others = {key: given[key] for key in given if key not in ("prompt", "add_special_tokens")}
        made = {"prompt_token_ids": token_ids, "prompt": text, **others}
        return cast(TokensPrompt, made)

    async def tokenize(
        self, prompt: PromptType, *, is_long: bool = False, max_tokens: int | None = None
    ) -> TokenizedPrompt:
        """Return the token ids of a prompt, as `PromptTokenizer.tokenize` does.

        Args:
            prompt: prompt of any type.
            is_long: the prompt is one of many, which take long together.
            max_tokens: limit of tokens; see `PromptTokenizer.tokenize`.
        """
        prompt = await self.media.read(prompt)
        cost = preparation_cost(prompt, _NO_PARAMS)
        if cost < LONG_TEXT_CHARS and not (is_long and text_of(prompt) is not None):
            return self._processor.tokenize(prompt, max_tokens=max_tokens)
        if max_tokens is not None:
            await self._refuse_long_text(prompt, max_tokens)
        prompt = await self._encode_huge_text(prompt)
        return await self.run_in_background(
            lambda processor: processor.tokenize(prompt, max_tokens=max_tokens), cost
        )

    async def _refuse_long_text(self, prompt: PromptType, max_tokens: int) -> None:
        """Refuse a text with far more than `max_tokens` tokens, before all of it is tokenised.

        Only texts with unusually many bytes are counted, piece by piece, so that the count can be
        cancelled. The pieces have a few more tokens than the whole text, so the text is refused
        only above twice the limit.

        Raises:
            TextTooLongError: the text has too many tokens.
        """
        text = text_of(prompt)
        if text is None or len(text) <= max_tokens * USUAL_TOKEN_BYTES + LONG_TEXT_CHARS:
            return
        if self._processor.tokenizer is None:
            return
        await self.run_in_background(
            lambda processor: processor.prompts.check_length(text, max_tokens)
        )
        num_tokens = 0
        for piece in split_at_spaces(text, _PIECE_CHARS):
            count = partial(_count_tokens, text=piece)
            num_tokens += await self.run_in_background(count)
            if num_tokens > 2 * max_tokens:
                max_model_len = self._processor.max_model_len
                raise TextTooLongError(len(text.encode()), max_tokens, max_model_len)

    async def run_in_background(
        self, work: Callable[[InputProcessor], _Result], num_chars: int = 0
    ) -> _Result:
        """Run slow work that needs a tokenizer, in a thread with its own tokenizer.

        Args:
            work: function that gets the processor of the thread.
            num_chars: length of the text, if there is one; huge texts have a separate thread.
        """
        tokenizer = self._huge_thread if num_chars >= HUGE_TEXT_CHARS else self._long_thread
        return await tokenizer.run(work)


def _count_tokens(processor: InputProcessor, text: str) -> int:
    return processor.prompts.count_tokens(text)
