"""Decide whether the next step is scheduled before the result of the current one is known."""

import time

_MIN_SHARE = 0.03
"""Minimum fraction of a step that the host must take. Below it scheduling ahead gains nothing, and
a new request would wait for one more step, which may take seconds."""

_DECAY = 0.9
"""Weight of the earlier steps in the moving averages."""


class AsyncSchedulingPolicy:
    """Decides whether to schedule ahead, from the time that the device would wait for the host.

    The host works from the time a result arrives until it waits for the next one: it processes the
    result, makes outputs, schedules and starts the next step. If it schedules ahead, the device
    computes during this time; otherwise the device is idle.

    Args:
        is_allowed: False: never schedule ahead.
        min_share: schedule ahead when the host takes at least this fraction of a step; 0: always.
    """

    def __init__(self, is_allowed: bool, min_share: float = _MIN_SHARE) -> None:
        self._is_allowed = is_allowed
        self._min_share = min_share
        self._host_s = 0.0
        self._step_s: float | None = None
        """None until there were two steps in succession."""
        self._wait_began = 0.0
        self._last_result: float | None = None

    @property
    def should_schedule_ahead(self) -> bool:
        """Whether to schedule the next step while one is in flight."""
        if self._step_s is None:
            return self._is_allowed and self._min_share == 0
        return self._is_allowed and self._host_s >= self._min_share * self._step_s

    def wait(self) -> None:
        """Record that the host begins to wait for a result."""
        self._wait_began = time.perf_counter()

    def result(self) -> None:
        """Record that a result has arrived."""
        now = time.perf_counter()
        if self._last_result is not None:
            host_s, step_s = self._wait_began - self._last_result, now - self._last_result
            decay = 0 if self._step_s is None else _DECAY
            self._host_s = decay * self._host_s + (1 - decay) * host_s
            self._step_s = decay * (self._step_s or 0) + (1 - decay) * step_s
        self._last_result = now

    def idle(self) -> None:
        """Record that there was nothing to compute, so that the time until the next result is not
        measured.
        """
        self._last_result = None
