"""Attention of padded launches on HPU: store the new tokens, then attend.

Pure torch with the shapes of the bucket: nothing reads a tensor on the host, so a launch can be
captured as a graph and replayed with other metadata. What is a fused kernel on a card comes in
as a function (`SDPAKernel`); without one the same code runs on any device.

Letters: B rows, Q new tokens of a row, C blocks of context of a row, H query heads, G key/value
heads, D head size, S block size, K = C * S + Q keys of a row. All sizes are padded.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.attention.backends.flat_pa import DecodeBlocks, flat_paged_attention
from vllm.attention.backends.hpu_metadata import HPUDecodeMetadata, HPUPrefillMetadata

_NEVER = 2**30
"""Position of a key that no query sees: after all of them."""


class SDPAKernel(Protocol):
    """Scaled dot product attention, as a fused kernel computes it."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        valid_lens: Tensor | None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [B, H, Q, D].
            key: [B, G, K, D].
            value: [B, G, K, D].
            mask: [B, 1 or H, Q, K]: bool, True where a query sees a key, or a float that is added
                to the scores. It holds all there is, causality too, and no query sees nothing.
                None: causal, with Q = K.
            scale: multiplies query @ key.
            valid_lens: [B] int32, only without a mask: tokens before the padding on the right. A
                kernel may use it to skip work; results after them are not used, but finite.

        Returns:
            [B, H, Q, D].
        """
        ...


def torch_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    valid_lens: Tensor | None,
) -> Tensor:
    """The kernel of torch."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def naive_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    valid_lens: Tensor | None,
) -> Tensor:
    """Product, float32 softmax, product: the reference of the others."""
    num_kv_heads, query_len, key_len = key.shape[1], query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(query_len, key_len, dtype=torch.bool, device=query.device).tril()
        mask = mask[None, None]
    grouped = query.unflatten(1, (num_kv_heads, -1))  # [B, G, H / G, Q, D]
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).float().flatten(1, 2) * scale
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, float("-inf"))
    weights = (scores + mask).softmax(-1).to(value.dtype).unflatten(1, (num_kv_heads, -1))
    return (weights @ value[:, :, None]).flatten(1, 2)


def write_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store the keys and values of a padded launch, in place.

    Padding is stored too, in the null block; slots there may repeat, any of them wins.

    Args:
        key: [..., G, D].
        value: [..., G, D].
        key_cache: [num_blocks, S, G, D], dense.
        value_cache: [num_blocks, S, G, D], dense.
        slot_mapping: [...], block id * S + offset.
    """
    slots = slot_mapping.flatten().long()
    for new, cache in ((key, key_cache), (value, value_cache)):
        heads = new.shape[-2:]
        cache.view(-1, *heads).index_copy_(0, slots, new.reshape(-1, *heads))


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: HPUDecodeMetadata,
    blocks: DecodeBlocks,
    scale: float,
    *,
    alibi_slopes: Tensor | None = None,
    is_pipelined: bool = True,
) -> Tensor:
    """Store one new token per row, and attend over all its row has in the cache.

    Args:
        query: [B, H, D].
        key: [B, G, D].
        value: [B, G, D].
        key_cache: [num_blocks, S, G, D], dense. Written.
        value_cache: [num_blocks, S, G, D], dense. Written.
        metadata: the launch.
        blocks: derived from it with the window of this layer.
        scale: multiplies query @ key.
        alibi_slopes: [H] float32, or None.
        is_pipelined: see `flat_paged_attention`.

    Returns:
        [B, H, D]. Padded rows are zero.
    """
    write_kv_cache(key, value, key_cache, value_cache, metadata.slot_mapping)
    return flat_paged_attention(
        query,
        key_cache,
        value_cache,
        blocks,
        scale,
        alibi_slopes=alibi_slopes,
        is_pipelined=is_pipelined,
    )


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: HPUPrefillMetadata,
    mask: Tensor | None,
    scale: float,
    kernel: SDPAKernel = torch_sdpa,
) -> Tensor:
    """Store the new tokens, and attend over the context of each row and over them.

    All writes come before all reads: a row may have context that another row of the launch fills.

    Args:
        query: [B, Q, H, D]. Here and below padding has to be finite.
        key: [B, Q, G, D].
        value: [B, Q, G, D].
        key_cache: [num_blocks, S, G, D], dense. Written.
        value_cache: [num_blocks, S, G, D], dense. Written.
        metadata: the launch.
        mask: `prefill_mask` of it, with the window of this layer.
        scale: multiplies query @ key.
        kernel: what computes it.

    Returns:
        [B, Q, H, D]. Padding is finite. What slots after the context hold has no effect.
    """
    write_kv_cache(key, value, key_cache, value_cache, metadata.slot_mapping)
    if metadata.context_blocks.shape[1]:
        key = torch.cat((_context(key_cache, metadata), key), dim=1)
        value = torch.cat((_context(value_cache, metadata), value), dim=1)
    return prompt_attention(query, key, value, mask, scale, metadata.query_lens, kernel)


def prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    query_lens: Tensor | None = None,
    kernel: SDPAKernel = torch_sdpa,
) -> Tensor:
    """Attention without a cache, in the layout of the model: [B, Q, H, D] and [B, K, G, D].

    A mask and lengths exclude each other in fused kernels: with a mask, lengths are not passed on.
    """
    out = kernel(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask,
        scale,
        query_lens if mask is None else None,
    )
    return out.transpose(1, 2)


def prefill_mask(
    metadata: HPUPrefillMetadata,
    block_size: int,
    sliding_window: int | None = None,
    alibi_slopes: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """Which keys the queries of a launch see; derived on the device, once a forward.

    Keys are the padded context, then the new tokens. Padding on the right comes after every
    real query, so that causality hides it; every query, padding too, sees itself at least.

    Args:
        metadata: the launch.
        block_size: S.
        sliding_window: None sees all earlier keys; W the W most recent ones, itself included.
        alibi_slopes: [H] float32; None without ALiBi.
        dtype: of an ALiBi mask: that of the queries, as torch wants it.

    Returns:
        [B, 1, Q, K] bool; with ALiBi [B, H, Q, K] to be added. None when plain causality says it
        all: no context, no window, padding on the right.
    """
    num_context, query_len = metadata.context_blocks.shape[1], metadata.slot_mapping.shape[1]
    if num_context == 0 and sliding_window is None and alibi_slopes is None:
        return None
    device, context_lens = metadata.context_lens.device, metadata.context_lens[:, None]
    column = torch.arange(num_context * block_size, dtype=torch.int32, device=device)
    query_pos = context_lens + torch.arange(query_len, dtype=torch.int32, device=device)
    context_pos = torch.where(column < context_lens, column, _NEVER)
    key_pos = torch.cat((context_pos, query_pos), dim=1)  # [B, K]
    age = (query_pos[:, :, None] - key_pos[:, None])[:, None]  # [B, 1, Q, K]
    mask = age >= 0
    if sliding_window is not None:
        mask = mask & (age < sliding_window)
    if alibi_slopes is None:
        return mask
    bias = -age.float() * alibi_slopes[:, None, None]
    return bias.masked_fill(~mask, float("-inf")).to(dtype)


def merged_prefill_mask(
    sequence_ids: Tensor, positions: Tensor, sliding_window: int | None = None
) -> Tensor:
    """The mask of several prompts one after another in a single row.

    Args:
        sequence_ids: [Q] which prompt each token belongs to; negative for padding.
        positions: [Q] place of the token in its prompt.
        sliding_window: as in `prefill_mask`.

    Returns:
        [1, 1, Q, Q] bool. Padding sees itself alone.
    """
    age = positions[:, None] - positions
    mask = (sequence_ids[:, None] == sequence_ids) & (sequence_ids >= 0) & (age >= 0)
    if sliding_window is not None:
        mask = mask & (age < sliding_window)
    index = torch.arange(positions.shape[0], device=positions.device)
    return (mask | (index[:, None] == index))[None, None]


def _context(cache: Tensor, metadata: HPUPrefillMetadata) -> Tensor:
    """[B, C * S, G, D] of the cache; zero after the context, where the cache may hold anything."""
    blocks = metadata.context_blocks
    context = cache.index_select(0, blocks.flatten())
    context = context.view(blocks.shape[0], -1, *cache.shape[2:])
    column = torch.arange(context.shape[1], dtype=torch.int32, device=cache.device)
    is_hidden = column >= metadata.context_lens[:, None]
    return context.masked_fill(is_hidden[:, :, None, None], 0.0)
