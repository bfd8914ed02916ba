"""Learned position embeddings of a square, interpolated for images of other shapes.

Independent of models.

Shapes: N patches, K positions of the table that decide the embedding of one.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from math import isqrt

import torch
from torch import Tensor, nn

from vllm.model_executor.media.vision.rotations import block_coordinates

Neighbours = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""Indices and length of an axis of an image, and length of an axis of the table -> nearest indices
in the table and their weights, both [N, n]."""


class InterpolatedTable(nn.Module):
    """A position table; the host computes which of its positions are interpolated for a patch.

    Args:
        num_positions: number of positions of the table, a square.
        hidden_size: C.
        along: finds neighbours and their weights along one axis.

    Shape: neighbours [N, K] and their weights [N, K] -> [N, C], of the dtype of the table.
    """

    weight: nn.Parameter
    """[num_positions, C]"""

    def __init__(self, num_positions: int, hidden_size: int, along: Neighbours) -> None:
        super().__init__()
        self.along = along
        self.side = isqrt(num_positions)
        table = torch.empty(num_positions, hidden_size)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, neighbours: Tensor, weights: Tensor) -> Tensor:
        pairs = zip(neighbours.unbind(1), weights[:, :, None].unbind(1), strict=True)
        # Add one neighbour at a time: K at once would need K times the memory of the result.
        parts = (self.weight.index_select(0, index).float() * weight for index, weight in pairs)
        return reduce(torch.add, parts).to(self.weight.dtype)

    def neighbours(
        self, grids: Sequence[tuple[int, int, int]], merge_size: int, num_padded: int
    ) -> dict[str, Tensor]:
        """Compute the arguments of `forward` for some images: neighbours and weights, by name.

        Args:
            grids: frames, rows and columns of each image.
            merge_size: rows and columns of a block; patches are ordered block by block.
            num_padded: N, number of patches to pad to.
        """
        neighbours, weights = [], []
        for grid in grids:
            row, column = block_coordinates(grid, merge_size).unbind(1)
            rows, of_rows = self.along(row, grid[1], self.side)
            columns, of_columns = self.along(column, grid[2], self.side)
            neighbours.append((rows[:, :, None] * self.side + columns[:, None, :]).flatten(1))
            weights.append((of_rows[:, :, None] * of_columns[:, None, :]).flatten(1))
        found = {"neighbours": torch.cat(neighbours), "weights": torch.cat(weights)}
        padding = num_padded - len(found["weights"])
        return {
            name: torch.nn.functional.pad(tensor, (0, 0, 0, padding))
            for name, tensor in found.items()
        }


def two_neighbours(index: Tensor, length: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the two neighbours of each index in the table and their weights (linear
    interpolation).

    The first and last index of the image are the first and last position of the table.
    """
    at = index.float() * (side - 1) / max(length - 1, 1)
    first = at.floor()
    indices = first.long()[:, None] + torch.arange(2)
    share = at - first
    return indices.clamp(0, side - 1), torch.stack((1 - share, share), dim=1)


def four_neighbours(index: Tensor, length: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the four neighbours of each index in the table and their weights (cubic
    interpolation).

    Cubic convolution (Keys 1981) with a = -0.75; the ends of both axes coincide. Beyond the ends
    the values at the ends are repeated.
    """
    at = (index.float() + 0.5) * side / length - 0.5
    first = at.floor()
    offsets = torch.arange(-1, 3)
    indices = first.long()[:, None] + offsets
    d = ((at - first)[:, None] - offsets).abs()
    a = -0.75
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return indices.clamp(0, side - 1), torch.where(d <= 1, near, far)
