"""Test the loop of the engine core, over an executor without a model."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tests.engine.test_background_warm_up import FakeSteps
from tests.reach import host_seconds_of, replace_background_warm_up
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.engine import async_scheduling
from vllm.engine.async_scheduling import AsyncSchedulingPolicy
from vllm.engine.background_warm_up import BackgroundWarmUp
from vllm.engine.engine_core import EngineCore
from vllm.errors import CapacityError, EngineAsleepError, EngineDeadError, RequestError
from vllm.executor import Executor
from vllm.messages import EngineRequest, FinishReason, ModelRunnerOutput, SchedulerOutput
from vllm.sampling_params import SamplingParams
from vllm.worker.interface import ENGINE_METHODS, USER_METHODS, MemoryReport, Worker


class FakeHandle:
    def __init__(
        self, output: ModelRunnerOutput, log: list[str], failure: BaseException | None
    ) -> None:
        self.output = output
        self.log = log
        self.failure = failure

    def result(self) -> ModelRunnerOutput:
        self.log.append(f"result {self.output.step_id}")
        if self.failure is not None:
            raise self.failure
        return self.output


class FakeExecutor(Executor):
    """Samples token 7 for each request that reaches its end, or returns its error in `row_errors`
    once.

    Raises in step `fails_at`, or raises `failure` when the result of step `fails_late` is read.
    """

    is_asynchronous = True

    def __init__(
        self,
        fails_at: int | None = None,
        fails_late: int | None = None,
        failure: BaseException | None = None,
    ) -> None:
        self.fails_at = fails_at
        self.fails_late = fails_late
        self.failure = failure or RuntimeError("lost later")
        self.row_errors: dict[int, str] = {}
        self.log: list[str] = []
        self.is_shut_down = False
        self.preparing: dict[str, Future[None]] = {}
        self.num_tokens: dict[int, int] = {}
        self.worker_calls: dict[str, Callable[..., Any]] = {}

    def start_workers(self) -> None:
        self.is_started = True

    def call_workers(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        report = MemoryReport(free_bytes=20, block_bytes=1, num_blocks=20)
        return [report if method is Worker.measure else None]

    def execute_model(self, step: SchedulerOutput) -> FakeHandle:
        if step.step_id == self.fails_at:
            raise RuntimeError("device lost")
        self.log.append(f"execute {step.step_id}")
        for new in step.new_requests:
            self.num_tokens[new.row] = len(new.request.prompt_token_ids)
        rows = []
        for row, start, count in zip(
            step.rows.tolist(),
            step.num_computed_tokens.tolist(),
            step.num_scheduled_tokens.tolist(),
            strict=True,
        ):
            if start + count == self.num_tokens[row]:
                rows.append(row)
                self.num_tokens[row] += 1
        return FakeHandle(
            ModelRunnerOutput(
                step_id=step.step_id,
                rows=np.array(rows, np.int32),
                token_ids=np.full(len(rows), 7, np.int32),
                errors={row: self.row_errors.pop(row) for row in rows if row in self.row_errors},
            ),
            self.log,
            self.failure if step.step_id == self.fails_late else None,
        )

    def prepare(self, request: EngineRequest) -> "Future[None] | None":
        return self.preparing.get(request.request_id)

    def run_call(self, call) -> list[Any]:
        self.log.append(f"call {call.method}")
        return [self.worker_calls[call.method](*call.args, **call.kwargs)]

    def shutdown(self) -> None:
        self.is_shut_down = True


def make_core(
    async_scheduling: AsyncSchedulingPolicy | None = None, *, can_sleep: bool = False, **fails: Any
) -> EngineCore:
    config = VllmConfig(
        model=ModelConfig(enable_sleep_mode=can_sleep),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=32),
    )
    return EngineCore(
        config, FakeExecutor(**fails), async_scheduling or AsyncSchedulingPolicy(False)
    )


def make_request(
    request_id: str, max_tokens: int = 3, eos: int | None = None, num_prompt: int = 3
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(range(1, num_prompt + 1)),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        eos_token_id=eos,
        max_total_tokens=num_prompt + max_tokens,
        arrival_time=0.0,
    )


@pytest.mark.parametrize("is_ahead", [False, True])
def test_requests_run_until_each_has_its_reason_to_end(is_ahead):
    core = make_core(AsyncSchedulingPolicy(is_ahead, min_share=0))
    core.add_request(make_request("long"))
    core.add_request(make_request("stops", eos=7))
    tokens: dict[str, list[int]] = {"long": [], "stops": []}
    reasons = {}
    while core.has_unfinished_requests():
        output = core.step()
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            tokens[request_id].append(token_id)
        reasons.update({name: end.reason for name, end in output.finished.items()})
    assert tokens == {"long": [7, 7, 7], "stops": [7]}
    assert reasons == {"long": FinishReason.LENGTH, "stops": FinishReason.STOP}


def test_an_idle_engine_does_nothing():
    output = make_core(fails_at=0).step()
    assert output.request_ids == [] and output.finished == {}


def test_an_aborted_request_is_gone_at_once():
    core = make_core()
    core.add_request(make_request("a"))
    core.step()
    core.abort_requests(["a", "never seen"])
    assert not core.has_unfinished_requests()
    assert core.reset_prefix_cache()


def test_the_next_step_starts_before_the_result_of_this_one_is_asked_for():
    core = make_core(AsyncSchedulingPolicy(True, min_share=0))
    core.add_request(make_request("a", max_tokens=3))
    outputs = [core.step().token_ids for _ in range(3)]
    assert outputs == [[7], [7], [7]] and not core.has_unfinished_requests()
    starts_first = ["execute 0", "execute 1", "result 0", "execute 2", "result 1", "result 2"]
    assert core.executor.log == starts_first


def test_without_running_ahead_a_step_waits_for_the_one_before():
    core = make_core()
    core.add_request(make_request("a", max_tokens=2))
    core.step(), core.step()
    assert core.executor.log == ["execute 0", "result 0", "execute 1", "result 1"]


def test_a_step_whose_requests_have_left_is_taken_in_and_says_nothing():
    core = make_core(AsyncSchedulingPolicy(True, min_share=0))
    core.add_request(make_request("a", eos=7))
    assert core.step().finished.keys() == {"a"}
    # A step was started before the end of the request was known.
    assert core.has_unfinished_requests()
    output = core.step()
    assert output.request_ids == [] and output.finished == {}
    assert not core.has_unfinished_requests()
    assert core.executor.log[-1] == "result 1" and core.reset_prefix_cache()


def test_a_step_that_fails_later_stops_the_engine_with_the_cause():
    core = make_core(AsyncSchedulingPolicy(True, min_share=0), fails_late=1)
    core.add_request(make_request("a"))
    core.step()
    with pytest.raises(EngineDeadError, match=r"step 1 failed.*lost later"):
        core.step()
    with pytest.raises(EngineDeadError, match="lost later"):
        core.add_request(make_request("b"))


def test_a_step_that_cannot_start_stops_the_engine_while_another_is_in_flight():
    core = make_core(AsyncSchedulingPolicy(True, min_share=0), fails_at=1)
    core.add_request(make_request("a"))
    with pytest.raises(EngineDeadError, match=r"step 1 failed.*device lost"):
        core.step()
    with pytest.raises(EngineDeadError, match="device lost"):
        core.step()
    core.abort_requests(["a"])
    core.shutdown()
    assert core.executor.is_shut_down and not core.has_unfinished_requests()


def test_ctrl_c_in_a_step_stays_ctrl_c_and_the_engine_is_not_used_again():
    core = make_core(
        AsyncSchedulingPolicy(True, min_share=0), fails_late=0, failure=KeyboardInterrupt()
    )
    core.add_request(make_request("a"))
    with pytest.raises(KeyboardInterrupt):
        core.step()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        core.step()


def test_an_error_of_a_row_ends_its_request_alone_while_the_next_step_is_in_flight():
    core = make_core(AsyncSchedulingPolicy(True, min_share=0))
    core.add_request(make_request("bad"))
    core.step()  # the step with the second token of this request is in flight now
    core.add_request(make_request("good"))
    core.executor.row_errors[0] = "NaN"
    outputs = [core.step() for _ in range(6)]
    ended = {name: end for output in outputs for name, end in output.finished.items()}
    assert ended.keys() == {"bad", "good"}
    assert (ended["bad"].reason, ended["bad"].error) == (FinishReason.ERROR, "NaN")
    got = [name for output in outputs for name in output.request_ids]
    assert (got.count("bad"), got.count("good")) == (1, 3)
    assert not core.has_unfinished_requests() and core.reset_prefix_cache()


def test_an_id_may_be_used_again_while_its_last_step_is_in_flight():
    core = make_core(AsyncSchedulingPolicy(True, min_share=0))
    core.add_request(make_request("a"))
    core.step()
    core.abort_requests(["a"])
    core.add_request(make_request("a", max_tokens=2))
    outputs = []
    while core.has_unfinished_requests():
        outputs.append(core.step())
    assert outputs[0].request_ids == []  # of the first step
    assert [name for output in outputs for name in output.request_ids] == ["a", "a"]
    assert [output.num_cached_tokens for output in outputs[:2]] == [{}, {"a": 0}]


class Clock:
    """A clock in which waiting for a step takes `step_s`, and everything else no time."""

    now = 0.0
    step_s = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_a_pause_between_two_loads_is_no_work_of_the_host(monkeypatch):
    clock, policy = Clock(), AsyncSchedulingPolicy(True)
    wait = policy.wait

    def wait_for_step() -> None:
        wait()
        clock.now += clock.step_s

    monkeypatch.setattr(async_scheduling, "time", clock)
    monkeypatch.setattr(policy, "wait", wait_for_step)
    core = make_core(policy)
    core.add_request(make_request("a", max_tokens=20))
    for _ in range(10):
        clock.now += 0.001
        core.step()
    assert policy.should_schedule_ahead
    core.abort_requests(["a"])
    # One step is left in flight, and nobody waits for its result.
    assert core.has_unfinished_requests()
    clock.now += 3600
    clock.step_s = 0.1
    core.add_request(make_request("b", max_tokens=20))
    for _ in range(20):
        core.step()
    assert not policy.should_schedule_ahead


@pytest.mark.parametrize("is_ahead", [False, True])
def test_parts_of_the_warm_up_run_between_steps_and_are_no_work_of_the_host(is_ahead, monkeypatch):
    clock, parts = Clock(), FakeSteps([0.5] * 4)
    policy = AsyncSchedulingPolicy(is_ahead, min_share=0)
    monkeypatch.setattr(async_scheduling, "time", clock)
    core = make_core(policy)
    replace_background_warm_up(core, BackgroundWarmUp(parts, 1.0, 1.0, clock.perf_counter))
    run = parts.run

    def run_part() -> None:
        run()
        clock.now = parts.now
        core.executor.log.append("part")

    monkeypatch.setattr(parts, "run", run_part)
    core.add_request(make_request("a", max_tokens=12))
    core.add_request(make_request("b", max_tokens=12))
    outputs = [core.step()]
    core.abort_requests(["b"])
    while core.has_unfinished_requests():
        outputs.append(core.step())
    assert sum(len(output.token_ids) for output in outputs) in (12, 13)
    log = core.executor.log
    assert log.count("part") == 4
    started = ended = 0
    for line in log:
        started, ended = started + line.startswith("execute"), ended + line.startswith("result")
        assert line != "part" or started == ended, "a step is in flight"
    assert host_seconds_of(policy) == 0


def test_a_part_of_the_warm_up_that_fails_stops_the_engine(monkeypatch):
    parts = FakeSteps([0.5])
    core = make_core()
    replace_background_warm_up(core, BackgroundWarmUp(parts, 1.0, 1.0, parts.time))
    monkeypatch.setattr(parts, "run", lambda: 1 / 0)
    core.add_request(make_request("a"))
    with pytest.raises(EngineDeadError, match=r"a part of the warm-up failed: .*division by zero"):
        core.step()
    with pytest.raises(EngineDeadError):
        core.step()


def test_the_prefix_cache_is_not_reset_under_a_running_request():
    core = make_core()
    core.add_request(make_request("a"))
    core.step()
    assert not core.reset_prefix_cache()


def test_a_failed_step_stops_the_engine_with_the_cause():
    core = make_core(fails_at=1)
    core.add_request(make_request("a"))
    core.step()
    with pytest.raises(EngineDeadError, match="device lost"):
        core.step()
    with pytest.raises(EngineDeadError, match="device lost"):
        core.add_request(make_request("b"))
    with pytest.raises(EngineDeadError):
        core.step()


def test_shutdown_lets_the_workers_go():
    core = make_core()
    core.shutdown()
    assert core.executor.is_shut_down


def test_the_batch_goes_on_while_something_is_loaded_for_another_request():
    core = make_core()
    loading = core.executor.preparing["slow"] = Future()
    core.add_request(make_request("slow", max_tokens=2))
    core.add_request(make_request("a", max_tokens=5))
    assert core.stats().num_waiting == 2
    assert [core.step().request_ids for _ in range(3)] == [["a"]] * 3
    loading.set_result(None)
    assert core.step().request_ids == ["a", "slow"]
    assert core.step().finished.keys() == {"a", "slow"}
    assert not core.has_unfinished_requests()


def test_a_request_that_waits_for_loading_can_be_aborted_and_refused():
    core = make_core()
    core.executor.preparing["slow"] = Future()
    core.add_request(make_request("slow"))
    assert core.has_unfinished_requests()
    assert core.step().request_ids == [], "and the caller can take in messages"
    with pytest.raises(RequestError, match="already being processed"):
        core.add_request(make_request("slow"))
    core.abort_requests(["slow"])
    assert not core.has_unfinished_requests()
    core.executor.preparing["long"] = Future()
    with pytest.raises(RequestError, match="max_model_len"):
        core.add_request(make_request("long", max_tokens=1000))
    assert not core.has_unfinished_requests()


def test_workers_are_called_by_name_but_not_for_what_the_engine_does_itself():
    core = make_core()
    core.executor.worker_calls["add"] = lambda a, b: a + b
    assert core.collective_rpc("add", args=(1,), kwargs={"b": 2}) == [3]
    for name in ENGINE_METHODS:
        message = f"{name}.*only the engine.*Accepted are get_model, .*--worker-extension-cls"
        with pytest.raises(RequestError, match=message):
            core.collective_rpc(name, args=(None,))
    for name in USER_METHODS:
        core.executor.worker_calls[name] = lambda: "done"
        assert core.collective_rpc(name) == ["done"]
    core.executor.worker_calls["join"] = lambda: "joined"
    assert core.call_workers("join") == ["joined"], "as the engine itself asks for it"


def test_a_call_to_the_workers_names_a_method_or_is_a_function():
    core = make_core()
    for method in (5, None, b"stats"):
        with pytest.raises(RequestError, match=f"name of a method or a function, not {method!r}"):
            core.collective_rpc(method)


class SleepingWorker:
    """A worker that records what sleeps, and an error for the next time that it wakes up."""

    def __init__(self, core: EngineCore) -> None:
        self.tags: list[str] = []
        self.error: Exception | None = None
        core.executor.worker_calls = {
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "sleeping_tags": lambda: list(self.tags),
        }

    def sleep(self, level: int) -> None:
        self.tags = ["weights", "kv_cache"]

    def wake_up(self, tags: list[str] | None) -> None:
        if self.error is not None:
            raise self.error
        self.tags = [tag for tag in self.tags if tags is not None and tag not in tags]


def run_all(core: EngineCore) -> None:
    while core.has_unfinished_requests():
        core.step()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_engine_that_sleeps_refuses_requests_until_all_of_it_is_awake(is_ahead):
    core = make_core(AsyncSchedulingPolicy(is_ahead, min_share=0), can_sleep=True)
    worker = SleepingWorker(core)
    core.add_request(make_request("a"))
    run_all(core)
    core.sleep(1)
    assert core.is_sleeping()
    for awake in (["kv_cache"], ["weights"]):
        with pytest.raises(EngineAsleepError, match="wake_up") as refusal:
            core.add_request(make_request("b"))
        assert refusal.value.status == 503
        core.wake_up(awake)
    assert not core.is_sleeping()
    core.add_request(make_request("b"))
    run_all(core)
    assert worker.tags == []


def test_nothing_sleeps_while_requests_run_and_no_step_is_in_flight_then():
    core = make_core(AsyncSchedulingPolicy(True, min_share=0), can_sleep=True)
    SleepingWorker(core)
    core.add_request(make_request("a", max_tokens=9))
    core.step()
    with pytest.raises(CapacityError, match=r"requests run or wait \(now 1\)") as refusal:
        core.sleep()
    assert refusal.value.status == 409 and not core.is_sleeping()
    core.abort_requests(["a"])
    assert core.has_unfinished_requests()  # a step was started ahead
    core.sleep()
    log = core.executor.log
    assert log[-3:-2] == ["result 1"] and log[-2] == "call sleep"
    assert not core.has_unfinished_requests()


def test_an_engine_forgets_its_prefixes_in_its_sleep():
    core = make_core(can_sleep=True)
    SleepingWorker(core)
    found = []
    for name in ("first", "second", "after"):
        if name == "after":
            core.sleep()
            core.wake_up()
        core.add_request(make_request(name, max_tokens=9, num_prompt=12))
        found.append(core.step().num_cached_tokens[name])
        run_all(core)
    assert found == [0, 8, 0]


def test_an_engine_whose_wake_up_fails_still_sleeps():
    core = make_core(can_sleep=True)
    worker = SleepingWorker(core)
    core.sleep(2)
    worker.error = ValueError("the file has gone")
    with pytest.raises(ValueError, match="gone"):
        core.wake_up()
    assert core.is_sleeping()
    worker.error = None
    core.wake_up()
    assert not core.is_sleeping()


def test_sleep_mode_must_be_on():
    core = make_core()
    for call in (core.sleep, core.wake_up):
        with pytest.raises(RequestError, match="--enable-sleep-mode"):
            call()
    assert not core.is_sleeping()
