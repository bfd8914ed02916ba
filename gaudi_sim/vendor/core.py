"""Simulates `habana_frameworks.torch.core`: steps, and preparing a model for inference."""

from torch import nn

from gaudi_sim.card.device import active_card

__all__ = [
    "hpu_inference_initialize",
    "hpu_inference_reset_env",
    "hpu_inference_set_env",
    "hpu_initialize",
    "hpu_reset_env",
    "hpu_set_env",
    "hpu_set_inference_env",
    "hpu_teardown_inference_env",
    "iter_mark_step",
    "mark_step",
]


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """End the recorded graph and launch it; do nothing in eager mode."""
    active_card().mark_step()


def iter_mark_step(device_str: str = "") -> None:
    """End the recorded graph at the end of an iteration; same as `mark_step`."""
    active_card().mark_step()


def hpu_inference_set_env(model: nn.Module | None = None) -> nn.Module | None:
    """Prepare a model before it is moved to the card. It is returned unchanged here."""
    active_card()
    return model


def hpu_inference_initialize(
    model: nn.Module | None = None,
    mark_only_scales_as_const: bool = False,
    mark_scales: bool = True,
    mark_non_scales: bool = True,
    optimizer: object = None,
    args: object = None,
) -> None:
    """Prepare a model after it was moved to the card: its parameters become constants of recipes.

    A card may then permute them; results are the same with and without, so this does nothing.
    """
    active_card()


def hpu_inference_reset_env() -> None:
    """Undo `hpu_inference_set_env` and `hpu_inference_initialize`."""
    active_card()


hpu_set_env = hpu_set_inference_env = hpu_inference_set_env
hpu_initialize = hpu_inference_initialize
hpu_reset_env = hpu_teardown_inference_env = hpu_inference_reset_env
