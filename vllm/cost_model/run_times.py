"""Measured seconds of forward passes of a running engine, and constants adapted to them.

The constants that were fitted to published runs are scaled, so that they predict these seconds. A
constant about which the measured buckets give no information is not changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from vllm.cost_model.fitted import CONSTANTS, Fitted, Floats, fitted_constants
from vllm.cost_model.throughput import ModelFigures, ServingCost
from vllm.errors import ConfigError

FIELD = "measured"
"""Field of a file of recorded traffic."""

BucketTimes = dict[tuple[int, int, int, int], tuple[float, float]]
"""Phase, batch, query length and blocks of a bucket -> forward passes in it, and their seconds."""

_MIN_PASSES = 100
_PRIOR_WEIGHT = 1e-3
"""Weight of the published constants, where 1 is the weight of all that was measured."""
_SMALLEST, _LARGEST = 0.05, 20.0
"""Range of the factor of a constant."""
_PHASES = ("prefill", "decode")


def add_times(*every: BucketTimes) -> BucketTimes:
    """Add up the times of several records."""
    total: BucketTimes = {}
    for times in every:
        for bucket, (count, seconds) in times.items():
            before = total.get(bucket, (0.0, 0.0))
            total[bucket] = before[0] + count, before[1] + seconds
    return total


@dataclass(frozen=True, kw_only=True)
class RunEngine:
    """The engine that measures times.

    Attributes:
        card: a key of `cards.CARDS`.
        is_simulated: nothing ran on hardware.
        num_cards: number of cards that share each layer.
        block_size: tokens of a KV block.
        figures: sizes of its model.
    """

    card: str
    is_simulated: bool
    num_cards: int
    block_size: int
    figures: ModelFigures


@dataclass(frozen=True)
class RunTimes:
    """Times that an engine has measured, and the settings of this engine."""

    engine: RunEngine
    times: BucketTimes

    @property
    def num_passes(self) -> float:
        """Number of forward passes that were measured."""
        return sum(count for count, _ in self.times.values())

    def to_json(self) -> dict[str, Any]:
        """Return the content of the field `FIELD` in a traffic file."""
        content: dict[str, Any] = msgspec.to_builtins(self.engine)
        content["buckets"] = [
            [_PHASES[phase], *sizes, count, round(seconds, 6)]
            for (phase, *sizes), (count, seconds) in sorted(self.times.items())
        ]
        return content

    @cached_property
    def factors(self) -> Floats:
        """Ratio of each measured constant to the published one. [7]"""
        engine = self.engine
        published = fitted_constants(engine.card)
        cost = ServingCost(
            engine.card, engine.num_cards, engine.figures, block_size=engine.block_size
        )
        rows = [(*bucket, *measured) for bucket, measured in self.times.items()]
        phase, batch, length, blocks, count, seconds = np.array(rows, np.float64).T
        attention, terms = cost.prefill_terms(batch, length, blocks)
        decodes = cost.decode_terms(batch, np.maximum(blocks, 1) * engine.block_size, length)
        is_decode = phase == 1
        terms[is_decode] = decodes[is_decode]
        mean = seconds / count
        parts = terms * published.values / mean[:, None]
        target = 1 - np.where(is_decode, 0.0, attention) / mean
        weights = seconds / seconds.sum()
        # Least squares of the relative errors, plus a penalty on the distance of each factor from
        # 1.
        square = parts.T @ (weights[:, None] * parts) + _PRIOR_WEIGHT * np.eye(len(CONSTANTS))
        change = np.linalg.solve(square, parts.T @ (weights * (target - parts.sum(1))))
        factors: Floats = np.clip(1 + change, _SMALLEST, _LARGEST)
        return factors

    @property
    def fitted(self) -> Fitted:
        """The constants fitted to published runs, scaled by the measurements."""
        fitted = fitted_constants(self.engine.card)
        return replace(fitted, values=fitted.values * self.factors)

    def describe(self) -> str:
        """Return one line of text about which constants are measured."""
        where = "a simulated card: nothing ran on hardware" if self.engine.is_simulated else "cards"
        changed = [
            f"{name} x {factor:.3g}"
            for name, factor in zip(CONSTANTS, self.factors, strict=True)
            if abs(factor - 1) >= 0.005
        ]
        return (
            f"Measured by a running engine on {where} ({self.num_passes:,.0f} forward passes in "
            f"{len(self.times)} buckets); time relative to published cards: "
            f"{', '.join(changed) or 'the same'}"
        )


def parse_run_times(data: Mapping[str, Any], source: str) -> RunTimes | None:
    """Parse the times in a file of recorded traffic; None if it has none.

    Args:
        data: content of the file.
        source: name of the file, for errors.

    Raises:
        ConfigError: they are damaged.
    """
    content = data.get(FIELD)
    if content is None:
        return None
    try:
        engine = msgspec.convert(content, RunEngine)
        rows = msgspec.convert(content["buckets"], list[tuple[str, int, int, int, float, float]])
        times = {
            (_PHASES.index(phase), batch, query_len, blocks): (count, seconds)
            for phase, batch, query_len, blocks, count, seconds in rows
        }
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise _damaged(source, str(error)) from None
    for (_, batch, query_len, blocks), (count, seconds) in times.items():
        if min(batch, query_len, count) < 1 or blocks < 0 or not 0 < seconds < 1e12:
            raise _damaged(source, f"a bucket has {count} forward passes of {seconds} s")
    return RunTimes(engine, times)


def read_run_times(data: Mapping[str, Any], source: str) -> RunTimes:
    """Parse the times in a file of recorded traffic, and check that they are enough for constants.

    Args:
        data: content of a file of recorded traffic.
        source: name of the file, for errors.

    Raises:
        ConfigError: there are none, or too few.
    """
    found = parse_run_times(data, source)
    if found is None:
        raise ConfigError(
            f"{source} has no measured times: record it with --record-traffic and "
            "pipeline_parallel_size 1"
        )
    if found.num_passes < _MIN_PASSES:
        raise ConfigError(
            f"{source} has {found.num_passes:.0f} measured forward passes, and at least "
            f"{_MIN_PASSES} are needed: record it while requests are served"
        )
    return found


def _damaged(source: str, what: str) -> ConfigError:
    return ConfigError(
        f"measured times in {source} are damaged: {what}. Record them again with --record-traffic."
    )
