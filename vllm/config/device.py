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

    bound_cores: tuple[tuple[int, ...], ...] | None = field(default=None, metadata={"cli": False})
    """For each worker on the CPU the cores to which its threads are bound, one thread each; None:
    any."""

    core_share: tuple[int, ...] | None = field(default=None, metadata={"cli": False})
    """Cores that the threads of this replica may use, any thread on any of them; None: all."""

    memory_share_bytes: int | None = field(default=None, metadata={"cli": False})
    """Memory of the machine for the weights and the KV cache of this replica; None: what is
    free."""

    replica_cores: tuple[tuple[tuple[int, ...], ...], ...] = field(
        default=(), metadata={"cli": False}
    )
    """`bound_cores` of each replica; empty: they get equal shares of the cores."""

    counts_threads: bool = field(default=True, metadata={"cli": False})
    """The CPU device chooses the number of its threads; False: OpenMP's settings do."""

    is_beside_server: bool = field(default=False, metadata={"cli": False})
    """The engine runs in its own process, next to a server process on the same cores."""

    def __post_init__(self) -> None:
        check_one_of(self, "device", ("auto", "cpu", "hpu"))
