"""Settings of the Habana bridge that this engine makes if the user has not: the one table.

`envs` sets them, for `platforms.hpu`. Other variables of the bridge are in `env/others`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class BridgeSetting:
    """A variable of the bridge or the graph compiler, and the value that this engine gives it."""

    name: str
    value: str
    why: str
    source: str
    """Other software that sets the variable to this value, or documentation of it."""
    is_for_lazy: bool = True
    """False: it is for eager mode and torch.compile."""
    is_early: bool = True
    """The bridge may read the variable while the bridge is imported, before it can say in which
    mode it is. An early setting that is not for lazy mode changes nothing there."""

    @property
    def modes(self) -> str:
        """The modes for which it is made, for people."""
        return "every mode" if self.is_for_lazy else "eager, torch.compile"


BRIDGE_SETTINGS = (
    BridgeSetting(
        "PT_HPU_AUTOLOAD",
        "0",
        "torch does not import the bridge on its own, so the engine can set the variables below, "
        "and choose the card of a worker, before it imports the bridge",
        "source of the bridge, 1.19",
    ),
    BridgeSetting(
        "PT_HPU_WEIGHT_SHARING",
        "0",
        "with the default, lazy mode never frees the first copy of a layer's weights, even after "
        "they were quantized, reloaded or put to sleep",
        "plugin of the vendor, August 2026; source of the bridge, 1.19",
    ),
    BridgeSetting(
        "PT_ENABLE_INT64_SUPPORT",
        "0",
        "indices are computed as int32, as in lazy mode: several operators have no int64",
        "start script of the vendor's plugin, August 2026",
        is_for_lazy=False,
    ),
    BridgeSetting(
        "PT_HPU_ENABLE_EAGER_CACHE",
        "true",
        "the bridge caches operators that run one by one; the vendor's script sets it and gives "
        "no reason",
        "start script of the vendor's plugin, August 2026",
        is_for_lazy=False,
    ),
    BridgeSetting(
        "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS",
        "1",
        "the graph compiler uses several threads, which shortens the warm-up",
        "plugin of the vendor, August 2026",
        is_for_lazy=False,
        is_early=False,
    ),
    BridgeSetting(
        "RUNTIME_SCALE_PATCHING",
        "1",
        "FP8 scales are inputs of recipes, so layers that differ only in scales share one "
        "recipe. According to the vendor this may cost 5 to 20 % of the throughput",
        "plugin of the vendor, August 2026",
        is_for_lazy=False,
        is_early=False,
    ),
)


def bridge_settings(is_lazy: bool | None) -> Iterator[BridgeSetting]:
    """Yield the settings of a mode.

    Args:
        is_lazy: whether it is lazy; None: the bridge will decide, so that only those are made which
            it may read before it can be asked.
    """
    for setting in BRIDGE_SETTINGS:
        if setting.is_for_lazy or is_lazy is False or (is_lazy is None and setting.is_early):
            yield setting


def has_vendor_library() -> bool:
    """Return whether the bridge, habana_frameworks.torch, is installed; does not import it.

    Other packages of the vendor, such as habana-media-loader, have their modules in
    `habana_frameworks`.
    """
    try:
        return find_spec("habana_frameworks.torch") is not None
    except ModuleNotFoundError:  # there is no habana_frameworks at all
        return False
