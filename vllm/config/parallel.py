"""How the model is split over devices."""

from dataclasses import dataclass, field
from typing import Literal

from vllm.config.fields import check_at_least
from vllm.errors import ConfigError

ONE_DEVICE = "the engine runs on one device"
"""Why every kind of parallelism is refused."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel groups and who runs the workers."""

    tensor_parallel_size: int = field(default=1, metadata={"aliases": ("-tp",)})
    """Devices that share every layer."""

    pipeline_parallel_size: int = field(default=1, metadata={"aliases": ("-pp",)})
    """Groups of devices that run consecutive layers."""

    distributed_executor_backend: Literal["uni"] | None = None
    """Who runs the workers. Not set: uni, the engine's own process."""

    worker_cls: str = "auto"
    """Class of the workers, as package.module.Class. auto: the one of the device."""

    worker_extension_cls: str = ""
    """Class whose methods are added to the workers, as package.module.Class; call them with
    collective_rpc. Not set: none."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tensor_parallel_size", "pipeline_parallel_size")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: not available in this version: {ONE_DEVICE}. "
                    "Leave it out."
                )

    @property
    def world_size(self) -> int:
        """Workers in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
