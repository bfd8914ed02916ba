"""Decide on which machine of a Ray cluster each rank runs."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.config import ParallelConfig
from vllm.distributed import RankLayout
from vllm.errors import ConfigError
from vllm.executor.ranks.rank_wire import RankAssignment
from vllm.executor.ray.utils import has_own_cluster, import_ray
from vllm.logger import init_logger

logger = init_logger(__name__)

_LOOK_S = 1.0
"""Interval of looking whether machines have joined."""
_QUIET_S = 5.0
"""Time to wait for resources before it is logged."""


@dataclass(frozen=True)
class Placement:
    """The machines on which the ranks run."""

    group: Any
    """The placement group of Ray."""
    bundles: list[int]
    """Index of each rank's bundle in the group."""
    nodes: list[str]
    """Id of each rank's machine."""
    assignments: list[RankAssignment]
    """Assignment of each rank."""


def place_ranks(parallel: ParallelConfig, resources: dict[str, float]) -> Placement:
    """Reserve resources for each rank.

    Each stage is on one machine if that is possible for all stages; different stages are on
    different machines if there are several.

    Args:
        parallel: sizes of the groups, and how long to wait for machines and resources.
        resources: resources of each rank, such as {"CPU": 1}.

    Raises:
        ConfigError: the cluster does not have the resources.
    """
    ray = import_ray()
    layout = RankLayout.of(parallel)
    size, timeout_s = layout.world_size, parallel.distributed_timeout_s
    started = time.monotonic()
    _wait_for_machines(ray, size, resources, timeout_s)
    room = sum(_room(node, layout.tensor_size, resources) for node in ray.nodes())
    is_whole = room >= layout.pipeline_size
    if is_whole:
        stage = {name: count * layout.tensor_size for name, count in resources.items()}
        bundles, strategy = [stage] * layout.pipeline_size, "SPREAD"
    else:
        logger.warning(
            "No machine of the Ray cluster has room for all workers of one stage (%d stages, %d "
            "workers each), so the workers of a stage run on several machines and exchange "
            "tensors over the network",
            *(layout.pipeline_size, layout.tensor_size),
        )
        bundles, strategy = [resources] * size, "PACK"
    group = _reserve(ray, bundles, strategy, timeout_s - (time.monotonic() - started))
    found: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    order = _ordered(found, ray.get_runtime_context().get_node_id())
    ranks = [bundle for bundle in order for _ in range(layout.tensor_size if is_whole else 1)]
    nodes = [found[bundle] for bundle in ranks]
    logger.info("Ray: %d workers on %d machines of the cluster", size, len(set(nodes)))
    assignments = _assignments(nodes, has_own_devices="HPU" in resources, has_whole_stage=is_whole)
    return Placement(group, ranks, nodes, assignments)


def _wait_for_machines(ray: Any, size: int, resources: dict[str, float], timeout_s: float) -> None:
    """Wait until the cluster has the resources, free or in use.

    A cluster with autoscaling is told what is needed. In other clusters, machines may join late.

    Raises:
        ConfigError: the resources are not there in time, or no machine can join this cluster.
    """
    lack = _lack(ray.cluster_resources(), size, resources)
    if lack is None:
        return
    if not has_own_cluster():
        logger.warning(
            "%s. Waiting up to %g s (distributed_timeout_s) for machines to join", lack, timeout_s
        )
        deadline = time.monotonic() + timeout_s
        demand = ray.util.placement_group([resources] * size)
        while lack is not None and time.monotonic() < deadline:
            demand.wait(min(_LOOK_S, timeout_s))
            lack = _lack(ray.cluster_resources(), size, resources)
        ray.util.remove_placement_group(demand)
    if lack is not None:
        raise ConfigError(
            f"distributed_executor_backend='ray': {lack}. Add machines (`ray start --address "
            f"...`), or lower tensor_parallel_size or pipeline_parallel_size"
        )


def _reserve(ray: Any, bundles: list[dict[str, float]], strategy: str, timeout_s: float) -> Any:
    """Return the placement group once it has its resources.

    Raises:
        ConfigError: the resources are not free in time.
    """
    each = ", ".join(f"{count:g} {name}" for name, count in bundles[0].items())
    wanted = f"{len(bundles)} times {each}"
    group = ray.util.placement_group(bundles, strategy=strategy)
    quiet_s = min(_QUIET_S, max(0.0, timeout_s))
    if group.wait(quiet_s):
        return group
    left_s = max(0.0, timeout_s - quiet_s)
    logger.warning(
        "%s are not free in the Ray cluster yet; waiting up to %.0f s for them", wanted, left_s
    )
    if group.wait(left_s):
        return group
    ray.util.remove_placement_group(group)
    raise ConfigError(
        f"distributed_executor_backend='ray': {wanted} were not free in the Ray cluster within "
        f"{timeout_s:.0f} s, the rest of distributed_timeout_s. Stop the jobs that use them (`ray "
        "status` lists them), or raise distributed_timeout_s"
    )


def _lack(there: dict[str, float], size: int, resources: dict[str, float]) -> str | None:
    """Describe the resources that a cluster lacks, as a sentence without its full stop; None if it
    has enough.
    """
    for name, count in resources.items():
        total = there.get(name, 0)
        if total < count * size:
            lack = f"{size} workers need {count * size:g} {name}, and the Ray cluster has {total:g}"
            if name == "HPU" and not total:
                lack += (
                    " (if Ray has not found the cards of a machine, give their number: `ray start "
                    "--resources='{\"HPU\": 8}'`)"
                )
            return lack
    return None


def _room(node: dict[str, Any], tensor_size: int, resources: dict[str, float]) -> int:
    """Return the number of stages that a machine could run."""
    if not node["Alive"]:
        return 0
    there = node["Resources"]
    return min(int(there.get(n, 0) // (count * tensor_size)) for n, count in resources.items())


def _ordered(nodes: dict[int, str], here: str) -> list[int]:
    """Return the bundles in the order of the ranks.

    Machines with the most bundles come first, so that a stage fits on one machine. Of machines with
    equally many, the engine's own comes first.
    """
    on_node = Counter(nodes.values())
    return sorted(nodes, key=lambda b: (-on_node[nodes[b]], nodes[b] != here, nodes[b]))


def _assignments(
    nodes: list[str], *, has_own_devices: bool, has_whole_stage: bool
) -> list[RankAssignment]:
    on_node, seen, assignments = Counter(nodes), Counter[str](), []
    for node in nodes:
        assignments.append(
            RankAssignment(
                index=seen[node],
                count=on_node[node],
                has_own_devices=has_own_devices,
                has_whole_stage=has_whole_stage,
            )
        )
        seen[node] += 1
    return assignments
