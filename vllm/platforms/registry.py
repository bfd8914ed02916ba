"""Find the platform for a device name."""

from functools import cache

from vllm import envs
from vllm.errors import ConfigError
from vllm.platforms.hpu import create_hpu_platform, has_card, simulated_card
from vllm.platforms.interface import Platform


@cache
def resolve_platform(device: str) -> Platform:
    """Return the platform of a `--device` value.

    Raises:
        ConfigError: the device is not known or not usable on this machine.
    """
    if device == "auto":
        device = envs.get().VLLM_TARGET_DEVICE or detect_device()
    if device == "cpu":
        from vllm.platforms.cpu import CPUPlatform

        return CPUPlatform()
    if device == "hpu":
        return create_hpu_platform()
    raise ConfigError(f"device {device!r} is not supported; accepted: auto, cpu, hpu")


def detect_device() -> str:
    """Return "hpu" if there is a card or a simulated one, else "cpu"."""
    return "hpu" if simulated_card() is not None or has_card() else "cpu"
