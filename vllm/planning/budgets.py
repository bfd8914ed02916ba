"""Budgets for buckets of a traffic: seconds of warm-up, or memory of HPU graphs."""

from collections.abc import Callable

import numpy as np

from vllm.bucketing import Bucket, Phase
from vllm.bucketing.optimal import Budget, Floats, Ints, ShapeCost
from vllm.errors import ConfigError
from vllm.planning.engine_plan import EnginePlan
from vllm.planning.start import ShapeCosts

WARM_UP, GRAPHS = "--warm-up-budget", "--graph-budget"
_GIB = 2**30


def bucket_budget(
    plan: EnginePlan, warm_up_s: float | None, graph_gib: float | None
) -> Budget | None:
    """Return the limit of the buckets of an engine; None if there is none.

    Args:
        plan: plan of the engine.
        warm_up_s: seconds to compile, run and capture all buckets; None: no limit.
        graph_gib: GiB that the HPU graphs of all buckets keep; None: no limit.

    Raises:
        ConfigError: the engine has no HPU graphs whose memory could be limited.
    """
    if warm_up_s is None and graph_gib is None:
        return None
    costs = ShapeCosts(plan)
    if warm_up_s is not None:
        return Budget(warm_up_s, _price(costs.warm_up_s), "seconds of warm-up", WARM_UP)
    assert graph_gib is not None
    if not costs.has_graphs:
        raise ConfigError(
            f"{GRAPHS} {graph_gib:g} needs HPU graphs, which exist only in lazy mode "
            f"(PT_HPU_LAZY_MODE=1, without --enforce-eager). Use {WARM_UP} or --num-buckets"
        )
    price = _price(lambda bucket: costs.bucket_graph_bytes(bucket) / _GIB)
    return Budget(graph_gib, price, "GiB of HPU graphs", GRAPHS)


def _price(of: Callable[[Bucket], float]) -> ShapeCost:
    """Return a function on arrays of sizes that calls another for each bucket."""

    def price(phase: Ints, *sizes: Ints) -> Floats:
        rows = zip(phase.tolist(), *(size.tolist() for size in sizes), strict=True)
        return np.array([of(Bucket(Phase(p), *rest)) for p, *rest in rows], np.float64)

    return price
