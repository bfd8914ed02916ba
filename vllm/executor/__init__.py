"""Run workers in this process, in other processes, or on other machines."""

from vllm.executor.base import Executor, WarmUpSteps
from vllm.executor.choose import make_executor
from vllm.executor.ranks.worker_call import WorkerMethod
from vllm.executor.uniproc import UniProcExecutor
from vllm.worker.interface import StepHandleLike, WarmUpStep, Worker

__all__ = [
    "Executor",
    "StepHandleLike",
    "UniProcExecutor",
    "WarmUpStep",
    "WarmUpSteps",
    "Worker",
    "WorkerMethod",
    "make_executor",
]
