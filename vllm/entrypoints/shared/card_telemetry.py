"""Read the sensors of an engine's cards, for the metrics and the status page."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from vllm.engine.metrics.registry import MetricSet
from vllm.platforms.habana.card_reading import CardReading

_MAX_AGE_S = 5.0
_PATIENCE_S = 0.5
LOST_AFTER_S = 60.0
"""Readings that are older are not shown: the driver does not answer."""
_GAUGES = {
    "power_watts": "Electric power of the card, in watts.",
    "temperature_celsius": "Temperature of the card's processor, in degrees Celsius.",
    "memory_used_bytes": "Device memory in use, in bytes.",
    "memory_total_bytes": "Device memory in total, in bytes.",
    "utilization": "Fraction of the last second in which the card was busy, 0 to 1.",
}
"""Fields of a reading, which give the metrics their names."""


class CardTelemetry:
    """Provides the newest sensor readings of cards.

    Readings are taken in a thread when they are requested and the last ones are too old. So a
    driver that hangs blocks neither a route nor the exit of the process.

    Args:
        read: takes readings; may block.
        max_age_s: maximum age of readings in seconds.
        patience_s: seconds for which `latest` waits for new readings.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[CardReading]],
        max_age_s: float = _MAX_AGE_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._read = read
        self._max_age_s = max_age_s
        self._patience_s = patience_s
        self._readings: Sequence[CardReading] = ()
        self._end_of_last = -math.inf
        self._running: Future[None] | None = None

    async def latest(self) -> Sequence[CardReading]:
        """Return the newest readings; older ones, or none, while the driver does not answer."""
        running = self._running
        if (running is None or running.done()) and self._age_s() >= self._max_age_s:
            running = self._running = Future()
            thread = threading.Thread(target=self._refresh, args=(running,), daemon=True)
            thread.start()
        if running is not None and not running.done():
            await asyncio.wait([asyncio.wrap_future(running)], timeout=self._patience_s)
        return () if self._age_s() > LOST_AFTER_S else self._readings

    def _age_s(self) -> float:
        return time.monotonic() - self._end_of_last

    def _refresh(self, running: "Future[None]") -> None:
        running.set_running_or_notify_cancel()  # the future can no longer be cancelled
        try:
            self._readings = self._read()
        finally:
            self._end_of_last = time.monotonic()
            running.set_result(None)


def card_metrics(readings: Iterable[CardReading]) -> MetricSet:
    """Return the metrics of cards. A value that is not known has no sample."""
    metrics = MetricSet()
    gauges = {
        field: metrics.gauges(f"vllm:hpu_{field}", text, "card", "module")
        for field, text in _GAUGES.items()
    }
    for reading in readings:
        module = "" if reading.module is None else str(reading.module)
        for field, gauge in gauges.items():
            value = getattr(reading, field)
            if value is not None:
                gauge.cell(str(reading.index), module).value = value
    return metrics
