"""Simulates `habana_frameworks.torch.utils.internal`."""

from gaudi_sim.card.device import active_card

__all__ = ["is_lazy"]


def is_lazy() -> bool:
    """Return whether operators are recorded up to `mark_step`."""
    return active_card().is_lazy
