"""Provide the attention metadata of padded batches to the layers.

Masks, one-hot matrices and other tensors that all layers share are computed once per forward pass,
on the device, when the batch is created.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vllm.attention.backends.flat_pa import DecodeBlocks, Softmax, derive_decode_blocks
from vllm.attention.backends.hpu_attn import (
    PrefillBlocks,
    decode_attention,
    derive_mask_positions,
    derive_merged_blocks,
    derive_prefill_blocks,
    prefill_attention,
)
from vllm.attention.backends.hpu_metadata import HPUDecodeMetadata, HPUPrefillMetadata
from vllm.attention.backends.merged_prefill import MergedPrefillMetadata, derive_merged_positions
from vllm.attention.backends.metadata import AttentionLayer
from vllm.attention.backends.prompt_masks import MaskPositions, SlicedMask
from vllm.attention.backends.sdpa import Fp8SDPA, FusedSDPA, SDPAKernel, naive_sdpa
from vllm.errors import ConfigError


class LayerKind(NamedTuple):
    """Properties of a layer that decide its mask, and whether a kernel needs a different input."""

    mask_kind: tuple[int | None, ...]
    """`AttentionOptions.mask_kind` of the layers."""
    adjusts_scores: bool
    has_alibi: bool
    has_sinks: bool


def _kind(layer: AttentionLayer) -> LayerKind:
    return LayerKind(
        layer.options.mask_kind,
        layer.options.adjusts_scores,
        layer.alibi_slopes is not None,
        layer.sinks is not None,
    )


def layer_kinds(layers: Iterable[AttentionLayer]) -> dict[LayerKind, AttentionLayer]:
    """Return one layer of each kind, for the masks of a batch.

    Raises:
        ConfigError: a layer needs something that padded batches do not support.
    """
    kinds: dict[LayerKind, AttentionLayer] = {}
    for layer in layers:
        slopes, first = layer.alibi_slopes, kinds.setdefault(_kind(layer), layer).alibi_slopes
        if slopes is not None and first is not None and not torch.equal(slopes, first):
            raise ConfigError(
                "this model has layers with different ALiBi slopes, which is not supported on hpu: "
                "run it on cpu"
            )
    return kinds


def fit_kernel(kernel: SDPAKernel, kinds: Mapping[LayerKind, AttentionLayer]) -> SDPAKernel:
    """Return the kernel, adapted to what the card supports for layers of these kinds. Called
    outside of compiled code.
    """
    if not isinstance(kernel, FusedSDPA):
        return kernel
    found = [layer for kind, layer in kinds.items() if _may_be_fused(kind)]
    return kernel.fitted(
        has_windows=any(layer.options.sliding_window is not None for layer in found),
        has_sinks=any(layer.sinks is not None for layer in found),
    )


def _may_be_fused(kind: LayerKind) -> bool:
    """Return whether a fused kernel supports everything that the layer needs, apart from windows
    and sinks.

    A fused kernel does not change scores, and its mask has the dtype of the queries, which would
    round ALiBi for distant tokens.
    """
    return not (kind.adjusts_scores or kind.has_alibi)


def _takes_window(kernel: SDPAKernel, kind: LayerKind, window: int | None, query_len: int) -> bool:
    """Return whether the kernel accepts the window of a prefill without context, instead of a
    mask.
    """
    return (
        isinstance(kernel, FusedSDPA)
        and kernel.window_multiple is not None
        and query_len % kernel.window_multiple == 0
        and window is not None
        and _is_fused(kernel, kind)
    )


PromptMask = Tensor | SlicedMask | None
"""Mask for all layers of a kind; None where causality says it all, or with the window that the
kernel gets."""


def _masks(
    positions: MaskPositions,
    kinds: Mapping[LayerKind, AttentionLayer],
    kernel: SDPAKernel,
    *,
    is_causal: bool,
) -> dict[LayerKind, PromptMask]:
    """Return the masks of a batch, by kind of layer. Without `is_causal`, even plain layers need
    one.
    """
    query_len, key_len = positions.query_positions.shape[1], positions.key_positions.shape[1]
    at_once = query_len
    if isinstance(kernel, FusedSDPA):
        at_once = kernel.slicing.queries_at_once(query_len, key_len)
    is_causal = is_causal and positions.last_keys is None
    masks: dict[LayerKind, PromptMask] = {}
    for kind, layer in kinds.items():
        options, slopes = layer.options, layer.alibi_slopes
        is_plain = options.sees_all and slopes is None
        takes_window = _takes_window(kernel, kind, options.lone_window, query_len)
        takes_none = is_causal and (is_plain or takes_window)
        if takes_none and (at_once == query_len or _is_fused(kernel, kind)):
            masks[kind] = None
        elif at_once < query_len:
            masks[kind] = SlicedMask(positions, at_once, options, slopes)
        else:
            masks[kind] = positions.mask(options, slopes)
    return masks


def _is_fused(kernel: SDPAKernel, kind: LayerKind) -> bool:
    """Return whether the fused kernel of a card computes layers of this kind."""
    return (
        isinstance(kernel, FusedSDPA)
        and _may_be_fused(kind)
        and (kernel.has_sinks or not kind.has_sinks)
    )


def _kernel_for(layer: AttentionLayer, kernel: SDPAKernel, mask: PromptMask) -> SDPAKernel:
    """Return the kernel with the inputs of a layer in addition to the mask. Without a mask it gets
    the window.
    """
    attend = _whole_kernel_for(layer, kernel, mask)
    fp8 = None
    # Not every version of the FP8 kernel documents windows and sinks, so they use the other
    # kernels.
    if attend is kernel and isinstance(kernel, FusedSDPA) and kernel.has_fp8:
        scales = layer.prompt_scales
        fp8 = None if scales is None else Fp8SDPA(kernel.kernels, scales)
        attend = attend if fp8 is None else fp8
    if isinstance(mask, SlicedMask):
        attend = partial(mask.attend, attend)
    return attend if fp8 is None else partial(fp8.round_inputs, attend)


def _whole_kernel_for(layer: AttentionLayer, kernel: SDPAKernel, mask: PromptMask) -> SDPAKernel:
    kind = _kind(layer)
    window = layer.options.lone_window if mask is None else None
    has_extras = window is not None or kind.has_sinks
    if isinstance(kernel, FusedSDPA) and has_extras and _is_fused(kernel, kind):
        return partial(kernel, window=window, sinks=layer.sinks)
    if kind.adjusts_scores or kind.has_sinks:
        return partial(naive_sdpa, options=layer.options, sinks=layer.sinks)
    return naive_sdpa if kind.has_alibi else kernel


@dataclass(frozen=True)
class PaddedDecode:
    """Metadata of one new token for each of B padded requests, or of the drafts to verify plus
    one.
    """

    blocks: Mapping[tuple[int | None, ...], DecodeBlocks]
    """Mask kind of `AttentionOptions` -> what all layers with it need."""
    normaliser: Softmax = None
    """Softmax of decodes; see `flat_paged_attention`."""

    @classmethod
    def derive(
        cls,
        metadata: HPUDecodeMetadata[Tensor],
        kinds: Mapping[LayerKind, AttentionLayer],
        block_size: int,
        dtype: torch.dtype,
        normaliser: Softmax = None,
        indices: Tensor | None = None,
    ) -> "PaddedDecode":
        """Compute the metadata of a batch for layers of these kinds and queries of this dtype.

        For `indices` see `derive_decode_blocks`.
        """
        blocks: dict[tuple[int | None, ...], DecodeBlocks] = {}
        for layer in kinds.values():
            options = layer.options
            if options.mask_kind not in blocks:
                blocks[options.mask_kind] = derive_decode_blocks(
                    metadata, block_size, dtype, options, indices
                )
        return cls(blocks, normaliser)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        stores: bool = True,
    ) -> Tensor:
        """Store the new keys and values, and compute attention for T = B * Q tokens."""
        assert layer.key_cache is not None and layer.value_cache is not None
        return decode_attention(
            query,
            key,
            value,
            layer.key_cache,
            layer.value_cache,
            self.blocks[layer.options.mask_kind],
            layer.options,
            alibi_slopes=layer.alibi_slopes,
            sinks=layer.sinks,
            normaliser=self.normaliser,
            scales=layer.cache_scales,
            stores=stores,
        )


@dataclass(frozen=True)
class PaddedPrefill:
    """Metadata of Q padded new tokens for each of B padded requests, after up to C blocks of
    context.
    """

    blocks: PrefillBlocks
    masks: Mapping[LayerKind, PromptMask]
    kernel: SDPAKernel

    @classmethod
    def derive(
        cls,
        metadata: HPUPrefillMetadata[Tensor],
        kinds: Mapping[LayerKind, AttentionLayer],
        block_size: int,
        kernel: SDPAKernel,
    ) -> "PaddedPrefill":
        """Compute the metadata of a batch for layers of these kinds."""
        is_causal = metadata.context_blocks.shape[1] == 0
        positions = derive_mask_positions(metadata, block_size)
        masks = _masks(positions, kinds, kernel, is_causal=is_causal)
        return cls(derive_prefill_blocks(metadata, block_size), masks, kernel)

    @classmethod
    def derive_merged(
        cls,
        metadata: MergedPrefillMetadata[Tensor],
        kinds: Mapping[LayerKind, AttentionLayer],
        block_size: int,
        kernel: SDPAKernel,
    ) -> "PaddedPrefill":
        """Compute the metadata of a batch of concatenated prompts, for layers of these kinds."""
        masks = _masks(
            derive_merged_positions(metadata, block_size), kinds, kernel, is_causal=False
        )
        return cls(derive_merged_blocks(metadata, block_size), masks, kernel)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        stores: bool = True,
    ) -> Tensor:
        """Store the new keys and values, and compute attention for T = B * Q tokens."""
        assert layer.key_cache is not None and layer.value_cache is not None
        shape = self.blocks.slots.shape
        query, key = query.unflatten(0, shape), key.unflatten(0, shape)
        value = None if value is None else value.unflatten(0, shape)
        mask = self.masks[_kind(layer)]
        attended = prefill_attention(
            query,
            key,
            value,
            layer.key_cache,
            layer.value_cache,
            self.blocks,
            mask if isinstance(mask, Tensor) else None,
            layer.options.scale_of(query.shape[-1]),
            _kernel_for(layer, self.kernel, mask),
            layer.cache_scales,
            stores=stores,
        )
        return attended.flatten(0, 1)
