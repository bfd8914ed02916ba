"""Counters of images, sounds and videos that were fetched or read."""

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True)
class MediaTimes:
    """Counters of one kind of work, by modality. They only grow."""

    num_items: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of all items together. Several may have been read at the same time."""

    def add(self, modality: str, seconds: float) -> None:
        """Count the work for one item."""
        self.num_items[modality] += 1
        self.seconds[modality] += seconds

    @property
    def total_seconds(self) -> float:
        """Seconds of all modalities together."""
        return sum(self.seconds.values())
