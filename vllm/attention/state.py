"""Define layers with a recurrent state per request: a summary of all its tokens, of fixed size.

The batch decides where states are stored and which tokens belong to which state. The layer computes
how a token changes a state.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vllm.attention.cached_layer import CachedLayer
from vllm.attention.context import ContextHolder, ReadsContext
from vllm.kv_cache_spec import CacheKind, CacheTensor, KVCacheSpec

States = tuple[Tensor, ...]
"""[B, ...] for each tensor of the layer's cache: the states of B sequences."""


@dataclass(frozen=True)
class StateRows:
    """Indices of the states of B sequences, with the longer sequences first."""

    indices: Tensor
    """[B] int64 rows of the tensors, none twice but the row of padding."""
    is_new: Tensor
    """[B] bool: a sequence that begins with one token, whatever its row holds."""
    lengths: Tensor | None = None
    """[B] int64 tokens of each sequence; None: one each."""
    num_with_token: tuple[int, ...] = ()
    """Numbers of sequences with a first token, a second one, ...; unused if `lengths` is None."""

    def by_token(self, run: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        """Run all sequences token by token.

        Args:
            run: gets state indices [n], is_new [n] and one token of each part [n, ...]; returns [n,
                ...].
            parts: [B, L, ...] each.

        Returns:
            [B, L, ...], 0 for padding.
        """
        first = run(self.indices, self.is_new, *(part[:, 0] for part in parts))
        if self.lengths is None:
            return first[:, None]
        out = first.new_zeros(len(first), len(self.num_with_token), *first.shape[1:])
        out[:, 0] = first
        for token, count in enumerate(self.num_with_token[1:], start=1):
            of_token = (part[:count, token] for part in parts)
            out[:count, token] = run(self.indices[:count], self.is_new[:count], *of_token)
        return out


class StateLayer(CachedLayer, ReadsContext):
    """Runs sequences from the states after their earlier tokens. A base class of a module.

    Attributes:
        provisional: [requests, tokens, ...] for each input of `run_sequences`: inputs of the tokens
            that ran with drafts in the last forward pass of each request. Its state includes none
            of them. Empty: there are no drafts.
    """

    input_names: ClassVar[tuple[str, ...]] = ("provisional",)

    def __init__(self) -> None:
        super().__init__()
        self.launch = ContextHolder()
        self.provisional: tuple[Tensor, ...] = ()
        for name in self.cache_names:
            setattr(self, name, None)

    @abstractmethod
    def state_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return the shape and dtype of one request's state, for each tensor of `cache_names`."""

    @abstractmethod
    def advance(
        self, inputs: tuple[Tensor, ...], lengths: Tensor | None, states: States
    ) -> tuple[Tensor, States]:
        """Run B sequences of L tokens.

        Args:
            inputs: [B, L, ...] each.
            lengths: [B] integers, tokens of each sequence; later tokens are padding, whose results
                are not used; None: all L.
            states: states before the first token; all zero for a new sequence.

        Returns:
            [B, L, ...], and the states after the last token of each.
        """

    @abstractmethod
    def input_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return the shape and dtype of one token in each input of `run_sequences`."""

    def advance_rows(self, inputs: tuple[Tensor, ...], rows: StateRows, caches: States) -> Tensor:
        """Run few tokens of B sequences, and replace their states.

        Args:
            inputs: [B, L, ...] each; L is 1 if the rows have no lengths.
            rows: indices of the states of the sequences.
            caches: [rows, ...] for each tensor of the layer's cache, or tensors like them.

        Returns:
            [B, L, ...]
        """
        states = load_states(caches, rows.indices, rows.is_new)
        out, states = self.advance(inputs, rows.lengths, states)
        store_states(caches, rows.indices, states)
        return out

    def cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return a spec of the states. Their dtypes do not depend on the dtype of the KV cache."""
        tensors, inputs = (
            tuple(
                CacheTensor(shape, str(dtype).removeprefix("torch."), dtype.itemsize)
                for shape, dtype in shapes
            )
            for shapes in (self.state_shapes(), self.input_shapes())
        )
        return KVCacheSpec(CacheKind.STATE, tensors, inputs=inputs)

    @property
    def request_tensors(self) -> tuple[Tensor, ...]:
        """The states, and the provisional inputs."""
        return self.kv_caches + self.provisional

    def release_kv_cache(self) -> None:
        """Drop the references to the tensors."""
        super().release_kv_cache()
        self.provisional = ()

    @contextmanager
    def of_tokens(self, tokens: slice | Tensor) -> Iterator[None]:
        """Limit the adapters to some tokens of the batch while layers run only these tokens."""
        whole = self.launch.context
        if whole is None or whole.adapters is None:
            yield
            return
        if isinstance(tokens, slice):
            tokens = torch.arange(tokens.start, tokens.stop)
        adapters = whole.adapters.select(tokens)
        self.launch.context = replace(whole, adapters=adapters)
        try:
            yield
        finally:
            self.launch.context = whole

    def run_sequences(self, *inputs: Tensor) -> Tensor:
        """Run the tokens of the batch, each with the state of its request.

        Args:
            inputs: [T, ...] each.

        Returns:
            [T, ...]
        """
        context = self.launch.context
        if context is None or context.attention is None or not self.kv_caches:
            # Without a cache, all tokens are one prompt and nothing is stored.
            states = tuple(
                torch.zeros((1, *shape), dtype=dtype, device=inputs[0].device)
                for shape, dtype in self.state_shapes()
            )
            return self.advance(tuple(x[None] for x in inputs), None, states)[0][0]
        assert context.states is not None, "this launch carries no states"
        return context.states.run(self, inputs)


@dataclass(frozen=True)
class PaddedReplays:
    """Replayed tokens of B padded requests: tokens that ran with drafts in the last forward pass
    and were accepted. Each request has memory for the inputs of P tokens.
    """

    counts: Tensor
    """[B] tokens that are replayed."""
    before: Tensor | None
    """[B] tokens that are replayed before the state that is kept; None: there is no prefix
    cache."""
    kept_rows: Tensor
    """[B] int64 rows of the caches to which that state is copied, a row of padding where none is
    kept; no effect without `before`."""

    def run(self, layer: StateLayer, rows: Tensor, states: States) -> States:
        """Replay the tokens of the requests with state indices `rows` [B], and return their states
        [B, ...].
        """
        inputs = tuple(memory.index_select(0, rows) for memory in layer.provisional)
        if self.before is None:
            return layer.advance(inputs, self.counts, states)[1]
        states = layer.advance(inputs, self.before, states)[1]
        store_states(layer.kv_caches, self.kept_rows, states)
        length = inputs[0].shape[1]
        column = torch.arange(length, dtype=self.before.dtype, device=rows.device)
        later = (self.before[:, None] + column).clamp(max=length - 1).long()
        moved = tuple(
            x.gather(1, later.view(*later.shape, *[1] * (x.dim() - 2)).expand_as(x)) for x in inputs
        )
        return layer.advance(moved, self.counts - self.before, states)[1]


@dataclass(frozen=True)
class PaddedStates:
    """The states of a batch of B padded requests with Q padded tokens each. Padded requests all use
    one unused state.
    """

    rows: Tensor
    """[B] rows of the caches."""
    is_new: Tensor
    """[B] bool: a request that begins, whatever its row holds."""
    lengths: Tensor | None = None
    """[B] tokens of each row; None: Q is 1."""
    replays: PaddedReplays | None = None
    """Data to replay in a decode with drafts, for layers that keep the inputs of Q tokens; None:
    this is another kind of forward pass."""

    def run(self, layer: StateLayer, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the B * Q tokens of a batch through a layer (`StateMetadata.run`)."""
        if self.lengths is None:
            tokens = tuple(x[:, None] for x in inputs)
            rows = StateRows(self.rows, self.is_new)
            return layer.advance_rows(tokens, rows, layer.kv_caches)[:, 0]
        before = load_states(layer.kv_caches, self.rows, self.is_new)
        tokens = tuple(x.unflatten(0, (len(self.rows), -1)) for x in inputs)
        if self.replays is None:
            out, states = layer.advance(tokens, self.lengths, before)
        else:
            before = self.replays.run(layer, self.rows, before)
            out, states = layer.advance(tokens, self.lengths, before)
            for memory, x in zip(layer.provisional, tokens, strict=True):
                memory.index_copy_(0, self.rows, x.to(memory.dtype))
            # For a request with drafts, keep the state before them until it is known which are
            # accepted.
            has_drafts = self.lengths > 1
            states = tuple(
                torch.where(has_drafts.view(-1, *[1] * (x.dim() - 1)), x, y.to(x.dtype))
                for x, y in zip(before, states, strict=True)
            )
        store_states(layer.kv_caches, self.rows, states)
        return out.flatten(0, 1)


def load_states(caches: States, rows: Tensor, is_new: Tensor) -> States:
    """Return the states at some indices [B]; zeros for new requests, whatever an earlier request
    left there.
    """
    found = (cache.index_select(0, rows) for cache in caches)
    return tuple(
        state.masked_fill(is_new.view(-1, *[1] * (state.dim() - 1)), 0.0) for state in found
    )


def store_states(caches: States, rows: Tensor, states: States) -> None:
    """Store the states [B, ...] at their indices [B]."""
    for cache, state in zip(caches, states, strict=True):
        cache.index_copy_(0, rows, state.to(cache.dtype))
