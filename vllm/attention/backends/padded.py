"""Padded launches as their attention layers meet them.

Masks, one-hot matrices and whatever else all layers share are derived once per forward pass, on
the device, when the launch is made.
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
    derive_merged_blocks,
    derive_prefill_blocks,
    derive_sight,
    prefill_attention,
)
from vllm.attention.backends.hpu_metadata import HPUDecodeMetadata, HPUPrefillMetadata
from vllm.attention.backends.merged_prefill import MergedPrefillMetadata, derive_merged_sight
from vllm.attention.backends.metadata import AttentionLayer
from vllm.attention.backends.prompt_masks import Sight, SlicedMask
from vllm.attention.backends.sdpa import Fp8SDPA, FusedSDPA, SDPAKernel, naive_sdpa
from vllm.errors import ConfigError


class LayerKind(NamedTuple):
    """What the mask of a layer depends on, and whether a kernel takes something instead of it."""

    window: int | None
    has_alibi: bool
    chunk_size: int | None = None
    has_soft_cap: bool = False
    has_sinks: bool = False


def _sight(kind: LayerKind) -> tuple[int | None, int | None]:
    """Which keys a query sees: window and size of chunks. No property of the kind: the compiler of
    torch 2.6 does not trace those of named tuples."""
    return kind.window, kind.chunk_size


def _kind(layer: AttentionLayer) -> LayerKind:
    return LayerKind(
        layer.sliding_window,
        layer.alibi_slopes is not None,
        layer.chunk_size,
        layer.logits_soft_cap is not None,
        layer.sinks is not None,
    )


def layer_kinds(layers: Iterable[AttentionLayer]) -> dict[LayerKind, AttentionLayer]:
    """A layer of each kind among these, for the masks of a launch.

    Raises:
        ConfigError: a layer asks for what the launches of this file do not compute.
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


def fit_kernel(kernel: SDPAKernel, kinds: Iterable[LayerKind]) -> SDPAKernel:
    """Return the kernel with what a card can do for layers of these kinds; outside of compiled
    code."""
    if not isinstance(kernel, FusedSDPA):
        return kernel
    found = [kind for kind in kinds if _may_be_fused(kind)]
    return kernel.fitted(
        has_windows=any(kind.window is not None for kind in found),
        has_sinks=any(kind.has_sinks for kind in found),
    )


def _may_be_fused(kind: LayerKind) -> bool:
    """Whether a fused kernel has all but windows and sinks. It has no soft cap, and a mask in the
    dtype of the queries, which would round ALiBi far back."""
    return not (kind.has_soft_cap or kind.has_alibi)


def _takes_window(kernel: SDPAKernel, kind: LayerKind, query_len: int) -> bool:
    """Whether the kernel takes the window of a prefill without context, instead of a mask."""
    return (
        isinstance(kernel, FusedSDPA)
        and kernel.window_multiple is not None
        and query_len % kernel.window_multiple == 0
        and kind.window is not None
        and kind.chunk_size is None
        and _is_fused(kernel, kind)
    )


PromptMask = Tensor | SlicedMask | None
"""Of all layers of a kind; None where causality says it all, or with the window that the kernel
gets."""


def _masks(
    sight: Sight,
    kinds: Mapping[LayerKind, AttentionLayer],
    kernel: SDPAKernel,
    *,
    is_causal: bool,
) -> dict[LayerKind, PromptMask]:
    """Return the masks of a launch. Without `is_causal`, even plain layers need one."""
    query_len, key_len = sight.query_positions.shape[1], sight.key_positions.shape[1]
    at_once = query_len
    if isinstance(kernel, FusedSDPA):
        at_once = kernel.slicing.queries_at_once(query_len, key_len)
    masks: dict[LayerKind, PromptMask] = {}
    for kind, layer in kinds.items():
        is_plain = kind.window is kind.chunk_size is layer.alibi_slopes is None
        takes_none = is_causal and (is_plain or _takes_window(kernel, kind, query_len))
        if takes_none and (at_once == query_len or _is_fused(kernel, kind)):
            masks[kind] = None
        elif at_once < query_len:
            masks[kind] = SlicedMask(
                sight, at_once, kind.window, layer.alibi_slopes, kind.chunk_size
            )
        else:
            masks[kind] = sight.mask(kind.window, layer.alibi_slopes, chunk_size=kind.chunk_size)
    return masks


def _is_fused(kernel: SDPAKernel, kind: LayerKind) -> bool:
    """Return whether the fused kernel of a card computes layers of a kind."""
    return (
        isinstance(kernel, FusedSDPA)
        and _may_be_fused(kind)
        and (kernel.has_sinks or not kind.has_sinks)
    )


def _kernel_for(layer: AttentionLayer, kernel: SDPAKernel, mask: PromptMask) -> SDPAKernel:
    """Return the kernel with what a layer has besides a mask; without one it gets the window."""
    attend = _whole_kernel_for(layer, kernel, mask)
    fp8 = None
    # Windows and sinks of a kernel in fp8 are not documented for every build.
    if attend is kernel and isinstance(kernel, FusedSDPA) and kernel.has_fp8:
        scales = layer.prompt_scales
        fp8 = None if scales is None else Fp8SDPA(kernel.kernels, scales)
        attend = attend if fp8 is None else fp8
    if isinstance(mask, SlicedMask):
        attend = partial(mask.attend, attend)
    return attend if fp8 is None else partial(fp8.round_inputs, attend)


def _whole_kernel_for(layer: AttentionLayer, kernel: SDPAKernel, mask: PromptMask) -> SDPAKernel:
    kind = _kind(layer)
    window = layer.sliding_window if mask is None else None
    has_extras = window is not None or kind.has_sinks
    if isinstance(kernel, FusedSDPA) and has_extras and _is_fused(kernel, kind):
        return partial(kernel, window=window, sinks=layer.sinks)
    if kind.has_soft_cap or kind.has_sinks:
        return partial(naive_sdpa, soft_cap=layer.logits_soft_cap, sinks=layer.sinks)
    return naive_sdpa if kind.has_alibi else kernel


@dataclass(frozen=True)
class PaddedDecode:
    """One new token for each of B padded rows, or the drafts to verify and one more."""

    blocks: Mapping[tuple[int | None, int | None], DecodeBlocks]
    """Window and size of chunks -> what all layers with it need."""
    normaliser: Softmax = None
    """See `flat_paged_attention`."""

    @classmethod
    def derive(
        cls,
        metadata: HPUDecodeMetadata[Tensor],
        kinds: Iterable[LayerKind],
        block_size: int,
        dtype: torch.dtype,
        normaliser: Softmax = None,
        indices: Tensor | None = None,
    ) -> "PaddedDecode":
        """Return a launch for layers of these kinds and queries of this dtype; `indices` see
        `derive_decode_blocks`, needed for chunks."""
        blocks: dict[tuple[int | None, int | None], DecodeBlocks] = {}
        for kind in kinds:
            sight = _sight(kind)
            if sight not in blocks:
                blocks[sight] = derive_decode_blocks(
                    metadata, block_size, dtype, kind.window, indices, kind.chunk_size
                )
        return cls(blocks, normaliser)

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor | None
    ) -> Tensor:
        """See `AttentionMetadata`; T is B * Q."""
        assert layer.key_cache is not None and layer.value_cache is not None
        return decode_attention(
            query,
            key,
            value,
            layer.key_cache,
            layer.value_cache,
            self.blocks[_sight(_kind(layer))],
            layer.scale,
            alibi_slopes=layer.alibi_slopes,
            soft_cap=layer.logits_soft_cap,
            sinks=layer.sinks,
            normaliser=self.normaliser,
            scales=layer.cache_scales,
        )


@dataclass(frozen=True)
class PaddedPrefill:
    """Q padded new tokens for each of B padded rows, after up to C blocks of context."""

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
        """A launch for layers of these kinds."""
        is_causal = metadata.context_blocks.shape[1] == 0
        sight = derive_sight(metadata, block_size)
        masks = _masks(sight, kinds, kernel, is_causal=is_causal)
        return cls(derive_prefill_blocks(metadata, block_size), masks, kernel)

    @classmethod
    def derive_merged(
        cls,
        metadata: MergedPrefillMetadata[Tensor],
        kinds: Mapping[LayerKind, AttentionLayer],
        block_size: int,
        kernel: SDPAKernel,
    ) -> "PaddedPrefill":
        """A launch of prompts end to end in one row, for layers of these kinds."""
        masks = _masks(derive_merged_sight(metadata, block_size), kinds, kernel, is_causal=False)
        return cls(derive_merged_blocks(metadata, block_size), masks, kernel)

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor | None
    ) -> Tensor:
        """See `AttentionMetadata`; T is B * Q."""
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
            layer.scale,
            _kernel_for(layer, self.kernel, mask),
            layer.cache_scales,
        )
        return attended.flatten(0, 1)
