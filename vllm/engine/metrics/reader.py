"""Return the metrics of /metrics as Python objects, for `get_metrics`.

Metrics have the same names as in /metrics; counters lack the ending `_total`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.engine.metrics.engine_metrics import EngineMetrics


@dataclass
class Metric:
    """One or several values with a name and labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A value that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """A counter with one value per index, such as accepted drafts by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A value that goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """Numbers of observations by bucket."""

    count: int
    sum: float
    buckets: dict[str, int]
    """Upper bound -> observations up to it; the last bound is "+Inf"."""


_POSITION = "position"
"""The label of counters that are one per position, in order."""


def read_metrics(metrics: EngineMetrics) -> list[Metric]:
    """Read all metrics of an engine.

    A metric with several label values gives one object for each.
    """
    return [
        found
        for metric_set in metrics.metric_sets()
        for family in metric_set.collect()
        for found in _read_family(family.name, family.type, family.samples)
    ]


def _read_family(name: str, kind: str, samples: Iterable[Any]) -> Iterable[Metric]:
    if kind == "gauge":
        return [Gauge(name, dict(s.labels), float(s.value)) for s in samples]
    if kind == "counter":
        totals = [s for s in samples if s.name.endswith("_total")]
        if totals and _POSITION in totals[0].labels:
            labels = {key: value for key, value in totals[0].labels.items() if key != _POSITION}
            return [Vector(name, labels, [int(s.value) for s in totals])]
        return [Counter(name, dict(s.labels), int(s.value)) for s in totals]
    assert kind == "histogram", f"{name} is a {kind}"
    return _read_histograms(name, samples)


def _read_histograms(name: str, samples: Iterable[Any]) -> Iterable[Metric]:
    found: dict[tuple[str, ...], Histogram] = {}
    for sample in samples:
        labels = {key: value for key, value in sample.labels.items() if key != "le"}
        histogram = found.setdefault(tuple(labels.values()), Histogram(name, labels, 0, 0.0, {}))
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram.sum = float(sample.value)
    return list(found.values())
