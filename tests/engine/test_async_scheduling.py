"""Test when a step is scheduled before the last one is done, because this is faster."""

import pytest

from vllm.engine import async_scheduling
from vllm.engine.async_scheduling import AsyncSchedulingPolicy


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(async_scheduling, "time", clock)
    return clock


def run_steps(
    policy: AsyncSchedulingPolicy, clock: Clock, host_s: float, wait_s: float, count: int = 60
):
    for _ in range(count):
        clock.now += host_s
        policy.wait()
        clock.now += wait_s
        policy.result()


@pytest.mark.parametrize(
    ("host_s", "wait_s", "pays"), [(0.5e-3, 2e-3, True), (0.5e-3, 60e-3, False), (1e-3, 0, True)]
)
def test_it_pays_where_the_host_has_a_share_worth_hiding(clock, host_s, wait_s, pays):
    policy = AsyncSchedulingPolicy(True)
    assert not policy.should_schedule_ahead  # the policy has measured nothing yet
    run_steps(policy, clock, host_s, wait_s)
    assert policy.should_schedule_ahead == pays


def test_it_follows_a_load_that_changes(clock):
    policy = AsyncSchedulingPolicy(True)
    run_steps(policy, clock, 1e-3, 2e-3)
    assert policy.should_schedule_ahead
    run_steps(policy, clock, 1e-3, 100e-3)
    assert not policy.should_schedule_ahead


def test_an_idle_hour_is_no_work_of_the_host(clock):
    policy = AsyncSchedulingPolicy(True)
    run_steps(policy, clock, 0.1e-3, 50e-3)
    policy.idle()
    run_steps(policy, clock, 3600, 50e-3, count=1)
    run_steps(policy, clock, 0.1e-3, 50e-3, count=1)
    assert not policy.should_schedule_ahead


def test_switched_off_it_never_pays(clock):
    policy = AsyncSchedulingPolicy(False, min_share=0)
    run_steps(policy, clock, 1, 1)
    assert not policy.should_schedule_ahead
