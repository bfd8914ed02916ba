"""Rotary embeddings of vision towers, by row and column of a patch. Independent of models."""

import torch
from torch import Tensor


def block_coordinates(grid: tuple[int, int, int], merge_size: int) -> Tensor:
    """Return row and column of each patch, [N, 2], in the order of blocks of patches.

    Args:
        grid: frames, rows and columns of patches.
        merge_size: rows and columns of a block; 1: patches are ordered row by row.
    """
    frames, rows, columns = grid
    shape = (rows // merge_size, merge_size, columns // merge_size, merge_size)
    row = torch.arange(rows)[:, None].expand(rows, columns)
    column = torch.arange(columns).expand(rows, columns)
    both = torch.stack([each.reshape(shape).transpose(1, 2).flatten() for each in (row, column)], 1)
    return both.repeat(frames, 1)


def axial_frequencies(head_size: int, theta: float) -> Tensor:
    """Return the rotary frequencies of one axis: the angle per row, or per column, of each pair.

    Returns:
        [head_size / 4]: rows rotate the first half of the pairs of a head, columns the second half.
    """
    exponents = torch.arange(0, head_size // 2, 2, dtype=torch.float32) / (head_size // 2)
    return 1.0 / theta**exponents


def rotations_of(coordinates: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    """Return cosines and sines of the rotation angles of N patches.

    Args:
        coordinates: [N, 2], row and column.
        by_row: [R], angle per row of each pair that rows rotate.
        by_column: [S], angle per column of each pair that columns rotate.

    Returns:
        [2, N, R + S] float32: cosines, then sines.
    """
    row, column = coordinates.float().unbind(1)
    angles = torch.cat((row[:, None] * by_row, column[:, None] * by_column), dim=1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate heads, computed in float32.

    Args:
        x: [N, H, D]; pairs are elements i and i + D / 2 of a head.
        rotations: [2, N, D / 2]: cosines, then sines.

    Returns:
        [N, H, D], dtype of x.
    """
    cosine, sine = rotations[:, :, None].unbind(0)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)
