"""Attention within consecutive groups of patches, such as frames or windows.

A patch attends only to the patches of its group. Independent of models.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.model_executor.media.vision.attention import attend

MAX_QUERIES = 2048
"""Queries of one mask, which has as many elements as queries times keys."""


def attend_within(query: Tensor, key: Tensor, value: Tensor, groups: Tensor | None) -> Tensor:
    """Compute attention in which each query attends to the keys of its group.

    N patches, H heads of size D.

    Args:
        query: [N, H, D].
        key: [N, H, D].
        value: [N, H, D].
        groups: [N], index of the group of each patch; None: all patches are one group.

    Returns:
        [N, H, D]
    """
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    if groups is None:
        read = attend(query, key, value)
    else:
        parts = zip(query.split(MAX_QUERIES, 2), groups.split(MAX_QUERIES), strict=True)
        read = torch.cat(
            [attend(part, key, value, own[:, None] == groups) for part, own in parts], dim=2
        )
    return read[0].transpose(0, 1)


def attend_within_windows(
    query: Tensor, key: Tensor, value: Tensor, groups: Tensor, window: int
) -> Tensor:
    """Compute attention within groups that are small, such as windows.

    The sequence is cut into pieces of the maximum group size. The keys of a group are in the same
    piece as the query or in the one before or after it, so a query is compared with three pieces
    only.

    Args:
        query: [N, H, D].
        key: [N, H, D].
        value: [N, H, D].
        groups: [N], index of the group of each patch, not negative. The patches of a group are
            consecutive.
        window: largest number of patches of a group.

    Returns:
        [N, H, D]
    """
    num_patches = len(query)
    after = -num_patches % window
    query = F.pad(query, (0, 0, 0, 0, 0, after)).unflatten(0, (-1, window))
    own = F.pad(groups, (0, after), value=-1).unflatten(0, (-1, window))
    around = (window, after + window)
    key, value = (_pieces(F.pad(each, (0, 0, 0, 0, *around)), window) for each in (key, value))
    theirs = _pieces(F.pad(groups, around, value=-1), window)
    mask = own[:, None, :, None] == theirs[:, None, None, :]
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return attend(query, key, value, mask).transpose(1, 2).flatten(0, 1)[:num_patches]


def _pieces(x: Tensor, window: int) -> Tensor:
    """Concatenate each piece with the pieces before and after it.

    Args:
        x: [(pieces + 2) * window, ...]
        window: size of a piece.

    Returns:
        [pieces, 3 * window, ...]
    """
    pieces = x.unflatten(0, (-1, window))
    return torch.cat((pieces[:-2], pieces[1:-1], pieces[2:]), dim=1)
