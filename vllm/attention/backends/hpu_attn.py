"""Compute attention of padded batches on HPU: store the new tokens, then compute attention.

Pure torch with the shapes of the bucket: nothing reads a tensor on the host, so a forward pass can
be captured as a graph and replayed with other metadata. A fused kernel is passed in as a function
(`SDPAKernel`); without one the same code runs on any device.

Letters: B requests (rows), Q new tokens of a request, C blocks of context of a request, H query
heads, G key/value heads, D head size, S block size, K = C * S + Q keys of a request. All sizes are
padded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.backends.cache_scales import CacheScale, CacheScales
from vllm.attention.backends.flat_pa import DecodeBlocks, Softmax, by_block, flat_paged_attention
from vllm.attention.backends.hpu_metadata import HPUPrefillMetadata
from vllm.attention.backends.merged_prefill import MergedPrefillMetadata, is_context_hidden
from vllm.attention.backends.prompt_masks import MaskPositions
from vllm.attention.backends.sdpa import PromptInputs, SDPAKernel, naive_sdpa, torch_sdpa
from vllm.ops.attention_options import PLAIN_ATTENTION, AttentionOptions

__all__ = [
    "SDPAKernel",
    "decode_attention",
    "naive_sdpa",
    "prefill_attention",
    "prefill_mask",
    "prompt_attention",
    "torch_sdpa",
    "write_kv_cache",
]

_NEVER = 2**30
"""Position of a key that no query sees: after all of them."""


def write_kv_cache(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | int,
    slots: Tensor,
    scales: CacheScales | None = None,
) -> None:
    """Store the keys and values of a padded batch in the cache, in place.

    Each cache is written directly, not through a view: a compiler for Gaudi would copy the whole
    cache of the layer at every step. Padding is also stored, in the null block; slots there may
    repeat, and any of their values may remain.

    Values that are not finite are replaced by 0. Attention gives the weight 0 to a slot that is not
    in use, and 0 * NaN is NaN. Keys are not changed, so that the request of such a token still gets
    NaN.

    Args:
        key: [..., G, D].
        value: [..., G, D]; None if value_cache is an integer.
        key_cache: [num_blocks * S, G, D].
        value_cache: [num_blocks * S, G, D]; an integer V: the first V elements of a key are its
            value.
        slots: [...] int64, block id * S + offset.
        scales: scales of an FP8 cache; None if the cache has the dtype of the keys.
    """
    slots = slots.flatten()
    if isinstance(value_cache, int):
        latent, rest = key[..., :value_cache], key[..., value_cache:]
        new_rows = [(torch.cat((_finite(latent), rest), dim=-1), key_cache)]
    else:
        assert value is not None
        new_rows = [(key, key_cache), (_finite(value), value_cache)]
    if scales is not None:
        pairs = zip(new_rows, (scales.key, scales.value), strict=False)
        new_rows = [(scale.store(new, cache.dtype), cache) for (new, cache), scale in pairs]
    for new, cache in new_rows:
        cache.index_copy_(0, slots, new if new.dim() == 3 else new.flatten(0, -3))


def _finite(x: Tensor) -> Tensor:
    """Replace NaN and infinity in x by 0."""
    return torch.where(x.abs() <= torch.finfo(x.dtype).max, x, 0.0)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | int,
    blocks: DecodeBlocks,
    options: AttentionOptions,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    normaliser: Softmax = None,
    scales: CacheScales | None = None,
    stores: bool = True,
) -> Tensor:
    """Store the new token of each request, and compute attention over all tokens of the request in
    the cache.

    Args:
        query: [B, H, D].
        key: [B, G, D].
        value: [B, G, D]; None as for `write_kv_cache`.
        key_cache: [num_blocks * S, G, D]. Written.
        value_cache: [num_blocks * S, G, D], finite. Written. An integer as for `write_kv_cache`.
        blocks: the batch, with the window of this layer.
        options: options; see `flat_paged_attention`.
        alibi_slopes: [H] float32, or None.
        sinks: sinks; see `flat_paged_attention`.
        normaliser: normaliser; see `flat_paged_attention`.
        scales: scales, as for `write_kv_cache`.
        stores: False: another layer has stored the new tokens.

    Returns:
        [B, H, D], or [B, H, V]. Padded requests are zero.
    """
    if stores:
        write_kv_cache(key, value, key_cache, value_cache, blocks.slots, scales)
    return flat_paged_attention(
        query,
        key_cache,
        value_cache,
        blocks,
        options,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        normaliser=normaliser,
        scales=scales,
    )


@dataclass(frozen=True)
class PrefillBlocks:
    """Tensors that all layers need for a prefill; computed on the device, once per forward pass."""

    slots: Tensor
    """[B, Q] int64: where new keys and values go."""
    block_size: int
    """S, the number of tokens of a block."""
    query_lens: Tensor | None = None
    """[B] int32; None for merged prompts, whose mask says it."""
    context_blocks: Tensor | None = None
    """[B * C] blocks of the context; None in a launch without."""
    is_hidden: Tensor | None = None
    """[B, C * S, 1, 1] slots that hold no token of the context; None in a launch without."""


def derive_prefill_blocks(metadata: HPUPrefillMetadata[Tensor], block_size: int) -> PrefillBlocks:
    """Compute the slots and context blocks of a prefill batch."""
    slots, lens = metadata.slot_mapping.long(), metadata.query_lens
    num_context = metadata.context_blocks.shape[1]
    if not num_context:
        return PrefillBlocks(slots, block_size, lens)
    context_blocks = metadata.context_blocks.flatten()
    device = context_blocks.device
    column = torch.arange(num_context * block_size, dtype=torch.int32, device=device)
    is_hidden = (column >= metadata.context_lens[:, None])[:, :, None, None]
    return PrefillBlocks(slots, block_size, lens, context_blocks, is_hidden)


def derive_merged_blocks(metadata: MergedPrefillMetadata[Tensor], block_size: int) -> PrefillBlocks:
    """Compute the slots and context blocks of concatenated prompts: one sequence of Q tokens and C
    blocks of context.
    """
    slots = metadata.slot_mapping.long()[None]
    if not metadata.context_blocks.shape[0]:
        return PrefillBlocks(slots, block_size)
    is_hidden = is_context_hidden(metadata, block_size).view(1, -1, 1, 1)
    return PrefillBlocks(slots, block_size, None, metadata.context_blocks, is_hidden)


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | int,
    blocks: PrefillBlocks,
    mask: Tensor | None,
    scale: float,
    kernel: SDPAKernel = torch_sdpa,
    scales: CacheScales | None = None,
    *,
    stores: bool = True,
) -> Tensor:
    """Store the new tokens, and compute attention over the context of each request and the new
    tokens.

    All writes come before all reads, because the context of one request may be filled by another
    request of the same batch.

    Args:
        query: [B, Q, H, D]. Padding must be finite, here and below.
        key: [B, Q, G, D].
        value: [B, Q, G, D]; None as for `write_kv_cache`.
        key_cache: [num_blocks * S, G, D]. Written.
        value_cache: [num_blocks * S, G, D], finite. Written. An integer as for `write_kv_cache`.
        blocks: the batch.
        mask: the mask of the batch (`prefill_mask`), with the window of this layer.
        scale: multiplies query @ key.
        kernel: computes the attention.
        scales: scales, as for `write_kv_cache`. New keys and values are used without rounding.
        stores: False: another layer has stored the new tokens.

    Returns:
        [B, Q, H, D], or [B, Q, H, V]. Padding is finite. The content of slots after the context has
        no effect.
    """
    if stores:
        write_kv_cache(key, value, key_cache, value_cache, blocks.slots, scales)
    if blocks.context_blocks is not None and blocks.is_hidden is not None:
        # Clear keys that are masked: a score of NaN would remain NaN. Values are already finite.
        key_scale, value_scale = (None, None) if scales is None else (scales.key, scales.value)
        context_keys = _context(key_cache, blocks, key_scale, key.dtype)
        context_keys = context_keys.masked_fill(blocks.is_hidden, 0.0)
        key = torch.cat((context_keys, key), dim=1)
        if value is not None and not isinstance(value_cache, int):
            context_values = _context(value_cache, blocks, value_scale, value.dtype)
            value = torch.cat((context_values, value), dim=1)
    if isinstance(value_cache, int):
        value = key[..., :value_cache]
    assert value is not None
    return prompt_attention(query, key, value, mask, scale, blocks.query_lens, kernel)


def prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    query_lens: Tensor | None = None,
    kernel: SDPAKernel = torch_sdpa,
) -> Tensor:
    """Compute attention without a cache, in the layout of the model: [B, Q, H, D] and [B, K, G, D].

    Fused kernels accept either a mask or lengths: with a mask, lengths are not passed on.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    lens = query_lens if mask is None else None
    return kernel(PromptInputs(query, key, value, mask, scale, lens)).transpose(1, 2)


def prefill_mask(
    metadata: HPUPrefillMetadata[Tensor],
    block_size: int,
    options: AttentionOptions = PLAIN_ATTENTION,
    alibi_slopes: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """Return a mask of the keys that the queries of a batch see; computed on the device, once per
    forward pass.

    The keys are the padded context, then the new tokens. Padding on the right comes after every
    real query, so causality hides it. Every query, including padding, sees at least itself.

    Args:
        metadata: metadata of the batch.
        block_size: S.
        options, alibi_slopes, dtype: see `MaskPositions.mask`.

    Returns:
        [B, 1, Q, K] bool; with ALiBi [B, H, Q, K] values to add. None if plain causality is
        sufficient: no context, no window, no token that sees later ones, and padding on the right.
    """
    sees_ahead = metadata.last_keys.shape[0] > 0
    is_plain = options.sees_all and alibi_slopes is None and not sees_ahead
    if metadata.context_blocks.shape[1] == 0 and is_plain:
        return None
    return derive_mask_positions(metadata, block_size).mask(options, alibi_slopes, dtype)


def derive_mask_positions(metadata: HPUPrefillMetadata[Tensor], block_size: int) -> MaskPositions:
    """Return the positions from which the masks of a batch are computed."""
    num_context, query_len = metadata.context_blocks.shape[1], metadata.slot_mapping.shape[1]
    device, context_lens = metadata.context_lens.device, metadata.context_lens[:, None]
    column = torch.arange(num_context * block_size, dtype=torch.int32, device=device)
    query_pos = context_lens + torch.arange(query_len, dtype=torch.int32, device=device)
    context_pos = torch.where(column < context_lens, column, _NEVER)
    key_pos = torch.cat((context_pos, query_pos), dim=1)
    return MaskPositions.of(query_pos, key_pos, metadata.last_keys)


def _context(
    cache: Tensor, blocks: PrefillBlocks, scale: CacheScale | None, dtype: torch.dtype
) -> Tensor:
    """Read the context [B, C * S, G, D] from the cache."""
    assert blocks.context_blocks is not None
    context = by_block(cache, blocks.block_size).index_select(0, blocks.context_blocks)
    if scale is not None:
        context = scale.read(context, dtype)
    return context.view(len(blocks.slots), -1, *cache.shape[1:])
