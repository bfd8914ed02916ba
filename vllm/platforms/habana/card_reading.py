"""Define the sensor readings of an accelerator card."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CardReading:
    """The readings of one card at one time. None: the card or its driver does not report the
    value.
    """

    index: int
    """Index in the order of the driver."""
    module: int | None
    """Index of the card in the machine, as in HABANA_VISIBLE_MODULES."""
    name: str | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    memory_used_bytes: int | None = None
    """Bytes used by all processes. A process on a card takes all of its memory when it opens it."""
    memory_total_bytes: int | None = None
    utilization: float | None = None
    """Share of the last second in which the card computed, 0 to 1."""
