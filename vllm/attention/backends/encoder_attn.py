"""Compute bidirectional attention over whole prompts: any device, no padding.

A ragged batch has the same form as for decoders, so the same operators and recorded programs run
it. The stored keys and values are read only while their layer runs, so all layers share the same
memory.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backends.native_attn import RaggedMetadata
from vllm.messages import IntArray
from vllm.ops import get_ops
from vllm.utils.ragged import positions_within

_BLOCK_SIZE = 16


def make_prompt_caches(
    num_tokens: int, num_prompts: int, num_heads: int, head_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Allocate memory for the keys and values of any batch up to this many tokens and prompts.

    Returns:
        Two uninitialised tensors [blocks, tokens of a block, num_heads, head_size].
    """
    num_blocks = -(-(num_tokens + (_BLOCK_SIZE - 1) * num_prompts) // _BLOCK_SIZE)
    shape = (num_blocks, _BLOCK_SIZE, num_heads, head_size)
    return torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)


def whole_prompts(num_tokens: Iterable[int] | IntArray) -> RaggedMetadata:
    """Return the metadata of a batch of whole prompts, in which every token sees its whole prompt.

    Args:
        num_tokens: tokens of each prompt, 1 or more.
    """
    counts = np.asarray(num_tokens, np.int32)
    num_blocks = -(-counts // _BLOCK_SIZE)
    first_blocks = np.cumsum(num_blocks, dtype=np.int32) - num_blocks
    slots = np.repeat(first_blocks * _BLOCK_SIZE, counts) + positions_within(counts)
    # Entries after the last block of a prompt are not read.
    tables = first_blocks[:, None] + np.arange(num_blocks.max(initial=0), dtype=np.int32)
    return RaggedMetadata(
        num_decodes=0,  # the decode kernel adds in a different order, so its results would differ
        slot_mapping=torch.from_numpy(slots.astype(np.int64)),
        block_tables=torch.from_numpy(tables),
        seq_lens=torch.from_numpy(counts),
        query_start_loc=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        host_seq_lens=counts,
        last_keys=np.repeat(counts - 1, counts),
    )


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Compute attention from every query to every key that the mask allows.

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
