"""Estimates how long a whole warm-up still takes, all of its passes together.

All forward passes are counted before the first one: compile, run once, capture, each for every
shape of every bucket. The time of each kind of forward pass is measured as the warm-up proceeds: a
constant part, and a part in proportion to its padded cost, because large shapes come first and take
longer. A kind that has not run yet is estimated from the kinds that have (`_PRIOR_S`).

The estimate may fall at any time. It rises by at most a third from one step to the next, so that it
does not seem to jump; a slower warm-up than expected is corrected in a few steps.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vllm.bucketing import Phase

Stage = Literal["compile", "load", "run", "capture"]
"""Stages of a warm-up. "load" is compiling where the recipe is on disk already."""
Runs = Phase | Literal["encoder"]
"""The language model in one of its phases, or the encoder of images."""

_PRIOR_S: dict[tuple[Stage, Runs], float] = {
    ("compile", "encoder"): 0.5,
    ("compile", Phase.PREFILL): 0.5,
    ("compile", Phase.DECODE): 0.34,
    ("load", Phase.PREFILL): 0.18,
    ("load", Phase.DECODE): 0.12,
    ("run", Phase.PREFILL): 0.25,
    ("run", Phase.DECODE): 0.17,
    ("capture", "encoder"): 0.33,
    ("capture", Phase.PREFILL): 0.33,
    ("capture", Phase.DECODE): 0.33,
}
"""Only the ratios count. Compiling and capturing: the times of each bucket in published logs of
Llama-3.1-8B in bf16. Loading a recipe: 35 % of compiling by the vendor's documentation. Running
what is compiled: no log shows it; half of compiling is rather too much on a card, as an estimate
had better fall than rise. An encoder is taken for a prompt."""

_PRIOR_SAMPLING = 2.0
"""A launch with the first sampling of its batch size against one without; an assumption."""

_PRIOR_WEIGHT = 0.2
"""Number of launches that count as much as the assumption that half of the time of an average
launch is in proportion to its padded cost. It decides while all measured launches have about the
same size."""

_MIN_STEPS = 2
"""Steps that must have been measured before there is an estimate."""

_MAX_RISE = 4 / 3


class Kind(NamedTuple):
    """A kind of warm-up step whose forward passes take about the same time, apart from
    their size.
    """

    stage: Stage
    """Stage of the warm-up; `compile` includes the forward pass that compiles."""
    phase: Runs
    samples: bool
    """Whether sampling of the same batch size is compiled, run or captured together with it."""

    @property
    def prior_s(self) -> float:
        """Assumed seconds of an average forward pass; only the ratio between kinds matters."""
        return _PRIOR_S[self.stage, self.phase] * (_PRIOR_SAMPLING if self.samples else 1)


class Work(NamedTuple):
    """One forward pass of the warm-up."""

    kind: Kind
    cost: float
    """Padded cost, to be compared within a phase."""


@dataclass
class _Pace:
    """The remaining forward passes of a kind, and sums over its measured steps.

    Sizes are in units of the mean size when the kind was first planned.
    """

    unit: float
    num_left: int = 0
    size_left: float = 0.0
    num_measured: int = 0
    # Sums of the least squares over steps, with n launches, their size x, and their seconds t.
    nn: float = 0.0
    nx: float = 0.0
    xx: float = 0.0
    nt: float = 0.0
    xt: float = 0.0
    latest_s: float = 0.0
    """Seconds of each launch of the latest step."""

    def measure(self, num: int, size: float, seconds: float) -> None:
        """Add the measurement of a step of `num` forward passes."""
        self.num_measured += num
        self.nn += num * num
        self.nx += num * size
        self.xx += size * size
        self.nt += num * seconds
        self.xt += size * seconds
        self.latest_s = seconds / num

    def fit(self, assumed_s: float | None = None) -> tuple[float, float]:
        """Return the seconds for each forward pass and for each unit of size, fitted to
        measurements.

        Args:
            assumed_s: seconds of an average forward pass, according to other kinds; it counts as
                one measurement, as the first one of a kind may be unlike the others. None: unknown.
        """
        nn, nx, xx, nt, xt = self.nn, self.nx, self.xx, self.nt, self.xt
        if assumed_s is not None:
            nn, nx, xx, nt, xt = nn + 1, nx + 1, xx + 1, nt + assumed_s, xt + assumed_s
        # Minimise the squared error of t = a n + b x, plus a penalty on (a - b) squared.
        n2, x2, nx2 = nn + _PRIOR_WEIGHT, xx + _PRIOR_WEIGHT, nx - _PRIOR_WEIGHT
        determinant = n2 * x2 - nx2 * nx2
        per_launch = (nt * x2 - xt * nx2) / determinant
        per_size = (xt * n2 - nt * nx2) / determinant
        if per_launch < 0:
            return 0.0, xt / xx
        if per_size < 0:
            return nt / nn, 0.0
        return per_launch, per_size


class WarmUpEstimate:
    """Estimates the remaining time of one warm-up.

    Args:
        clock: clock that counts seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paces: dict[Kind, _Pace] = {}
        self._num_steps = 0
        self._step: Sequence[Work] = ()
        self._began = 0.0
        self._shown: float | None = None

    def plan(self, work: Iterable[Work]) -> None:
        """Replace the remaining work by these forward passes."""
        for pace in self._paces.values():
            pace.num_left, pace.size_left = 0, 0.0
        self.add(work)

    def add(self, work: Iterable[Work]) -> None:
        """Add forward passes to the remaining work."""
        by_kind: dict[Kind, list[float]] = {}
        for kind, cost in work:
            by_kind.setdefault(kind, []).append(cost)
        for kind, costs in by_kind.items():
            total = sum(costs)
            pace = self._paces.setdefault(kind, _Pace(unit=total / len(costs) or 1.0))
            pace.num_left += len(costs)
            pace.size_left += total / pace.unit

    def begin(self, step: Sequence[Work]) -> float | None:
        """Begin a step of forward passes of one kind.

        Returns:
            Seconds until the end of the warm-up, this step included; None: unknown.
        """
        # The warm-up runs a kind of step that was not in its plan.
        if step[0].kind not in self._paces:
            self.add(step)
        self._step, self._began = step, self._clock()
        if self._num_steps >= _MIN_STEPS:
            estimate = self._seconds_left()
            most = estimate if self._shown is None else _MAX_RISE * self._shown
            self._shown = min(estimate, most)
        return self._shown

    def end(self, *, has_run: bool, seconds: float | None = None) -> None:
        """End the step, if there is one. A step that was given up before it ran took no time.

        Args:
            has_run: whether the step has run.
            seconds: seconds that it has taken; None: measured since `begin`.
        """
        if not self._step:
            return
        kind = self._step[0].kind
        pace = self._paces[kind]
        num, size = len(self._step), sum(work.cost for work in self._step) / pace.unit
        pace.num_left = max(0, pace.num_left - num)
        pace.size_left = max(0.0, pace.size_left - size)
        self._step = ()
        if has_run:
            self._num_steps += 1
            pace.measure(num, size, self._clock() - self._began if seconds is None else seconds)

    def expect(self, work: Work) -> float:
        """Return the expected seconds of a forward pass.

        It follows from all measurements of its kind, but is at least the latest one. For kinds that
        have not run, it is in proportion to others.
        """
        pace, assumed_s = self._paces.get(work.kind), self._assume(work.kind)
        if pace is None or not pace.num_measured:
            return work.kind.prior_s if assumed_s is None else assumed_s
        per_launch, per_size = pace.fit(assumed_s)
        return max(pace.latest_s, per_launch + per_size * work.cost / pace.unit)

    def _seconds_left(self) -> float:
        left = 0.0
        for kind, pace in self._paces.items():
            assumed_s = self._assume(kind)
            if pace.num_measured:
                per_launch, per_size = pace.fit(assumed_s)
            else:
                assert assumed_s is not None, "a step was measured, so it is of another kind"
                per_launch = per_size = assumed_s / 2
            left += per_launch * pace.num_left + per_size * pace.size_left
        return left

    def _assume(self, kind: Kind) -> float | None:
        """Return the expected seconds of an average forward pass, from other kinds.

        They are kinds of the same stage, or of any stage; None if nothing was measured.
        """
        others = [(k, p) for k, p in self._paces.items() if p.num_measured and k != kind]
        others = [(k, p) for k, p in others if k.stage == kind.stage] or others
        if not others:
            return None
        measured_s = sum(p.num_measured * sum(p.fit()) for _, p in others)
        return kind.prior_s * measured_s / sum(p.num_measured * k.prior_s for k, p in others)
