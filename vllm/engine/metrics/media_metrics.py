"""Define the metrics of images, audio and videos: fetched and read by the server, encoded by a
worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.engine.metrics.registry import MetricSet
from vllm.messages import SchedulerStats
from vllm.multimodal.interface.media_times import MediaTimes

MODALITY = "modality"
"""Label of metrics that distinguish images, sound and videos."""


@dataclass(slots=True)
class MediaReadStats:
    """Counters of a server that reads media: decodes, cuts and resizes them."""

    read: MediaTimes
    num_cache_queries: int
    """Items that were looked up in the cache of items that have been read."""
    num_cache_hits: int


def add_encoder_metrics(metrics: MetricSet, totals: SchedulerStats) -> None:
    """Add the encoder metrics that the workers have counted."""
    media, runner = totals.media, totals.runner
    counter = metrics.set_counter
    counter(
        "encoder_cache_queries",
        "Number of images, sounds and videos looked up in the encoder cache.",
        media.num_queries,
    )
    counter(
        "encoder_cache_hits",
        "Number of images, sounds and videos found in the encoder cache.",
        media.num_hits,
    )
    counter(
        "encoder_items", "Number of images, sounds and videos encoded.", runner.num_encoded_items
    )
    counter(
        "encoder_seconds",
        "Seconds spent on encoding images, sounds and videos.",
        runner.encode_seconds,
    )


def read_metrics(stats: MediaReadStats, model_name: str) -> MetricSet:
    """Return the metrics of the media items that the server has read."""
    metrics = _labelled(model_name)
    queries = metrics.counter(
        "vllm:mm_cache_queries",
        "Number of images, sounds and videos looked up in the processor cache.",
    )
    queries.value = stats.num_cache_queries
    hits = metrics.counter(
        "vllm:mm_cache_hits", "Number of images, sounds and videos found in the processor cache."
    )
    hits.value = stats.num_cache_hits
    _add_times(
        metrics, "mm_items", "Number of images, sounds and videos decoded.", stats.read.num_items
    )
    _add_times(
        metrics,
        "mm_read_seconds",
        "Seconds spent on decoding images, sounds and videos.",
        stats.read.seconds,
    )
    return metrics


def fetch_metrics(times: MediaTimes, model_name: str) -> MetricSet:
    """Return the metrics of the media items that the server has fetched."""
    metrics = _labelled(model_name)
    _add_times(
        metrics, "mm_fetches", "Number of images, sounds and videos downloaded.", times.num_items
    )
    _add_times(
        metrics,
        "mm_fetch_seconds",
        "Seconds spent on downloading images, sounds and videos.",
        times.seconds,
    )
    return metrics


def _labelled(model_name: str) -> MetricSet:
    """Return an empty set for metrics that all replicas share, labelled as the first replica."""
    return MetricSet({"model_name": model_name, "engine": "0"})


def _add_times(metrics: MetricSet, name: str, help: str, values: Mapping[str, float]) -> None:
    family = metrics.counters(f"vllm:{name}", help, MODALITY)
    for modality, value in values.items():
        family.cell(modality).value = value
