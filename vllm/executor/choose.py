"""Choose the executor that a config asks for."""

from vllm.config import VllmConfig
from vllm.config.parallel import check_tensor_split
from vllm.executor.base import Executor
from vllm.executor.uniproc import UniProcExecutor


def make_executor(config: VllmConfig) -> Executor:
    """Create the executor of an engine, without starting it.

    Raises:
        ConfigError: the model cannot be divided over the devices, or the launcher of this process
            does not fit.
    """
    arch = config.model.resolved_arch
    # Check before any process starts. Workers check the models that they build, which may include a
    # draft model.
    check_tensor_split(
        config.parallel.tensor_parallel_size,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        intermediate_size=arch.intermediate_size,
    )
    if config.parallel.distributed_executor_backend == "ray":
        from vllm.executor.ray.executor import RayExecutor

        return RayExecutor(config)
    if config.parallel.distributed_executor_backend == "external_launcher":
        from vllm.executor.external import ExternalExecutor

        return ExternalExecutor(config)
    if config.parallel.world_size == 1:
        return UniProcExecutor(config)
    from vllm.executor.multiproc import MultiprocExecutor

    return MultiprocExecutor(config)
