"""Stands in for the vendor's package `habana-pyhlml`, with the signatures of build 1.24.

The cards are in the list `cards`, and tests change their values. A value that a card lacks is an
error, as in the package.
"""

from dataclasses import dataclass, field
from typing import Any

INVALID_ARGUMENT, NOT_SUPPORTED = 2, 3


class HLMLError(Exception):
    """An error with the code of the library."""

    def __init__(self, value: int) -> None:
        super().__init__(f"HLML Error with code {value}")
        self.value = value


@dataclass
class c_hlml_memory:
    free: int
    total: int
    used: int


@dataclass
class c_hlml_utilization:
    aip: int
    memory: int


@dataclass
class Card:
    """The values of one card; missing values are not supported."""

    says: dict[str, Any] = field(default_factory=dict)


cards: list[Card] = []
calls: list[str] = []
init_error: Exception | None = None


def reset() -> None:
    """Restore two cards as a driver lists them, without recorded calls."""
    global init_error
    calls.clear()
    init_error = None
    cards[:] = [
        Card(
            {
                "name": b"HL-225",
                "module": module,
                "power": 412_600,
                "temperature": 51,
                "memory": c_hlml_memory(free=8 * 2**30, total=96 * 2**30, used=88 * 2**30),
                "utilization": c_hlml_utilization(aip=87, memory=0),
            }
        )
        for module in (3, 1)
    ]


def _ask(device: Card, what: str) -> Any:
    calls.append(what)
    if what not in device.says:
        raise HLMLError(NOT_SUPPORTED)
    return device.says[what]


def hlmlInit() -> None:
    calls.append("init")
    if init_error is not None:
        raise init_error


def hlmlDeviceGetCount() -> int:
    return len(cards)


def hlmlDeviceGetHandleByIndex(index: int) -> Card:
    return cards[index]


def hlmlDeviceGetName(device: Card) -> bytes:
    return _ask(device, "name")


def hlmlDeviceGetModuleID(device: Card) -> int:
    return _ask(device, "module")


def hlmlDeviceGetPowerUsage(device: Card) -> int:
    return _ask(device, "power")


def hlmlDeviceGetTemperature(device: Card, sensor_type: int) -> int:
    if sensor_type != 0:
        raise HLMLError(INVALID_ARGUMENT)
    return _ask(device, "temperature")


def hlmlDeviceGetMemoryInfo(device: Card) -> c_hlml_memory:
    return _ask(device, "memory")


def hlmlDeviceGetUtilizationRates(device: Card) -> c_hlml_utilization:
    return _ask(device, "utilization")
