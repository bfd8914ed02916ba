"""Which device runs the model."""

from dataclasses import dataclass, field
from typing import Literal

from vllm.config.fields import check_one_of

Device = Literal["auto", "cpu", "hpu"]


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """The device and its threads."""

    device: Device = "auto"
    """Device to run on. auto: hpu when a card is there, else cpu."""

    bound_cores: tuple[int, ...] | None = field(default=None, metadata={"cli": False})
    """Cores to which the threads of the CPU device are bound, one thread each; None: any."""

    counts_threads: bool = field(default=True, metadata={"cli": False})
    """The CPU device chooses the number of its threads; False: OpenMP's settings do."""

    is_beside_server: bool = field(default=False, metadata={"cli": False})
    """The engine runs in its own process, next to a server process on the same cores."""

    def __post_init__(self) -> None:
        check_one_of(self, "device", ("auto", "cpu", "hpu"))
