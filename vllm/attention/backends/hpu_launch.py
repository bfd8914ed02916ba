"""Padded launches as their attention layers meet them.

Masks, one-hot matrices and whatever else all layers share are derived once per forward pass, on
the device, when the launch is made.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.backends.flat_pa import DecodeBlocks, Normaliser, derive_decode_blocks
from vllm.attention.backends.hpu_attn import (
    PrefillBlocks,
    attend_prefill,
    decode_attention,
    derive_prefill_blocks,
    merged_prefill_attention,
    prefill_mask,
)
from vllm.attention.backends.hpu_metadata import HPUDecodeMetadata, HPUPrefillMetadata
from vllm.attention.backends.merged_prefill import MergedPrefillMetadata, derive_merged_mask
from vllm.attention.backends.sdpa import SDPAKernel
from vllm.attention.metadata import AttentionLayer
from vllm.errors import ConfigError


def check_layers(layers: Iterable[AttentionLayer]) -> None:
    """Refuse layers that the launches of this file would compute wrongly.

    Raises:
        ConfigError: a layer has ALiBi or a soft cap.
    """
    for layer in layers:
        for asked, what in (
            (layer.alibi_slopes, "ALiBi"),
            (layer.logits_soft_cap, "a soft cap of attention scores"),
        ):
            if asked is not None:
                raise ConfigError(
                    f"this model has {what}, which hpu cannot compute yet: run on cpu"
                )


@dataclass(frozen=True)
class HPUDecodeLaunch:
    """One new token for each of B padded rows, or the drafts to verify and one more."""

    metadata: HPUDecodeMetadata[Tensor]
    blocks: Mapping[int | None, DecodeBlocks]
    """Sliding window -> what all layers with it need."""
    normaliser: Normaliser | float | None = None
    """See `flat_paged_attention`."""

    @classmethod
    def derive(
        cls,
        metadata: HPUDecodeMetadata[Tensor],
        windows: Iterable[int | None],
        block_size: int,
        dtype: torch.dtype,
        normaliser: Normaliser | float | None = None,
        positions: Tensor | None = None,
    ) -> "HPUDecodeLaunch":
        """A launch for layers with these windows and queries of this dtype; `positions` see
        `derive_decode_blocks`."""
        blocks = {
            w: derive_decode_blocks(metadata, block_size, dtype, w, positions) for w in windows
        }
        return cls(metadata, blocks, normaliser)

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionMetadata`; T is B * Q."""
        assert layer.key_cache is not None and layer.value_cache is not None
        return decode_attention(
            query,
            key,
            value,
            layer.key_cache,
            layer.value_cache,
            self.metadata,
            self.blocks[layer.sliding_window],
            layer.scale,
            normaliser=self.normaliser,
        )


@dataclass(frozen=True)
class HPUPrefillLaunch:
    """Q padded new tokens for each of B padded rows, after up to C blocks of context."""

    blocks: PrefillBlocks
    shape: tuple[int, int]
    """B and Q."""
    masks: Mapping[int | None, Tensor | None]
    """Sliding window -> mask of all layers with it; None where causality says it all."""
    kernel: SDPAKernel

    @classmethod
    def derive(
        cls,
        metadata: HPUPrefillMetadata[Tensor],
        windows: Iterable[int | None],
        block_size: int,
        kernel: SDPAKernel,
    ) -> "HPUPrefillLaunch":
        """A launch for layers with these windows."""
        masks = {w: prefill_mask(metadata, block_size, w) for w in windows}
        batch, query_len = metadata.slot_mapping.shape
        blocks = derive_prefill_blocks(metadata, block_size)
        return cls(blocks, (batch, query_len), masks, kernel)

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionMetadata`; T is B * Q."""
        assert layer.key_cache is not None and layer.value_cache is not None
        attended = attend_prefill(
            query.unflatten(0, self.shape),
            key.unflatten(0, self.shape),
            value.unflatten(0, self.shape),
            layer.key_cache,
            layer.value_cache,
            self.blocks,
            self.masks[layer.sliding_window],
            layer.scale,
            self.kernel,
        )
        return attended.flatten(0, 1)


@dataclass(frozen=True)
class HPUMergedLaunch:
    """Prompts end to end in one row of Q padded tokens, after C blocks of their context."""

    metadata: MergedPrefillMetadata[Tensor]
    masks: Mapping[int | None, Tensor]
    """Sliding window -> mask of all layers with it."""
    kernel: SDPAKernel

    @classmethod
    def derive(
        cls,
        metadata: MergedPrefillMetadata[Tensor],
        windows: Iterable[int | None],
        block_size: int,
        kernel: SDPAKernel,
    ) -> "HPUMergedLaunch":
        """A launch for layers with these windows."""
        masks = {w: derive_merged_mask(metadata, block_size, w) for w in windows}
        return cls(metadata, masks, kernel)

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionMetadata`; T is Q."""
        assert layer.key_cache is not None and layer.value_cache is not None
        return merged_prefill_attention(
            query,
            key,
            value,
            layer.key_cache,
            layer.value_cache,
            self.metadata,
            self.masks[layer.sliding_window],
            layer.scale,
            self.kernel,
        )
