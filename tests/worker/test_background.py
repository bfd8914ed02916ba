"""Threads that prepare things beside steps."""

import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import torch

from vllm.worker import background
from vllm.worker.background import StepClock, run_in_background


def test_work_takes_one_thread_and_short_turns_and_leaves_nothing_behind():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = Future()
        run_in_background(
            lambda: found.set_result((torch.get_num_threads(), sys.getswitchinterval()))
        )
        assert found.result(10) == (1, background._SHORT_TURN_S)
        assert torch.get_num_threads() == 2
        after = Future()  # of a thread that begins later
        threading.Thread(target=lambda: after.set_result(torch.get_num_threads())).start()
        assert after.result(10) == 2
    finally:
        torch.set_num_threads(threads)


def test_turns_have_their_usual_length_again_when_the_last_of_several_threads_ends():
    usual = sys.getswitchinterval()
    begun, ends = [Future(), Future()], [threading.Event(), threading.Event()]

    def work(number: int) -> None:
        begun[number].set_result(threading.current_thread())
        ends[number].wait(10)

    for number in range(2):
        run_in_background(lambda number=number: work(number))
    threads = [future.result(10) for future in begun]
    for number in range(2):  # the first to begin is the first to end
        assert sys.getswitchinterval() == background._SHORT_TURN_S
        ends[number].set()
        threads[number].join(10)
    assert sys.getswitchinterval() == usual


def test_steps_run_for_a_while_after_the_last_has_begun(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now[0]))
    steps = StepClock()
    steps._began = now[0] - 1
    assert not steps.is_busy()
    steps.note()
    assert steps.is_busy()
    now[0] += 1
    assert not steps.is_busy()
