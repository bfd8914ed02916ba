"""Pass the data of a forward pass to the layers of a model, in addition to token ids and positions.

Models get flattened tokens, and their files do not depend on requests, devices or phases. One
frozen object contains everything that a layer needs to know about the running batch. A runner sets
it once per forward pass; the layers read it.

Every model has its own `ContextHolder`, which its layers reference. So two engines in one process
never see each other's batches, whatever threads they run in. It is a plain object with a plain
attribute, because `torch.compile` can trace these, but not a context variable or thread-local.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn

from vllm.attention.backends.metadata import AttentionMetadata
from vllm.attention.cross import SeenItems
from vllm.ops.lora_weights import AdaptedExperts, AdaptedLayer, LoRAHeads
from vllm.ops.prepared import SingleExperts


class GivenEmbeddings(Protocol):
    """Embeddings that a batch provides, instead of embeddings from the table."""

    def put_into(self, rows: Tensor) -> Tensor:
        """Return the looked-up embeddings [T, embedding_dim], with some replaced by the given
        ones.
        """
        ...


class GivenStates(Protocol):
    """Values of a batch that are added to the hidden states of some tokens after the first
    layers.
    """

    @property
    def num_layers(self) -> int:
        """Number of first layers that have values."""
        ...

    def add_to(self, hidden_states: Tensor, layer: int) -> Tensor:
        """Return the hidden states [T, hidden] after this layer, with its values added."""
        ...


@dataclass(frozen=True)
class ReplacedTokens:
    """Tokens of a batch whose embeddings are given instead of looked up."""

    indices: Tensor
    """[m] int64: which of the T tokens."""
    embeddings: Tensor
    """[m, embedding_dim] in any floating type."""

    def put_into(self, rows: Tensor) -> Tensor:
        """Return the looked-up embeddings [T, embedding_dim], with some replaced by the given
        ones.
        """
        return rows.index_copy(0, self.indices, self.embeddings.to(rows.dtype))


@dataclass(frozen=True)
class AddedStates:
    """Tokens of a batch with values that are added to their hidden states (`GivenStates`)."""

    indices: Tensor
    """[m] int64: which of the T tokens."""
    values: tuple[Tensor, ...]
    """[m, hidden] for each of the first layers of the model, in any floating type."""

    @property
    def num_layers(self) -> int:
        return len(self.values)

    def add_to(self, hidden_states: Tensor, layer: int) -> Tensor:
        values = self.values[layer].to(hidden_states.dtype)
        return hidden_states.index_add(0, self.indices, values)


@dataclass(frozen=True)
class TableEmbeddings:
    """Given embeddings in a table, and values to add to hidden states, with shapes that depend only
    on the table size.

    It implements `GivenEmbeddings` and `GivenStates`.
    """

    index: Tensor
    """[T] int32: entry of the table for each token; negative: its embedding is looked up."""
    table: Tensor
    """[1 + num_layers, N, embedding_dim]: embeddings, and what is added after each of the first
    layers."""

    @property
    def num_layers(self) -> int:
        return self.table.shape[0] - 1

    def put_into(self, rows: Tensor) -> Tensor:
        return torch.where(self.index[:, None] >= 0, self._read(0), rows)

    def add_to(self, hidden_states: Tensor, layer: int) -> Tensor:
        added = hidden_states + self._read(1 + layer).to(hidden_states.dtype)
        return torch.where(self.index[:, None] >= 0, added, hidden_states)

    def _read(self, part: int) -> Tensor:
        """Return a part of each token's table entry, [T, embedding_dim]. A token without an entry
        gets the first one.
        """
        return self.table[part].index_select(0, self.index.clamp_min(0))


class LaunchAdapters(Protocol):
    """The LoRA adapters of the tokens in a batch."""

    def adapt(self, layer: AdaptedLayer, x: Tensor, y: Tensor) -> Tensor:
        """Return the output of a layer with the adapters of its tokens.

        Args:
            layer: the layer.
            x: [T, in_features]
            y: [T, out_features], its output without adapters. May be changed in place.
        """
        ...

    def adapt_heads(self, layer: LoRAHeads, x: Tensor, y: Tensor) -> Tensor:
        """Return the outputs of the matrices of H heads, with the adapters of its tokens.

        Args:
            layer: the layer with the heads.
            x: [T, H, in_features]
            y: [T, H, out_features or more], of which the first elements are the output without
                adapters. May be changed in place.
        """
        ...

    def adapt_embeddings(self, table: AdaptedLayer, ids: Tensor, y: Tensor) -> Tensor:
        """Return the output of the input embedding with the adapters of its tokens.

        Args:
            table: embedding table.
            ids: [T] int64
            y: [T, out_features], embeddings without adapters. May be changed in place.
        """
        ...

    def adapt_experts(
        self,
        layer: AdaptedExperts,
        single: SingleExperts,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Return the output of an expert layer, with the adapters of its tokens.

        Args:
            layer: the layer.
            single: access to the single experts on this rank.
            x: [T, hidden]
            ids: [T, k] int64, the experts of each token, numbered over all ranks.
            weights: [T, k] float32, weight of each of these experts.
            y: [T, hidden], output without adapters. May be changed in place.
        """
        ...

    def select(self, tokens: Tensor) -> "LaunchAdapters":
        """Return the adapters of the tokens with these indices [n]."""
        ...


class LaunchParts(TypedDict, total=False):
    """Data of requests for the tokens of a batch: fields of `LaunchContext`."""

    positions: Tensor
    replaced: GivenEmbeddings
    added: GivenStates
    adapters: LaunchAdapters
    items: SeenItems


class StateMetadata(Protocol):
    """The recurrent states to which the tokens of a batch belong, on one kind of device."""

    def run(self, layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the sequences of the batch through a layer, and store their new states.

        Args:
            layer: a `StateLayer` whose caches are bound.
            inputs: [T, ...] each.

        Returns:
            [T, ...]
        """
        ...


@dataclass(frozen=True)
class LaunchContext:
    """One forward pass of T tokens, as the layers of the model see it."""

    attention: AttentionMetadata | None
    """Attention metadata of the tokens; None: all tokens are one prompt, and there is no KV
    cache."""
    positions: Tensor
    """[P, T] positions of the tokens, by which queries and keys rotate. P is 1, or the number of
    positions that the model takes (3 for M-RoPE); there P of 1 means that all positions of a token
    are the same. Masks depend on the index of a token in its request, which `attention` knows."""
    replaced: GivenEmbeddings | None = None
    """Embeddings that replace looked-up ones; None: all embeddings are looked up."""
    added: GivenStates | None = None
    """Values to add to hidden states after the first layers; None: there are none."""
    rotary_angles: Sequence[tuple[Tensor, Tensor]] | None = None
    """Angles for `NativeOps.rotate` from each table of the model, by `RotaryEmbedding.index`. None:
    every layer looks them up."""
    adapters: LaunchAdapters | None = None
    """LoRA adapters of the tokens; None: no token has one."""
    states: StateMetadata | None = None
    """Recurrent states of the tokens; None: no layer of the model has any."""
    items: SeenItems | None = None
    """Items that the tokens see by cross-attention; None: no token sees one."""


class ContextHolder:
    """Holds the context of the forward pass that a model is running, if any. A model runs one at a
    time.
    """

    def __init__(self) -> None:
        self.context: LaunchContext | None = None

    @property
    def adapters(self) -> "LaunchAdapters | None":
        """The adapters of the running batch; None: there are none."""
        return None if self.context is None else self.context.adapters

    @contextmanager
    def running(self, context: LaunchContext | None) -> Iterator[None]:
        """Run a forward pass with this context. None: the tokens are one prompt without a cache."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before


class ReadsContext:
    """A layer that reads the context of the forward pass; a second base class of its module."""

    launch: ContextHolder
    """A holder of its own until `share_context` gives it the holder of its model."""


def share_context(model: nn.Module) -> ContextHolder:
    """Return the context holder that all layers of a model share; the first call creates it.

    Args:
        model: a model or a single layer, complete.
    """
    readers = [module for module in model.modules() if isinstance(module, ReadsContext)]
    holders = {id(reader.launch): reader.launch for reader in readers}
    if len(holders) == 1:
        return next(iter(holders.values()))
    shared = ContextHolder()
    for reader in readers:
        reader.launch = shared
    return shared


def text_positions(positions: Tensor) -> Tensor:
    """Return the positions [T] of tokens that have one each, given as [T] or [1, T].

    Raises:
        ValueError: the tokens have several positions each, which the calling layer does not
            support.
    """
    if positions.dim() == 1:
        return positions
    if len(positions) != 1:
        raise ValueError(
            "positions must have the shape [T] or [1, T] for this layer, one per token, got "
            f"{list(positions.shape)}"
        )
    return positions[0]
