"""Provide the items that the tokens of a padded batch see by cross-attention.

Letters: B requests (rows) with Q tokens each, T = B * Q, S slots of a request, H query heads, G
key/value heads, D head size. All sizes are padded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.backends.hpu_attn import prompt_attention
from vllm.attention.backends.sdpa import PromptInputs, SDPAKernel, naive_sdpa
from vllm.attention.cross import ReadsItems

NUM_FIELDS = 3
"""Fields of a slot in a table: the slot, the first token that sees it, and the index after
the last one."""


@dataclass(frozen=True)
class PaddedItems:
    """The slots of each request, and the tokens that see them."""

    slots: Tensor
    """[B * S] int32."""
    is_seen: Tensor
    """[B, 1, Q, S] bool. A token that sees no slot gets the first one, because a softmax needs at
    least one."""
    sees_any: Tensor
    """[T] bool."""
    kernel: SDPAKernel

    @classmethod
    def derive(cls, tables: Tensor, indices: Tensor, kernel: SDPAKernel) -> "PaddedItems":
        """Compute the data of a batch on the device.

        Args:
            tables: [B, NUM_FIELDS, S] int32.
            indices: [B, Q] int32 positions of the tokens in their requests.
            kernel: computes the attention.
        """
        slots, first, end = (tables[:, field] for field in range(NUM_FIELDS))
        index = indices[:, :, None]
        is_seen = (index >= first[:, None]) & (index < end[:, None])
        sees_any = torch.sum(is_seen, -1, dtype=torch.int32) > 0
        is_first = torch.arange(slots.shape[1], dtype=torch.int32, device=slots.device) == 0
        is_seen = is_seen | (is_first & ~sees_any[:, :, None])
        return cls(slots.flatten(), is_seen[:, None], sees_any.flatten(), kernel)

    def attend_to_items(self, layer: ReadsItems, query: Tensor) -> Tensor:
        assert layer.item_keys is not None and layer.item_values is not None
        batch, _, query_len, num_slots = self.is_seen.shape
        key, value = (
            pool.index_select(0, self.slots).unflatten(0, (batch, num_slots))
            for pool in (layer.item_keys, layer.item_values)
        )
        scale = layer.item_options.scale_of(query.shape[-1])
        if query_len == 1:
            # Treat the query heads that share a key head as queries of one head: one matmul instead
            # of several vectors.
            by_head = query.unflatten(1, (key.shape[2], -1))
            key, value = key.transpose(1, 2), value.transpose(1, 2)
            inputs = PromptInputs(by_head, key, value, self.is_seen, scale)
            read = naive_sdpa(inputs).flatten(1, 2)
        else:
            by_row = query.unflatten(0, (batch, query_len))
            read = prompt_attention(
                by_row, key, value, self.is_seen, scale, kernel=self.kernel
            ).flatten(0, 1)
        return self.clear_unseeing(read)

    def clear_unseeing(self, x: Tensor) -> Tensor:
        return torch.where(self.sees_any.view(-1, *[1] * (x.dim() - 1)), x, 0.0)
