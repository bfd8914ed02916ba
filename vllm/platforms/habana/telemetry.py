"""Read the sensors of Gaudi cards through `habana-pyhlml`, which no other module imports.

The package is the vendor's binding of its library for management, libhlml: it opens no card, so any
process may read any card while others compute. Written from its published interface; it has not run
on a card.
"""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from vllm.logger import init_logger
from vllm.platforms.habana.card_reading import CardReading

logger = init_logger(__name__)

_Figure = TypeVar("_Figure")

_ON_CHIP = 0
"""Index of the temperature sensor of the processor (HLML_TEMPERATURE_ON_AIP)."""


class CardReader:
    """Reads the sensors of the cards on this machine that an engine uses.

    Args:
        modules: module ids of these cards; None: all cards.
    """

    def __init__(self, modules: Collection[int] | None = None) -> None:
        self._modules = modules
        self._cards: list[_Card] | None = None

    def read(self) -> list[CardReading]:
        """Read all sensors through the driver. One thread at a time.

        This takes a moment, and longer the first time, so do not call it in an event loop. Returns
        an empty list if the package or the driver is missing, which is logged once.
        """
        if self._cards is None:
            try:
                self._cards = self._open()
            except ImportError:
                self._give_up("habana-pyhlml is not installed: pip install 'vllm[hpu-telemetry]'")
            except Exception as error:  # a vendor library may raise anything
                self._give_up(f"habana-pyhlml: {type(error).__name__}: {error}")
        return [card.read() for card in self._cards or ()]

    def _give_up(self, reason: str) -> None:
        self._cards = []
        logger.info(
            "power, temperature, memory and utilization of the cards are not measured: %s", reason
        )

    def _open(self) -> "list[_Card]":
        import pyhlml

        pyhlml.hlmlInit()
        cards = [_Card(pyhlml, index) for index in range(pyhlml.hlmlDeviceGetCount())]
        # A card with an unknown module id may belong to this engine, so it is included.
        return [
            card
            for card in cards
            if self._modules is None or card.module is None or card.module in self._modules
        ]


class _Card:
    """The sensors of one card.

    Args:
        hlml: the package.
        index: index of the card.
    """

    def __init__(self, hlml: Any, index: int) -> None:
        self._hlml = hlml
        self._index = index
        self._handle = hlml.hlmlDeviceGetHandleByIndex(index)
        self.module = _known(lambda: int(hlml.hlmlDeviceGetModuleID(self._handle)))
        self._name = _known(lambda: str(hlml.hlmlDeviceGetName(self._handle), "utf-8"))

    def read(self) -> CardReading:
        hlml, handle = self._hlml, self._handle
        memory = _known(lambda: hlml.hlmlDeviceGetMemoryInfo(handle))
        return CardReading(
            index=self._index,
            module=self.module,
            name=self._name,
            power_watts=_known(lambda: hlml.hlmlDeviceGetPowerUsage(handle) / 1000),
            temperature_celsius=_known(
                lambda: float(hlml.hlmlDeviceGetTemperature(handle, _ON_CHIP))
            ),
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            utilization=_known(lambda: hlml.hlmlDeviceGetUtilizationRates(handle).aip / 100),
        )


def _known(ask: Callable[[], _Figure]) -> _Figure | None:
    """Return the value of one query; None if the driver, or this build of it, does not have it."""
    try:
        return ask()
    except Exception:  # a vendor library may raise anything
        return None
