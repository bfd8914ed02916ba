"""Test which Ray cluster an engine joins, and how it waits for machines, without starting a
cluster.
"""

import os
import socket
import types
from collections.abc import Iterator

import pytest

from vllm.config import ParallelConfig
from vllm.errors import ConfigError
from vllm.executor.ray import placement as ray_placement
from vllm.executor.ray.utils import initialize_ray_cluster

ray = pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def _has_no_cluster(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Set and delete the variable, so that monkeypatch restores it afterwards.
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.fixture
def closed() -> Iterator[str]:
    """Return an address of this machine on which no program listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


@pytest.mark.parametrize("given", ["RAY_ADDRESS", "ray_address", "ray_current_cluster"])
def test_an_address_where_no_cluster_is_any_more_is_refused_at_once(
    given, closed, monkeypatch, tmp_path
):
    if given == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", closed)
    elif given == "ray_current_cluster":  # a cluster that has crashed left this file
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(closed)
    with pytest.raises(ConfigError, match=rf"no Ray cluster answers at {closed}, .*{given}"):
        initialize_ray_cluster(ray_address=closed if given == "ray_address" else None)


def test_ray_client_is_refused_as_the_engine_has_to_be_in_the_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ConfigError, match=r"cannot use Ray Client .*`ray job submit`"):
        initialize_ray_cluster()


def test_what_ray_says_of_a_cluster_is_one_line_and_no_usage_data_is_sent(monkeypatch):
    def init(address, logging_level):
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 1.0.0")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=r"mismatch: The cluster was started with: Ray: 1\.0\.0"):
        initialize_ray_cluster(ray_address="local")


def test_cards_that_ray_has_not_found_can_be_told(monkeypatch):
    cluster = GrowingCluster(most=1)
    cluster.cluster_resources = lambda: {"CPU": 64.0}
    monkeypatch.setattr(ray_placement, "import_ray", lambda: cluster)
    parallel = ParallelConfig(tensor_parallel_size=8, distributed_timeout_s=0.01)
    with pytest.raises(ConfigError, match=r"""has 0 \(.* `ray start --resources='{"HPU": 8}'`"""):
        ray_placement.place_ranks(parallel, {"CPU": 1, "HPU": 1})


class GrowingCluster:
    """A stand-in for the package `ray`: each time that the cluster is read, it has one machine
    more.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.machines = 1
        self.demanded: list[list[dict[str, float]]] = []
        self.removed: list[list[dict[str, float]]] = []
        context = types.SimpleNamespace(get_node_id=lambda: "0")
        self.get_runtime_context = lambda: context
        self.util = types.SimpleNamespace(
            placement_group=self._demand,
            placement_group_table=lambda group: {
                "bundles_to_node_id": {n: str(n) for n in range(len(group.bundles))}
            },
            remove_placement_group=lambda group: self.removed.append(group.bundles),
        )

    def cluster_resources(self) -> dict[str, float]:
        return {"HPU": 2.0 * self.machines}

    def nodes(self) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": {"HPU": 2.0}}] * self.machines

    def _demand(self, bundles, strategy="PACK"):
        self.demanded.append(bundles)
        return types.SimpleNamespace(bundles=bundles, wait=self._wait)

    def _wait(self, timeout_s: float) -> bool:
        self.machines = min(self.most, self.machines + 1)
        return True


def test_machines_that_join_late_are_waited_for_and_a_cluster_that_grows_is_told(monkeypatch):
    cluster = GrowingCluster(most=3)
    monkeypatch.setattr(ray_placement, "import_ray", lambda: cluster)
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    found = ray_placement.place_ranks(parallel, {"HPU": 1})
    assert cluster.demanded == [[{"HPU": 1}] * 6, [{"HPU": 2}] * 3]
    assert cluster.removed == cluster.demanded[:1]
    assert found.nodes == ["0", "0", "1", "1", "2", "2"]


@pytest.mark.parametrize(("is_own", "looks"), [(True, []), (False, [[{"HPU": 1}] * 6])])
def test_machines_that_do_not_join_are_missed_in_one_line(monkeypatch, is_own, looks):
    cluster = GrowingCluster(most=2)
    monkeypatch.setattr(ray_placement, "import_ray", lambda: cluster)
    monkeypatch.setattr(ray_placement, "has_own_cluster", lambda: is_own)
    parallel = ParallelConfig(tensor_parallel_size=6, distributed_timeout_s=0.01)
    with pytest.raises(ConfigError, match=r"6 workers need 6 HPU, and the Ray cluster has \d\."):
        ray_placement.place_ranks(parallel, {"HPU": 1})
    assert cluster.demanded == cluster.removed == looks
