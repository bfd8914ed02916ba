"""Steps in a thread of their own: in order, each with its own result or failure."""

import threading

import numpy as np
import pytest

from vllm.executor.step_thread import StepThread
from vllm.messages import ModelRunnerOutput, SchedulerOutput
from vllm.worker.model_runner import StepHandle


class SlowWorker:
    """Waits for `may_run` in its first step; fails in step 1."""

    def __init__(self) -> None:
        self.may_run = threading.Event()
        self.steps: list[int] = []
        self.threads: set[int] = set()

    def execute_model(self, step: SchedulerOutput) -> StepHandle:
        assert self.may_run.wait(timeout=30)
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


def test_steps_are_queued_at_once_and_run_one_after_the_other():
    worker = SlowWorker()
    thread = StepThread(worker)
    handles = [thread.execute_model(make_step(i)) for i in range(3)]
    assert worker.steps == []  # the caller did not wait
    worker.may_run.set()
    assert handles[2].result().step_id == 2 and handles[0].result().step_id == 0
    with pytest.raises(ValueError, match="step 1 is bad"):
        handles[1].result()
    thread.shutdown()
    assert worker.steps == [0, 1, 2]
    assert len(worker.threads) == 1 and threading.get_ident() not in worker.threads
