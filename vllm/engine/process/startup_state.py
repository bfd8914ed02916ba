"""Track the state of an engine's start, for callers that wait for it. `startup_progress` reports
it.
"""

import asyncio
import time
from collections.abc import Callable

from vllm.logger import init_logger

logger = init_logger(__name__)

_MIN_PACE_DONE = 2
"""Units of a phase that must be done before its pace is logged."""

LOG_INTERVAL_S = 10.0
"""Seconds between two lines about the progress of one phase."""

_NOT_STARTED = "waiting to start"
_ENDS = ("ready", "failed")


class StartupState:
    """Phase, progress and readiness of one engine.

    Args:
        on_change: called after each change; None: no callback.
        is_logged: whether to log the phases.

    Attributes:
        phase: name of the current phase; "ready" or "failed" at the end.
        done: units of work of this phase that have been done.
        total: units of work of this phase; 0: unknown.
        eta_seconds: estimated seconds until the engine is ready, rounded to tenths, from the last
            report; None: unknown. The log, the probes and the pages all show this value.
        error: the reason of a failure, or None.
        finished_phases: (name, seconds) of each finished phase of the latest start.
    """

    def __init__(
        self, on_change: Callable[[], None] | None = None, *, is_logged: bool = True
    ) -> None:
        self._on_change = on_change or (lambda: None)
        self._is_logged = is_logged
        self.phase = _NOT_STARTED
        self.done = 0
        self.total = 0
        self.eta_seconds: float | None = None
        self.error: BaseException | None = None
        self.finished_phases: list[tuple[str, float]] = []
        self._phase_began = self._logged = time.monotonic()
        self._changed = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether the engine serves requests."""
        return self.phase == "ready"

    def report(
        self, phase: str, done: int = 0, total: int = 0, eta_seconds: float | None = None
    ) -> None:
        """Record the progress of a phase. A new phase ends the one before.

        Args:
            phase: name of the phase, in words.
            done: number of finished units of the phase.
            total: number of units of the phase; 0: unknown.
            eta_seconds: estimated seconds until the engine is ready; None: unknown.
        """
        if phase != self.phase:
            if self._is_logged:
                self._log_change(phase)
            self._note_end()
            self._phase_began = self._logged = time.monotonic()
        self.phase, self.done, self.total = phase, done, total
        self.eta_seconds = None if eta_seconds is None else round(eta_seconds, 1)
        self._on_change()
        if self._is_logged and total and time.monotonic() - self._logged >= LOG_INTERVAL_S:
            self._logged = time.monotonic()
            logger.info("start: %s: %d of %d%s", phase, done, total, self._time_left())

    def _time_left(self) -> str:
        """Describe the time until the engine is ready, or until the end of the phase if the former
        is unknown.
        """
        if self.eta_seconds is not None:
            return f", about {self.eta_seconds:.0f} s left"
        if self.done < _MIN_PACE_DONE:
            return ""
        pace_s = self._elapsed_s() / self.done
        return f", about {pace_s * max(0, self.total - self.done):.0f} s left of this phase"

    def _log_change(self, phase: str) -> None:
        """Log one line per phase: the name of the new phase, and how long the previous one took."""
        if phase in _ENDS:
            if self.phase not in (_NOT_STARTED, *_ENDS):
                logger.info("start: %s took %.1f s", self.phase, self._elapsed_s())
        elif self.phase in (_NOT_STARTED, *_ENDS):
            logger.info("start: %s", phase)
        else:
            logger.info("start: %s took %.1f s; now: %s", self.phase, self._elapsed_s(), phase)

    def _note_end(self) -> None:
        """Add the phase that ends to `finished_phases`. After a complete start, begin a new
        list.
        """
        if self.phase in _ENDS:
            self.finished_phases = []
        elif self.phase != _NOT_STARTED:
            self.finished_phases.append((self.phase, self._elapsed_s()))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._phase_began

    def set_ready(self) -> None:
        """Mark the engine as ready, and wake up all callers of `wait`."""
        self.error = None
        self._changed.set()
        self.report("ready")

    def set_unready(self, phase: str) -> None:
        """Mark the engine as not ready, so that requests have to wait."""
        self.error = None
        self._changed.clear()
        self.report(phase)

    def set_failed(self, error: BaseException) -> None:
        """Mark the start as failed, and raise the error in all callers of `wait`."""
        self.error = error
        self._changed.set()
        self.report("failed")

    async def wait(self) -> None:
        """Wait until the engine is ready.

        Raises:
            The error of `set_failed`.
        """
        await self._changed.wait()
        if self.error is not None:
            raise self.error
