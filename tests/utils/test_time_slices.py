"""Test that the interpreter switches threads often while background work runs, and only then."""

import sys
import threading
from concurrent.futures import Future

from vllm.utils.background_work import TIME_SLICE_S, start_in_time_slices


def test_turns_have_their_usual_length_again_when_the_last_of_several_threads_ends():
    usual = sys.getswitchinterval()
    begun, ends = [Future(), Future()], [threading.Event(), threading.Event()]

    def work(number: int) -> None:
        begun[number].set_result(threading.current_thread())
        ends[number].wait(120)

    for number in range(2):
        start_in_time_slices(lambda number=number: work(number), "test")
    threads = [future.result(120) for future in begun]
    for number in range(2):  # the blocks that begin first also end first
        assert sys.getswitchinterval() == TIME_SLICE_S
        ends[number].set()
        threads[number].join(120)
    assert sys.getswitchinterval() == usual


def test_work_is_done_at_once_where_no_thread_can_be_started(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = Future()
    start_in_time_slices(lambda: done.set_result(threading.current_thread()), "test")
    assert done.result(0) is threading.current_thread()
