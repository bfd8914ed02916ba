"""The adapters of a launch, and where their weights are: on the host, where a launch has any shape,
and on a device that compiles shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm.lora.places import AdaptedPlaces
from vllm.ops import get_ops
from vllm.ops.low_rank import AdaptedLayer, AdaptedRows, LowRank, PreparedAdapter
from vllm.utils.pace import Rest, no_rest


class AdapterStore(Protocol):
    """The adapters in slots."""

    def prepare(self, parts: Sequence[LowRank | None], rest: Rest = no_rest) -> Any:
        """Bring an adapter into the layout of the slots, in host memory. From any thread.

        Args:
            parts: of the adapter, by their numbers; None: not changed.
            rest: between two projections.
        """
        ...

    def put(self, slot: int, prepared: Any) -> None:
        """Write an adapter to a slot, between two launches."""
        ...

    def clear(self, slot: int) -> None:
        """Keep the adapter of a slot no longer; no row uses it."""
        ...


# ---- launches of any shape ------------------------------------------------------------------


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory."""

    layers: PreparedAdapter
    """What it adds to linear layers."""
    embedding: LowRank | None
    """What it adds to input embeddings: a [r, vocabulary], b [embedding_dim, r]."""
    changes_head: bool
    changes_experts: bool


@dataclass(frozen=True)
class RaggedAdapters:
    """The adapters of T tokens; those without one are not touched."""

    rows: AdaptedRows
    embeddings: Mapping[int, LowRank]
    """By the indices of `rows`, of the adapters that add to input embeddings."""
    of_experts: frozenset[int]
    """Indices of those that add to experts."""

    @property
    def need_modules(self) -> bool:
        """A recorded program has no part of them: the launch runs module by module."""
        return bool(self.embeddings or self.of_experts)

    def adapt(self, layer: AdaptedLayer, x: Tensor, y: Tensor) -> Tensor:
        """See `LaunchAdapters`."""
        return get_ops().add_low_rank(y, x, layer, self.rows)

    def adapt_embeddings(self, table: AdaptedLayer, ids: Tensor, y: Tensor) -> Tensor:
        """See `LaunchAdapters`."""
        for number, part in self.embeddings.items():
            chosen = (self.rows.of_rows == number).nonzero().flatten()
            added = part.a[:, ids[chosen]].T.float() @ part.b.T.float()
            y[chosen] = (y[chosen].float() + added).to(y.dtype)
        return y

    def expert_tokens(self) -> Tensor | None:
        """See `LaunchAdapters`."""
        if not self.of_experts:
            return None
        numbers = torch.tensor(sorted(self.of_experts), dtype=torch.int32)
        return torch.isin(self.rows.of_rows, numbers).nonzero().flatten()

    def select(self, tokens: Tensor) -> "RaggedAdapters":
        """See `LaunchAdapters`."""
        return replace(self, rows=replace(self.rows, of_rows=self.rows.of_rows[tokens]))


class HostSlots:
    """Adapters in host memory: a slot refers to one.

    Args:
        places: of the layers.
        num_slots: adapters in use at once.
        dtype: of the inputs of layers.
    """

    def __init__(self, places: AdaptedPlaces, num_slots: int, dtype: torch.dtype) -> None:
        self._places = places
        self._dtype = dtype
        self.adapters: list[HostAdapter | None] = [None] * num_slots
        """By slot."""

    def prepare(self, parts: Sequence[LowRank | None], rest: Rest = no_rest) -> HostAdapter:
        """See `AdapterStore`."""
        places = self._places
        layers = [layer for layer in places.layers if layer is not places.embedding]
        prepared = get_ops().prepare_adapter(layers, parts, self._dtype, rest)
        changes = places.change_head(parts), places.change_experts(parts)
        return HostAdapter(prepared, places.embedding_of(parts), *changes)

    def put(self, slot: int, prepared: HostAdapter) -> None:
        """See `AdapterStore`."""
        self.adapters[slot] = prepared

    def of_tokens(self, slots: Tensor) -> RaggedAdapters:
        """The adapters of a launch.

        Args:
            slots: [T] int32 of its tokens; -1: none.
        """
        layers = tuple(None if each is None else each.layers for each in self.adapters)
        used = set(slots.unique().tolist())
        known = {
            number: each
            for number, each in enumerate(self.adapters)
            if each is not None and number in used
        }
        embeddings = {n: each.embedding for n, each in known.items() if each.embedding is not None}
        of_experts = frozenset(number for number, each in known.items() if each.changes_experts)
        return RaggedAdapters(AdaptedRows(layers, slots), embeddings, of_experts)

    def clear(self, slot: int) -> None:
        """See `AdapterStore`."""
        self.adapters[slot] = None


# ---- launches of a fixed shape --------------------------------------------------------------


@dataclass(frozen=True)
class SlottedAdapters:
    """The adapters of T tokens, S slots of rank R: shapes do not depend on who has which.

    x is multiplied with the A of all slots, and what is not of the slot of a token becomes zero.
    So an index is data, and a launch is a few large products. Tokens without an adapter get
    back what the layer computed.
    """

    slots: "DeviceSlots"
    is_own: Tensor
    """[T, S, 1] in the dtype of the weights: 1 for the slot of a token."""
    has_one: Tensor
    """[T, 1] bool: the token has an adapter."""

    def adapt(self, layer: AdaptedLayer, x: Tensor, y: Tensor) -> Tensor:
        """See `LaunchAdapters`."""
        a = self.slots.a[layer.number]
        return self._add(layer, torch.mm(x.to(a.dtype), a.flatten(0, 1).t()), y)

    def adapt_embeddings(self, table: AdaptedLayer, ids: Tensor, y: Tensor) -> Tensor:
        """See `LaunchAdapters`."""
        a = self.slots.a[table.number]
        return self._add(table, a.flatten(0, 1).index_select(1, ids).t(), y)

    def expert_tokens(self) -> Tensor | None:
        """See `LaunchAdapters`. Slots have no room for experts."""
        return None

    def select(self, tokens: Tensor) -> "SlottedAdapters":
        """See `LaunchAdapters`."""
        return SlottedAdapters(
            self.slots, self.is_own.index_select(0, tokens), self.has_one.index_select(0, tokens)
        )

    def _add(self, layer: AdaptedLayer, inner: Tensor, y: Tensor) -> Tensor:
        """Add to y what comes of x times the A of all slots, [T, S * P * R]."""
        a, b = self.slots.a[layer.number], self.slots.b[layer.number]
        inner = inner.unflatten(1, a.shape[:2]) * self.is_own
        rank = self.slots.rank
        sums = [
            torch.mm(inner[:, :, i * rank : (i + 1) * rank].flatten(1, 2), part.flatten(0, 1))
            for i, part in enumerate(b)
        ]
        added = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
        return torch.where(self.has_one, y + added.to(y.dtype), y)


class DeviceSlots:
    """The weights of adapters on a device, stacked, at addresses that stay.

    P projections of a layer, S slots.

    Args:
        places: of the layers; the projections of each cover all of its outputs, in order.
        num_slots: S.
        rank: R, the largest of an adapter; others are padded with zeros.
        dtype: of the weights.
        device: that has them.
        end: ends what is compiled together: called before and after the writes of an adapter.

    Attributes:
        a: for each layer [S, P * R, in_features].
        b: for each layer and projection [S, R, size].
    """

    def __init__(
        self,
        places: AdaptedPlaces,
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        end: Callable[[], None],
    ) -> None:
        self._places = places.layers
        self._dtype, self._device, self._end = dtype, device, end
        self.rank = rank
        self.a: list[Tensor] = []
        self.b: list[list[Tensor]] = []
        for place in places.layers:
            ends = [offset + size for offset, size in place.parts]
            assert [0, *ends[:-1]] == [offset for offset, _ in place.parts], place
            shape = (num_slots, len(place.parts) * rank, place.in_features)
            self.a.append(torch.zeros(shape, dtype=dtype, device=device))
            self.b.append(
                [
                    torch.zeros((num_slots, rank, size), dtype=dtype, device=device)
                    for _, size in place.parts
                ]
            )
        self._numbers = torch.arange(num_slots, dtype=torch.int32).to(device)

    @property
    def num_bytes(self) -> int:
        """On the device."""
        tensors = [*self.a, *(part for parts in self.b for part in parts)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def prepare(self, parts: Sequence[LowRank | None], rest: Rest = no_rest) -> list[Tensor]:
        """See `AdapterStore`: a [P * R, in_features], then b [R, size] of each projection, of one
        layer after the other."""
        found = []
        for place, a, b in zip(self._places, self.a, self.b, strict=True):
            stacked = torch.zeros(a.shape[1:], dtype=self._dtype)
            found.append(stacked)
            for index, target in enumerate(b):
                rest()
                own, part = torch.zeros(target.shape[1:], dtype=self._dtype), None
                part = parts[place.first_part + index]
                if part is not None:
                    size = len(part.a)
                    stacked[index * self.rank : index * self.rank + size] = part.a
                    own[:size] = part.b.T
                found.append(own)
        return found

    def put(self, slot: int, prepared: list[Tensor]) -> None:
        """See `AdapterStore`. Every adapter takes the same writes, so they are compiled once."""
        self._end()  # what is queued is no part of them
        index = torch.tensor([slot]).to(self._device)
        targets = [t for a, b in zip(self.a, self.b, strict=True) for t in (a, *b)]
        for target, source in zip(targets, prepared, strict=True):
            # To the tensor itself: a write through a view would copy all slots on a card.
            target.index_copy_(0, index, source.to(self._device)[None])
        self._end()

    def clear(self, slot: int) -> None:
        """See `AdapterStore`. The memory of a slot is taken for good, and no row reads it."""

    def warm_up(self) -> None:
        """Compile what `put` runs. No slot may be in use."""
        self.put(0, self.prepare([None] * sum(len(place.parts) for place in self._places)))

    def of_tokens(self, slots: Tensor) -> SlottedAdapters:
        """The adapters of a launch.

        Args:
            slots: [T] int32 on the device; -1: none.
        """
        is_own = (slots[:, None] == self._numbers).to(self._dtype)
        return SlottedAdapters(self, is_own[:, :, None], (slots >= 0)[:, None])
