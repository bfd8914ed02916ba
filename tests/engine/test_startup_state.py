"""Test the log of a start: one line per phase, and the progress of long phases."""

import logging

import pytest

from vllm.engine.process import startup_state
from vllm.engine.process.startup_state import StartupState


@pytest.fixture
def lines():
    """Return the lines that have been logged."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    startup_state.logger.addHandler(handler)
    yield found
    startup_state.logger.removeHandler(handler)


@pytest.fixture
def now(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(startup_state.time, "monotonic", lambda: clock[0])
    return clock


def test_each_phase_is_a_line_with_the_time_of_the_one_before(lines, now):
    startup = StartupState()
    startup.report("importing")
    now[0] += 2.5
    startup.report("loading weights")
    startup.report("loading weights", 1, 3)
    now[0] += 4
    startup.set_ready()
    startup.set_unready("restarting the engine")
    now[0] += 1
    startup.set_failed(RuntimeError())
    assert lines == [
        "start: importing",
        "start: importing took 2.5 s; now: loading weights",
        "start: loading weights took 4.0 s",
        "start: restarting the engine",
        "start: restarting the engine took 1.0 s",
    ]


def test_a_long_phase_tells_its_progress_now_and_then(lines, now):
    startup = StartupState()
    for done in range(30):
        startup.report("loading weights", done, 30)
        now[0] += 1
    assert lines == [
        "start: loading weights",
        "start: loading weights: 10 of 30, about 20 s left of this phase",
        "start: loading weights: 20 of 30, about 10 s left of this phase",
    ]


def test_once_the_whole_start_is_estimated_the_log_has_that_figure(lines, now):
    startup = StartupState()
    for done in range(12):
        startup.report("warm-up: prefill buckets", done, 12, 300.0 - done)
        now[0] += 1
    assert lines == [
        "start: warm-up: prefill buckets",
        "start: warm-up: prefill buckets: 10 of 12, about 290 s left",
    ]
