"""Predicts the times of exchanges between the cards of one machine. No torch."""

import numpy as np
from numpy.typing import ArrayLike

from vllm.cost_model.cards import CardSpec
from vllm.cost_model.fitted import CONSTANTS, Floats, fitted_constants

NUM_PEERS = 7
"""Cards of a box that a card has links to, equally many to each (published)."""


def all_reduce_bytes(num_bytes: ArrayLike, num_cards: int) -> Floats:
    """Return the bytes that all links of a card together could move while an all-reduce runs.

    Each card exchanges a part of the sum twice with each other card, over the links between the
    two. An all-gather does so once, so it is like an all-reduce of half of its result.

    Args:
        num_bytes: bytes of the tensor that is summed.
        num_cards: number of cards that take part.
    """
    return np.asarray(num_bytes, np.float64) * (2 * NUM_PEERS / num_cards)


def moving_seconds(spec: CardSpec, num_bytes: ArrayLike, num_cards: int) -> Floats:
    """Return the seconds in which the links move the bytes of an all-reduce at their peak rate.

    See `all_reduce_bytes`.
    """
    found: Floats = all_reduce_bytes(num_bytes, num_cards) / spec.link_bytes_per_s
    return found


def empty_all_reduce_seconds(spec: CardSpec) -> float:
    """Return the seconds of an all-reduce without data, which published runs of models imply."""
    values = fitted_constants(spec.name.lower()).values
    return 1e-6 * float(values[list(CONSTANTS).index("all_reduce_us")])
