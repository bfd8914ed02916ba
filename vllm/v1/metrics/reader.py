"""The metrics that `LLM.get_metrics` returns."""

from vllm.engine.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
