"""Prepare slow requests in threads, so that the event loop is not blocked.

A request is slow if any of its texts and lists is long. Requests wait in a queue for the thread; a
cancelled request leaves the queue.
"""

import asyncio
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from vllm.engine.input.input_processor import LONG_TEXT_CHARS, InputProcessor
from vllm.guided_decoding_params import GuidedDecodingParams
from vllm.inputs import PromptType
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.background_work import run_in_time_slices

_Result = TypeVar("_Result")

HUGE_TEXT_CHARS = 2**20
"""Texts of at least this length are tokenised in a thread of their own: they take seconds."""
_IDS_PER_CHAR = 8
"""Number of token ids that are checked in the time of tokenising one character."""
_SPACE = re.compile(r"\s")
_MAX_WORD_CHARS = 4096
"""A text without white space for this many characters is split anywhere."""
_WORD_CHARS = 32
"""Additional cost of a bad word, in characters."""


class BackgroundTokenizer:
    """A thread with its own tokenizer, because a tokenizer serves one thread at a time.

    Args:
        name: name of the thread.
        source: returns the processor whose tokenizer is copied at the first use.
    """

    def __init__(self, name: str, source: Callable[[], InputProcessor]) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._processor: InputProcessor | None = None

    def prepare(self) -> None:
        """Copy the tokenizer now, before the first use. This blocks all threads, for half a second
        with 128,000 tokens.
        """
        self._own_processor()

    async def run(self, work: Callable[[InputProcessor], _Result]) -> _Result:
        """Run `work` in the thread. If it is cancelled while it waits in the queue, it is not
        run.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, run_in_time_slices, lambda: work(self._own_processor())
        )

    def shutdown(self) -> None:
        """Accept no more work, and drop the queued work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _own_processor(self) -> InputProcessor:
        if self._processor is None:
            source = self._source()
            self._processor = source.with_tokenizer(copy.deepcopy(source.tokenizer))
        return self._processor


def preparation_cost(prompt: PromptType, params: SamplingParams | PoolingParams) -> int:
    """Estimate the cost of preparing a request, in characters of text. Cheap to compute."""
    cost = 0
    if isinstance(params, SamplingParams):
        lists = (params.stop_token_ids, params.allowed_token_ids, params.logit_bias)
        cost += sum(len(given or ()) for given in lists) // _IDS_PER_CHAR
        cost += sum(len(word) + _WORD_CHARS for word in params.bad_words or ())
        if params.guided_decoding is not None:
            cost += _grammar_size(params.guided_decoding)
    if (text := text_of(prompt)) is not None:
        return cost + len(text)
    if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
        return cost + LONG_TEXT_CHARS  # a large input, whose bytes are checked and hashed
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    return cost + (len(ids) // _IDS_PER_CHAR if isinstance(ids, (list, tuple)) else 0)


def text_of(prompt: PromptType) -> str | None:
    """Return the text of a prompt that has to be tokenised; None if it is given as tokens."""
    if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None:
        return None
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def split_at_spaces(text: str, num_chars: int) -> Iterator[str]:
    """Split a text into pieces of at least `num_chars` characters, before white space if it is
    near.

    >>> list(split_at_spaces("one two three four", 8))
    ['one two three', ' four']
    """
    start = 0
    while start < len(text):
        end = start + num_chars
        space = _SPACE.search(text, end, end + _MAX_WORD_CHARS)
        end = end if space is None else space.start()
        yield text[start:end]
        start = end


def _grammar_size(guided: GuidedDecodingParams) -> int:
    """Estimate the size of a grammar or schema in characters, up to a limit."""
    size = 0
    left: list[Any] = [guided.json, guided.regex, guided.choice, guided.grammar]
    left.append(guided.structural_tag)
    while left and size < LONG_TEXT_CHARS:
        value = left.pop()
        size += len(value) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list):
            left += value
    return size
