"""Whether the next step is scheduled before the result of this one is known."""

import time

_MIN_SHARE = 0.03
"""Of a step's time that the host works. Below it there is nothing to gain, and a request that
comes in would wait for one step more: for seconds, where steps are that long."""

_MEMORY = 0.9
"""Weight of what was known before, for each step."""


class RunAhead:
    """Measures how much of a step the device would wait for the host.

    A step ends when its result is there. From then on until the wait for the next result the host
    works: it takes in the result, makes outputs of it, schedules and starts the next step. Run
    ahead, the device computes meanwhile; else it waits.

    Args:
        is_allowed: False never runs ahead.
        min_share: of the host's time from which on it pays; 0 always runs ahead.
    """

    def __init__(self, is_allowed: bool, min_share: float = _MIN_SHARE) -> None:
        self._is_allowed = is_allowed
        self._min_share = min_share
        self._host_s = 0.0
        self._step_s: float | None = None
        """None until a step has followed another."""
        self._wait_began = 0.0
        self._last_result: float | None = None

    @property
    def pays(self) -> bool:
        """Schedule the next step now, while one is in flight."""
        if self._step_s is None:
            return self._is_allowed and self._min_share == 0
        return self._is_allowed and self._host_s >= self._min_share * self._step_s

    def wait(self) -> None:
        """The host begins to wait for a result."""
        self._wait_began = time.perf_counter()

    def result(self) -> None:
        """The result is there."""
        now = time.perf_counter()
        if self._last_result is not None:
            host_s, step_s = self._wait_began - self._last_result, now - self._last_result
            memory = 0 if self._step_s is None else _MEMORY
            self._host_s = memory * self._host_s + (1 - memory) * host_s
            self._step_s = memory * (self._step_s or 0) + (1 - memory) * step_s
        self._last_result = now

    def idle(self) -> None:
        """There is nothing to compute: what follows is no part of a step."""
        self._last_result = None
