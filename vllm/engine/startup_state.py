"""How far an engine has come with its start, for those who wait for it."""

import asyncio
import time

_MIN_ETA_DONE = 2
"""Units of work that must be done before an estimate is worth telling."""


class Startup:
    """Phase, progress and readiness of one engine.

    Attributes:
        phase: what it does at the moment, in words; "ready" or "failed" at the end.
        done: units of work of this phase that are done.
        total: units of work of this phase; 0 is not known.
        error: why it failed, or None.
        finished_phases: name and seconds of each phase of the latest start that has ended.
    """

    def __init__(self) -> None:
        self.phase = "waiting to start"
        self.done = 0
        self.total = 0
        self.error: BaseException | None = None
        self.finished_phases: list[tuple[str, float]] = []
        self._phase_began = time.monotonic()
        self._changed = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Requests are computed."""
        return self.phase == "ready"

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the end of this phase at its pace so far; None: not known."""
        if self.is_ready or self.total <= 0 or self.done < _MIN_ETA_DONE:
            return None
        elapsed = time.monotonic() - self._phase_began
        return elapsed / self.done * max(0, self.total - self.done)

    def report(self, phase: str, done: int = 0, total: int = 0) -> None:
        """The start has come this far."""
        if phase != self.phase:
            now = time.monotonic()
            if self.is_ready:
                self.finished_phases = []  # another start begins
            else:
                self.finished_phases.append((self.phase, now - self._phase_began))
            self._phase_began = now
        self.phase, self.done, self.total = phase, done, total

    def set_ready(self) -> None:
        """Those who wait go on."""
        self.report("ready")
        self.error = None
        self._changed.set()

    def set_unready(self, phase: str) -> None:
        """Requests have to wait (again)."""
        self.report(phase)
        self._changed.clear()

    def set_failed(self, error: BaseException) -> None:
        """It will never be ready; those who wait get the error."""
        self.report("failed")
        self.error = error
        self._changed.set()

    async def wait(self) -> None:
        """Until it is ready.

        Raises:
            The error it failed with.
        """
        await self._changed.wait()
        if self.error is not None:
            raise self.error
