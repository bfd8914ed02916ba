"""Test cross-attention as a card compiles it: only documented operators, with and without
drafts.
"""

import pytest
import torch
from torch import Tensor

from tests.conformance.hpu_program import operators_of_a_card
from tests.conformance.test_captured_sampler import violations_of
from vllm.attention import LaunchContext, share_context
from vllm.attention.backends.sdpa import naive_sdpa
from vllm.attention.padded_items import NUM_FIELDS, PaddedItems
from vllm.distributed import TPGroup
from vllm.model_executor.layers.cross_attention import CrossAttention

BATCH, SLOTS, HIDDEN = 2, 8, 32


@pytest.mark.parametrize("query_len", [1, 3])
@torch.inference_mode()
def test_tokens_read_items_on_the_device(query_len):
    with operators_of_a_card():
        layer = CrossAttention(HIDDEN, 4, 2, 8, TPGroup(), qvo_bias=True).eval()
        holder = share_context(layer)

        def read(tables: Tensor, indices: Tensor, x: Tensor, *pool: Tensor) -> Tensor:
            layer.bind_pool(*pool)
            items = PaddedItems.derive(tables, indices, naive_sdpa)
            holder.context = LaunchContext(None, indices.view(1, -1), items=items)
            return layer.clear_unseeing(layer(x))

        found = violations_of(
            read,
            torch.zeros(BATCH, NUM_FIELDS, SLOTS, dtype=torch.int32),
            torch.zeros(BATCH, query_len, dtype=torch.int32),
            torch.zeros(BATCH * query_len, HIDDEN),
            *(torch.zeros(SLOTS, 2, 8) for _ in range(2)),
        )
    assert found == []


@torch.inference_mode()
def test_keys_and_values_are_written_on_the_device():
    with operators_of_a_card():
        layer = CrossAttention(HIDDEN, 4, 2, 8, TPGroup()).eval()

        def write(states: Tensor, slots: Tensor, *pool: Tensor) -> tuple[Tensor, ...]:
            layer.bind_pool(*pool)
            layer.store(states, slots)
            return pool

        states, slots = torch.zeros(4, HIDDEN), torch.zeros(4, dtype=torch.int32)
        found = violations_of(write, states, slots, *(torch.zeros(SLOTS, 2, 8) for _ in range(2)))
    assert found == []
