"""Workers of a Ray cluster of two nodes give the tokens of one process.

Both nodes are on this machine. Each has one CPU, so each gets one worker.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.ranks import ENGINE, PARAMS, PROMPTS, assert_same, generate
from tests.tiny_models import make_tiny_model
from vllm import LLM
from vllm.errors import ConfigError, EngineDeadError

ray: Any = pytest.importorskip("ray")

RAY: dict[str, Any] = ENGINE | {"distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, logging_level="ERROR")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))


def nodes_of(llm: LLM) -> list[str]:
    """The node of each rank."""
    group = llm.llm_engine.engine_core.executor._placement.group
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [table[bundle] for bundle in llm.llm_engine.engine_core.executor._placement.bundles]


def test_tensor_ranks_on_two_nodes_give_the_tokens_of_one(cluster, folder):
    llm = LLM(folder, tensor_parallel_size=2, **RAY)
    assert len(set(nodes_of(llm))) == 2
    want = generate(LLM(folder, **ENGINE))
    assert_same(generate(llm), want)
    assert_same(generate(llm), want)  # from the prefix cache
    assert llm.collective_rpc("sleeping_tags") == [[], []]
    assert llm.llm_engine.engine_core.executor.stats().num_steps > 0
    llm.llm_engine.engine_core.shutdown()
    assert ray.is_initialized(), "the engine has not joined the cluster, so it does not leave it"


def test_more_workers_than_the_cluster_has_room_for_are_refused(cluster, folder):
    with pytest.raises(ConfigError, match="4 workers need 4 CPU, and the Ray cluster has 2"):
        LLM(folder, tensor_parallel_size=4, **RAY)


def test_a_node_that_is_lost_ends_its_requests_with_an_error(cluster, folder):
    llm = LLM(folder, pipeline_parallel_size=2, **RAY)
    assert_same(generate(llm), generate(LLM(folder, **ENGINE)))
    engine = llm.llm_engine
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
    engine.step()
    node = next(node for node in cluster.worker_nodes if node.node_id in nodes_of(llm))
    rank = nodes_of(llm).index(node.node_id)
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(EngineDeadError, match=rf"rank {rank} \(an actor of Ray\) has ended"):
        for number in range(2000):  # the actor may live on for a moment
            engine.add_request(str(number), {"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
            while engine.has_unfinished_requests():
                engine.step()
    engine.engine_core.shutdown()
