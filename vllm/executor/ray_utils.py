"""The Ray cluster of an engine, and where in it each rank runs. Ray is the extra `vllm[ray]`."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.config import ParallelConfig
from vllm.errors import ConfigError
from vllm.executor.rank_wire import RankPlace
from vllm.logger import init_logger

logger = init_logger(__name__)


def import_ray() -> Any:
    """The package `ray`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ConfigError(
            f"distributed_executor_backend='ray' needs Ray, which cannot be imported ({error}). "
            f"Install it with: pip install 'vllm[ray]'; or use 'mp' for workers on one machine"
        ) from None
    return ray


def initialize_ray_cluster(
    parallel_config: ParallelConfig | None = None, ray_address: str | None = None
) -> None:
    """Join a Ray cluster: the one of `ray_address` or RAY_ADDRESS, or one that runs on this
    machine; else start one. Nothing happens in a process that has joined one.

    Args:
        parallel_config: of the engine that will use the cluster; not read, an engine takes what it
            needs when it starts.
        ray_address: such as auto or 10.0.0.1:6379.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    try:
        ray.init(address=ray_address, logging_level="WARNING")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"no Ray cluster could be joined or started: {reason}. Start one with `ray start "
            f"--head`, and set RAY_ADDRESS if it runs on another machine"
        ) from error


@dataclass(frozen=True)
class Placement:
    """Where ranks run."""

    group: Any
    """The placement group of Ray."""
    bundles: list[int]
    """By rank: its bundle of the group."""
    places: list[RankPlace]
    """By rank."""


def place_ranks(parallel: ParallelConfig, resources: dict[str, float]) -> Placement:
    """Reserve resources for each rank. Consecutive ranks are on one machine where that is possible,
    so that the ranks of a stage are not divided.

    Args:
        parallel: number of ranks, and how long to wait for the resources.
        resources: of each rank, such as {"CPU": 1}.

    Raises:
        ConfigError: the cluster does not have the resources.
    """
    ray = import_ray()
    size = parallel.world_size
    for name, count in resources.items():
        total = ray.cluster_resources().get(name, 0)
        if total < count * size:
            raise ConfigError(
                f"distributed_executor_backend='ray': {size} workers need {count * size:g} {name}, "
                f"and the Ray cluster has {total:g}. Add machines (`ray start --address ...`), or "
                f"lower tensor_parallel_size or pipeline_parallel_size"
            )
    group = ray.util.placement_group([resources] * size, strategy="PACK")
    if not group.wait(parallel.distributed_timeout_s):
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"distributed_executor_backend='ray': {size} times {resources} were not free in the "
            f"Ray cluster within distributed_timeout_s={parallel.distributed_timeout_s}. End what "
            f"uses them; `ray status` shows it"
        )
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    on_node = Counter(nodes.values())
    here = ray.get_runtime_context().get_node_id()
    # The fullest machines first, as a stage fits into one; and this one before others like it.
    order = sorted(
        nodes, key=lambda bundle: (-on_node[nodes[bundle]], nodes[bundle] != here, nodes[bundle])
    )
    seen: Counter[str] = Counter()
    places = []
    for bundle in order:
        node = nodes[bundle]
        places.append(
            RankPlace(index=seen[node], count=on_node[node], has_own_devices="HPU" in resources)
        )
        seen[node] += 1
    logger.info("%d workers on %d machines of the Ray cluster", size, len(on_node))
    return Placement(group, order, places)


def worker_environment() -> dict[str, str]:
    """The variables of this process that workers on other machines get."""
    return envs.passed_on()
