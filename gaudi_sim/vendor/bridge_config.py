"""Simulates `habana_frameworks.torch.internal.bridge_config`: the one flag that has an effect."""

from collections.abc import Iterator
from contextlib import contextmanager

from gaudi_sim.card.device import active_card

__all__ = ["env_setting", "get_pt_compile_only_mode", "set_pt_compile_only_mode"]

_COMPILE_ONLY = "PT_COMPILE_ONLY_MODE"


def get_pt_compile_only_mode() -> bool:
    """Return whether recipes are compiled but not launched."""
    return active_card().is_compile_only


def set_pt_compile_only_mode(value: bool) -> None:
    active_card().is_compile_only = bool(value)


@contextmanager
def env_setting(name: str, value: bool) -> Iterator[None]:
    """Set a flag in this context.

    Raises:
        ValueError: the flag has no effect in the simulation.
    """
    if name != _COMPILE_ONLY:
        raise ValueError(f"the simulated card supports only the flag {_COMPILE_ONLY}, got {name}")
    before = get_pt_compile_only_mode()
    set_pt_compile_only_mode(value)
    try:
        yield
    finally:
        set_pt_compile_only_mode(before)
