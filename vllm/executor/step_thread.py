"""A thread that runs steps one after the other, for devices that compute in the call itself."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vllm.messages import ModelRunnerOutput, SchedulerOutput
from vllm.platforms.cpu_threads import count_cores
from vllm.worker.interface import Worker


def has_core_to_spare() -> bool:
    """Whether a core is left for scheduling while all threads of the model compute.

    Without one, the host takes a core away from a thread for which the others wait: a quarter of
    the tokens per second of a small model was lost on two cores.
    """
    return count_cores() > torch.get_num_threads()


class StepThread:
    """Makes a worker asynchronous whose `execute_model` returns when the step is done.

    All steps run in the same thread: OpenMP keeps a team of threads for each that calls it.

    Args:
        worker: loaded.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")

    def execute_model(self, step: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        """Queue a step; its tokens are known before the next begins."""
        return self._threads.submit(self._run, step)

    def shutdown(self) -> None:
        """Wait for the step that runs, and end the thread."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._worker.execute_model(step).result()
