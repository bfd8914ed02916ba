"""The order of rows of query and key projections, which says which elements rotate together."""

import torch
from torch import Tensor


def halves_of_neighbours(num_rows: int, num_heads: int) -> Tensor:
    """Return, for each row of a projection whose heads rotate element i with i + D / 2, the row of
    one that rotates neighbours, 2 i with 2 i + 1: [num_rows] int64."""
    return torch.arange(num_rows).view(num_heads, -1, 2).mT.flatten()
