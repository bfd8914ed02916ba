"""When it pays to schedule a step before the last one is done."""

import pytest

from vllm.engine import run_ahead
from vllm.engine.run_ahead import RunAhead


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(run_ahead, "time", clock)
    return clock


def run_steps(policy: RunAhead, clock: Clock, host_s: float, wait_s: float, count: int = 60):
    for _ in range(count):
        clock.now += host_s
        policy.wait()
        clock.now += wait_s
        policy.result()


@pytest.mark.parametrize(
    ("host_s", "wait_s", "pays"), [(0.5e-3, 2e-3, True), (0.5e-3, 60e-3, False), (1e-3, 0, True)]
)
def test_it_pays_where_the_host_has_a_share_worth_hiding(clock, host_s, wait_s, pays):
    policy = RunAhead(True)
    assert not policy.is_worthwhile  # nothing is known yet
    run_steps(policy, clock, host_s, wait_s)
    assert policy.is_worthwhile == pays


def test_it_follows_a_load_that_changes(clock):
    policy = RunAhead(True)
    run_steps(policy, clock, 1e-3, 2e-3)
    assert policy.is_worthwhile
    run_steps(policy, clock, 1e-3, 100e-3)
    assert not policy.is_worthwhile


def test_an_idle_hour_is_no_work_of_the_host(clock):
    policy = RunAhead(True)
    run_steps(policy, clock, 0.1e-3, 50e-3)
    policy.idle()
    run_steps(policy, clock, 3600, 50e-3, count=1)
    run_steps(policy, clock, 0.1e-3, 50e-3, count=1)
    assert not policy.is_worthwhile


def test_switched_off_it_never_pays(clock):
    policy = RunAhead(False, min_share=0)
    run_steps(policy, clock, 1, 1)
    assert not policy.is_worthwhile
