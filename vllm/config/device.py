"""Which device runs the model."""

from dataclasses import dataclass
from typing import Literal

from vllm.config.checks import check_one_of

Device = Literal["auto", "cpu", "hpu"]


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """The platform, and how its operators run."""

    device: Device = "auto"
    """Device to run on. auto: hpu when a card is there, else cpu."""

    def __post_init__(self) -> None:
        check_one_of(self, "device", ("auto", "cpu", "hpu"))
