"""Test that workers in a Ray cluster of two nodes give the tokens of one process.

Both nodes are on this machine. Each has two CPUs and two simulated cards.
"""

import asyncio
import os
import select
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.ranks import ENGINE, PARAMS, PROMPTS, assert_same, generate
from tests.e2e.server import start_server, wait_until
from tests.e2e.test_server_faults import LONG, SHORT, answers_around
from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, needs_simulated_device, simulated_hpu
from tests.reach import core_of, executor_of, nodes_of
from tests.tiny_models import make_tiny_model
from vllm import LLM, envs
from vllm.config import ParallelConfig
from vllm.errors import CollectiveError, ConfigError, EngineDeadError
from vllm.platforms.cpu_threads import count_cores

ray: Any = pytest.importorskip("ray")

from vllm.executor.ranks.rank_group import RankError  # noqa: E402
from vllm.executor.ray import executor as ray_executor  # noqa: E402
from vllm.executor.ray.placement import Placement, place_ranks  # noqa: E402

EXTENSION = "tests.e2e.worker_extension.WorkerExtension"
RAY: dict[str, Any] = ENGINE | {
    "distributed_executor_backend": "ray",
    "worker_extension_cls": EXTENSION,
}
NODE: dict[str, Any] = {
    "num_cpus": 2,
    "resources": {"HPU": 2},
    "include_dashboard": False,
    "include_log_monitor": False,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        # Actors with environment variables get processes of their own: start none before them.
        patch.setenv("RAY_prestart_worker_first_driver", "false")
        nodes = Cluster(initialize_head=True, head_node_args=NODE)
        nodes.add_node(**NODE)
        ray.init(address=nodes.address, logging_level="ERROR")
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(autouse=True)
def _has_free_nodes(cluster: Any) -> None:
    """Wait until the actors of the test before have exited, which takes some time. Otherwise two
    stages would share a node.
    """
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def want(folder: str) -> list[Any]:
    return generate(LLM(folder, **ENGINE))


@pytest.mark.parametrize(
    ("sizes", "nodes_of_stages"),
    [
        ((2, 1), [1]),
        ((2, 2), [1, 1]),
        ((4, 1), [2]),  # no machine has room for all four ranks
        ((1, 2), [1, 1]),
    ],
)
def test_a_stage_is_on_one_machine_and_stages_are_on_different_ones(
    cluster, sizes, nodes_of_stages
):
    tensor_size, num_stages = sizes
    parallel = ParallelConfig(tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    found: Placement = place_ranks(parallel, {"CPU": 1})
    ray.util.remove_placement_group(found.group)
    stages = [
        set(found.nodes[first : first + tensor_size])
        for first in range(0, parallel.world_size, tensor_size)
    ]
    assert [len(stage) for stage in stages] == nodes_of_stages
    assert len(set(found.nodes)) == (1 if sizes == (2, 1) else 2)
    assert [each.has_whole_stage for each in found.assignments] == [
        sizes != (4, 1)
    ] * parallel.world_size


@pytest.mark.parametrize(
    ("size", "collectives"),
    [
        (2, "SharedMemoryCollectives"),
        # Exhaustive: four ranks on two nodes.
        pytest.param(4, "CheckedCollectives", marks=pytest.mark.exhaustive),
    ],
)
def test_tensor_ranks_share_memory_if_they_are_on_one_node(
    cluster, folder, want, size, collectives
):
    llm = LLM(folder, tensor_parallel_size=size, **RAY)
    assert_same(generate(llm), want)
    assert_same(generate(llm), want)  # the prompts are in the prefix cache now
    assert llm.collective_rpc("collectives") == [collectives] * size
    assert executor_of(llm).stats().num_steps > 0
    core_of(llm).shutdown()
    assert ray.is_initialized(), "the engine has not joined the cluster, so it does not leave it"


def test_more_workers_than_the_cluster_gets_room_for_are_refused(cluster):
    parallel = ParallelConfig(tensor_parallel_size=5, distributed_timeout_s=0.1)
    with pytest.raises(ConfigError, match="5 workers need 5 CPU, and the Ray cluster has 4"):
        place_ranks(parallel, {"CPU": 1})


def test_resources_that_others_keep_are_refused(cluster):
    parallel = ParallelConfig(tensor_parallel_size=4, distributed_timeout_s=0.1)
    taken = ray.util.placement_group([{"CPU": 1}])
    assert taken.wait(60)
    try:
        with pytest.raises(ConfigError, match="4 times 1 CPU were not free"):
            place_ranks(parallel, {"CPU": 1})
    finally:
        ray.util.remove_placement_group(taken)


@pytest.mark.exhaustive
def test_another_version_on_a_machine_is_refused(cluster, folder, monkeypatch):
    monkeypatch.setattr(ray_executor, "__version__", "0.0.9")
    with pytest.raises(
        ConfigError, match=r"rank 0 has version \S+ of vllm, but the engine has 0.0.9"
    ):
        LLM(folder, tensor_parallel_size=2, **RAY)


@pytest.mark.exhaustive
@needs_simulated_device
def test_two_cards_of_the_cluster_give_the_tokens_of_the_cpu(cluster, folder):
    engine = SMALL_ENGINE | {"skip_tokenizer_init": True}
    want = generate(LLM(folder, device="cpu", **engine))
    with simulated_hpu(PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        llm = LLM(
            folder,
            device="hpu",
            tensor_parallel_size=2,
            distributed_executor_backend="ray",
            **engine,
        )
        assert_same(generate(llm), want)
        core_of(llm).shutdown()


@pytest.mark.exhaustive
def test_a_worker_that_ends_while_idle_is_noticed_and_one_that_is_stopped_is_named(
    cluster, folder, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    envs.get.cache_clear()
    llm = LLM(folder, pipeline_parallel_size=2, distributed_timeout_s=2.0, **RAY)
    core = core_of(llm)
    # Ray sets OMP_NUM_THREADS=1, but each rank is the only worker of its node and uses more
    # threads.
    assert min(llm.collective_rpc("num_threads")) > 1 or count_cores() == 1
    first, _ = llm.collective_rpc("process_id")
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(CollectiveError, match="rank 0 does not answer: its process is stopped"):
        llm.collective_rpc("process_id")
    os.kill(first, signal.SIGKILL)
    readable, _, _ = select.select([core.executor.failure_fd], [], [], 60.0)
    assert readable
    with pytest.raises(RankError, match=r"rank 0 \(a Ray actor\) has exited"):
        core.executor.check_health()
    core.shutdown()


@pytest.mark.exhaustive
def test_a_replica_whose_node_is_lost_is_started_again_when_there_is_another(cluster):
    """Each node has room for one of the two replicas."""
    taken = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert taken.wait(60)
    ranks = ("-dp", "2", "--distributed-executor-backend", "ray")
    variables = {"RAY_ADDRESS": cluster.address, "VLLM_SERVER_DEV_MODE": "1"}
    with start_server(*ranks, "--restart-engine", "1", variables=variables) as server:

        def lose_a_node() -> None:
            (node,) = cluster.worker_nodes
            cluster.remove_node(node, allow_graceful=False)

        answers = asyncio.run(
            answers_around(server, [{**LONG, "max_tokens": 200}] * 8, lose_a_node)
        )
        lost = [text for status, text in answers if status == 500]
        assert len(lost) == 4 and all("(a Ray actor) has exited" in text for text in lost)
        # The other replica answers.
        assert server.request("POST", "/v1/completions", SHORT)[0] == 200
        cluster.add_node(**NODE)
        wait_until(lambda: server.replica_states() == ["ready", "ready"])
        assert server.request("POST", "/v1/completions", SHORT)[0] == 200
    ray.util.remove_placement_group(taken)


@pytest.mark.exhaustive
def test_a_node_that_is_lost_ends_its_requests_with_an_error(cluster, folder, want):
    llm = LLM(folder, pipeline_parallel_size=2, distributed_timeout_s=60.0, **RAY)
    assert_same(generate(llm), want)
    engine = llm.llm_engine
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
    engine.step()
    node = next(node for node in cluster.worker_nodes if node.node_id in nodes_of(llm))
    rank = nodes_of(llm).index(node.node_id)
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(EngineDeadError, match=rf"rank {rank} \(a Ray actor\) has exited"):
        for number in range(2000):  # the actor may live on for a moment
            engine.add_request(str(number), {"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
            while engine.has_unfinished_requests():
                engine.step()
    ray.shutdown()  # the program disconnects from the cluster before the engine ends
    engine.engine_core.shutdown()
    assert not ray.is_initialized()
    ray.init(address=cluster.address, logging_level="ERROR")
