"""Flat paged attention: a decode as one list of blocks, whatever row they belong to.

Knows tensors. Work and shapes depend on how many blocks the batch has together, not on its
longest row. Every block attends with the query of its row; then the partial softmaxes of a row are
brought to one maximum, and a product with a one-hot matrix adds them up. That matrix also
spreads the queries, so that both run on the matrix engine.

Nothing reads a tensor on the host, and no shape depends on the content of one.

Letters: B rows, H query heads, G key/value heads, R = H / G, D head size, S block size, N entries
of the block list.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.backends.hpu_metadata import HPUDecodeMetadata

_HIDDEN = torch.finfo(torch.float32).min
"""Score of a hidden key. Finite: in a block with nothing to see, maximum and exponential stay
numbers, and the block gets weight 0 next to any that sees something."""


@dataclass(frozen=True)
class DecodeBlocks:
    """What all layers with one window need of a launch; derived on the device, once a forward."""

    block_list: Tensor
    """[N - sliced] int32, of the metadata."""
    rows: Tensor
    """[N] int64: the row of each entry; B for padding."""
    mapping: Tensor
    """[N, B] one-hot of the rows, in the dtype of the model; padding has no one."""
    is_hidden: Tensor
    """[N, S] slots that no query sees."""
    relative: Tensor
    """[N, S] float32: position of the slot's token, minus that of the newest token of the row."""


def derive_decode_blocks(
    metadata: HPUDecodeMetadata,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None = None,
) -> DecodeBlocks:
    """Masks and one-hot matrix of a launch.

    Args:
        metadata: the launch.
        block_size: S.
        dtype: of the queries.
        sliding_window: None sees all keys; W the W most recent ones, the new one included.
    """
    groups, batch = metadata.block_groups, metadata.slot_mapping.shape[0]
    is_padding = groups < 0
    slot = torch.arange(block_size, dtype=torch.int32, device=groups.device)
    age = metadata.block_age[:, None] - slot
    is_hidden = is_padding[:, None] | (slot >= metadata.block_usage[:, None])
    if sliding_window is not None:
        is_hidden = is_hidden | (age >= sliding_window)
    row_ids = torch.arange(batch, dtype=torch.int32, device=groups.device)
    return DecodeBlocks(
        block_list=metadata.block_list,
        rows=groups.masked_fill(is_padding, batch).long(),
        mapping=(groups[:, None] == row_ids).to(dtype),
        is_hidden=is_hidden,
        relative=-age.float(),
    )


def flat_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: DecodeBlocks,
    scale: float,
    *,
    alibi_slopes: Tensor | None = None,
    is_pipelined: bool = True,
) -> Tensor:
    """Attention of one new token per row over its blocks.

    Products have the dtype of the query, the softmax is float32.

    Args:
        query: [B, H, D], all finite: a sum over a one-hot matrix meets every row.
        key_cache: [num_blocks, S, G, D], the new tokens' keys included.
        value_cache: [num_blocks, S, G, D].
        blocks: the launch.
        scale: multiplies query @ key.
        alibi_slopes: [H] float32; None without ALiBi.
        is_pipelined: True multiplies with the values under the maximum of each block and
            corrects for that of the row afterwards, so that nothing waits for the latter; False
            finds the maximum of the row first. The results are the same but for rounding.

    Returns:
        [B, H, D]. Padded rows are zero. What hidden slots hold (even NaN) has no effect.

    Raises:
        ValueError: the launch slices more blocks than the cache has.
    """
    batch, num_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[2]
    queries = blocks.mapping @ query.flatten(1)  # [N, B] @ [B, H * D]
    queries = queries.view(-1, num_kv_heads, num_heads // num_kv_heads, head_size)
    spans, keys, values = _fetch(key_cache, value_cache, blocks)
    scores = []
    for span, k in zip(spans, keys, strict=True):
        # [n, G, R, D] @ [n, G, D, S] -> [n, G, R, S]
        s = (queries[span] @ k.permute(0, 2, 3, 1)).float() * scale
        if alibi_slopes is not None:
            slopes = alibi_slopes.view(num_kv_heads, -1, 1)
            s = s + slopes * blocks.relative[span][:, None, None]
        scores.append(s.masked_fill(blocks.is_hidden[span][:, None, None], _HIDDEN))

    block_max = torch.cat([s.amax(-1, keepdim=True) for s in scores])  # [N, G, R, 1]
    row_max = None if is_pipelined else _max_of_rows(block_max, blocks.rows, batch)
    subtracted = block_max if row_max is None else row_max
    weighted, sums = [], []
    for span, s, v in zip(spans, scores, values, strict=True):
        weights = (s - subtracted[span]).exp().to(v.dtype)
        # What a block holds past its end may be NaN, and 0 * NaN is NaN: clear it.
        v = v.masked_fill(blocks.is_hidden[span][:, :, None, None], 0.0)
        weighted.append((weights @ v.transpose(1, 2)).float())  # [n, G, R, D]
        sums.append(weights.sum(-1, keepdim=True, dtype=torch.float32))
    out, total = torch.cat(weighted), torch.cat(sums)
    if row_max is None:
        row_max = _max_of_rows(block_max, blocks.rows, batch)
        correction = (block_max - row_max).exp()
        out, total = out * correction, total * correction
    out = out / _sum_of_rows(total, blocks.mapping)
    return (blocks.mapping.T @ out.to(query.dtype).flatten(1)).view(query.shape)


def _fetch(
    key_cache: Tensor, value_cache: Tensor, blocks: DecodeBlocks
) -> tuple[list[slice], list[Tensor], list[Tensor]]:
    """(entries, keys, values) of the part that is a slice of the cache, and of the gathered one.

    They are kept apart to the end of the maths within a block: joining them would copy the slice.
    """
    num_gathered = blocks.block_list.shape[0]
    num_sliced = blocks.rows.shape[0] - num_gathered
    if num_sliced > key_cache.shape[0]:
        raise ValueError(
            f"the launch reads blocks 0 to {num_sliced - 1} of a cache of {key_cache.shape[0]}"
        )
    spans, keys, values = [], [], []
    if num_sliced:
        spans.append(slice(0, num_sliced))
        keys.append(key_cache[:num_sliced])
        values.append(value_cache[:num_sliced])
    if num_gathered or not num_sliced:
        spans.append(slice(num_sliced, num_sliced + num_gathered))
        keys.append(key_cache.index_select(0, blocks.block_list))
        values.append(value_cache.index_select(0, blocks.block_list))
    return spans, keys, values


def _max_of_rows(block_max: Tensor, rows: Tensor, batch: int) -> Tensor:
    """For every entry the maximum over all entries of its row; [N, G, R, 1] as given."""
    flat = block_max.flatten(1)  # [N, H]
    # One more row collects the padding.
    maxima = flat.new_full((batch + 1, flat.shape[1]), _HIDDEN)
    maxima = maxima.scatter_reduce(0, rows[:, None].expand_as(flat), flat, "amax")
    return maxima.index_select(0, rows).view(block_max.shape)


def _sum_of_rows(total: Tensor, mapping: Tensor) -> Tensor:
    """For every entry the sum over all entries of its row; its own, which is not 0, for padding."""
    one_hot = mapping.float()
    sums = one_hot @ (one_hot.T @ total.flatten(1))
    return torch.maximum(sums.view(total.shape), total)
