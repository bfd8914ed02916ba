"""Compute decode attention over one flat list of blocks, whatever request they belong to (flat
paged attention).

This module works on tensors only. Work and shapes depend on the total number of blocks in the
batch, not on the longest request. Every block computes attention with the query of its request.
Then the partial softmaxes of a request are rescaled to a common maximum, and a matmul with a
one-hot matrix adds them up. The same matrix distributes the queries, so both run on the matrix
engine.

Nothing reads a tensor on the host, and no shape depends on the content of a tensor.

A decode that verifies drafts has Q queries per request. They are treated like additional heads:
each entry runs with all queries of its request, and only the mask distinguishes them.

Letters: B requests (rows), H query heads, G key/value heads, R = H / G, D head size, S block size,
N entries of the block list.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.backends.cache_scales import CacheScales
from vllm.attention.backends.hpu_metadata import HPUDecodeMetadata
from vllm.ops.attention_options import PLAIN_ATTENTION, AttentionOptions
from vllm.platforms.habana.kernels import FusedKernels

HIDDEN = torch.finfo(torch.float32).min
"""Score of a hidden key. Finite: in a block with nothing to see, maximum and exponential stay
numbers."""

_LOWEST_OFFSET = HIDDEN / 2
"""Scores are taken relative to this at least, so that a hidden key has exactly the weight 0,
also in a block with nothing to see."""

_TINY = torch.finfo(torch.float32).tiny

# torch has two reductions for the maximum of a row; Gaudi documents only this one. torch warns once
# per process that it is beta: trigger that warning here, silenced.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.zeros(1, device="cpu").index_reduce(
        0, torch.zeros(1, dtype=torch.int64, device="cpu"), torch.zeros(1, device="cpu"), "amax"
    )


@dataclass(frozen=True)
class DecodeBlocks:
    """Tensors that all layers with one window need for a batch; computed on the device, once per
    forward pass.
    """

    block_list: Tensor
    """[N - sliced] int32, of the metadata."""
    slots: Tensor
    """[B * Q] int64, the slot mapping of the metadata."""
    rows: Tensor
    """[N] int64: the row of each entry; 0 for padding, which adds nothing to it."""
    groups: Tensor
    """[N] int32: `rows` for kernels of a card."""
    mapping: Tensor
    """[N, B] one-hot of the rows, in the dtype of the model; padding has no one."""
    mapping_t: Tensor
    """[B, N] `mapping` transposed."""
    summing: Tensor
    """[B, N] float32: `mapping_t`, with padding in row 0."""
    is_hidden: Tensor
    """[N, 1, S] slots that no query sees; with several queries [N, 1, Q, 1, S] slots that each
    query does not see."""
    age: Tensor
    """[N, 1, S] int32: how many tokens the one in the slot is older than the newest of the row."""
    query_len: int = 1
    """Q, the number of new tokens of each request."""

    @property
    def block_size(self) -> int:
        """Block size S."""
        return self.age.shape[-1]


Normaliser = Callable[[Tensor, DecodeBlocks], Tensor]
"""([N, H, 1] the highest score of each block) -> [N, H, 1] what is subtracted from its scores, the
same for all blocks of a row. See `normalisers`."""


@dataclass(frozen=True)
class FusedBlocks:
    """Fused kernels of a Gaudi card for the softmax of blocks."""

    kernels: FusedKernels
    """Kernels of the card, which include `block_softmax_adjustment`."""
    has_softmax: bool
    """Whether the kernels also include `block_softmax`."""


Softmax = Normaliser | float | FusedBlocks | None
"""Method by which a decode finds the value that is subtracted from scores, see
`flat_paged_attention`."""


def derive_decode_blocks(
    metadata: HPUDecodeMetadata[Tensor],
    block_size: int,
    dtype: torch.dtype,
    options: AttentionOptions = PLAIN_ATTENTION,
    indices: Tensor | None = None,
) -> DecodeBlocks:
    """Compute the masks and the one-hot matrix of a batch.

    Args:
        metadata: metadata of the batch.
        block_size: S.
        dtype: dtype of the queries.
        options: options of the layers, which define the keys that a query sees.
        indices: [B, Q] int32 positions of the new tokens in their requests, ascending; padding
            repeats the last one. None: one token per request, and the options need no positions.
    """
    groups = metadata.block_groups
    query_len = 1 if indices is None else indices.shape[1]
    batch = (metadata.slot_mapping if indices is None else indices).shape[0]
    slot = torch.arange(block_size, dtype=torch.int32, device=groups.device)
    row_ids = torch.arange(batch, dtype=torch.int32, device=groups.device)
    is_padding = groups < 0
    age = metadata.block_age.view(-1, 1, 1) - slot
    is_hidden = is_padding.view(-1, 1, 1) | (slot >= metadata.block_usage.view(-1, 1, 1))
    rows = groups.masked_fill(is_padding, 0)
    at = None
    if options.needs_indices:  # indices of each entry's queries
        assert indices is not None
        at = indices.index_select(0, rows.long()).unsqueeze(-1)
    if indices is not None and query_len > 1:
        # The age of each query relative to the newest token; it must not attend to younger keys.
        back = (indices[:, -1:] - indices).index_select(0, rows.long())
        age_of_query = age - back.unsqueeze(-1)  # [N, Q, S]
        is_hidden = _without(is_hidden | (age_of_query < 0), options.sees(age_of_query, at))
        is_hidden = is_hidden.unflatten(1, (1, -1, 1))
    else:
        is_hidden = _without(is_hidden, options.sees(age, at))
    mapping = (groups.view(-1, 1) == row_ids).to(dtype)
    return DecodeBlocks(
        block_list=metadata.block_list,
        slots=metadata.slot_mapping.long(),
        rows=rows.long(),
        groups=rows,
        mapping=mapping,
        mapping_t=mapping.T,
        summing=(row_ids.view(-1, 1) == rows).float(),
        is_hidden=is_hidden,
        age=age,
        query_len=query_len,
    )


def _without(is_hidden: Tensor, seen: Tensor | None) -> Tensor:
    """Return the mask of hidden slots with the unseen ones added; seen is None if all are seen."""
    return is_hidden if seen is None else is_hidden | ~seen


def flat_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | int,
    blocks: DecodeBlocks,
    options: AttentionOptions,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    normaliser: Softmax = None,
    scales: CacheScales | None = None,
) -> Tensor:
    """Compute attention from the new tokens of each request to its blocks.

    Matmuls have the dtype of the query, the softmax is float32.

    Args:
        query: [B * Q, H, D], all finite, because the matmul with the one-hot matrix multiplies
            every query.
        key_cache: [num_blocks * S, G, D], including the keys of the new tokens.
        value_cache: [num_blocks * S, G, D]. All values must be finite, even those that no query
            sees: they are multiplied by the weight 0 (`write_kv_cache` ensures this). An integer V:
            the values are the first V elements of the keys, which are finite.
        blocks: the batch, with the keys that its queries see.
        options: options of the layer.
        alibi_slopes: [H] float32; None without ALiBi.
        sinks: [H] float32, score of one additional key per head, whose value is zero; None without.
        normaliser: value that is subtracted from the scores before the exponential. None: the
            maximum of each block; the result is corrected for the maximum of the request
            afterwards, so that no operation waits for it. A function or a float: no correction
            follows, and with a float no maximum is needed. The results are right if the highest
            scores of a request are within about 80 of this value: far above it weights overflow,
            and far below it the result becomes zero. `FusedBlocks`: as None, with kernels of the
            card; these do not support sinks, with which None is used.
        scales: scales of an FP8 cache; None if the cache has the dtype of the query.

    Returns:
        [B * Q, H, D], or [B * Q, H, V]. Padded requests are zero. The content of hidden slots (for
        keys even NaN) has no effect.

    Raises:
        ValueError: the batch slices more blocks than the cache has.
    """
    num_kv_heads, head_size = key_cache.shape[1:]
    value_size = value_cache if isinstance(value_cache, int) else value_cache.shape[-1]
    shape = (*query.shape[:2], value_size)
    if blocks.query_len > 1:
        query = _queries_as_heads(query, num_kv_heads, blocks.query_len)
        # For older queries all biases shift by the same constant, which softmax ignores.
        if alibi_slopes is not None:
            alibi_slopes = _numbers_of_heads(alibi_slopes, num_kv_heads, blocks.query_len)
        if sinks is not None:
            sinks = _numbers_of_heads(sinks, num_kv_heads, blocks.query_len)
    queries = blocks.mapping @ query.flatten(1)  # [N, B] @ [B, H * D]
    queries = queries.view(-1, num_kv_heads, query.shape[1] // num_kv_heads, head_size)
    parts = _fetch(key_cache, value_cache, blocks, scales, query.dtype)
    scores = [_scores(part, queries, blocks, options, alibi_slopes) for part in parts]
    if isinstance(normaliser, FusedBlocks):
        fused, normaliser = normaliser if sinks is None else None, None
    else:
        fused = None
    if fused is not None:
        out, factor = _attend_fused(parts, scores, fused, blocks, num_kv_heads, query.dtype)
    elif isinstance(normaliser, (float, int)):  # a union type breaks the graph before torch 2.10
        out, total = _attend(parts, scores, normaliser, query.dtype)
        factor = _sum_with_sinks(total, sinks, normaliser, blocks).reciprocal()
    else:
        block_max = _joined([s.amax(-1, keepdim=True) for s in scores])  # [N, H, 1]
        if normaliser is None:
            out, total = _attend(parts, scores, block_max, query.dtype)
            row_max = max_of_rows(block_max, blocks)
            correction = (block_max - row_max).exp()
            factor = correction / _sum_with_sinks(total * correction, sinks, row_max, blocks)
        else:
            offset = normaliser(block_max, blocks)
            out, total = _attend(parts, scores, offset, query.dtype)
            factor = _sum_with_sinks(total, sinks, offset, blocks).reciprocal()
    out = (out * factor).to(query.dtype)
    out = (blocks.mapping_t @ out.flatten(1)).view(*query.shape[:2], value_size)
    if blocks.query_len > 1:
        out = out.unflatten(1, (num_kv_heads, blocks.query_len, -1)).transpose(1, 2)
        return out.reshape(shape)
    return out


def _queries_as_heads(query: Tensor, num_kv_heads: int, query_len: int) -> Tensor:
    """Rearrange [B * Q, H, D] to [B, G * Q * R, D], so that the queries of one key/value head are
    neighbours.
    """
    by_row = query.unflatten(0, (-1, query_len)).unflatten(2, (num_kv_heads, -1))
    return by_row.transpose(1, 2).flatten(1, 3)


def _numbers_of_heads(numbers: Tensor, num_kv_heads: int, query_len: int) -> Tensor:
    """Rearrange [H] to [G * Q * R], one value for each head of `_queries_as_heads`."""
    return numbers.view(num_kv_heads, 1, -1).expand(-1, query_len, -1).flatten()


def _sum_with_sinks(
    total: Tensor, sinks: Tensor | None, offset: Tensor | float, blocks: DecodeBlocks
) -> Tensor:
    """Return the sum of all weights of each entry's request, including the weight of its sink: [N,
    H, 1]. Never zero.

    If a sink is so far above the scores that its weight overflows, all other factors become zero.
    """
    total = sum_of_rows(total, blocks) + _TINY
    if sinks is None:
        return total
    if isinstance(offset, Tensor):
        offset = offset.clamp(min=_LOWEST_OFFSET)
    return total + (sinks[:, None] - offset).exp()


def max_of_rows(x: Tensor, blocks: DecodeBlocks) -> Tensor:
    """Return for every entry the maximum over all entries of its request, in the shape of x, [N, H,
    1].
    """
    maxima = x.new_full((blocks.summing.shape[0], *x.shape[1:]), HIDDEN)
    return maxima.index_reduce_(0, blocks.rows, x, "amax").index_select(0, blocks.rows)


def sum_of_rows(x: Tensor, blocks: DecodeBlocks) -> Tensor:
    """Return for every entry the sum over all entries of its request, in the shape of x, [N, H, 1],
    float32.
    """
    return (blocks.summing @ x.squeeze(-1)).index_select(0, blocks.rows).unsqueeze(-1)


def by_block(cache: Tensor, block_size: int) -> Tensor:
    """View [num_blocks * S, ...] as [num_blocks, S, ...] for reading."""
    return cache.view(-1, block_size, *cache.shape[1:])


@dataclass(frozen=True)
class _Part:
    """Entries whose keys and values are in one tensor."""

    span: slice | None
    """Selection of the N entries; None for all."""
    keys: Tensor
    """[n, S, G, D]"""
    values: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return the part of x that belongs to these entries."""
        return x if self.span is None else x[self.span]


def _part(
    span: slice | None,
    keys: Tensor,
    values: Tensor | int,
    scales: CacheScales | None,
    dtype: torch.dtype,
) -> _Part:
    """Create a part from stored blocks. If `values` is an integer, the values are this many first
    elements of the keys.
    """
    if scales is not None:
        keys = scales.key.read(keys, dtype)
    if isinstance(values, int):
        return _Part(span, keys, keys[..., :values])
    return _Part(span, keys, values if scales is None else scales.value.read(values, dtype))


def _fetch(
    key_cache: Tensor,
    value_cache: Tensor | int,
    blocks: DecodeBlocks,
    scales: CacheScales | None,
    dtype: torch.dtype,
) -> list[_Part]:
    """Return the part that is a slice of the cache, and the gathered part.

    They are kept separate until the end of the computation within a block, because joining them
    would copy the slice.
    """
    num_gathered, num_entries = blocks.block_list.shape[0], blocks.rows.shape[0]
    num_sliced, size = num_entries - num_gathered, blocks.block_size
    keys = by_block(key_cache, size)
    if num_sliced > keys.shape[0]:
        raise ValueError(
            f"the forward pass reads blocks 0 to {num_sliced - 1}, but the KV cache has only "
            f"{keys.shape[0]} blocks"
        )

    values = value_cache if isinstance(value_cache, int) else by_block(value_cache, size)
    parts = []
    if num_sliced:
        span = slice(0, num_sliced) if num_gathered else None
        sliced = values if isinstance(values, int) else values[:num_sliced]
        parts.append(_part(span, keys[:num_sliced], sliced, scales, dtype))
    if num_gathered or not num_sliced:
        span = slice(num_sliced, num_entries) if num_sliced else None
        listed = blocks.block_list
        gathered = values if isinstance(values, int) else values.index_select(0, listed)
        parts.append(_part(span, keys.index_select(0, listed), gathered, scales, dtype))
    return parts


def _scores(
    part: _Part,
    queries: Tensor,
    blocks: DecodeBlocks,
    options: AttentionOptions,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """Compute the attention scores [n, H, S] float32 for the entries of one part.

    Args:
        part: keys of n of the N entries of the batch, S positions each.
        queries: [N, G, R, D] queries of all entries.
        blocks: positions of the entries that are hidden, and their distances for ALiBi.
        options: scale of the scores and further changes to them.
        alibi_slopes: [H] slopes of ALiBi; None: the model has none.
    """
    dot_products = _by_head(part.of(queries), part.keys.permute(0, 2, 3, 1)).float()
    scores = options.adjusted(dot_products * options.scale_of(queries.shape[-1]))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None] * part.of(blocks.age).float()
    is_hidden = part.of(blocks.is_hidden)
    if blocks.query_len > 1:
        by_query = scores.unflatten(1, (part.keys.shape[2], blocks.query_len, -1))
        return by_query.masked_fill(is_hidden, HIDDEN).flatten(1, 3)
    return scores.masked_fill(is_hidden, HIDDEN)


def _attend(
    parts: list[_Part], scores: list[Tensor], offset: Tensor | float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute the weighted values [N, H, V] of each entry and the sum [N, H, 1] of its weights,
    both float32.

    Weights are exponentials of scores minus the offset, which is [N, H, 1] or one value for all.
    """
    weighted, sums = [], []
    if isinstance(offset, Tensor):
        offset = offset.clamp(min=_LOWEST_OFFSET)
    for part, s in zip(parts, scores, strict=True):
        relative = s - (part.of(offset) if isinstance(offset, Tensor) else offset)
        weights = relative.exp().to(dtype)  # [n, H, S]
        sums.append(weights.sum(-1, keepdim=True, dtype=torch.float32))
        weights = weights.unflatten(1, (part.values.shape[2], -1))
        weighted.append(_by_head(weights, part.values.transpose(1, 2)).float())
    return _joined(weighted), _joined(sums)


def _attend_fused(
    parts: list[_Part],
    scores: list[Tensor],
    fused: FusedBlocks,
    blocks: DecodeBlocks,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Compute the weighted values [N, H, V] of each entry and their factors [N, H, 1], both
    float32.

    `block_softmax` gives the weight 0 to a block without visible keys only if the block belongs to
    no request. It treats all queries of a request as one, so drafts do not use it.
    """
    kernels, num_rows = fused.kernels, blocks.summing.shape[0]
    if not fused.has_softmax or blocks.query_len > 1:
        block_max = _joined([s.amax(-1, keepdim=True) for s in scores])  # [N, H, 1]
        out, total = _attend(parts, scores, block_max, dtype)
        maxima, sums = (
            x.unflatten(1, (num_kv_heads, -1)).unsqueeze(-1) for x in (block_max, total + _TINY)
        )
        factor = kernels.block_softmax_adjustment(maxima, sums, blocks.groups, num_rows)
        return out, factor.view(block_max.shape)
    is_empty = blocks.is_hidden.flatten(1).all(1)
    groups = blocks.groups.masked_fill(is_empty, -1)
    found = []
    for part, s in zip(parts, scores, strict=True):
        grouped = s.unflatten(1, (num_kv_heads, -1)).unsqueeze(3)  # [n, G, R, 1, S]
        # Scores already contain the mask, so the bias of the kernel is 0.
        bias = grouped.new_zeros(len(s), 1, 1, 1, s.shape[-1])
        found.append(kernels.block_softmax(grouped, bias, part.of(groups)))
    weighted = [
        _by_head(weights.squeeze(3).to(dtype), part.values.transpose(1, 2)).float()
        for (weights, _, _), part in zip(found, parts, strict=True)
    ]
    out, maxima, sums = (
        _joined(x) for x in (weighted, [x for _, x, _ in found], [x for _, _, x in found])
    )
    # For a block without a request, the result of the kernel is undefined.
    maxima = maxima.masked_fill(is_empty[:, None], HIDDEN)
    sums = sums.masked_fill(is_empty[:, None], _TINY)
    shape = [len(out), num_kv_heads, out.shape[1] // num_kv_heads, 1]
    factor = kernels.block_softmax_adjustment(maxima, sums, blocks.groups, num_rows, shape)
    return out, factor.view(*out.shape[:2], 1)


def _by_head(x: Tensor, cached: Tensor) -> Tensor:
    """Compute [n, G, R, K] @ [n, G, K, M] -> [n, G * R, M], in one matmul over all blocks for each
    of the G heads.

    This reads keys and values in place. A single matmul would need n and G in one dimension, which
    requires a transposed copy of all keys and values.
    """
    pairs = zip(x.unbind(1), cached.unbind(1), strict=True)
    return _joined([torch.bmm(left, right) for left, right in pairs], dim=1)


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
