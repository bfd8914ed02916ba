"""Traces of torch's profiler that are started and stopped while the engine runs."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from vllm.errors import RequestError
from vllm.logger import init_logger
from vllm.messages import SchedulerOutput

logger = init_logger(__name__)

_NO_SPAN = nullcontext()


class TorchProfile:
    """Records one trace at a time; Perfetto and chrome://tracing can open its file.

    A trace has the operators of the thread in which it begins, so begin it where steps run.

    Args:
        folder: folder for the files; created if it does not exist. None: traces are disabled.
        worker_name: beginning of the names of the files.
        steps: (first, last) step, counted from 1, of a trace that starts and stops automatically;
            None: no such trace.
    """

    def __init__(
        self, folder: str | None, worker_name: str, steps: tuple[int, int] | None = None
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self._worker_name = worker_name
        self._profile: Any = None
        self._steps = steps
        self._num_steps = 0
        if folder is not None:
            # The first trace of a process imports modules for seconds, during which requests would
            # wait. The profiler must also be set up by the thread that imported torch.
            with _new_profile():
                pass

    def start(self) -> None:
        """Begin a trace.

        Raises:
            RequestError: there is no folder, or a trace is being recorded already.
        """
        if self._folder is None:
            raise RequestError(
                "start_profile needs a folder for the trace: set VLLM_TORCH_PROFILER_DIR=FOLDER "
                "before the engine starts"
            )
        if self._profile is not None:
            raise RequestError(
                "start_profile: a trace is being recorded already; stop it with stop_profile"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        profile = _new_profile()
        profile.start()
        self._profile = profile
        logger.info("Profiling enabled. Traces will be saved to: %s", self._folder)

    def stop(self) -> str:
        """End the trace, write its file, and return the path.

        Raises:
            RequestError: no trace is being recorded.
        """
        if self._profile is None:
            raise RequestError(
                "stop_profile: no trace is being recorded; start one with start_profile"
            )
        profile, self._profile = self._profile, None
        profile.stop()
        assert self._folder is not None
        path = self._folder / f"{self._worker_name}.{time.time_ns()}.pt.trace.json.gz"
        profile.export_chrome_trace(str(path))
        logger.info("Trace written to %s", path)
        return str(path)

    def step(self, step: SchedulerOutput) -> AbstractContextManager[Any]:
        """Return a context manager that marks a step in the trace, and starts or stops automatic
        ones.

        It does nothing while no trace is recorded.
        """
        return self._span(step) if self._steps is None else self._counted(step, *self._steps)

    @contextmanager
    def _counted(self, step: SchedulerOutput, first: int, last: int) -> Iterator[None]:
        self._num_steps += 1
        if self._num_steps == first and self._profile is None:
            self.start()
        with self._span(step):
            yield
        if self._num_steps == last:
            self._steps = None
            if self._profile is not None:
                self.stop()

    def _span(self, step: SchedulerOutput) -> AbstractContextManager[Any]:
        if self._profile is None:
            return _NO_SPAN
        return torch.profiler.record_function(
            f"step {step.step_id}: {len(step.rows)} requests, {step.num_tokens} tokens"
        )


def _new_profile() -> Any:
    """Create a profiler for all devices that this torch can profile.

    Devices registered from Python, such as the simulated card, are left out: torch 2.10 and 2.11
    take its name, hpu, for their own device, and its work is CPU operators anyway.
    """
    activities = torch.profiler.supported_activities() - {ProfilerActivity.PrivateUse1}
    # acc_events: without it, torch 2.11 prints a warning for each trace, even for a single cycle.
    return torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
