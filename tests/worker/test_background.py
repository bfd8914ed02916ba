"""Test threads that prepare work parallel to steps."""

import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import torch

from vllm.utils.background_work import TIME_SLICE_S
from vllm.worker.parts import adapters
from vllm.worker.parts.adapters import StepClock, run_in_background


def test_work_takes_one_thread_and_short_turns_and_leaves_nothing_behind():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = Future()
        run_in_background(
            lambda: found.set_result((torch.get_num_threads(), sys.getswitchinterval()))
        )
        assert found.result(10) == (1, TIME_SLICE_S)
        assert torch.get_num_threads() == 2
        after = Future()  # the number of threads in a thread that begins later
        threading.Thread(target=lambda: after.set_result(torch.get_num_threads())).start()
        assert after.result(10) == 2
    finally:
        torch.set_num_threads(threads)


def test_steps_run_for_a_while_after_the_last_has_begun(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(adapters, "time", SimpleNamespace(monotonic=lambda: now[0]))
    steps = StepClock()
    assert not steps.is_busy()
    steps.note()
    assert steps.is_busy()
    now[0] += 1
    assert not steps.is_busy()
