"""Compute cross-attention: from tokens to the images, audio or videos of their requests.

Each item has hidden states. Every cross-attention layer stores their keys and values in slots of a
separate pool. A slot holds one hidden state. All layers use the same slots for an item.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm.messages import IntArray
from vllm.ops import get_ops
from vllm.ops.attention_options import AttentionOptions, AttentionTensors
from vllm.ops.item_slots import ItemSlots

_NO_TENSORS = AttentionTensors()

MAX_SINGLE = 8
"""Tokens of a run up to which each is computed by itself: a longer run is one matmul. A recorded
program computes every token by itself, so that a run has the same bits there."""


class ReadsItems(Protocol):
    """A cross-attention layer with H query heads and G key/value heads of size D.

    Attributes:
        item_keys: [slots, G, D]; None while the pool is not bound.
        item_values: [slots, G, D]; None while the pool is not bound.
        item_options: options for computing scores.
    """

    item_keys: Tensor | None
    item_values: Tensor | None
    item_options: AttentionOptions


class SeenItems(Protocol):
    """The items that the T tokens of a batch see."""

    def attend_to_items(self, layer: ReadsItems, query: Tensor) -> Tensor:
        """Compute cross-attention [T, H, D]; zeros for tokens that see no item.

        Args:
            layer: layer whose pool is bound.
            query: [T, H, D]
        """
        ...

    def clear_unseeing(self, x: Tensor) -> Tensor:
        """Return x [T, ...] with zeros for the tokens that see no item."""
        ...


@dataclass(frozen=True)
class SeenRun:
    """Consecutive tokens of a batch that see the same slots."""

    begin: int
    """Index of the first token."""
    end: int
    """Index after the last one."""
    slots: IntArray
    """[n] at least one, dense."""

    @property
    def is_long(self) -> bool:
        """Whether the tokens are computed together."""
        return self.end - self.begin > MAX_SINGLE


@dataclass(frozen=True)
class RaggedItems:
    """The items that the tokens of a ragged batch see. The result for a run is the same, bit by
    bit, in any batch.
    """

    num_tokens: int
    """T."""
    runs: tuple[SeenRun, ...]
    """Runs of tokens that see items, in order. The other tokens see none."""

    def attend_to_items(self, layer: ReadsItems, query: Tensor) -> Tensor:
        assert layer.item_keys is not None and layer.item_values is not None
        # Each slot is a block of one token.
        pools = layer.item_keys[:, None], layer.item_values[:, None]
        out = torch.zeros_like(query)
        single = [run for run in self.runs if not run.is_long]
        if single:
            tokens, tables, lens = _tables(single, query.device)
            out[tokens] = get_ops().paged_attention_decode(
                query[tokens], *pools, tables, lens, layer.item_options, _NO_TENSORS
            )
        for run in self.runs:
            if run.is_long:
                out[run.begin : run.end] = _attend_run(layer, query[run.begin : run.end], run.slots)
        return out

    @property
    def has_long_runs(self) -> bool:
        """Whether some run has tokens that are computed together."""
        return any(run.is_long for run in self.runs)

    def by_token(self) -> ItemSlots:
        """Return the slots that each token sees."""
        found = ItemSlots.empty(self.num_tokens)
        for run in self.runs:
            found.put(slice(run.begin, run.end), run.slots)
        return found

    def clear_unseeing(self, x: Tensor) -> Tensor:
        if sum(run.end - run.begin for run in self.runs) == self.num_tokens:
            return x
        cleared = torch.zeros_like(x)
        for run in self.runs:
            cleared[run.begin : run.end] = x[run.begin : run.end]
        return cleared


def _tables(runs: Sequence[SeenRun], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens [n] of some runs, and for each token its padded slots [n, longest] and
    their number [n].
    """
    tokens = [token for run in runs for token in range(run.begin, run.end)]
    lens = np.array([len(run.slots) for run in runs for _ in range(run.begin, run.end)], np.int32)
    tables = np.zeros((len(tokens), int(lens.max())), np.int32)
    row = 0
    for run in runs:
        end = row + run.end - run.begin
        tables[row:end, : len(run.slots)] = run.slots
        row = end
    return (
        torch.tensor(tokens, device=device),
        torch.from_numpy(tables).to(device),
        torch.from_numpy(lens).to(device),
    )


def _attend_run(layer: ReadsItems, query: Tensor, slots: IntArray) -> Tensor:
    """Compute cross-attention for tokens [Q, H, D] that all see the same slots.

    The operator sees them as one token: all queries that use a key/value head are heads that share
    it.
    """
    assert layer.item_keys is not None and layer.item_values is not None
    num_queries, num_heads, head_size = query.shape
    num_kv_heads = layer.item_keys.shape[1]
    shape = (num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
    by_head = query.view(shape).transpose(0, 1)
    read = get_ops().paged_attention_prefill(
        by_head.reshape(1, num_queries * num_heads, head_size),
        layer.item_keys[:, None],
        layer.item_values[:, None],
        torch.from_numpy(slots)[None].to(query.device),
        np.array([0, 1], np.int32),
        np.array([len(slots)], np.int32),
        layer.item_options,
        _NO_TENSORS,
    )
    return read.view(by_head.shape).transpose(0, 1).reshape(query.shape)
