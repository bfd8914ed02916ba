"""Where workers live."""

from vllm.executor.base import Executor
from vllm.executor.choose import make_executor
from vllm.executor.uniproc import UniProcExecutor
from vllm.executor.worker_call import WorkerMethod
from vllm.worker.interface import StepHandleLike

__all__ = ["Executor", "StepHandleLike", "UniProcExecutor", "WorkerMethod", "make_executor"]
