"""Provide counters, gauges and histograms with very low cost per count, and expose them.

Cells are plain numbers; the Prometheus format is created only when the metrics are scraped. Not
thread-safe: count and scrape in one event loop. Only this module uses the Prometheus client, and it
does not depend on the metrics themselves.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client import exposition as text_format
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector


class Sample:
    """One value of a counter or of a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        """Increase the value."""
        self.value += amount


class Histogram:
    """Counts observations in buckets.

    Args:
        bounds: ascending upper bounds, inclusive; infinity is added.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum: float = 0

    def observe(self, value: float) -> None:
        """Add one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Add many observations."""
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sum += sum(values)

    def observe_many(self, count: int, value: float, total: float) -> None:
        """Add several observations that fall into one bucket.

        Args:
            count: number of observations.
            value: a value in the same bucket.
            total: sum of the observations.
        """
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += total

    @property
    def sum(self) -> float:
        """Sum of all observations."""
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of observations up to it) of each bucket."""
        total, pairs = 0, []
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            total += count
            pairs.append((name, float(total)))
        return pairs


_Family = TypeVar("_Family", bound="Family")


class Family(Protocol):
    """One metric with all its label values."""

    def metric(self, constant: Mapping[str, str]) -> Metric:
        """Return the metric as a Prometheus object; every sample has the labels `constant`."""
        ...


class ScalarMetric:
    """A counter or a gauge with labels.

    Cells are never removed, so label values must come from a bounded set, never from a client.

    Args:
        kind: "counter" or "gauge".
        name: name without the `_total` that is added to counters.
        help: one line.
        labels: names of the labels.
    """

    def __init__(
        self, kind: Literal["counter", "gauge"], name: str, help: str, labels: Sequence[str]
    ) -> None:
        self._kind = kind
        self._name = name
        self._help = help
        self._labels = labels
        self._cells: dict[tuple[str, ...], Sample] = {}

    def cell(self, *values: str) -> Sample:
        """Return the cell with these label values; create it if it does not exist."""
        found = self._cells.get(values)
        if found is None:
            found = self._cells[values] = Sample()
        return found

    def metric(self, constant: Mapping[str, str]) -> Metric:
        """Return the counter or gauge as a Prometheus object."""
        make = CounterMetricFamily if self._kind == "counter" else GaugeMetricFamily
        metric = make(self._name, self._help, labels=[*constant, *self._labels])
        for values, cell in self._cells.items():
            metric.add_metric([*constant.values(), *values], cell.value)
        return metric


class Histograms:
    """A histogram with labels; see `ScalarMetric`."""

    def __init__(
        self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str]
    ) -> None:
        self._name = name
        self._help = help
        self._bounds = tuple(bounds)
        self._labels = labels
        self._cells: dict[tuple[str, ...], Histogram] = {}

    def cell(self, *values: str) -> Histogram:
        """Return the histogram with these label values; create it if it does not exist."""
        found = self._cells.get(values)
        if found is None:
            found = self._cells[values] = Histogram(self._bounds)
        return found

    def metric(self, constant: Mapping[str, str]) -> Metric:
        """Return the histogram as a Prometheus object."""
        metric = HistogramMetricFamily(self._name, self._help, labels=[*constant, *self._labels])
        for values, cell in self._cells.items():
            metric.add_metric([*constant.values(), *values], cell.buckets(), cell.sum)
        return metric


class MetricSet(Collector):
    """Metrics that are exposed together.

    Args:
        labels: labels of every sample.
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self._constant = dict(labels or {})
        self._families: list[Family] = []

    def counter(self, name: str, help: str) -> Sample:
        """Add a counter without labels. It is exposed from the start, with the value 0."""
        return self.counters(name, help).cell()

    def gauge(self, name: str, help: str) -> Sample:
        """Add a gauge without labels."""
        return self.gauges(name, help).cell()

    def set_counter(self, name: str, help: str, value: float) -> None:
        """Add a counter of the engine, which is counted elsewhere, with its value."""
        self.counter(f"vllm:{name}", help).value = value

    def set_gauge(self, name: str, help: str, value: float) -> None:
        """Add a gauge of the engine with its value."""
        self.gauge(f"vllm:{name}", help).value = value

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        """Add a histogram without labels."""
        return self.histograms(name, help, bounds).cell()

    def counters(self, name: str, help: str, *labels: str) -> ScalarMetric:
        """Add a counter with labels."""
        return self._add(ScalarMetric("counter", name, help, labels))

    def gauges(self, name: str, help: str, *labels: str) -> ScalarMetric:
        """Add a gauge with labels."""
        return self._add(ScalarMetric("gauge", name, help, labels))

    def histograms(self, name: str, help: str, bounds: Sequence[float], *labels: str) -> Histograms:
        """Add a histogram with labels."""
        return self._add(Histograms(name, help, bounds, labels))

    def collect(self) -> Iterable[Metric]:
        """Return the metrics; called by the Prometheus registry."""
        return [family.metric(self._constant) for family in self._families]

    def _add(self, family: _Family) -> _Family:
        self._families.append(family)
        return family


class MergedMetrics(Collector):
    """Merges sets of the same metrics with different labels, so that each metric is exposed once.

    Args:
        sets: the sets of metrics, at least one.
    """

    def __init__(self, sets: Iterable[Collector]) -> None:
        self._sets = list(sets)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all sets; called by the Prometheus registry."""
        families: dict[str, Metric] = {}
        for each in self._sets:
            for metric in each.collect():
                if (first := families.setdefault(metric.name, metric)) is not metric:
                    first.samples += metric.samples
        return families.values()


AnyMetrics = MetricSet | MergedMetrics


def process_collectors() -> list[Collector]:
    """Return collectors of the `process_*` and `python_*` metrics of this process."""
    registry = CollectorRegistry()
    return [ProcessCollector(registry=registry), PlatformCollector(registry), GCCollector(registry)]


def expose(collectors: Iterable[Collector], accept: str = "") -> tuple[bytes, str]:
    """Return the response to a scrape of the metrics.

    Args:
        collectors: collectors in the order of the page; they are not kept.
        accept: Accept header of the scrape. The format is OpenMetrics if the scraper accepts it,
            otherwise the Prometheus text format.

    Returns:
        Body and content type.
    """
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    if "application/openmetrics-text" in accept:
        # By default, and only in this format, the library replaces the colons in metric names by
        # underscores.
        body = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
        return body, openmetrics.CONTENT_TYPE_LATEST
    return text_format.generate_latest(registry), text_format.CONTENT_TYPE_PLAIN_0_0_4
