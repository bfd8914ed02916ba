"""Divide the model over workers, and check this against the model and the device."""

from dataclasses import replace

from vllm import envs
from vllm.config import DeviceConfig, ModelConfig, ParallelConfig
from vllm.config.parallel import even_partition
from vllm.errors import ConfigError
from vllm.platforms.cpu_threads import usable_cores
from vllm.platforms.numa import nodes_of

_PARTITION = "VLLM_PP_LAYER_PARTITION"


def resolve_parallel(
    asked: ParallelConfig, model: ModelConfig, device: DeviceConfig
) -> ParallelConfig:
    """Return the sizes of the groups, with the layers of each stage and the number of steps that
    run at the same time.

    Raises:
        ConfigError: the model or another setting needs one worker or one stage.
    """
    size = asked.pipeline_parallel_size
    if size == 1:
        return asked
    arch = model.resolved_arch
    if arch.is_one_stage:
        raise ConfigError(
            f"pipeline_parallel_size must be 1 for {arch.architecture}, got {size}: its last "
            "layers need results of earlier layers, embeddings or an encoder, which stages do not "
            "send to each other. Use tensor_parallel_size instead"
        )
    num_layers = arch.num_layers
    partition = _asked_partition(size, num_layers) or even_partition(num_layers, size)
    num_steps = asked.pipeline_steps_in_flight
    if num_steps is None:
        num_steps = 1 if _stages_share_cores(asked, device) else size
    return replace(
        asked, pipeline_layer_partition=tuple(partition), pipeline_steps_in_flight=num_steps
    )


def _stages_share_cores(parallel: ParallelConfig, device: DeviceConfig) -> bool:
    """Return whether the stages of a replica share the cores and the memory of this machine.

    If they run one after another, each of them uses all cores, and reads each weight once for the
    whole batch. If they ran at the same time, they would read it once for each part of the batch.
    When memory limits the speed, as with small batches, that would take as many times longer as
    there are stages.
    """
    if device.device != "cpu" or parallel.distributed_executor_backend not in (None, "mp"):
        return False
    cores_of_ranks = device.bound_cores
    if device.replica_cores:
        cores_of_ranks = device.replica_cores[0]
    if cores_of_ranks is not None:
        size = parallel.tensor_parallel_size  # ranks of one stage are consecutive
        starts = range(0, parallel.world_size, size)
        stages = [set().union(*cores_of_ranks[start : start + size]) for start in starts]
        return sum(map(len, stages)) > len(set().union(*stages))
    if not device.counts_threads:
        first = (envs.get().OMP_NUM_THREADS or "").split(",")[0].strip()
        num_cores = len(usable_cores()) // max(1, parallel.num_local_replicas)
        return not first.isdecimal() or int(first) * parallel.world_size > num_cores
    # With several NUMA nodes, each rank is bound to the cores of one node.
    return len(nodes_of(usable_cores())) < 2


def _asked_partition(size: int, num_layers: int) -> list[int] | None:
    text = envs.get().VLLM_PP_LAYER_PARTITION
    if text is None:
        return None
    counts = [count.strip() for count in text.split(",")]
    if all(count.isdecimal() and int(count) for count in counts):
        found = [int(count) for count in counts]
        if len(found) == size and sum(found) == num_layers:
            return found
    raise ConfigError(
        f"{_PARTITION}={text!r} must be {size} layer counts, one for each stage of "
        f"pipeline_parallel_size={size}, whose sum is the {num_layers} layers of the model, such "
        f"as {','.join(map(str, even_partition(num_layers, size)))}"
    )
