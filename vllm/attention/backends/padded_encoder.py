"""Provide the metadata of padded batches of whole prompts whose tokens all see each other, without
a cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.backends.hpu_attn import prompt_attention
from vllm.attention.backends.metadata import AttentionLayer
from vllm.attention.backends.sdpa import SDPAKernel


@dataclass(frozen=True)
class PaddedEncoder:
    """Metadata of B padded prompts with Q padded tokens each."""

    shape: tuple[int, int]
    """B and Q."""
    mask: Tensor
    """[B, 1, Q, Q] bool, True where a query sees a key: everywhere but at keys of padding."""
    kernel: SDPAKernel

    @classmethod
    def derive(
        cls, query_lens: Tensor, shape: tuple[int, int], kernel: SDPAKernel
    ) -> "PaddedEncoder":
        """Compute the metadata of prompts with these lengths, [B] int32, on the device."""
        _, query_len = shape
        key = torch.arange(query_len, dtype=torch.int32, device=query_lens.device)
        # Padding rows attend to their first token, because softmax over no token gives NaN.
        is_there = key < query_lens.clamp(min=1)[:, None]
        mask = is_there[:, None, None].repeat(1, 1, query_len, 1)
        return cls(shape, mask, kernel)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        stores: bool = True,
    ) -> Tensor:
        """Compute attention within each prompt, T = B * Q. Nothing is stored, and `value` must be
        given.
        """
        assert value is not None
        attended = prompt_attention(
            query.unflatten(0, self.shape),
            key.unflatten(0, self.shape),
            value.unflatten(0, self.shape),
            self.mask,
            layer.options.scale_of(query.shape[-1]),
            kernel=self.kernel,
        )
        return attended.flatten(0, 1)
