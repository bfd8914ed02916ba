"""The speed of the requests in a replay, and the highest rate that meets goals."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm.cost_model.fitted import Floats
from vllm.planning.replay import Replay
from vllm.planning.throughput.goals import KINDS, Goals, Miss

PERCENTILES = (50, 90, 99)
GOAL_PERCENTILE = 90
"""Percentage of the requests that have to meet the goals."""
MAX_SEARCHED = 1_000
"""Requests of a replay of the search: its first ones."""
_LOWEST, _HIGHEST = 1e-4, 1e5
"""Requests per second between which rates are tried."""
_PRECISION = 1.03
"""Ratio of the lowest rate that fails to the highest that does not, at the end of the search."""

RunAt = Callable[[float], Replay]
"""Replays requests at this many per second."""


@dataclass(frozen=True)
class ReplaySpeed:
    """The speed of an engine in a replay, in predicted times.

    Attributes:
        num_requests: number of requests of the replay.
        requests_per_s: mean arrival rate; None: all arrive at the same time.
        tokens_per_s: tokens per second of all outputs.
        ttft_s, tpot_s, request_s: the `PERCENTILES` of these times; requests with one output token
            have no time per output token.
        mean_kv_usage: average over the time from the first request to the end of the last.
        num_preemptions: number of times that a request lost its KV blocks.
    """

    num_requests: int
    requests_per_s: float | None
    tokens_per_s: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    request_s: tuple[float, ...]
    mean_kv_usage: float
    max_kv_usage: float
    num_preemptions: int

    @classmethod
    def of(cls, found: Replay) -> "ReplaySpeed":
        """Compute the speed of a replay."""
        span = float(found.arrivals[-1] - found.arrivals[0])
        count = len(found.arrivals)
        return cls(
            num_requests=count,
            requests_per_s=(count - 1) / span if span else None,
            tokens_per_s=float(found.num_outputs.sum() / found.seconds),
            ttft_s=_percentiles(found.first_tokens - found.arrivals),
            tpot_s=_percentiles(tpot_s(found)),
            request_s=_percentiles(found.ends - found.arrivals),
            mean_kv_usage=found.kv_seconds / found.seconds,
            max_kv_usage=found.max_kv_usage,
            num_preemptions=found.num_preemptions,
        )

    def lines(self) -> Iterator[str]:
        """Yield the speed as lines of text."""
        rate = self.requests_per_s
        arrive = "all at once" if rate is None else f"at {rate:,.3g} requests/s"
        yield (
            f"{_counted(self.num_requests, 'request')} {arrive}: {self.tokens_per_s:,.0f} output "
            f"tokens/s, {_counted(self.num_preemptions, 'preemption')}"
        )
        mean, most = self.mean_kv_usage, self.max_kv_usage
        yield f"KV cache in use: {mean:.1%} on average, {most:.1%} at most"
        yield f"{'':<14}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES)
        for name, values, scale in (
            ("TTFT, ms", self.ttft_s, 1e3),
            ("TPOT, ms", self.tpot_s, 1e3),
            ("request, s", self.request_s, 1.0),
        ):
            if values:
                yield f"{name:<14}" + "".join(f"{_short(scale * x):>10}" for x in values)

    def as_json(self) -> dict[str, Any]:
        """Return these values as a JSON object."""
        times = {"ttft_s": "first_token_s", "tpot_s": "tpot_s", "request_s": "request_s"}
        names = [f"p{percentile}" for percentile in PERCENTILES]
        values = {times.get(name, name): value for name, value in vars(self).items()}
        for name in times.values():
            values[name] = dict(zip(names, values[name], strict=False))
        return values


@dataclass(frozen=True)
class RateChoice:
    """The highest arrival rate at which a replay meets goals.

    Attributes:
        speed: speed at this rate, or at the lowest one if none meets the goals.
        misses: goals that are not met; empty if all are.
        is_highest_tried: whether a higher rate might meet them as well.
    """

    speed: ReplaySpeed
    misses: tuple[Miss, ...]
    is_highest_tried: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the result as lines of text."""
        what = f"{GOAL_PERCENTILE} % of the requests meet the goals, with the default buckets"
        if self.misses:
            misses = "; ".join(map(str, self.misses))
            yield f"There is no rate at which {what}. At the lowest rate that was tried: {misses}"
        elif self.is_highest_tried:
            yield f"At every rate that was tried, {what}. The highest one:"
        else:
            yield f"Highest rate at which {what}:"
        yield from (f"  {line}" for line in self.speed.lines())

    def as_json(self) -> dict[str, Any]:
        """Return these values as a JSON object."""
        return {
            "is_met": not self.misses,
            "is_highest_tried": self.is_highest_tried,
            "misses": [vars(miss) for miss in self.misses],
            **self.speed.as_json(),
        }


def highest_rate(run: RunAt, goals: Goals, start: float) -> RateChoice:
    """Return the highest rate that meets the goals for times; other goals are ignored.

    Args:
        run: replays the requests at a rate.
        goals: the goals, with at least one for a time.
        start: the first rate that is tried, in requests per second.
    """
    start = min(max(start, _LOWEST), _HIGHEST)
    met: RateChoice | None = None
    good, bad = 0.0, math.inf
    rate = start
    while good < bad / _PRECISION:
        found = run(rate)
        misses = _misses(found, goals)
        choice = RateChoice(ReplaySpeed.of(found), misses)
        if misses:
            bad = rate
            if rate <= _LOWEST:
                return choice
        else:
            good, met = rate, choice
            if rate >= _HIGHEST:
                return replace(choice, is_highest_tried=True)
        if not good:
            rate = max(bad / 4, _LOWEST)
        elif math.isinf(bad):
            rate = min(good * 4, _HIGHEST)
        else:
            rate = math.sqrt(good * bad)
    assert met is not None
    return met


def _misses(found: Replay, goals: Goals) -> tuple[Miss, ...]:
    times = {"ttft_ms": found.first_tokens - found.arrivals, "tpot_ms": tpot_s(found)}
    misses = []
    for name, goal in goals.given.items():
        seconds = times.get(name)
        if seconds is None or not len(seconds):
            continue
        value = KINDS[name].scale * float(np.percentile(seconds, GOAL_PERCENTILE))
        if value > goal:
            misses.append(Miss(name, value, goal))
    return tuple(misses)


def tpot_s(found: Replay) -> Floats:
    """Return the time per output token of each request that has more than one."""
    several = found.num_outputs > 1
    taken: Floats = (found.ends - found.first_tokens)[several]
    return taken / (found.num_outputs[several] - 1)


def _percentiles(seconds: Floats) -> tuple[float, ...]:
    if not len(seconds):
        return ()
    return tuple(float(x) for x in np.percentile(seconds, PERCENTILES))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _short(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.10g}"
