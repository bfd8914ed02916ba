"""Test steps in a separate thread: they run in order, none runs after one that failed, and the
thread always ends.
"""

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from tests.core.helpers import make_request
from tests.hpu import captured_log
from tests.reach import record_tokens, replace_worker
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.executor.step_thread import StepThread
from vllm.executor.uniproc import UniProcExecutor
from vllm.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput
from vllm.worker.runner import StepHandle


class SlowWorker:
    """Waits for `may_run` in its first step, and fails in step 1."""

    def __init__(self) -> None:
        self.may_run = threading.Event()
        self.steps: list[int] = []
        self.threads: set[int] = set()

    def execute_model(self, step: SchedulerOutput) -> StepHandle:
        assert self.may_run.wait(timeout=120)
        self.steps.append(step.step_id)
        self.threads.add(threading.get_ident())
        if step.step_id == 1:
            raise ValueError("step 1 is bad")
        none = np.empty(0, np.int32)
        return StepHandle(
            lambda: ModelRunnerOutput(step_id=step.step_id, rows=none, token_ids=none)
        )


def make_step(step_id: int) -> SchedulerOutput:
    none = np.empty(0, np.int32)
    return SchedulerOutput(
        step_id=step_id,
        freed_rows=[],
        new_requests=[],
        rows=none,
        num_computed_tokens=none,
        num_scheduled_tokens=none,
        block_rows=none,
        block_ids=none,
    )


def step_threads() -> set[threading.Thread]:
    """Return the step threads that run; an engine of another test may have one too."""
    return {thread for thread in threading.enumerate() if thread.name == "step"}


def test_steps_are_queued_at_once_and_run_one_after_the_other():
    worker, before = SlowWorker(), step_threads()
    thread = StepThread(worker)
    handles = [thread.execute_model(make_step(i)) for i in (0, 2, 3)]
    assert worker.steps == []  # the caller did not wait for the step
    worker.may_run.set()
    assert handles[2].result().step_id == 3 and handles[0].result().step_id == 0
    thread.shutdown()
    assert worker.steps == [0, 2, 3]
    assert len(worker.threads) == 1 and threading.get_ident() not in worker.threads
    assert not step_threads() - before


def test_no_step_runs_after_one_that_failed():
    worker = SlowWorker()
    thread = StepThread(worker)
    handles = [thread.execute_model(make_step(i)) for i in range(3)]
    worker.may_run.set()
    assert handles[0].result().step_id == 0
    with pytest.raises(ValueError, match="step 1 is bad"):
        handles[1].result()
    for handle in (handles[2], thread.execute_model(make_step(3))):
        with pytest.raises(RuntimeError, match=r"an earlier step failed.*step 1 is bad"):
            handle.result()
    assert worker.steps == [0, 1]
    thread.shutdown()


def test_a_call_runs_after_the_steps_before_it_and_fails_alone():
    worker = SlowWorker()
    thread = StepThread(worker)
    step = thread.execute_model(make_step(0))
    calls = [thread.call(lambda: list(worker.steps)), thread.call(lambda: 1 // 0)]
    after = thread.execute_model(make_step(2))
    worker.may_run.set()
    assert calls[0].result() == [0]
    with pytest.raises(ZeroDivisionError):
        calls[1].result()
    assert (step.result().step_id, after.result().step_id) == (0, 2)
    thread.shutdown()


class HoldingWorker(SlowWorker):
    """Holds resources of requests, by their ids. Loading `slow` ends when `is_loaded` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[str] = set()
        self.is_loaded: Future[str | None] = Future()

    def prepare(self, request: EngineRequest) -> "Future[str | None] | None":
        self.held.add(request.request_id)
        return self.is_loaded if request.request_id == "slow" else None

    def release(self, request_ids: Sequence[str]) -> None:
        if "unknown" in request_ids:
            raise KeyError("unknown")
        self.held.difference_update(request_ids)

    def record_tokens(self, tokens: object) -> None:
        raise KeyError("unknown")


def executor_of(worker: HoldingWorker) -> UniProcExecutor:
    """Return an executor whose worker runs in a step thread."""
    config = VllmConfig(
        model=ModelConfig(model="m"),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_model_len=16, max_num_seqs=4, max_num_batched_tokens=16),
    )
    executor = UniProcExecutor(config)
    replace_worker(executor, worker, StepThread(worker))
    return executor


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda executor: executor.release(["unknown"]), "releasing finished requests"),
        (lambda executor: record_tokens(executor, None), "recording the tokens of another rank"),
    ],
)
def test_a_failure_whose_result_nobody_reads_is_logged_and_ends_the_steps(act, name):
    worker = HoldingWorker()
    executor = executor_of(worker)
    worker.may_run.set()
    with captured_log() as lines:
        act(executor)
        with pytest.raises(RuntimeError, match="an earlier step failed: KeyError"):
            executor.execute_model(make_step(0)).result()
    assert lines == [f"{name} failed, so no step is run any more"]
    assert worker.steps == []
    executor.shutdown()


def test_a_late_release_takes_nothing_from_a_request_that_has_the_id_now():
    worker = HoldingWorker()
    executor = executor_of(worker)
    requests = [make_request(name) for name in ("a", "slow")]
    assert executor.prepare(requests[0]) is None and executor.prepare(requests[1]) is not None
    executor.execute_model(make_step(0))
    executor.release(["a", "slow"])  # both requests wait for the step to end
    again = [executor.prepare(request) for request in requests]
    assert executor.prepare(make_request("other")) is None, "only those ids wait for the step"
    assert not any(future is None or future.done() for future in again)
    worker.may_run.set()
    assert again[0].result(timeout=120) is None
    # This call runs after the jobs before it.
    executor.collective_rpc("prepare", args=(make_request("last"),))
    assert worker.held == {"a", "slow", "other", "last"} and not again[1].done()
    worker.is_loaded.set_result("no such file")
    assert again[1].result(timeout=120) == "no such file"
    executor.release(["a"])
    executor.shutdown()


def test_shutdown_waits_for_the_step_that_runs_and_cancels_the_next():
    worker = SlowWorker()
    thread = StepThread(worker)
    handles = [thread.execute_model(make_step(i)) for i in (0, 2)]
    while not handles[0].running():
        threading.Event().wait(0.001)

    def run_when_the_next_is_cancelled():
        while not handles[1].cancelled():
            threading.Event().wait(0.001)
        worker.may_run.set()

    releasing = threading.Thread(target=run_when_the_next_is_cancelled)
    releasing.start()
    thread.shutdown()
    thread.shutdown()
    releasing.join()
    assert handles[0].result(timeout=0).step_id == 0 and worker.steps == [0]
    with pytest.raises(CancelledError):
        handles[1].result(timeout=0)


def test_a_thread_ends_with_its_owner_which_may_be_collected_in_a_step():
    class CollectingWorker(SlowWorker):
        def execute_model(self, step: SchedulerOutput) -> StepHandle:
            handle = super().execute_model(step)
            gc.collect()
            return handle

    worker, before = CollectingWorker(), step_threads()
    thread = StepThread(worker)
    handle = thread.execute_model(make_step(0))
    thread.itself = thread  # a reference cycle: only the garbage collector can free the thread
    is_gone = threading.Event()
    weakref.finalize(thread, is_gone.set)
    gc.disable()  # the collector may run in the step only
    try:
        del thread
        worker.may_run.set()
        assert handle.result(timeout=120).step_id == 0 and is_gone.is_set()
    finally:
        gc.enable()
    for runner in step_threads() - before:
        runner.join(120)
    assert not step_threads() - before


def test_steps_run_while_other_threads_of_the_program_do():
    program = """
        import threading
        from tests.executor.test_step_thread import SlowWorker, StepThread, make_step

        worker, main = SlowWorker(), threading.main_thread()
        worker.may_run.set()
        thread = StepThread(worker)

        def work():
            main.join()
            print([thread.execute_model(make_step(i)).result().step_id for i in (0, 2)])

        threading.Thread(target=work).start()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 2]\n", "", 0)
