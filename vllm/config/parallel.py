"""How the model is split over devices."""

from dataclasses import dataclass, field
from typing import Literal

from vllm.config.fields import check_at_least
from vllm.errors import ConfigError

ONE_REPLICA = "the engine has one replica of the model"
"""Why data parallelism is refused."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel groups and who runs the workers."""

    tensor_parallel_size: int = field(default=1, metadata={"aliases": ("-tp",)})
    """Devices that share every layer."""

    pipeline_parallel_size: int = field(default=1, metadata={"aliases": ("-pp",)})
    """Groups of devices that run consecutive layers."""

    distributed_executor_backend: Literal["uni", "mp"] | None = None
    """Who runs the workers. uni: the engine's own process, for one device. mp: one process for each
    device on this machine, the engine's own among them. Not set: uni for one device, else mp."""

    distributed_timeout_s: float = 300.0
    """Seconds that one worker waits for the others in an exchange of tensors. Longer means that one
    of them hangs, and the engine stops."""

    worker_cls: str = "auto"
    """Class of the workers, as package.module.Class. auto: the one of the device."""

    worker_extension_cls: str = ""
    """Class whose methods are added to the workers, as package.module.Class; call them with
    collective_rpc. Not set: none."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tensor_parallel_size", "pipeline_parallel_size")
        if not self.distributed_timeout_s > 0:
            raise ConfigError(
                f"distributed_timeout_s must be more than 0, got {self.distributed_timeout_s}"
            )
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ConfigError(
                f"distributed_executor_backend='uni' runs one worker, and "
                f"tensor_parallel_size * pipeline_parallel_size is {self.world_size}. Leave "
                f"distributed_executor_backend out, or use 'mp'"
            )
        if self.pipeline_parallel_size > 1:
            raise ConfigError(
                f"pipeline_parallel_size={self.pipeline_parallel_size}: not available in this "
                f"version. Leave it out; tensor_parallel_size splits a model over devices"
            )

    @property
    def world_size(self) -> int:
        """Workers in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
