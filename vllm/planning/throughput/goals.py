"""Finds the fewest cards, and the largest number of concurrent requests, that meet goals."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vllm.cost_model.fitted import Floats
from vllm.errors import ConfigError
from vllm.planning.throughput.prediction import Prediction, Speed


@dataclass(frozen=True)
class _Kind:
    """One kind of goal: its name, unit and the speed that it limits."""

    flag: str
    words: str
    unit: str
    attribute: str
    """Name of an attribute of `throughput.Speed`."""
    scale: float = 1.0
    """Number of these units in one unit of the attribute."""
    is_least: bool = False
    """Whether the speed must be at least the goal, not at most."""

    def values(self, speed: Speed) -> Floats:
        """Return the speed of each batch size, in the unit of the goal."""
        return self.scale * getattr(speed, self.attribute)


KINDS = {
    "ttft_ms": _Kind("--goal-ttft", "time to first token", "ms", "ttft_s", 1e3),
    "tpot_ms": _Kind("--goal-tpot", "time per token", "ms", "tpot_s", 1e3),
    "tokens_per_s": _Kind(
        "--goal-tokens-per-s", "throughput", "tokens/s", "tokens_per_s", is_least=True
    ),
}
"""Kinds of goals by the name of the attribute of `Goals`."""


@dataclass(frozen=True, kw_only=True)
class Goals:
    """Goals for the speed of an engine; None: no goal.

    Raises:
        ConfigError: a goal is not a number above 0.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            goal = getattr(self, name)
            if goal is not None and not (math.isfinite(goal) and goal > 0):
                raise ConfigError(
                    f"{kind.flag} must be a number above 0, in {kind.unit}, got {goal:g}"
                )

    @property
    def given(self) -> dict[str, float]:
        """The goals that are set."""
        goals = {name: getattr(self, name) for name in KINDS}
        return {name: goal for name, goal in goals.items() if goal is not None}

    @property
    def has_times(self) -> bool:
        """Whether there is a goal for a time (latency)."""
        return self.ttft_ms is not None or self.tpot_ms is not None


@dataclass(frozen=True)
class Miss:
    """A goal that is not met."""

    name: str
    value: float
    goal: float

    def __str__(self) -> str:
        kind = KINDS[self.name]
        limit = "least" if kind.is_least else "most"
        value, goal = (f"{x:,.0f}" if x >= 1000 else f"{x:.4g}" for x in (self.value, self.goal))
        return f"{kind.words} {value} {kind.unit} (goal: at {limit} {goal})"


@dataclass(frozen=True)
class Choice:
    """The number of cards and the request limit that meet the goals, or come nearest.

    Attributes:
        num_cards: number of cards that share each layer.
        max_num_seqs: requests that run at a time.
        prediction: the speed with them, for one batch size.
        misses: goals that are not met; empty if all are.
    """

    num_cards: int
    max_num_seqs: int
    prediction: Prediction
    misses: tuple[Miss, ...]


def search(goals: Goals, predictions: Iterable[tuple[int, Prediction]]) -> Choice:
    """Return the fewest cards that meet the goals, with the largest batch size that does.

    If no number of cards meets them, return the batch size that misses its worst goal by the
    smallest factor.

    Args:
        goals: the goals, at least one.
        predictions: for each number of cards, in ascending order, the speed of every batch size
            that its KV cache can hold.
    """
    nearest: tuple[float, int, Prediction, int] | None = None
    for num_cards, prediction in predictions:
        factor = miss_factor(goals, prediction)
        met = np.flatnonzero(factor <= 1)
        if len(met):
            return _choice(goals, num_cards, prediction, int(met[-1]))
        index = int(factor.argmin())
        if nearest is None or factor[index] < nearest[0]:
            nearest = float(factor[index]), num_cards, prediction, index
    assert nearest is not None, "no number of cards was given"
    return _choice(goals, *nearest[1:])


def miss_factor(goals: Goals, prediction: Prediction) -> Floats:
    """Return the factor by which each batch size misses its worst goal; at most 1: all are met."""
    factors = [np.zeros_like(prediction.batch)]
    for name, goal in goals.given.items():
        share = KINDS[name].values(prediction.expected) / goal
        factors.append(1 / share if KINDS[name].is_least else share)
    return np.max(factors, axis=0)


def _choice(goals: Goals, num_cards: int, prediction: Prediction, index: int) -> Choice:
    one = prediction.at(index)
    misses = []
    for name, goal in goals.given.items():
        alone = Goals(**{name: goal})
        if miss_factor(alone, one)[0] > 1:
            misses.append(Miss(name, float(KINDS[name].values(one.expected)[0]), goal))
    return Choice(num_cards, int(one.batch[0]), one, tuple(misses))
