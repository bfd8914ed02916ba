"""Detect devices, and describe the differences between them. Other packages do not ask which device
it is.
"""

from typing import TYPE_CHECKING

from vllm.platforms.interface import Platform
from vllm.platforms.registry import resolve_platform

if TYPE_CHECKING:
    from vllm.platforms.current import CurrentPlatform

    current_platform: CurrentPlatform

__all__ = ["Platform", "current_platform", "resolve_platform"]


def __getattr__(name: str) -> "CurrentPlatform":
    if name == "current_platform":
        from vllm.platforms.current import CurrentPlatform

        return CurrentPlatform(resolve_platform("auto"))
    raise AttributeError(f"module 'vllm.platforms' has no attribute {name!r}")
