"""Ragged attention through the operator table: any device, no padding.

Which code computes it (torch, or the C++ kernels) is the table's business.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.attention.metadata import AttentionLayer
from vllm.messages import IntArray
from vllm.ops import get_ops


@dataclass(frozen=True)
class RaggedMetadata:
    """A ragged launch of B requests and T tokens: decodes first, then prefills.

    B_d requests are decodes, with one token each: rows 0 to B_d - 1 and tokens 0 to B_d - 1.
    """

    num_decodes: int
    """B_d."""
    slot_mapping: Tensor
    """[T] int64 on the device: where each token's key and value go, block_id * S + offset."""
    block_tables: Tensor
    """[B, max_blocks] int32 on the device."""
    seq_lens: Tensor
    """[B] int32 on the device: tokens of the request, this launch's included."""
    query_start_loc: IntArray
    """[B + 1] on the host: the tokens of request b are query_start_loc[b] up to [b + 1]."""
    host_seq_lens: IntArray
    """[B] `seq_lens` on the host."""

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `LaunchMetadata`."""
        assert layer.key_cache is not None and layer.value_cache is not None
        return ragged_attention(
            query,
            key,
            value,
            layer.key_cache,
            layer.value_cache,
            self,
            layer.scale,
            layer.sliding_window,
        )


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
    metadata: RaggedMetadata,
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
