"""The data of one launch for the layers of a model, in addition to token ids and positions.

Models get flattened tokens, and their files do not depend on requests, devices or phases. One
frozen object contains everything that a layer needs of the running launch. A runner sets it once
per launch; the layers read it.

Every model has a `ContextHolder` of its own, to which its layers hold a reference. So two engines
in one process never see each other's launches, whatever threads they run in. It is a plain object
with a plain attribute, because `torch.compile` traces reading and setting one, and traces no
context variable and no thread-local.
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
    """Embeddings that a launch provides instead of looked-up ones."""

    def put_into(self, rows: Tensor) -> Tensor:
        """Return the embeddings [T, embedding_dim] that were looked up, some of them replaced by
        these."""
        ...


class GivenStates(Protocol):
    """Values that a launch brings, which are added to hidden states of some of its tokens after the
    first layers."""

    @property
    def num_layers(self) -> int:
        """The first layers, which have values."""
        ...

    def add_to(self, hidden_states: Tensor, layer: int) -> Tensor:
        """Return the hidden states [T, hidden] after one of these layers, with its values added."""
        ...


@dataclass(frozen=True)
class ReplacedTokens:
    """Tokens of a launch whose embeddings are given, and not looked up."""

    indices: Tensor
    """[m] int64: which of the T tokens."""
    embeddings: Tensor
    """[m, embedding_dim] in any floating type."""

    def put_into(self, rows: Tensor) -> Tensor:
        """Return the embeddings [T, embedding_dim] that were looked up, some of them replaced by
        these."""
        return rows.index_copy(0, self.indices, self.embeddings.to(rows.dtype))


@dataclass(frozen=True)
class AddedStates:
    """Tokens of a launch with values to add to their hidden states; see `GivenStates`."""

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
    """Embeddings that a launch provides in a table, and values that it adds to hidden states:
    shapes depend only on the size of the table. See `GivenEmbeddings` and `GivenStates`."""

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
        """Return a part of the entry [T, embedding_dim] of each token, of any entry if it has
        none."""
        return self.table[part].index_select(0, self.index.clamp_min(0))


class LaunchAdapters(Protocol):
    """The LoRA adapters of the tokens of a launch."""

    def adapt(self, layer: AdaptedLayer, x: Tensor, y: Tensor) -> Tensor:
        """Return the output of a layer with the adapters of its tokens.

        Args:
            layer: which one.
            x: [T, in_features]
            y: [T, out_features], what it computes without adapters. May be changed in place.
        """
        ...

    def adapt_heads(self, layer: LoRAHeads, x: Tensor, y: Tensor) -> Tensor:
        """Return the outputs of the matrices of H heads with the adapters of its tokens.

        Args:
            layer: which ones.
            x: [T, H, in_features]
            y: [T, H, out_features or more], of which the first are what they compute without
                adapters. May be changed in place.
        """
        ...

    def adapt_embeddings(self, table: AdaptedLayer, ids: Tensor, y: Tensor) -> Tensor:
        """Return the output of the input embedding with the adapters of its tokens.

        Args:
            table: whose inputs are the tokens of the vocabulary.
            ids: [T] int64
            y: [T, out_features], looked up without adapters. May be changed in place.
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
        """Return the output of a layer of experts with the adapters of its tokens.

        Args:
            layer: which one.
            single: of its experts on this rank.
            x: [T, hidden]
            ids: [T, k] int64, the experts of each token, of all ranks.
            weights: [T, k] float32, how much they count.
            y: [T, hidden], what it computes without adapters. May be changed in place.
        """
        ...

    def select(self, tokens: Tensor) -> "LaunchAdapters":
        """Select the adapters of some of the tokens, by their indices [n]."""
        ...


class LaunchParts(TypedDict, total=False):
    """Data of requests for the tokens of a launch: fields of `LaunchContext`."""

    positions: Tensor
    replaced: GivenEmbeddings
    added: GivenStates
    adapters: LaunchAdapters
    items: SeenItems


class StateMetadata(Protocol):
    """The states that the tokens of a launch belong to, on one kind of device."""

    def run(self, layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the sequences of the launch, and store their new states.

        Args:
            layer: a `StateLayer` whose caches are bound.
            inputs: [T, ...] each.

        Returns:
            [T, ...]
        """
        ...


@dataclass(frozen=True)
class LaunchContext:
    """One launch of T tokens, as the layers of the model know it."""

    attention: AttentionMetadata | None
    """Attention metadata of its tokens; None: all of them are one prompt, and there is no KV
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
    """Angles for `Ops.rotate` from each table of the model, by `RotaryEmbedding.index`. None: every
    layer looks them up."""
    adapters: LaunchAdapters | None = None
    """LoRA adapters of the tokens; None: no token has one."""
    states: StateMetadata | None = None
    """Recurrent states of its tokens; None: no layer of the model has any."""
    items: SeenItems | None = None
    """Items that its tokens see by cross-attention; None: no token sees one."""


class ContextHolder:
    """The launch that a model is running, if any. One model runs one launch at a time."""

    def __init__(self) -> None:
        self.context: LaunchContext | None = None

    @contextmanager
    def running(self, context: LaunchContext | None) -> Iterator[None]:
        """Run a forward pass with this context. None: the tokens are one prompt without a cache."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before


class ReadsContext:
    """A layer that reads the launch; a second base of its module."""

    launch: ContextHolder
    """A holder of its own until `share_context` gives it the holder of its model."""


def share_context(model: nn.Module) -> ContextHolder:
    """Give all layers of a model one holder in the first call, and return it.

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
        ValueError: the tokens have several positions each, which the calling layer does not take.
    """
    if positions.dim() == 1:
        return positions
    if len(positions) != 1:
        raise ValueError(
            "positions must have the shape [T] or [1, T] for this layer, one per token, got "
            f"{list(positions.shape)}"
        )
    return positions[0]
