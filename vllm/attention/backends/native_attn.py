"""Ragged attention through the operator table: any device, no padding.

Which code computes it (torch, or the C++ kernels) is the table's business.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.attention.metadata import AttentionMetadata
from vllm.ops import get_ops


def prompt_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
) -> Tensor:
    """Causal attention of one prompt without a cache.

    Args:
        query: [T, H, D].
        key: [T, G, D].
        value: [T, G, D].
        scale: multiplies query @ key.
        sliding_window: most recent keys a query sees, or None.

    Returns:
        [T, H, D].
    """
    mask = None
    if sliding_window is not None:
        position = torch.arange(query.shape[0], device=query.device)
        distance = position[:, None] - position
        mask = (distance >= 0) & (distance < sliding_window)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Store the new keys and values, then attend: decodes in one call, prefills in another.

    All writes come before all reads, so a request may read blocks that another request of the
    same launch fills.

    Args:
        query: [T, H, D].
        key: [T, G, D].
        value: [T, G, D].
        key_cache: [num_blocks, S, G, D].
        value_cache: [num_blocks, S, G, D].
        metadata: the launch.
        scale: multiplies query @ key.
        sliding_window: most recent keys a query sees, or None.

    Returns:
        [T, H, D].
    """
    ops = get_ops()
    ops.reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping)
    num_decodes = metadata.num_decodes
    num_requests = len(metadata.host_seq_lens)
    outputs = []
    if num_decodes:
        outputs.append(
            ops.paged_attention_decode(
                query[:num_decodes],
                key_cache,
                value_cache,
                metadata.block_tables[:num_decodes],
                metadata.seq_lens[:num_decodes],
                scale,
                sliding_window,
            )
        )
    if num_requests > num_decodes:
        outputs.append(
            ops.paged_attention_prefill(
                query[num_decodes:],
                key_cache,
                value_cache,
                metadata.block_tables[num_decodes:],
                metadata.query_start_loc[num_decodes:] - num_decodes,
                metadata.host_seq_lens[num_decodes:],
                scale,
                sliding_window,
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
