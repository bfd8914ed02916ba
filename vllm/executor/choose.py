"""The executor that a config asks for."""

from vllm.config import VllmConfig
from vllm.executor.base import Executor
from vllm.executor.uniproc import UniProcExecutor


def make_executor(config: VllmConfig) -> Executor:
    """The executor of an engine, not yet started."""
    if config.parallel.distributed_executor_backend == "ray":
        from vllm.executor.ray_executor import RayExecutor

        return RayExecutor(config)
    if config.parallel.distributed_executor_backend == "external_launcher":
        from vllm.executor.external import ExternalExecutor

        return ExternalExecutor(config)
    if config.parallel.world_size == 1:
        return UniProcExecutor(config)
    from vllm.executor.multiproc import MultiprocExecutor

    return MultiprocExecutor(config)
