"""Limit the prompt tokens of a step, so that running requests do not wait too long for a token.

Images are encoded within the same time.
"""

import math

from vllm.core.pacing.step_time import StepTimes, StepWork

_TARGET = 0.85
"""Fraction of the bound for which a step is planned: the rest covers errors of the estimate."""
_MIN_PROMPT_PART = 0.1
"""Fraction of the bound that prompts may take where decodes take nearly all of it: requests that
wait for their first token must not starve."""
_MIN_TOKENS = 16
"""Prompt tokens that a step may always run, if one prompt has as many left."""
_FIRST_FACTOR = 4
"""Times as many may run while no time of a prompt is known."""
_ANY_NUMBER = 2**30
_LARGEST_GROWTH = 2
"""Prompt tokens of a step at most, in steps of the largest so far: longer ones are not known."""


class PromptBudget:
    """Number of prompt tokens that one step may still run, within a time limit.

    Args:
        times: time estimates.
        max_seconds: time that a step may take.
        min_tokens: tokens that the first prompt of the step may always run.
    """

    def __init__(self, times: StepTimes, max_seconds: float, min_tokens: int) -> None:
        self._times = times
        self._seconds = _prompt_seconds(times.decode_s, max_seconds)
        self._least = min_tokens if times.token_s > 0 else _FIRST_FACTOR * min_tokens
        self._most = max(self._least, _LARGEST_GROWTH * times.largest)

    def most(self, start: int, num_tokens: int, num_encoded: int = 0) -> int:
        """Return how many of the remaining tokens of a prompt may run.

        Args:
            start: index of the first remaining token.
            num_tokens: number of remaining tokens.
            num_encoded: embeddings of images that must be computed for these tokens.
        """
        times = self._times
        most = self._most
        seconds = self._seconds - self._encoder_s(num_encoded)
        if seconds <= 0:
            most = 0
        elif times.token_s > 0:
            most = min(most, _most_in(seconds, times.token_s, times.pair_s, start))
        return min(num_tokens, max(most, self._least))

    def most_encoded(self, num_encoded: int = 0) -> int:
        """Return how many embeddings of images may be computed; 0 while their time is not known.

        Args:
            num_encoded: embeddings that are computed before, and whose time is not spent yet.
        """
        known = self._times.encoded_s
        if known is None:
            return 0
        left = max(self._seconds - known * num_encoded, 0.0)
        return int(left / known) if known else _ANY_NUMBER

    def spend(self, start: int, num_tokens: int, num_encoded: int = 0) -> None:
        """Subtract the time of `num_tokens` tokens of a prompt from index `start` on, and of the
        embeddings of their images.
        """
        self._seconds -= self._encoder_s(num_encoded)
        self._seconds -= self._times.prompt_s(num_tokens, num_pairs(start, num_tokens))
        self._most -= num_tokens
        self._least = 0

    def _encoder_s(self, num_encoded: int) -> float:
        """Return the seconds that an encoder needs; all of the time while that is not known."""
        if not num_encoded:
            return 0.0
        known = self._times.encoded_s
        return self._seconds if known is None else known * num_encoded


class StepBound:
    """Learns how long steps take, and limits the prompt tokens of steps for which requests wait.

    Args:
        max_seconds: longest time that a running request should wait for its next token.
        num_pipelined_steps: number of steps that run at the same time; a request is in one of them.
        min_tokens: prompt tokens that each step may always run.
    """

    def __init__(
        self, max_seconds: float, num_pipelined_steps: int = 1, min_tokens: int = _MIN_TOKENS
    ) -> None:
        self._times = StepTimes()
        self._min_tokens = min_tokens
        self._max_seconds = max_seconds / num_pipelined_steps

    def budget(self) -> PromptBudget:
        """Return the prompt budget of a step for which running requests wait."""
        return PromptBudget(self._times, self._max_seconds, self._min_tokens)

    def record(self, work: StepWork, seconds: float) -> None:
        """Record how many seconds a step took."""
        self._times.record(work, seconds)


def num_pairs(start: int, num_tokens: int) -> float:
    """Return the number of (query, key) pairs in the causal attention of some tokens of a prompt.

    >>> num_pairs(10, 4)
    48.0
    """
    return num_tokens * (start + num_tokens / 2)


def _prompt_seconds(decode_s: float, max_seconds: float) -> float:
    """Return how many seconds of a step prompts may take.

    If the decodes take longer than the limit, no budget can meet it. Prompts then get up to half
    the time of the decodes, so that new requests do not wait for minutes.

    >>> [round(_prompt_seconds(decodes, 1.0), 2) for decodes in (0.1, 0.8, 1.25, 4.0)]
    [0.75, 0.1, 0.4, 2.0]
    """
    left = _TARGET * max_seconds - decode_s
    return max(left, _MIN_PROMPT_PART * max_seconds, min(-left, decode_s / 2))


def _most_in(seconds: float, token_s: float, pair_s: float, start: int) -> int:
    """Return how many prompt tokens from index `start` on can run in the given seconds.

    >>> _most_in(1.0, 0.01, 0.0, 500)
    100
    >>> _most_in(1.0, 0.01, 0.0001, 0)
    73
    """
    if seconds <= 0:
        return 0
    linear, half = token_s + pair_s * start, pair_s / 2
    # Of the two ways to write the root, this one is exact where `half` is small or 0.
    return int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * half * seconds)))
