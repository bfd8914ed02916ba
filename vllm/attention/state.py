"""A layer that keeps a state of each request: a summary of all its tokens, of fixed size.

Where states are and which tokens are whose is the launch's; what one token does to a state is the
layer's.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vllm.attention.cached_layer import CachedLayer
from vllm.attention.context import ContextHolder, ReadsContext
from vllm.kv_cache_spec import CacheKind, CacheTensor, KVCacheSpec
from vllm.messages import IntArray

States = tuple[Tensor, ...]
"""[B, ...] for each tensor of the layer's cache: the states of B sequences."""


class StateLayer(CachedLayer, ReadsContext):
    """Runs sequences from the states that their earlier tokens have left. A base of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.launch = ContextHolder()
        for name in self.cache_names:
            setattr(self, name, None)

    @abstractmethod
    def state_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and dtype of the state of one request, for each tensor of `cache_names`."""

    @abstractmethod
    def advance(
        self, inputs: tuple[Tensor, ...], lengths: Tensor | None, states: States
    ) -> tuple[Tensor, States]:
        """Run B sequences of L tokens.

        Args:
            inputs: [B, L, ...] each.
            lengths: [B] integers, tokens of each sequence, those behind are padding, whose results
                count for nothing; None: all L.
            states: before the first token; all zero for a new sequence.

        Returns:
            [B, L, ...], and the states after the last token of each.
        """

    def advance_rows(self, inputs: tuple[Tensor, ...], rows: Tensor, is_new: Tensor) -> Tensor:
        """Run one token of B sequences, whose states are in rows of the bound caches.

        Args:
            inputs: [B, ...] each.
            rows: [B] int64, none twice but the row of padding.
            is_new: [B] bool, sequences that begin, whatever their rows hold.

        Returns:
            [B, ...]
        """
        states = load_states(self.kv_caches, rows, is_new)
        out, states = self.advance(tuple(x[:, None] for x in inputs), None, states)
        store_states(self.kv_caches, rows, states)
        return out[:, 0]

    def cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """The states; their dtypes do not depend on that of the KV cache."""
        tensors = tuple(
            CacheTensor(shape, str(dtype).removeprefix("torch."), dtype.itemsize)
            for shape, dtype in self.state_shapes()
        )
        return KVCacheSpec(CacheKind.STATE, tensors)

    @contextmanager
    def of_tokens(self, start: int, end: int) -> Iterator[None]:
        """While only these tokens of the launch run, layers find the adapters of these."""
        whole = self.launch.context
        if whole is None or whole.adapters is None:
            yield
            return
        adapters = whole.adapters.select(torch.arange(start, end))
        self.launch.context = replace(whole, adapters=adapters)
        try:
            yield
        finally:
            self.launch.context = whole

    def run_sequences(self, *inputs: Tensor) -> Tensor:
        """Run the tokens of the launch, each with the state of its request.

        Args:
            inputs: [T, ...] each.

        Returns:
            [T, ...]
        """
        context = self.launch.context
        if context is None or context.attention is None or not self.kv_caches:
            # No cache: all tokens are one prompt, and nothing is kept.
            states = tuple(
                torch.zeros((1, *shape), dtype=dtype, device=inputs[0].device)
                for shape, dtype in self.state_shapes()
            )
            return self.advance(tuple(x[None] for x in inputs), None, states)[0][0]
        assert context.states is not None, "this launch carries no states"
        return context.states.run(self, inputs)


@dataclass(frozen=True)
class StateCopies:
    """Copies between the states of rows and kept states, which are further rows of the caches.

    Attributes:
        restored: (row, kept state) of rows that begin with a kept state.
        kept: index of a row in the launch -> (n, kept state) for states that are kept after n of
            its tokens, n ascending.
    """

    restored: tuple[tuple[int, int], ...] = ()
    kept: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    @classmethod
    def of_rows(
        cls, rows: IntArray, restored: IntArray | None, kept: IntArray | None
    ) -> "StateCopies":
        """Return the copies of a launch of these rows; the others as in `SchedulerOutput`."""
        if restored is None and kept is None:
            return NO_COPIES
        pairs = () if restored is None else tuple((row, kept) for row, kept in restored.tolist())
        by_index: dict[int, list[tuple[int, int]]] = {}
        if kept is not None:
            index_of = {row: index for index, row in enumerate(rows.tolist())}
            for row, count, number in kept.tolist():
                by_index.setdefault(index_of[row], []).append((count, number))
        return cls(pairs, by_index)


NO_COPIES = StateCopies()


@dataclass(frozen=True)
class RaggedStates:
    """The states of a ragged launch; its rows are those of `RaggedMetadata`: decodes first."""

    num_decodes: int
    """B_d, the number of rows with one token each."""
    decode_rows: Tensor
    """[B_d] int64 on the device: rows of the batch, which are indices of states."""
    is_new: Tensor
    """[B_d] bool on the device: a request that begins, whatever its row holds."""
    rows: IntArray
    """[B] rows of the batch."""
    num_computed_tokens: IntArray
    """[B] 0 for a request that begins."""
    query_start_loc: IntArray
    """[B + 1] the tokens of row b are query_start_loc[b] up to [b + 1]."""
    copies: StateCopies = NO_COPIES
    """The copies that this launch makes."""

    @classmethod
    def build(
        cls,
        rows: IntArray,
        num_computed_tokens: IntArray,
        query_start_loc: IntArray,
        num_decodes: int,
        device: torch.device,
        copies: StateCopies = NO_COPIES,
    ) -> "RaggedStates":
        """Of a launch; arguments as the fields."""
        decode_rows = torch.from_numpy(rows[:num_decodes].astype("int64"))
        is_new = torch.from_numpy(num_computed_tokens[:num_decodes] == 0)
        return cls(
            num_decodes,
            decode_rows.to(device),
            is_new.to(device),
            rows,
            num_computed_tokens,
            query_start_loc,
            copies,
        )

    def run(self, layer: StateLayer, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the tokens of a launch through a layer, from the states of their rows.

        Args:
            layer: has the caches.
            inputs: [T, ...] each.

        Returns:
            [T, ...]
        """
        caches, outputs = layer.kv_caches, []
        for row, number in self.copies.restored:
            _copy_state(caches, number, row)
        if self.num_decodes:
            tokens = tuple(x[: self.num_decodes] for x in inputs)
            with layer.of_tokens(0, self.num_decodes):
                outputs.append(layer.advance_rows(tokens, self.decode_rows, self.is_new))
            for index, kept in self.copies.kept.items():
                if index < self.num_decodes:
                    for _, number in kept:
                        _copy_state(caches, int(self.rows[index]), number)
        for index in range(self.num_decodes, len(self.rows)):
            outputs += self._run_row(layer, inputs, index)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run_row(self, layer: StateLayer, inputs: tuple[Tensor, ...], index: int) -> list[Tensor]:
        """Run the tokens of one row, in pieces where states are kept in the middle."""
        start, end = self.query_start_loc[index : index + 2].tolist()
        row, outputs = int(self.rows[index]), []
        places = tuple(cache[row : row + 1] for cache in layer.kv_caches)
        states = places
        if not self.num_computed_tokens[index]:
            states = tuple(torch.zeros_like(place) for place in places)
        kept = [(start + count, number) for count, number in self.copies.kept.get(index, ())]
        ends = sorted({stop for stop, _ in kept} | {end})
        for stop in ends:
            with layer.of_tokens(start, stop):
                piece = tuple(x[None, start:stop] for x in inputs)
                out, states = layer.advance(piece, None, states)
            outputs.append(out[0])
            for place, number in kept:
                if place == stop:
                    for cache, state in zip(layer.kv_caches, states, strict=True):
                        cache[number].copy_(state[0])
            start = stop
        for place, state in zip(places, states, strict=True):
            place.copy_(state)
        return outputs


@dataclass(frozen=True)
class PaddedStates:
    """The states of a launch of B padded rows of Q padded tokens each. Padded rows are all in one
    row of the caches, which no request has."""

    rows: Tensor
    """[B] rows of the caches."""
    is_new: Tensor
    """[B] bool: a request that begins, whatever its row holds."""
    lengths: Tensor | None = None
    """[B] tokens of each row; None: Q is 1."""

    def run(self, layer: StateLayer, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the B * Q tokens of a launch through a layer; as `RaggedStates.run`."""
        if self.lengths is None:
            return layer.advance_rows(inputs, self.rows, self.is_new)
        states = load_states(layer.kv_caches, self.rows, self.is_new)
        shape = (len(self.rows), -1)
        out, states = layer.advance(
            tuple(x.unflatten(0, shape) for x in inputs), self.lengths, states
        )
        store_states(layer.kv_caches, self.rows, states)
        return out.flatten(0, 1)


def _copy_state(caches: States, source: int, target: int) -> None:
    """Copy the states of a row to another one."""
    for cache in caches:
        cache[target].copy_(cache[source])


def load_states(caches: States, rows: Tensor, is_new: Tensor) -> States:
    """The states of some rows [B]; zeros for a new request, whatever an earlier one has left."""
    found = (cache.index_select(0, rows) for cache in caches)
    return tuple(
        state.masked_fill(is_new.view(-1, *[1] * (state.dim() - 1)), 0.0) for state in found
    )


def store_states(caches: States, rows: Tensor, states: States) -> None:
    """Put the states [B, ...] into their rows [B]."""
    for cache, state in zip(caches, states, strict=True):
        cache.index_copy_(0, rows, state.to(cache.dtype))
