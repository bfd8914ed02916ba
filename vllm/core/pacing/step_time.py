"""Estimate the time of a step from the measured times of earlier steps."""

from dataclasses import dataclass

_NEW_WEIGHT = 0.2
"""Weight of the newest step of decodes in their time."""
_MEMORY = 0.9
"""Weight of the past, per step with prompts, in the fit of their time."""
_FASTER, _SLOWER = 0.2, 0.5
"""Weight of the newest step with prompts in the correction, where it was faster or slower than
expected: a step that is longer than its bound is worse than a short one."""
_INITIAL_CORRECTION = 1.25
"""Small parts of a prompt take longer per token than the whole prompts that are measured first."""
_LARGEST_SURPRISE = 2.0
"""A step counts as at most so many times longer than expected: an interruption of the process tells
nothing about the next step."""
_MIN_PART = 0.2
"""Prompts take at least this fraction of the time of their step, however long decodes take."""
_MIN_TOKEN_PART = 0.2
"""The part of the time of prompts that grows with their tokens is at least this fraction of it, as
attention never takes all."""
_MIN_DETERMINANT = 1e-3
"""Smallest determinant, relative to its largest value, with which the steps tell the two parts
apart."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Amount of work in a step, on which its time depends."""

    num_prompt_tokens: int = 0
    num_pairs: float = 0.0
    """Pairs of a query and a key in the attention of prompts."""
    has_decodes: bool = True
    num_encoded: int = 0
    """Embeddings of images, or hidden states of sounds, that the step computes."""


ONLY_DECODES = StepWork()


class StepTimes:
    """Estimates the time of decodes, and the time that prompts add to a step.

    Prompts take `token_s` for each token and `pair_s` for each pair of a query and a key. Both come
    from a least-squares fit in which older steps count less, weighted by 1 / tokens. A correction
    factor follows the last few steps and covers what the fit ignores, such as other programs on the
    machine.

    Encoders of images take `encoded_s` for each embedding. This is a moving average of what steps
    with them took longer than expected of their decodes and prompts.

    Attributes:
        decode_s: seconds of a decode step; 0 before the first one.
        encoded_s: seconds for one more embedding of an image; None before the first one.
        largest: prompt tokens of the largest step so far.
    """

    def __init__(self) -> None:
        self.decode_s = 0.0
        self.encoded_s: float | None = None
        self.largest = 0
        self._has_begun = False
        self._token_s = self._pair_s = 0.0
        self._correction = _INITIAL_CORRECTION
        self._tokens = self._pairs = self._pairs_squared = 0.0
        self._seconds = self._seconds_by_pairs = 0.0

    @property
    def token_s(self) -> float:
        """Seconds for one more prompt token, without its attention to earlier tokens."""
        return self._correction * self._token_s

    @property
    def pair_s(self) -> float:
        """Seconds for one more pair of a query and a key."""
        return self._correction * self._pair_s

    def prompt_s(self, num_tokens: int, num_pairs: float) -> float:
        """Return the expected seconds that prompts add to a step; 0 before any were measured."""
        return self.token_s * num_tokens + self.pair_s * num_pairs

    def record(self, work: StepWork, seconds: float) -> None:
        """Record how many seconds a step took."""
        if not self._has_begun:  # the first step of a process pays for all that is made once
            self._has_begun = True
        elif work.num_encoded:
            self._record_encoder(work, seconds)
        elif work.num_prompt_tokens:
            self._record_prompts(work, seconds)
        elif self.decode_s:
            usual = min(seconds, _LARGEST_SURPRISE * self.decode_s)
            self.decode_s += _NEW_WEIGHT * (usual - self.decode_s)
        else:
            self.decode_s = seconds

    def _record_encoder(self, work: StepWork, seconds: float) -> None:
        others = self.prompt_s(work.num_prompt_tokens, work.num_pairs)
        if work.has_decodes:
            others += self.decode_s
        found = max(seconds - others, 0.0) / work.num_encoded
        if self.encoded_s is None:
            self.encoded_s = found
            return
        change = min(found, _LARGEST_SURPRISE * self.encoded_s) - self.encoded_s
        self.encoded_s += (_SLOWER if change > 0 else _FASTER) * change

    def _record_prompts(self, work: StepWork, seconds: float) -> None:
        num_tokens, num_pairs = work.num_prompt_tokens, work.num_pairs
        added = seconds
        if work.has_decodes:
            # Decodes cannot take longer than a step with prompts. Without this, a stall in one step
            # of decodes would count until there is a step without prompts again.
            self.decode_s = min(self.decode_s, seconds)
            added = max(seconds - self.decode_s, _MIN_PART * seconds)
        fitted = self._token_s * num_tokens + self._pair_s * num_pairs
        if fitted:
            added = min(added, _LARGEST_SURPRISE * self._correction * fitted)
            change = added / fitted - self._correction
            # only steps with decodes update the correction, because it is meant for them
            if work.has_decodes:
                self._correction += (_SLOWER if change > 0 else _FASTER) * change
        self.largest = max(self.largest, num_tokens)
        self._fit(num_tokens, num_pairs, added)

    def _fit(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        pairs_each = num_pairs / num_tokens
        self._tokens = self._tokens * _MEMORY + num_tokens
        self._pairs = self._pairs * _MEMORY + num_pairs
        self._pairs_squared = self._pairs_squared * _MEMORY + num_pairs * pairs_each
        self._seconds = self._seconds * _MEMORY + seconds
        self._seconds_by_pairs = self._seconds_by_pairs * _MEMORY + seconds * pairs_each
        mean = self._seconds / self._tokens
        largest = self._tokens * self._pairs_squared
        determinant = largest - self._pairs * self._pairs
        self._token_s, self._pair_s = mean, 0.0
        if determinant <= _MIN_DETERMINANT * largest:
            return
        pair_s = self._tokens * self._seconds_by_pairs - self._pairs * self._seconds
        most = (1 - _MIN_TOKEN_PART) * self._seconds / self._pairs
        self._pair_s = min(max(pair_s / determinant, 0.0), most)
        self._token_s = (self._seconds - self._pair_s * self._pairs) / self._tokens
