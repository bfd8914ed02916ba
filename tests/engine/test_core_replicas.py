"""Test the asynchronous engine over several fake cores: division of requests, failures, draining,
restarts.
"""

import asyncio
import threading
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.fakes import make_config
from tests.engine.test_async_llm_engine import collect, params, until
from tests.fake_core import FakeCoreClient, FakeEngineCore, fake_clients
from tests.reach import startups_of
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.engine.metrics.registry import expose
from vllm.engine.process.admission import AdmissionLimits
from vllm.engine.process.wire import CoreFailed
from vllm.engine.replicas.core_replicas import CoreReplicas
from vllm.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    RequestError,
    RequestTimeoutError,
    WeightLoadError,
    WorkerCallError,
)
from vllm.messages import SchedulerStats


class Worker:
    """A worker that records its weights and its trace.

    Attributes:
    folder: folder from which its weights were read. lost: a folder that is not there. has_trace: it
        records a trace.
    """

    folder = "MODEL"
    lost = "gone"
    has_trace = False

    def name(self):
        return "worker"

    def reload_weights(self, weights_path=None):
        if weights_path == self.lost:
            raise WeightLoadError(f"{weights_path}: no such folder")
        self.folder = weights_path or self.folder

    def start_profile(self):
        self.has_trace = True

    def stop_profile(self):
        if not self.has_trace:
            raise RequestError("no trace is being recorded")
        self.has_trace = False


def make_clients(count=2, **fields):
    clients = [
        FakeCoreClient(FakeEngineCore(lambda request: [10, 11, 12]), **fields) for _ in range(count)
    ]
    for client in clients:
        client.core.worker = Worker()
    return clients


@pytest.fixture
def run(monkeypatch):
    """Run `check(engine, *clients)` on an engine of two replicas with fake cores."""

    def run(check, *, num_clients=2, **engine_args):
        clients = make_clients(num_clients)
        config = make_config()
        parallel = replace(config.parallel, data_parallel_size=2)

        async def main():
            engine = AsyncLLM(config=replace(config, parallel=parallel), **engine_args)
            try:
                await engine.start()
                await check(engine, *clients)
            finally:
                engine.shutdown()
            assert all(client.is_closed for client in clients)
            assert [state.num_tokens for state in engine.replica_states()] == [0, 0]

        with fake_clients(*clients):
            asyncio.run(main())

    return run


def added(*clients):
    return [len(client.core.added) for client in clients]


async def hold(engine, clients, count=4):
    """Start requests that do not finish, half of them on each replica."""
    for client in clients:
        client.is_held = True
    tasks = [asyncio.create_task(collect(engine, f"held{n}", [n])) for n in range(count)]
    await until(lambda: sum(len(client.received) for client in clients) == count)
    return tasks


def release(*clients):
    for client in clients:
        client.is_held = False
        client.turn()


def test_requests_are_divided_and_their_numbers_added(run):
    async def check(engine, *clients):
        found = await asyncio.gather(*(collect(engine, f"r{n}", [n]) for n in range(8)))
        assert all(outputs[-1].finished for outputs in found)
        assert added(*clients) == [4, 4]
        assert engine.stats.num_kv_blocks == 200 and engine.stats.num_running == 0
        metrics = engine.metrics
        assert metrics.num_generation_tokens == 32 and len(metrics.recent) == 8
        assert [each.num_generation_tokens for each in metrics.replicas] == [16, 16]
        page = expose(metrics.metric_sets())[0].decode()
        assert page.count("# TYPE vllm:generation_tokens_total counter") == 1
        for index in range(2):
            label = f'engine="{index}",model_name="stdlib"'
            assert f"vllm:generation_tokens_total{{{label}}} 16.0" in page
            assert f"vllm:e2e_request_latency_seconds_count{{{label}}} 4.0" in page
        assert len(list(text_string_to_metric_families(page))) == page.count("# TYPE ")

    run(check)


def test_the_caller_may_name_the_replica(run):
    async def check(engine, *clients):
        for n in range(3):
            async for _ in engine.generate([n], params(), f"r{n}", data_parallel_rank=1):
                pass
        assert added(*clients) == [0, 3]
        with pytest.raises(RequestError, match="data_parallel_rank=2: this replica does not exist"):
            async for _ in engine.generate([1], params(), "r", data_parallel_rank=2):
                pass

    run(check)


def test_aborts_go_to_the_replica_that_has_the_request(run):
    async def check(engine, *clients):
        tasks = await hold(engine, clients)
        await engine.abort([f"held{n}" for n in range(4)])
        release(*clients)
        for outputs in await asyncio.gather(*tasks):
            assert outputs[-1].outputs[0].finish_reason == "abort"
        assert sorted(len(client.core.aborted) for client in clients) == [2, 2]

    run(check)


def test_a_replica_that_dies_loses_its_requests_alone(run):
    async def check(engine, first, second):
        tasks = await hold(engine, (first, second))
        for metrics in engine.metrics.replicas:
            metrics.stats = SchedulerStats(num_running=2)
        first.die()
        assert engine.metrics.totals.num_running == 2 and not engine.metrics.num_restarts
        release(second)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [each for each in found if isinstance(each, EngineDeadError)]
        assert [str(each) for each in lost] == [
            "the engine process of replica 0 has ended (signal 9)"
        ] * 2
        assert sum(isinstance(each, list) and each[-1].finished for each in found) == 2
        reasons = sorted(request.finish_reason for request in engine.metrics.recent)
        assert reasons == ["error", "error", "length", "length"]
        assert engine.is_running and not engine.errored
        assert [state.state for state in engine.replica_states()] == ["failed", "ready"]
        assert (await collect(engine, "after"))[-1].finished
        with pytest.raises(CapacityError, match=r"data_parallel_rank=0: .* \(failed\)"):
            async for _ in engine.generate([1], params(), "r", data_parallel_rank=0):
                pass
        deaths = []
        engine.on_death(deaths.append)
        second.die()
        assert engine.errored and len(deaths) == 1
        with pytest.raises(EngineDeadError):
            await collect(engine, "too late")

    run(check)


def test_a_replica_that_died_comes_back_while_the_other_serves(run):
    async def check(engine, first, second, third):
        tasks = await hold(engine, (first, second))
        first.die()
        assert engine.is_running
        release(second)
        await asyncio.gather(*tasks, return_exceptions=True)
        while engine.replica_states()[0].state != "ready":
            assert (await collect(engine, "meanwhile"))[-1].finished
        for n in range(4):
            assert (await collect(engine, f"r{n}"))[-1].finished
        assert third.core.added and engine.num_restarts_done == 1
        assert engine.metrics.num_restarts == 1
        assert [each.num_restarts for each in engine.metrics.replicas] == [1, 0]

    run(check, num_clients=3, num_restarts=1)


def test_a_replica_is_drained_and_restarted_while_the_other_serves(run):
    async def check(engine, first, second, third):
        tasks = await hold(engine, (first, second))
        restart = asyncio.create_task(engine.restart_replica(0))
        await until(lambda: engine.replica_states()[0].state == "draining")
        release(second)
        before = len(first.core.added)
        for n in range(3):
            assert (await collect(engine, f"r{n}"))[-1].finished
        assert engine.replica_states()[0].state == "draining" and not restart.done()
        release(first)
        await restart
        assert all(outputs[-1].finished for outputs in await asyncio.gather(*tasks))
        assert first.is_closed and len(first.core.added) >= before
        for n in range(4):
            assert (await collect(engine, f"s{n}"))[-1].finished
        assert third.core.added and engine.is_running

    run(check, num_clients=3)


def test_the_other_replica_serves_while_the_process_of_one_ends(run):
    """The kernel needs seconds to free its memory or its card, and only then may a new process
    start.
    """

    async def check(engine, first, second, third):
        is_freed = threading.Event()

        def close():
            assert is_freed.wait(60), "the event loop has waited for the process"

        first.close = close
        restart = asyncio.create_task(engine.restart_replica(0))
        await until(lambda: first.is_closed)
        assert (await collect(engine, "meanwhile"))[-1].finished
        assert engine.replica_states()[0].state == "restarting the engine"
        is_freed.set()
        await restart

    run(check, num_clients=3)


def test_a_replica_that_is_resumed_before_it_is_empty_keeps_its_requests(run):
    async def check(engine, first, second):
        tasks = await hold(engine, (first, second))
        for call in (engine.drain_replica(0), engine.restart_replica(0, timeout=60)):
            task = asyncio.create_task(call)
            await until(lambda: engine.replica_states()[0].state == "draining")
            await engine.resume_replica(0)
            with pytest.raises(CapacityError, match="replica 0 was resumed") as caught:
                await task
            assert caught.value.status == 409
        release(first, second)
        assert all(outputs[-1].finished for outputs in await asyncio.gather(*tasks))
        assert [state.state for state in engine.replica_states()] == ["ready", "ready"]

    run(check)


@pytest.mark.parametrize("woken", [[], ["weights"], None])
def test_a_replica_that_is_started_again_sleeps_as_the_other_does(run, woken):
    async def check(engine, first, second, third):
        await engine.sleep(1)
        if woken != []:
            await engine.wake_up(woken)
        await engine.restart_replica(1)
        # The restarted replica got the earlier call too.
        assert await engine.collective_rpc("name") == ["worker", "worker"]
        assert third.core.sleeping_tags == first.core.sleeping_tags
        assert third.core.is_sleeping() == (woken is not None)
        assert (engine.refusal is None) == (woken is None)
        await engine.wake_up()
        assert not await engine.is_sleeping()

    run(check, num_clients=3)


def test_a_replica_that_is_started_again_has_the_weights_that_the_other_has_read(run):
    async def check(engine, first, second, third, fourth):
        # Without a folder, the weights of the last folder are loaded again.
        for args in (["A"], ["B"], []):
            await engine.collective_rpc("reload_weights", args=args)
        with pytest.raises(WorkerCallError, match="gone"):
            await engine.collective_rpc("reload_weights", args=["gone"])
        second.die()
        third.is_held = True
        tasks = [asyncio.create_task(collect(engine, f"r{n}")) for n in range(2)]
        assert all(outputs[-1].finished for outputs in await asyncio.gather(*tasks))
        await until(lambda: engine.replica_states()[1].state == "repeating reload_weights")
        assert third.core.worker.folder == "MODEL" and not third.core.added
        release(third)
        await engine.sleep(2)  # waits until the new replica has repeated its calls
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": "C"})
        assert third.core.worker.folder == first.core.worker.folder == "C"
        await engine.restart_replica(0)
        assert fourth.core.worker.folder == "C" and fourth.core.is_sleeping()
        await engine.wake_up()

    run(check, num_clients=4, num_restarts=1)


def test_a_replica_whose_weights_cannot_be_read_again_takes_no_requests(run):
    async def check(engine, first, second, third):
        await engine.collective_rpc("reload_weights", args=["A"])
        third.core.worker.lost = "A"
        with pytest.raises(EngineDeadError, match=r"reload_weights could not be repeated.*no such"):
            await engine.restart_replica(1)
        assert [state.state for state in engine.replica_states()] == ["ready", "failed"]
        assert (await collect(engine, "after"))[-1].finished

    run(check, num_clients=3)


def test_a_replica_that_ends_while_it_reads_weights_is_started_again_once(run):
    async def check(engine, first, second, third, fourth):
        second.is_held = True
        with pytest.raises(RequestTimeoutError):  # the caller stops waiting, but the call continues
            await engine.collective_rpc("reload_weights", timeout=0.01, args=["A"])
        third.is_held = True
        second.die()  # the second replica dies during the call; the first one has finished it
        await until(lambda: engine.replica_states()[1].state == "repeating reload_weights")
        assert first.core.worker.folder == "A"
        third.die()
        await until(lambda: engine.replica_states()[1].state == "ready")
        assert fourth.core.worker.folder == "A" and engine.num_restarts_done == 2

    run(check, num_clients=4, num_restarts=2)


def test_a_trace_ends_although_a_replica_was_started_again(run):
    async def check(engine, first, second, third):
        await engine.start_profile()
        await engine.restart_replica(1)
        assert await engine.stop_profile() == [
            "replica 1 has no trace, because it was restarted after the trace began"
        ]
        assert not first.core.worker.has_trace
        with pytest.raises(RequestError, match="no trace is being recorded"):
            await engine.stop_profile()
        await engine.start_profile()
        assert await engine.stop_profile() == []
        await engine.start_profile()
        third.die()
        assert await engine.stop_profile() == ["replica 1 has no trace: its state is 'failed'"]

    run(check, num_clients=3)


def test_requests_that_do_not_end_in_time_are_lost_by_a_restart(run):
    async def check(engine, first, second, third):
        tasks = await hold(engine, (first, second))
        await engine.restart_replica(1, timeout=0.05)
        release(first)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [str(each) for each in found if isinstance(each, EngineDeadError)]
        assert lost == ["the engine process is being restarted"] * 2
        assert (await collect(engine, "after"))[-1].finished

    run(check, num_clients=3)


def test_a_dead_replica_can_be_restarted_and_a_drained_one_resumed(run):
    async def check(engine, first, second, third):
        second.die()
        await engine.restart_replica(1)
        assert [state.state for state in engine.replica_states()] == ["ready", "ready"]
        await engine.drain_replica(0)
        assert engine.refusal is None
        await engine.drain_replica(1)
        assert engine.refusal == "every replica that is ready is being drained. Try again later"
        with pytest.raises(CapacityError, match="being drained"):
            await collect(engine, "refused")
        await engine.resume_replica(0)
        assert engine.refusal is None
        assert (await collect(engine, "taken"))[-1].finished
        with pytest.raises(RequestError, match=r"replica=2: this replica does not exist.* has 2"):
            await engine.drain_replica(2)

    run(check, num_clients=3)


def test_calls_go_to_all_replicas(run):
    async def check(engine, *clients):
        assert await engine.collective_rpc("name") == ["worker", "worker"]
        assert await engine.reset_prefix_cache()
        await engine.sleep(1)
        assert await engine.is_sleeping()
        assert all(client.core.is_sleeping() for client in clients)
        await engine.wake_up()
        assert not await engine.is_sleeping()
        task = asyncio.create_task(collect(engine, "busy", [1]))
        clients[0].is_held = clients[1].is_held = True
        await until(lambda: any(client.has_messages for client in clients))
        sleeping = asyncio.create_task(engine.sleep(1))
        await until(lambda: all(client.has_messages for client in clients))
        release(*clients)
        with pytest.raises(CapacityError, match="requests run"):
            await sleeping
        assert not await engine.is_sleeping()  # no replica sleeps if one of them cannot
        assert (await task)[-1].finished

    run(check)


def test_the_queue_counts_all_replicas(run):
    async def check(engine, *clients):
        tasks = await hold(engine, clients, count=17)  # 2 * 8 requests run and 1 waits
        with pytest.raises(CapacityError, match="the queue is full"):
            await collect(engine, "refused")
        clients[0].die()
        release(clients[1])
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await collect(engine, "taken"))[-1].finished

    run(check, limits=AdmissionLimits(max_queued_requests=1))


def test_a_replica_that_cannot_start_ends_the_start(monkeypatch):
    failure = CoreFailed(message="no memory for the KV cache", is_config_error=True)
    clients = [*make_clients(1), FakeCoreClient(FakeEngineCore(), failure)]
    config = make_config()
    parallel = replace(config.parallel, data_parallel_size=2)

    async def main():
        engine = AsyncLLM(config=replace(config, parallel=parallel))
        with pytest.raises(ConfigError, match="no memory"):
            await engine.start()
        assert engine.errored and all(client.is_closed for client in clients)
        engine.shutdown()

    with fake_clients(*clients):
        asyncio.run(main())


def test_a_start_lasts_as_long_as_that_of_the_slowest_replica():
    parallel = replace(make_config().parallel, data_parallel_size=3)
    ignore = {"on_output": print, "on_refused": print, "on_lost": print}
    replicas = CoreReplicas(parallel, 0, **ignore)
    first, second, third = startups_of(replicas)
    first.report("warm-up: prefill buckets", 2, 9, 40.0)
    second.report("warm-up: prefill buckets", 3, 9, 60.0)
    assert replicas.startup.eta_seconds is None  # the third replica has not reported anything yet
    third.report("warm-up: prefill buckets", 1, 9, 50.0)
    shown = replicas.startup
    assert (shown.phase, shown.done, shown.eta_seconds) == ("warm-up: prefill buckets", 2, 60.0)
    second.set_ready()
    assert shown.eta_seconds == 50.0
    replicas.stop(EngineDeadError("the test is over"))
