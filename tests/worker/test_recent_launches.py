"""Test the recorded times of forward passes while steps overlap, with a simulated clock."""

import pytest

from vllm.bucketing.bucket import decode, prefill
from vllm.cost_model.padded import forward_seconds
from vllm.worker.hpu.launches.step_report import RecentLaunches

DECODE, PREFILL = (1, 3, 1, 20, 4, 1, 32), (0, 1, 100, 0, 1, 128, 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(recent: RecentLaunches, *launches, is_compiled: bool = True) -> None:
    recent.begin_step()
    for phase, *sizes in launches:
        bucket = decode(4, 32) if phase else prefill(1, 128)
        recent.add((sizes[0], sizes[1], sizes[2]), bucket, is_compiled=is_compiled)


def test_a_step_takes_the_time_since_the_one_before_it():
    clock = Clock()
    recent = RecentLaunches(clock, 128)
    run(recent, DECODE)  # starts at 0 s
    clock.now = 0.001
    run(recent, DECODE)  # starts while the first step runs
    assert recent.record == ()
    clock.now = 0.010
    recent.end_step()
    assert recent.record == (1, *DECODE, 10_000)
    clock.now = 0.014
    recent.end_step()
    assert recent.record == (2, *DECODE, 10_000, *DECODE, 4000)
    clock.now = 1.0  # no request has run since the last step
    run(recent, PREFILL)
    clock.now = 1.05
    recent.end_step()
    assert recent.record == (3, *DECODE, 4000, *PREFILL, 50_000)


def test_forward_passes_of_a_step_divide_its_time():
    clock = Clock()
    recent = RecentLaunches(clock, 128)
    run(recent, DECODE, PREFILL)
    clock.now = 1.0
    recent.end_step()
    seconds = [forward_seconds(*each[0:1], *each[4:], 128) for each in (DECODE, PREFILL)]
    shares = [round(1e6 * each / sum(seconds)) for each in seconds]
    assert recent.record == (2, *DECODE, shares[0], *PREFILL, shares[1])
    assert recent.num_decode_blocks == 20 and recent.num_padded_blocks == 12


@pytest.mark.parametrize(("clock", "is_compiled"), [(Clock(), False), (None, True)])
def test_a_step_that_compiles_or_is_not_timed_has_no_time(clock, is_compiled):
    recent = RecentLaunches(clock, 128)
    run(recent, DECODE, is_compiled=is_compiled)
    Clock.now = 0.5
    recent.end_step()
    Clock.now = 0.0
    assert recent.record == (1, *DECODE, 0)


def test_a_step_without_forward_passes_changes_nothing():
    recent = RecentLaunches(None, 128)
    run(recent, DECODE)
    recent.end_step()
    run(recent)
    recent.end_step()
    assert recent.record == (1, *DECODE, 0)
