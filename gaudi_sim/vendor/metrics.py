"""Simulates `habana_frameworks.torch.hpu.metrics`: counters of the card, as (tag, value) lists."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from gaudi_sim.card.card import SimulatedCard
from gaudi_sim.card.device import active_card
from vllm import envs
from vllm.platforms.habana.bridge import DeviceCounters

__all__ = ["Metric", "MetricNotFound", "metric_global", "metric_localcontext"]

_NAMES = ("graph_compilation", "cpu_fallback", "memory_defragmentation")
_NOTHING = DeviceCounters(compilations=0, compile_s=0.0, cpu_fallbacks={})


class MetricNotFound(Exception):
    """There is no metric of this name."""


class Metric:
    """Counts from `start` to `stop`; there may be several such spans."""

    def __init__(self, metric_name: str, started: DeviceCounters | None = None) -> None:
        self._name = metric_name
        self._started = started
        self._spans: list[tuple[DeviceCounters, DeviceCounters]] = []

    def name(self) -> str:
        return self._name

    def start(self) -> None:
        if self._started is None:
            self._started = active_card().counters()

    def stop(self) -> None:
        """Stop counting; the counts remain readable."""
        self._spans = self._counted()
        self._started = None

    def reset(self) -> None:
        """Reset the counts to zero."""
        self._spans.clear()
        if self._started is not None:
            self._started = active_card().counters()

    def stats(self) -> list[tuple[str, Any]]:
        """Return tags and values in fixed order; times are in microseconds."""
        stats: list[tuple[str, Any]]
        spans = self._counted()
        if self._name == "graph_compilation":
            number = sum(end.compilations - start.compilations for start, end in spans)
            total_us = round(sum(end.compile_s - start.compile_s for start, end in spans) * 1e6)
            average_us = total_us // number if number else 0
            stats = [("TotalNumber", number), ("TotalTime", total_us), ("AvgTime", average_us)]
            if envs.get().PT_HPU_METRICS_GC_DETAILS:
                # Counted since the card was opened: a reset does not change them.
                stats.append(("recipe", list(active_card().counters().recipes)))
            return stats
        if self._name == "cpu_fallback":
            ops: Counter[str] = Counter()
            for start, end in spans:
                ops += Counter(end.cpu_fallbacks) - Counter(start.cpu_fallbacks)
            return [("TotalNumber", sum(ops.values())), ("FallbackOps", dict(ops))]
        # The simulated memory pool never moves data.
        return [("TotalNumber", 0), ("TotalSuccessful", 0), ("AvgTime", 0), ("MaxTime", 0)]

    def _counted(self) -> list[tuple[DeviceCounters, DeviceCounters]]:
        if self._started is None:
            return self._spans
        return [*self._spans, (self._started, active_card().counters())]


_GLOBAL: WeakKeyDictionary[SimulatedCard, dict[str, Metric]] = WeakKeyDictionary()


def metric_global(name: str) -> Metric | None:
    """Return a metric that counts since the card was opened; None for an unknown name."""
    if name not in _NAMES:
        return None
    metrics = _GLOBAL.setdefault(active_card(), {})
    return metrics.setdefault(name, Metric(name, _NOTHING))


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    """Yield a metric that counts in this context and can be read afterwards.

    Raises:
        MetricNotFound: there is no metric of this name.
    """
    if name not in _NAMES:
        raise MetricNotFound(name)
    metric = Metric(name)
    metric.start()
    try:
        yield metric
    finally:
        metric.stop()
