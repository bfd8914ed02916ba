"""Attention in both directions over whole prompts: any device, no KV cache.

Letters: T tokens of a launch, B prompts, L their padded length, H heads, D head size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backends.metadata import AttentionLayer
from vllm.messages import IntArray
from vllm.ops import get_ops

_MAX_PADDING = 1.25
"""Padded tokens of a group for each of its tokens, at most."""


@dataclass(frozen=True)
class EncoderGroup:
    """Prompts of similar length that attend in one call."""

    tokens: Tensor
    """[B * L] int64: index among the T of each padded token; padding has the index of the first
    token."""
    shape: tuple[int, int]
    """B and L."""
    real: Tensor | None
    """[tokens of the group] int64: the ones of the B * L that are not padding; None: all are."""
    mask: Tensor | None
    """[B, 1, 1, L] bool, True for keys that are there; None: all are."""


@dataclass(frozen=True)
class EncoderMetadata:
    """A ragged launch of whole prompts."""

    groups: tuple[EncoderGroup, ...]

    @classmethod
    def build(cls, query_start_loc: IntArray, device: torch.device) -> "EncoderMetadata":
        """Make the metadata of a launch whose prompt b has the tokens query_start_loc[b] up to [b +
        1]."""
        lens = np.diff(query_start_loc)
        order = np.argsort(lens, kind="stable")
        groups, start = [], 0
        for end in _ends(lens[order]):
            prompts = order[start:end]
            groups.append(_group(query_start_loc[prompts], lens[prompts], device))
            start = end
        return cls(tuple(groups))

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        stores: bool = True,
    ) -> Tensor:
        """Attend within each prompt; nothing is stored, and there is a value."""
        assert value is not None
        out, scale = torch.empty_like(query), layer.options.scale_of(query.shape[-1])
        for group in self.groups:
            q, k, v = (x[group.tokens].unflatten(0, group.shape) for x in (query, key, value))
            attended = full_attention(q, k, v, group.mask, scale).flatten(0, 1)
            if group.real is None:
                out[group.tokens] = attended
            else:
                out[group.tokens[group.real]] = attended[group.real]
        return out


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attend from every query to every key that the mask allows.

    Args:
        query: [B, L, H, D].
        key: [B, L, H, D].
        value: [B, L, H, D].
        mask: [B, 1, 1, L] bool, or None.
        scale: multiplies query @ key.

    Returns:
        [B, L, H, D].
    """
    out = get_ops().full_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, scale
    )
    return out.transpose(1, 2)


def _ends(lens: IntArray) -> list[int]:
    """Return the ends of groups of ascending lengths, in which padding stays within its limit.

    >>> _ends(np.array([3, 8, 9, 9, 100]))
    [1, 4, 5]
    """
    ends, start, total = [], 0, 0
    for index, length in enumerate(lens.tolist()):
        if index > start and length * (index + 1 - start) > _MAX_PADDING * (total + length):
            ends.append(index)
            start, total = index, 0
        total += length
    return [*ends, len(lens)]


def _group(starts: IntArray, lens: IntArray, device: torch.device) -> EncoderGroup:
    longest = int(lens.max())
    column = np.arange(longest)
    is_real = column < lens[:, None]
    tokens = np.where(is_real, starts[:, None] + column, starts[:, None]).astype(np.int64)
    shape = (len(lens), longest)
    flat = torch.from_numpy(tokens.ravel()).to(device)
    if is_real.all():
        return EncoderGroup(flat, shape, None, None)
    real = torch.from_numpy(np.flatnonzero(is_real)).to(device)
    mask = torch.from_numpy(is_real)[:, None, None].to(device)
    return EncoderGroup(flat, shape, real, mask)
