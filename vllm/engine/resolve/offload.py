"""Weights that are to stay on the host (`cpu_offload_gb`), for a device and the way it runs."""

from dataclasses import replace

from vllm.config import LoadConfig, ModelConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.platforms import Platform

logger = init_logger(__name__)


def resolve_offload(load: LoadConfig, model: ModelConfig, platform: Platform) -> LoadConfig:
    """`load` with the offload that the device can have.

    Raises:
        ConfigError: the model runs in a way that needs all weights on the device.
    """
    if not load.cpu_offload_gb:
        return load
    if not platform.has_own_memory:
        logger.warning(
            "cpu_offload_gb=%g has no effect: on the device %r all weights are in the memory of "
            "the host",
            load.cpu_offload_gb,
            platform.name,
        )
        return replace(load, cpu_offload_gb=0.0)
    if not model.enforce_eager:
        raise ConfigError(
            f"cpu_offload_gb={load.cpu_offload_gb:g} needs enforce_eager: an HPU graph, and a "
            f"model that torch.compile has compiled, need all weights on the card at once. Add "
            f"enforce_eager, or leave cpu_offload_gb out"
        )
    if model.enable_sleep_mode:
        raise ConfigError(
            f"cpu_offload_gb={load.cpu_offload_gb:g} and enable_sleep_mode cannot be used "
            f"together: sleep mode moves all weights at once. Leave one of them out"
        )
    return load
