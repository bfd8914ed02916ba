"""From a device name to its platform."""

from functools import cache

from vllm import envs
from vllm.errors import ConfigError
from vllm.platforms.interface import Platform


@cache
def resolve_platform(device: str) -> Platform:
    """The platform of a `--device` value.

    Raises:
        ConfigError: the device is not known or not usable here.
    """
    if device == "auto":
        device = envs.get().VLLM_TARGET_DEVICE or "cpu"
    if device == "cpu":
        from vllm.platforms.cpu import CPUPlatform

        return CPUPlatform()
    raise ConfigError(f"device {device!r} is not supported by this version; accepted: auto, cpu")
