"""Find the platform for a device name."""

from functools import cache

from vllm import envs
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.platforms.hpu import create_hpu_platform, missing_of_card, simulated_card
from vllm.platforms.interface import Platform

logger = init_logger(__name__)


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
    """Return "hpu" if there is a card or a simulated one, else "cpu".

    Half of what a card needs is a mistake more often than not, so the log says what is missing.
    """
    missing = [] if simulated_card() is not None else missing_of_card()
    if len(missing) == 1 and not envs.is_child():
        logger.warning(
            "the engine runs on the CPU and not on a Gaudi card: %s. README_GAUDI.md has the "
            "installation; VLLM_TARGET_DEVICE=cpu chooses the CPU without this warning",
            missing[0],
        )
    return "cpu" if missing else "hpu"
