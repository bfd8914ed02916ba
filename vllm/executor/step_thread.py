"""Run steps one after the other in a thread, for devices that compute inside the call."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from vllm.logger import init_logger
from vllm.messages import ModelRunnerOutput, SchedulerOutput
from vllm.platforms.cpu_threads import count_cores
from vllm.worker.interface import Worker

logger = init_logger(__name__)


def has_core_to_spare(num_workers: int = 1) -> bool:
    """Return whether a core is left for scheduling while all threads of the model compute.

    Without a free core, the host takes a core away from a thread for which the others wait. On two
    cores, a small model lost a quarter of its tokens per second.

    Args:
        num_workers: number of workers on this machine, each with as many threads as this process.
    """
    # Imported here, because torch takes seconds to import and a server does not need it.
    import torch

    return count_cores() > num_workers * torch.get_num_threads()


class _Job:
    """Work that is queued or running, and its result.

    Args:
        work: function to run in the thread.
        is_step: whether the work is a step or belongs to one; if it fails, the state of the worker
            is unknown.
    """

    def __init__(self, work: Callable[[], Any], *, is_step: bool) -> None:
        self.future: Future[Any] = Future()
        self._work = work
        self._is_step = is_step

    def run(self, failure: str | None) -> str | None:
        """Run the job, unless an earlier step has failed. Returns the failure of this or the
        earlier step, if there is one.
        """
        if not self.future.set_running_or_notify_cancel():
            return failure
        if failure is not None:
            self.future.set_exception(RuntimeError(f"an earlier step failed: {failure}"))
            return failure
        try:
            self.future.set_result(self._work())
        except BaseException as error:
            self.future.set_exception(error)
            return repr(error) if self._is_step else None
        return None


_Jobs = SimpleQueue[_Job | None]


class StepThread:
    """Makes the steps of a worker asynchronous: runs its synchronous `execute_model` in a thread.

    All steps run in the same thread, because OpenMP keeps a team of threads for each calling
    thread. After a step fails no other step is run, because the state of the worker is unknown.

    Args:
        worker: a loaded worker.
    """

    # Not a ThreadPoolExecutor: those accept no work once the main thread has ended, while other
    # threads of a program may still generate.

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._jobs: _Jobs = SimpleQueue()
        thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name="step", daemon=True)
        thread.start()
        # The thread does not reference its owner, so it ends when the owner is garbage-collected,
        # or at exit.
        self._end = weakref.finalize(self, _end, self._jobs, thread)

    def execute_model(self, step: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        """Queue a step. Its tokens are recorded before the next step begins."""
        worker = self._worker
        return self._put(_Job(lambda: worker.execute_model(step).result(), is_step=True))

    def call(self, work: Callable[[], Any]) -> "Future[Any]":
        """Queue a call that runs after earlier steps. If it fails, only the call fails."""
        return self._put(_Job(work, is_step=False))

    def post(self, name: str, work: Callable[[], Any]) -> "Future[Any]":
        """Queue a call whose result nobody reads. If it fails, the error is logged and no later
        step is run.

        Args:
            name: name of the call in the log.
            work: function to run in the thread.
        """

        def run() -> None:
            try:
                work()
            except BaseException:
                logger.error("%s failed, so no step is run any more", name, exc_info=True)
                raise

        return self._put(_Job(run, is_step=True))

    def _put(self, job: _Job) -> "Future[Any]":
        self._jobs.put(job)
        return job.future

    def shutdown(self) -> None:
        """Wait for the running step, cancel the queued steps, and end the thread."""
        self._end()


def _run_jobs(jobs: _Jobs) -> None:
    failure: str | None = None
    while (job := jobs.get()) is not None:
        failure = job.run(failure)
        del job  # otherwise this reference keeps the worker alive


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    while True:
        try:
            job = jobs.get_nowait()
        except Empty:
            break
        if job is not None:
            job.future.cancel()
    jobs.put(None)
    # This thread itself may garbage-collect the owner during a step, and cannot wait for itself.
    if thread is not threading.current_thread():
        thread.join()
