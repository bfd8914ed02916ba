"""How the model is divided over workers, checked against the model and the device."""

from dataclasses import replace

from vllm import envs
from vllm.config import ModelConfig, ParallelConfig
from vllm.config.parallel import even_partition
from vllm.errors import ConfigError

_PARTITION = "VLLM_PP_LAYER_PARTITION"


def resolve_parallel(asked: ParallelConfig, model: ModelConfig) -> ParallelConfig:
    """The sizes of the groups, with the layers of each stage.

    Raises:
        ConfigError: the model or another setting needs one worker or one stage.
    """
    size = asked.pipeline_parallel_size
    if size == 1:
        return asked
    num_layers = model.resolved_arch.num_layers
    partition = _asked_partition(size, num_layers) or even_partition(num_layers, size)
    return replace(asked, pipeline_layer_partition=tuple(partition))


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
        f"{_PARTITION}={text!r} must be {size} numbers of layers, one for each stage of "
        f"pipeline_parallel_size={size}, with the sum {num_layers}, the layers of the model, such "
        f"as {','.join(map(str, even_partition(num_layers, size)))}"
    )
