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

from vllm.attention.backends.flat_pa import DecodeBlocks, Normaliser, derive_decode_blocks
from vllm.attention.backends.hpu_attn import (
    PrefillBlocks,
    decode_attention,
    derive_merged_blocks,
    derive_prefill_blocks,
    prefill_attention,
    prefill_mask,
)
from vllm.attention.backends.hpu_metadata import HPUDecodeMetadata, HPUPrefillMetadata
from vllm.attention.backends.merged_prefill import MergedPrefillMetadata, derive_merged_mask
from vllm.attention.backends.sdpa import SDPAKernel, naive_sdpa
from vllm.attention.metadata import AttentionLayer
from vllm.errors import ConfigError


class LayerKind(NamedTuple):
    """What the mask of a layer depends on."""

    window: int | None
    has_alibi: bool
    chunk_size: int | None = None


def _sight(kind: LayerKind) -> tuple[int | None, int | None]:
    """Which keys a query sees: window and size of chunks. No property of the kind: the compiler of
    torch 2.6 does not trace those of named tuples."""
    return kind.window, kind.chunk_size


def _kind(layer: AttentionLayer) -> LayerKind:
    return LayerKind(layer.sliding_window, layer.alibi_slopes is not None, layer.chunk_size)


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


def _kernel_for(layer: AttentionLayer, kernel: SDPAKernel) -> SDPAKernel:
    """Fused kernels have no soft cap and no sinks, and a mask in the dtype of the queries, which
    would round ALiBi far back."""
    if layer.logits_soft_cap is not None or layer.sinks is not None:
        return partial(naive_sdpa, soft_cap=layer.logits_soft_cap, sinks=layer.sinks)
    return kernel if layer.alibi_slopes is None else naive_sdpa


@dataclass(frozen=True)
class PaddedDecode:
    """One new token for each of B padded rows, or the drafts to verify and one more."""

    blocks: Mapping[tuple[int | None, int | None], DecodeBlocks]
    """Window and size of chunks -> what all layers with it need."""
    normaliser: Normaliser | float | None = None
    """See `flat_paged_attention`."""

    @classmethod
    def derive(
        cls,
        metadata: HPUDecodeMetadata[Tensor],
        kinds: Iterable[LayerKind],
        block_size: int,
        dtype: torch.dtype,
        normaliser: Normaliser | float | None = None,
        positions: Tensor | None = None,
    ) -> "PaddedDecode":
        """A launch for layers of these kinds and queries of this dtype; `positions` see
        `derive_decode_blocks`, needed for chunks."""
        blocks: dict[tuple[int | None, int | None], DecodeBlocks] = {}
        for kind in kinds:
            sight = _sight(kind)
            if sight not in blocks:
                blocks[sight] = derive_decode_blocks(
                    metadata, block_size, dtype, kind.window, positions, kind.chunk_size
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
    masks: Mapping[LayerKind, Tensor | None]
    """The mask of all layers of a kind; None where causality says it all."""
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
        masks = {
            kind: prefill_mask(
                metadata, block_size, kind.window, layer.alibi_slopes, chunk_size=kind.chunk_size
            )
            for kind, layer in kinds.items()
        }
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
        masks = {
            kind: derive_merged_mask(
                metadata, block_size, kind.window, layer.alibi_slopes, chunk_size=kind.chunk_size
            )
            for kind, layer in kinds.items()
        }
        return cls(derive_merged_blocks(metadata, block_size), masks, kernel)

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor | None
    ) -> Tensor:
        """See `AttentionMetadata`; T is B * Q."""
        assert layer.key_cache is not None and layer.value_cache is not None
        shape = self.blocks.slots.shape
        query, key = query.unflatten(0, shape), key.unflatten(0, shape)
        value = None if value is None else value.unflatten(0, shape)
        kind = _kind(layer)
        attended = prefill_attention(
            query,
            key,
            value,
            layer.key_cache,
            layer.value_cache,
            self.blocks,
            self.masks[kind],
            layer.scale,
            _kernel_for(layer, self.kernel),
            layer.cache_scales,
        )
        return attended.flatten(0, 1)
