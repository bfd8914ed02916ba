"""Define settings for dividing the model over devices."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from vllm.config.fields import check_at_least, check_one_of
from vllm.errors import ConfigError

_MAX_RANKS = 128
"""More are not proposed in an error."""

ExecutorBackend = Literal["uni", "mp", "ray", "external_launcher"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel groups, and how workers are started."""

    tensor_parallel_size: int = field(default=1, metadata={"aliases": ("-tp",)})
    """Number of devices over which each layer is split."""

    pipeline_parallel_size: int = field(default=1, metadata={"aliases": ("-pp",)})
    """Number of pipeline stages: groups of devices that run consecutive layers, and work on
    different requests at the same time."""

    pipeline_steps_in_flight: int | None = None
    """Number of steps that are in the pipeline stages at the same time, each with a part of the
    requests. 1: the stages run one after another. Default: the number of stages; 1 if the stages
    share the cores of one CPU, because each stage then uses all cores."""

    enable_expert_parallel: bool = False
    """Place whole experts of a mixture-of-experts model on different devices of
    tensor_parallel_size. False: split every expert over all of these devices. No effect on one
    device, or on a model without experts."""

    data_parallel_size: int = field(default=1, metadata={"aliases": ("-dp",)})
    """Number of replicas of the model that one server uses, each in its own process. Every request
    goes to the replica with the fewest tokens to compute. CPU cores and memory are divided among
    the replicas."""

    data_parallel_size_local: int | None = field(default=None, metadata={"aliases": ("-dpl",)})
    """Number of replicas on this machine. The others run on machines where `vllm serve --headless`
    is started with the same flags; see docs/data_parallel.md. Default: all replicas."""

    data_parallel_start_rank: int = field(default=0, metadata={"aliases": ("-dpr",)})
    """Index of the first replica of this machine, with --headless."""

    data_parallel_address: str = field(default="127.0.0.1", metadata={"aliases": ("-dpa",)})
    """Address of the machine with the server, where the other machines connect."""

    data_parallel_rpc_port: int = field(default=29550, metadata={"aliases": ("-dpp",)})
    """Port of data_parallel_address. The connection is neither encrypted nor authenticated: use a
    private network."""

    data_parallel_rank: int = field(default=0, metadata={"cli": False})
    """Index of this replica, from 0."""

    pipeline_layer_partition: tuple[int, ...] | None = field(default=None, metadata={"cli": False})
    """Number of layers of each stage (VLLM_PP_LAYER_PARTITION). None: as even as possible."""

    distributed_executor_backend: ExecutorBackend | None = None
    """How worker processes are started. uni: in the process of the engine, for one device. mp: one
    process for each device of this machine. ray: Ray actors on one or more machines (needs
    vllm[ray]). external_launcher: by torchrun or similar, one process for each device; only for
    LLM. Default: uni for one device, otherwise mp."""

    distributed_timeout_s: float = 300.0
    """Seconds that a worker waits for the other workers when they exchange tensors. After that the
    engine stops, because a worker hangs. The server also kills an engine process that was stopped
    by a signal (SIGSTOP) for so long."""

    worker_cls: str = "auto"
    """Class of the workers, as package.module.Class. auto: the worker class for the device."""

    worker_extension_cls: str = ""
    """Class whose methods are added to the workers, as package.module.Class; call them with
    collective_rpc. Default: none."""

    def __post_init__(self) -> None:
        check_at_least(
            self, 1, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
        )
        steps = self.pipeline_steps_in_flight
        if steps is not None and not 1 <= steps <= self.pipeline_parallel_size:
            raise ConfigError(
                "pipeline_steps_in_flight must be from 1 to pipeline_parallel_size "
                f"({self.pipeline_parallel_size}), got {steps}: a stage runs one step at a time"
            )
        self._check_replicas()
        if not self.distributed_timeout_s > 0:
            raise ConfigError(
                f"distributed_timeout_s must be more than 0, got {self.distributed_timeout_s}"
            )
        if self.distributed_executor_backend is not None:
            check_one_of(self, "distributed_executor_backend", get_args(ExecutorBackend))
        if self.distributed_executor_backend == "external_launcher":
            self._check_external()
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ConfigError(
                "distributed_executor_backend='uni' runs one worker, but tensor_parallel_size * "
                f"pipeline_parallel_size is {self.world_size}. Leave distributed_executor_backend "
                "out, or use 'mp' or 'ray'"
            )

    def _check_replicas(self) -> None:
        size, local = self.data_parallel_size, self.data_parallel_size_local
        if local is not None and not 0 <= local <= size:
            raise ConfigError(
                f"data_parallel_size_local must be from 0 to data_parallel_size ({size}), the "
                f"number of replicas on all machines, got {local}"
            )
        most = size - self.num_local_replicas
        if not 0 <= self.data_parallel_start_rank <= most:
            raise ConfigError(
                f"data_parallel_start_rank must be from 0 to {most}, because "
                f"{self.num_local_replicas} of {size} replicas are on this machine, got "
                f"{self.data_parallel_start_rank}. "
                "Set data_parallel_size_local to the number of replicas on it"
            )
        if not 1 <= self.data_parallel_rpc_port <= 65535:
            raise ConfigError(
                f"data_parallel_rpc_port must be from 1 to 65535, got {self.data_parallel_rpc_port}"
            )

    def _check_external(self) -> None:
        if self.data_parallel_size > 1:
            raise ConfigError(
                "distributed_executor_backend='external_launcher' needs data_parallel_size=1, got "
                f"{self.data_parallel_size}. Leave data_parallel_size out, or use "
                "distributed_executor_backend='mp'"
            )

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas on this machine."""
        local = self.data_parallel_size_local
        return self.data_parallel_size if local is None else local

    @property
    def local_replica(self) -> int:
        """Index of this replica among the replicas on this machine, from 0."""
        return self.data_parallel_rank - self.data_parallel_start_rank

    @property
    def is_on_this_machine(self) -> bool:
        """Whether all replicas and their ranks run on this machine. False with Ray, which chooses
        the machines."""
        return (
            self.num_local_replicas == self.data_parallel_size
            and self.distributed_executor_backend != "ray"
        )

    @property
    def world_size(self) -> int:
        """Number of workers of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_pipelined_steps(self) -> int:
        """Number of steps that the stages of a pipeline run at the same time; 1 without a
        pipeline.
        """
        steps = self.pipeline_steps_in_flight
        return self.pipeline_parallel_size if steps is None else steps

    @property
    def stages_alternate(self) -> bool:
        """Whether at most one stage of a pipeline runs at a time."""
        return self.pipeline_parallel_size > 1 and self.num_pipelined_steps == 1


def check_tensor_split(
    size: int, *, num_heads: int, num_kv_heads: int, intermediate_size: int
) -> None:
    """Check that the attention and the MLP of a model can be divided over `size` devices.

    Raises:
        ConfigError: a size cannot be divided; names it, and sizes that fit.
    """

    def unfit(size: int) -> list[str]:
        return [
            name
            for name, is_fit in (
                ("attention heads", num_heads % size == 0),
                ("intermediate_size", intermediate_size % size == 0),
                ("KV heads", num_kv_heads % size == 0 or size % num_kv_heads == 0),
            )
            if not is_fit
        ]

    if failed := unfit(size):
        raise ConfigError(
            f"tensor_parallel_size ({size}) must divide the number of attention heads "
            f"({num_heads}) and intermediate_size ({intermediate_size}), and must divide, or be a "
            f"multiple of, the number of KV heads ({num_kv_heads}). It does not fit "
            f"{', '.join(failed)}. {sizes_that_fit(lambda other: not unfit(other), num_heads)}"
        )


def sizes_that_fit(fits: Callable[[int], bool], most: int) -> str:
    """Return a sentence with the values of tensor_parallel_size that are possible for a model.

    Args:
        fits: returns whether a value is possible.
        most: largest value to check.

    >>> sizes_that_fit(lambda size: 12 % size == 0, 6)
    'Sizes that fit: 1, 2, 3, 4, 6'
    """
    found = [size for size in range(1, min(most, _MAX_RANKS) + 1) if fits(size)]
    return f"Sizes that fit: {', '.join(map(str, found))}"


def even_partition(num_layers: int, num_stages: int) -> list[int]:
    """Return the number of layers of each stage. Remaining layers are assigned to the stages in the
    middle, then to the first one, because the last one also computes logits and samples.

    >>> even_partition(8, 3), even_partition(32, 2), even_partition(3, 2)
    ([3, 3, 2], [16, 16], [2, 1])

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages}: the model has {num_layers} layers, and each "
            f"stage needs at least one. Lower pipeline_parallel_size to {num_layers} or less"
        )
    size, num_left = divmod(num_layers, num_stages)
    sizes = [size] * num_stages
    for index in [*range(1, num_stages - 1), 0][:num_left]:
        sizes[index] += 1
    return sizes
