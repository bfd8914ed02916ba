"""Converts between the two row orders of query and key projections (rotary neighbours or
halves).
"""

import torch
from torch import Tensor


def halves_of_neighbours(num_rows: int, num_heads: int) -> Tensor:
    """Return the row order that converts a projection from rotating neighbours to rotating halves.

    For each row of a projection that rotates element i with i + D / 2 the result has the row of the
    one that rotates 2 i with 2 i + 1: [num_rows] int64.
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).mT.flatten()
