"""Keep the tokens per second of the last minutes, for the status page. Independent of
Prometheus.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

HISTORY_S = 120
"""Length of the history in seconds."""


class Rates(NamedTuple):
    """Tokens in each second, the oldest first; the last entry is the last complete second."""

    prompt: list[int]
    generation: list[int]


class RateHistory:
    """Counts tokens by second.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # One second more than is shown, because the current second is not complete.
        self._seconds: deque[list[int]] = deque(maxlen=HISTORY_S + 1)

    def add(self, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Count tokens in the current second."""
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append([now, 0, 0])
        second = self._seconds[-1]
        second[1] += num_prompt_tokens
        second[2] += num_generation_tokens

    def rates(self) -> Rates:
        """Return the rates of the last `HISTORY_S` complete seconds; idle seconds are 0."""
        now = int(self._clock())
        prompt, generation = [0] * HISTORY_S, [0] * HISTORY_S
        for second, num_prompt, num_generation in self._seconds:
            index = HISTORY_S - (now - second)
            if 0 <= index < HISTORY_S:
                prompt[index] = num_prompt
                generation[index] = num_generation
        return Rates(prompt, generation)
