"""Simulates `habana_frameworks.torch.hpu.random` with the CPU generator."""

import torch
from torch import Tensor

__all__ = [
    "default_generators",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]

default_generators = [torch.default_generator]


def manual_seed(seed: int) -> torch.Generator:
    return torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def seed() -> int:
    """Set and return a new, random seed."""
    return torch.default_generator.seed()


seed_all = seed


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


def get_rng_state(device: str = "hpu") -> Tensor:
    return torch.default_generator.get_state()


def set_rng_state(state: Tensor, device: str = "hpu") -> None:
    torch.default_generator.set_state(state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state()]


def set_rng_state_all(states: list[Tensor]) -> None:
    """Set the state of the generator.

    Raises:
        ValueError: there is more or less than one state; there is one card.
    """
    (state,) = states
    set_rng_state(state)
