"""Which device there is, and what differs between devices. Nothing above asks which it is."""

from vllm.platforms.interface import Platform
from vllm.platforms.registry import resolve_platform

__all__ = ["Platform", "current_platform", "resolve_platform"]


def __getattr__(name: str) -> Platform:
    if name == "current_platform":
        return resolve_platform("auto")
    raise AttributeError(f"module 'vllm.platforms' has no attribute {name!r}")
