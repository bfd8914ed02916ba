"""Run the rest of a warm-up after the start: while there are no requests, and between two steps.

Under load it takes at most a given fraction of the time. A part that would delay a step of the
engine for too long waits until there are no requests. The workers choose the parts. This module
never sleeps.
"""

import time
from collections.abc import Callable

from vllm.executor import WarmUpStep, WarmUpSteps
from vllm.logger import init_logger
from vllm.messages import WarmUpStats

logger = init_logger(__name__)

_ASKED_AGAIN_AFTER_S = 10.0
"""Time under load until the workers are asked again for a step that is short enough."""
_COLD_AFTER_S = 600.0
"""Time under load after which a log line says which buckets are still cold."""


class BackgroundWarmUp:
    """Runs the rest of the warm-up of one engine.

    Args:
        steps: warm-up steps of the workers.
        share: fraction of the time under load, 0 to 1; 0: run only while there are no requests.
        max_delay_s: longest allowed delay of a step of the engine, in seconds.
        clock: returns seconds.

    Attributes:
        is_done: whether nothing is left to warm up.
    """

    def __init__(
        self,
        steps: WarmUpSteps,
        share: float,
        max_delay_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._share = share
        self._max_delay_s = max_delay_s
        self._clock = clock
        self.is_done = False
        self._named: WarmUpStep | None = None
        """The step that runs next; None: it is not known."""
        self._latest: WarmUpStep | None = None
        self._loaded_since: float | None = None
        """When time under load was counted last; None: there are no requests."""
        self._loaded_s = 0.0
        self._credit_s = 0.0
        """Seconds that the warm-up may take now; below 0 after a step that took longer."""
        self._has_run = False
        """A step has run that the workers have not finished."""
        self._asked_at_s = 0.0
        self._held_since_s: float | None = None
        self._longest_delay_s = 0.0
        self._is_told = False
        self._num_buckets = 0
        """Buckets that are warm at the end."""
        if share:
            self._name(max_delay_s)

    def resume(self) -> None:
        """Continue the warm-up, because the workers have further parts."""
        self.is_done = self._is_told = False
        self._named = self._held_since_s = None

    # ---- without requests -----------------------------------------------------------------

    def run_idle(self) -> None:
        """Run one warm-up step while there are no requests."""
        self.note_idle()
        if self._named is None or self._named.must_wait:
            self._name(None)
        if not self.is_done:
            self._run()

    def note_idle(self) -> None:
        """Record that there are no requests, so that the time until the next one does not count as
        load.
        """
        self._loaded_since = None

    # ---- under load -----------------------------------------------------------------------

    def is_due(self) -> bool:
        """Return whether a warm-up step should run as soon as no engine step is in flight.

        Also counts the time under load. Cheap; called before each step of the engine.
        """
        if self.is_done:
            return False
        if not self._share:
            return self._has_run  # no steps under load, but complete results are installed
        now = self._clock()
        if self._loaded_since is not None:
            self._loaded_s += now - self._loaded_since
            self._credit_s += self._share * (now - self._loaded_since)
        self._loaded_since = now
        if self._named is None:
            return True
        # Limit the saved time to what one step needs; otherwise many steps would follow each other
        # after a phase in which none could run.
        needed_s = min(self._named.expected_s or 0.0, self._max_delay_s) * (1 - self._share)
        is_enough = self._credit_s >= needed_s
        self._credit_s = min(self._credit_s, needed_s)
        if self._named.must_wait:
            return self._loaded_s - self._asked_at_s >= _ASKED_AGAIN_AFTER_S
        return is_enough

    def run_due(self) -> None:
        """Run the warm-up step that is due, or find out whether one is short enough."""
        if self._named is None or self._named.must_wait:
            self._name(self._max_delay_s)
        if self._named is None or self._named.must_wait or not self.is_due():
            return
        began = self._clock()
        self._run()
        self._name(self._max_delay_s)  # requests wait for this call as well, so its time counts
        seconds = self._clock() - began
        self._credit_s -= seconds
        self._longest_delay_s = max(self._longest_delay_s, seconds)

    def _name(self, longest_s: float | None) -> None:
        step = self._named = self._steps.name(longest_s)
        self._asked_at_s, self._has_run = self._loaded_s, False
        if step is None:
            self.is_done = True
            return
        self._latest = step
        self._num_buckets = step.num_wanted or self._num_buckets
        if not step.must_wait:
            self._held_since_s = None
        elif self._held_since_s is None:
            self._held_since_s = self._loaded_s

    def _run(self) -> None:
        self._steps.run()
        self._named, self._has_run = None, True

    # ---- what operators see ---------------------------------------------------------------

    def cold_line(self) -> str | None:
        """Return a log line about buckets that are not warmed up, only once; None if there is no
        such bucket or the line was returned before.
        """
        step, since = self._latest, self._held_since_s
        if self.is_done or self._is_told or step is None or since is None:
            return None
        if self._loaded_s - since < _COLD_AFTER_S:
            return None
        self._is_told = True
        num_cold = step.num_wanted - step.num_warm
        what = f"{num_cold} buckets" if num_cold else "parts of the sampler"
        share, costs = step.padded_share, ""
        if share is not None:
            costs = f" Padding is {share:.1%} of the device time of the traffic so far."
        return (
            f"warm-up: {what} cannot be warmed up under this load: one part takes about "
            f"{step.expected_s or 0.0:.1f} s, but it may delay requests by at most "
            f"{self._max_delay_s:g} s (--warm-up-max-delay).{costs} Raise --warm-up-max-delay, "
            "leave the server without requests for a while, or start it with --ready-when all"
        )

    @property
    def stats(self) -> WarmUpStats:
        """Return the number of warm buckets, the time left, and the longest delay of a step."""
        step = self._latest
        if step is None or self.is_done:
            num = self._num_buckets
            return WarmUpStats(num_warm=num, num_wanted=num, longest_delay_s=self._longest_delay_s)
        left = step.eta_seconds
        if left is not None and self._loaded_since is not None and self._share:
            left /= self._share
        return WarmUpStats(
            is_warming=True,
            num_warm=step.num_warm if step.num_wanted else self._num_buckets,
            num_wanted=self._num_buckets,
            seconds_left=left,
            longest_delay_s=self._longest_delay_s,
            padded_share=step.padded_share,
        )
