"""Represent the result of a check, and compare results of the card with the host's."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vllm.hpu_check.stopwatch import shortest_s
from vllm.platforms.habana.bridge import HabanaBridge

Status = Literal["pass", "fail", "skip"]

LIMITS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Largest error of a type, as a fraction of the largest value. A card rounds at other points than
the host and has an approximate exponent; a kernel that computes something else is far off."""

MAX_CALL_S = 0.005
"""Maximum number of seconds of a kernel on a few KiB, after its first call: a launch takes tens of
microseconds."""

MAX_STEP_S = 0.05
"""Maximum number of seconds of some dozens of operators on a few MiB, after the first call."""


@dataclass(frozen=True)
class Outcome:
    """Result of a check: its status and a note."""

    status: Status
    detail: str
    """Observation, or reason why the check failed or was not tried; one line."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Rates that the check has measured, of `vllm.cost_model.measured.RATES`."""


@dataclass(frozen=True)
class CheckResult:
    """One entry of the report."""

    name: str
    status: Status
    detail: str
    elapsed_ms: float
    """Milliseconds of the whole check on the host, compilation and reference included."""
    expected: str = ""
    """Behaviour of a card that works."""
    advice: str = ""
    """Advice; empty unless the check failed."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Rates that the check has measured, by their names in `vllm.cost_model.measured.RATES`."""


class Comparison:
    """Collects the largest error over the cases of one check."""

    def __init__(self) -> None:
        self._num_cases = 0
        self._largest = 0.0
        self._failures: list[str] = []

    def add(self, case: str, got: Tensor, want: Tensor) -> None:
        """Compare one result of the card with the host's.

        Args:
            case: name of the case, for failures.
            got: result of the card. Its dtype determines the allowed error.
            want: result of the host, of any dtype.
        """
        self._num_cases += 1
        limit = LIMITS[got.dtype]
        if got.shape != want.shape:
            self._failures.append(f"{case}: shape {list(got.shape)}, not {list(want.shape)}")
            return
        reference = want.float()
        difference = (got.cpu().float() - reference).abs().max()
        error = float(difference / reference.abs().max())
        self._largest = max(self._largest, error)
        if not error <= limit:  # `not <=`, so that NaN fails too
            self._failures.append(f"{case}: max error {error:.1e}, limit {limit:.0e}")

    def add_call(
        self, bridge: HabanaBridge, case: str, call: Callable[[], Tensor], want: Tensor
    ) -> None:
        """Compare the result of a call with the host's, and measure the call."""
        self.add(case, call(), want)
        self.add_time(case, shortest_s(bridge, call))

    def add_time(self, case: str, seconds: float, limit_s: float = MAX_CALL_S) -> None:
        """Add a failure if a call that has run before takes too long."""
        if (reason := slow_call(case, seconds, limit_s)) is not None:
            self._failures.append(reason)

    def outcome(self, note: str = "") -> Outcome:
        """Return a pass, or the first failure. `note` is put before the figures of a pass."""
        if self._failures:
            count = f"{len(self._failures)} of {self._num_cases} cases"
            return Outcome("fail", f"{self._failures[0]} ({count})")
        figures = f"max error {self._largest:.1e} over {self._num_cases} cases"
        return Outcome("pass", f"{note}, {figures}" if note else figures)


def slow_call(case: str, seconds: float, limit_s: float = MAX_CALL_S) -> str | None:
    """Describe why the time of a call is too long; None if it is not."""
    if seconds <= limit_s:
        return None
    return (
        f"{case}: a call takes {seconds * 1e3:.1f} ms, at most {limit_s * 1e3:.0f} ms are "
        f"expected: it is compiled each time, or runs on the host"
    )


def ran_on_host(bridge: HabanaBridge, before: Mapping[str, int]) -> Outcome | None:
    """Return a failure that names the operators that ran on the host; None if none did.

    Args:
        bridge: the card.
        before: counts of operators on the host when the check began.
    """
    after = bridge.counters().cpu_fallbacks
    names = sorted(name for name in after if after[name] != before.get(name))
    return Outcome("fail", f"ran on the host: {', '.join(names)}") if names else None


def run_check(name: str, check: Callable[[], Outcome]) -> CheckResult:
    """Run one check. An exception becomes a failure, so that the other checks still run."""
    start = time.perf_counter()
    torch.manual_seed(0)
    try:
        with torch.inference_mode():
            outcome = check()
    except Exception as error:  # a vendor library may raise anything
        lines = str(error).strip().splitlines() or ["no message"]
        outcome = Outcome("fail", f"{type(error).__name__}: {lines[0]}")
    elapsed_ms = (time.perf_counter() - start) * 1e3
    rates = dict(outcome.rates)
    return CheckResult(name, outcome.status, outcome.detail, elapsed_ms, rates=rates)
