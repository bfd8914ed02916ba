"""Where workers live."""

from vllm.executor.base import Executor
from vllm.executor.uniproc import UniProcExecutor

__all__ = ["Executor", "UniProcExecutor"]
