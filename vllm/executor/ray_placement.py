"""Where in a Ray cluster each rank runs."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.config import ParallelConfig
from vllm.distributed import RankLayout
from vllm.errors import ConfigError
from vllm.executor.rank_wire import RankPlace
from vllm.executor.ray_utils import import_ray
from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True)
class Placement:
    """Where ranks run."""

    group: Any
    """The placement group of Ray."""
    bundles: list[int]
    """By rank: its bundle of the group."""
    nodes: list[str]
    """By rank: the id of its machine."""
    places: list[RankPlace]
    """By rank."""


def place_ranks(parallel: ParallelConfig, resources: dict[str, float]) -> Placement:
    """Reserve resources for each rank. A stage is on one machine, if the machines have room for all
    stages so, and stages are on different machines where there are several.

    Args:
        parallel: sizes of the groups, and how long to wait for the resources.
        resources: of each rank, such as {"CPU": 1}.

    Raises:
        ConfigError: the cluster does not have the resources.
    """
    ray = import_ray()
    layout = RankLayout.of(parallel)
    size, timeout_s = layout.world_size, parallel.distributed_timeout_s
    _check_total(ray.cluster_resources(), size, resources)
    room = sum(_room(node, layout.tensor_size, resources) for node in ray.nodes())
    is_whole = room >= layout.pipeline_size
    if is_whole:
        stage = {name: count * layout.tensor_size for name, count in resources.items()}
        bundles, strategy = [stage] * layout.pipeline_size, "SPREAD"
    else:
        logger.warning(
            "No machines of the Ray cluster have room for %d stages of %d workers each, so a stage "
            "is divided among machines: its workers exchange tensors over the network",
            *(layout.pipeline_size, layout.tensor_size),
        )
        bundles, strategy = [resources] * size, "PACK"
    group = ray.util.placement_group(bundles, strategy=strategy)
    if not group.wait(timeout_s):
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"distributed_executor_backend='ray': {len(bundles)} times {bundles[0]} were not free "
            f"in the Ray cluster within distributed_timeout_s={timeout_s}. End what uses them; "
            f"`ray status` shows it"
        )
    found: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    order = _ordered(found, ray.get_runtime_context().get_node_id())
    ranks = [bundle for bundle in order for _ in range(layout.tensor_size if is_whole else 1)]
    nodes = [found[bundle] for bundle in ranks]
    logger.info("%d workers on %d machines of the Ray cluster", size, len(set(nodes)))
    places = _places(nodes, has_own_devices="HPU" in resources, has_whole_stage=is_whole)
    return Placement(group, ranks, nodes, places)


def _check_total(there: dict[str, float], size: int, resources: dict[str, float]) -> None:
    for name, count in resources.items():
        total = there.get(name, 0)
        if total < count * size:
            raise ConfigError(
                f"distributed_executor_backend='ray': {size} workers need {count * size:g} {name}, "
                f"and the Ray cluster has {total:g}. Add machines (`ray start --address ...`), or "
                f"lower tensor_parallel_size or pipeline_parallel_size"
            )


def _room(node: dict[str, Any], tensor_size: int, resources: dict[str, float]) -> int:
    """Stages that a machine could run."""
    if not node["Alive"]:
        return 0
    there = node["Resources"]
    return min(int(there.get(n, 0) // (count * tensor_size)) for n, count in resources.items())


def _ordered(nodes: dict[int, str], here: str) -> list[int]:
    """The bundles: the fullest machines first, as a stage fits into one; and this one before others
    like it."""
    on_node = Counter(nodes.values())
    return sorted(nodes, key=lambda b: (-on_node[nodes[b]], nodes[b] != here, nodes[b]))


def _places(nodes: list[str], *, has_own_devices: bool, has_whole_stage: bool) -> list[RankPlace]:
    on_node, seen, places = Counter(nodes), Counter[str](), []
    for node in nodes:
        places.append(
            RankPlace(
                index=seen[node],
                count=on_node[node],
                has_own_devices=has_own_devices,
                has_whole_stage=has_whole_stage,
            )
        )
        seen[node] += 1
    return places
