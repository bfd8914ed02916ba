"""Test how cores and memory are divided among the replicas of data parallelism."""

import os
from dataclasses import replace

import pytest

from tests.engine.fakes import make_config
from vllm import envs
from vllm.config import DeviceConfig, ObservabilityConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.engine.process.core_process import config_of
from vllm.engine.process.wire import StartCore
from vllm.engine.resolve import parallel as resolve_module
from vllm.engine.resolve import replicas
from vllm.engine.resolve.parallel import resolve_parallel
from vllm.engine.resolve.replicas import replica_configs, resolve_device
from vllm.env import ranks as env_ranks
from vllm.errors import ConfigError
from vllm.platforms import resolve_platform


@pytest.fixture
def machine(monkeypatch):
    """Simulate a machine of eight cores and 64 GiB; `bind` sets VLLM_CPU_OMP_THREADS_BIND."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(replicas, "usable_cores", lambda: frozenset(range(8)))
    monkeypatch.setattr(replicas, "by_topology", sorted)
    monkeypatch.setattr(type(resolve_platform("cpu")), "free_memory_bytes", lambda self: 64 << 30)

    def bind(text):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", text)
        envs.get.cache_clear()

    bind("auto")
    yield bind
    monkeypatch.undo()
    envs.get.cache_clear()


def configs(count, num_ranks=1, backend=None, **fields):
    config = make_config()
    parallel = replace(
        config.parallel,
        data_parallel_size=count,
        tensor_parallel_size=num_ranks,
        distributed_executor_backend=backend,
    )
    device = resolve_device(resolve_platform("cpu"), parallel)
    return replica_configs(replace(config, device=device, parallel=parallel, **fields))


def test_one_replica_has_everything(machine):
    (config,) = configs(1)
    assert config.device.core_share is None and config.device.memory_share_bytes is None


@pytest.mark.parametrize(
    ("text", "count", "bound", "shares"),
    [
        ("auto", 2, None, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("auto", 3, None, [(0, 1, 2), (3, 4, 5), (6, 7)]),
        ("all", 2, None, [None, None]),
        ("0-3", 2, [((0, 1),), ((2, 3),)], None),
        ("0,2|4-7", 2, [((0, 2),), ((4, 5, 6, 7),)], None),
    ],
)
def test_cores_are_divided(machine, text, count, bound, shares):
    machine(text)
    found = configs(count)
    assert [each.device.bound_cores for each in found] == (bound or [None] * count)
    assert [each.device.core_share for each in found] == (shares or [None] * count)
    assert [each.parallel.data_parallel_rank for each in found] == list(range(count))


def test_workers_of_ray_are_not_bound_to_cores_of_this_machine(machine):
    assert [each.device.core_share for each in configs(2, backend="ray")] == [None] * 2


def test_replicas_whose_workers_ray_places_need_no_cards_on_this_machine(machine):
    config = configs(2, backend="ray")[1]
    config = replace(config, device=DeviceConfig(device="hpu"))
    assert config_of(StartCore(config=config)).device.device == "hpu"
    config = replace(config, parallel=replace(config.parallel, distributed_executor_backend=None))
    with pytest.raises(ConfigError, match="needs 2 cards, but this machine has 0"):
        config_of(StartCore(config=config))


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("0-3", [((0, 1), (0, 1)), ((2, 3), (2, 3))]),
        ("0-1|4-5", [((0, 1), (0, 1)), ((4, 5), (4, 5))]),
        ("0|1|4|5", [((0,), (1,)), ((4,), (5,))]),
    ],
)
def test_workers_of_replicas_have_cores(machine, text, bound):
    machine(text)
    assert [each.device.bound_cores for each in configs(2, num_ranks=2)] == bound


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0|1|2", "has 3 lists of cores, and --data-parallel-size is 2"),
        ("0-3|auto", "must be the only list"),
        ("5", "names 1 cores for --data-parallel-size 2"),
        ("0|9", "cannot use the cores 9"),
    ],
)
def test_wrong_lists_of_cores_are_refused(machine, text, message):
    machine(text)
    with pytest.raises(ConfigError, match=message):
        configs(2)


@pytest.mark.parametrize(
    ("text", "num_threads", "num_nodes", "num_replicas", "num_steps"),
    [
        ("auto", None, 1, 1, 1),
        ("auto", None, 2, 1, 2),  # the ranks of each stage are on a NUMA node of their own
        ("auto", None, 1, 2, 1),
        ("0-3|4-7", None, 1, 1, 2),
        ("0-7", None, 1, 1, 1),  # both stages use these cores
        ("0-4|4-7", None, 1, 1, 1),
        ("0-3|4-7", None, 1, 2, 1),  # the stages of each replica use one of these lists
        ("all", None, 1, 1, 1),
        ("auto", "4", 1, 1, 2),
        ("auto", "5", 1, 1, 1),
        ("auto", "4,2", 1, 2, 1),
        ("auto", "2", 1, 2, 2),
    ],
)
def test_stages_on_the_same_cores_take_turns(
    machine, monkeypatch, text, num_threads, num_nodes, num_replicas, num_steps
):
    monkeypatch.setattr(resolve_module, "usable_cores", lambda: frozenset(range(8)))
    monkeypatch.setattr(resolve_module, "nodes_of", lambda cores: list(range(num_nodes)))
    if num_threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", num_threads)
    machine(text)
    asked = ParallelConfig(pipeline_parallel_size=2, data_parallel_size=num_replicas)
    device = resolve_device(resolve_platform("cpu"), asked)
    model = make_config().model
    assert resolve_parallel(asked, model, device).num_pipelined_steps == num_steps
    for steps in (1, 2):
        given = replace(asked, pipeline_steps_in_flight=steps)
        assert resolve_parallel(given, model, device) == replace(
            given, pipeline_layer_partition=(3, 3)
        )


def test_cards_do_not_share_cores_and_a_pipeline_has_no_more_steps_than_stages():
    asked = ParallelConfig(pipeline_parallel_size=2)
    found = resolve_parallel(asked, make_config().model, DeviceConfig(device="hpu"))
    assert found.num_pipelined_steps == 2
    with pytest.raises(ConfigError, match=r"from 1 to pipeline_parallel_size \(2\), got 3"):
        replace(asked, pipeline_steps_in_flight=3)


def test_memory_is_divided(machine):
    cache = replace(make_config().cache, kv_cache_memory_bytes=8 << 30)
    for config in configs(4, cache=cache):
        assert config.device.memory_share_bytes == 16 << 30
        assert config.cache.kv_cache_memory_bytes == 2 << 30


def test_events_of_each_replica_have_a_port(machine):
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "replay_endpoint": "tcp://*:6000"}
    found = configs(2, observability=ObservabilityConfig(kv_events_config=events))
    addresses = [
        (c.observability.kv_events.endpoint, c.observability.kv_events.replay_endpoint)
        for c in found
    ]
    assert addresses == [("tcp://*:5557", "tcp://*:6000"), ("tcp://*:5558", "tcp://*:6001")]
    events["endpoint"] = "ipc:///tmp/x"
    with pytest.raises(ConfigError, match="endpoint 'ipc:///tmp/x' has no port"):
        configs(2, observability=ObservabilityConfig(kv_events_config=events))


def test_the_offline_engine_has_one_replica():
    with pytest.raises(
        ConfigError, match="data_parallel_size=2: LLM runs one replica in one process"
    ):
        LLMEngine.from_engine_args(EngineArgs(data_parallel_size=2))


@pytest.mark.parametrize(
    ("visible", "index", "own"), [("", 1, "2,3"), ("1, 3,5,7", 0, "1,3"), ("1,3,5,7", 1, "5,7")]
)
def test_each_replica_sees_its_own_cards(monkeypatch, visible, index, own):
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    env_ranks.export_replica(index, 2, 2)
    assert os.environ["HABANA_VISIBLE_MODULES"] == own
    with pytest.raises(ConfigError, match=r"names 2 cards, but the engine needs 4.*data_parallel"):
        env_ranks.export_replica(index, 2, 2)
