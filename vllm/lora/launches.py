"""Apply the adapters of a batch, with their weights in slots: on the host, where a batch may have
any shape, and on a device that compiles shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.attention import LaunchAdapters
from vllm.lora.adapted_layers import AdaptedLayers
from vllm.ops import get_ops
from vllm.ops.lora_weights import (
    AdaptedExpert,
    AdaptedExperts,
    AdaptedLayer,
    AdaptedRows,
    LoRAHeads,
    LoRAWeights,
    PreparedAdapter,
)
from vllm.ops.native.experts import activated, choices_of
from vllm.ops.prepared import SingleExperts
from vllm.utils.background_work import Pause, no_pause


def _run_expert(
    adapters: LaunchAdapters, single: SingleExperts, number: int, expert: AdaptedExpert, x: Tensor
) -> Tensor:
    """Run an expert of this rank, with adapters, on all tokens x [n, hidden]."""
    gate_up = adapters.adapt(expert.gate_up, x, single.gate_up(number, x))
    middle = activated(get_ops(), gate_up, single.options)
    return adapters.adapt(expert.down, middle, single.down(number, middle))


def _inputs_of(single: SingleExperts, x: Tensor, weight: Tensor) -> Tensor:
    """Return the inputs of an expert for x [n, hidden], given the router weights [n, 1]."""
    return (x * weight).to(x.dtype) if single.options.scales_inputs else x


class AdapterStore(Protocol):
    """Stores adapters in slots."""

    def prepare(self, parts: Sequence[LoRAWeights | None], pause: Pause = no_pause) -> Any:
        """Convert an adapter to the layout of the slots, in host memory. May be called from any
        thread.

        Args:
            parts: weights of the adapter for each projection; None: not changed.
            pause: called between two projections.
        """
        ...

    def put(self, slot: int, prepared: Any) -> None:
        """Write an adapter to a slot, between two forward passes."""
        ...

    def clear(self, slot: int) -> None:
        """Drop the adapter of a slot that no request uses."""
        ...


# ---- launches of any shape ------------------------------------------------------------------


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory."""

    layers: PreparedAdapter
    """Weights for linear layers."""
    embedding: LoRAWeights | None
    """Weights for input embeddings: a [r, vocabulary], b [embedding_dim, r]."""
    changes_head: bool
    changes_experts: bool


@dataclass(frozen=True)
class RaggedAdapters:
    """The adapters of T tokens in a batch of any shape. Tokens without an adapter are not
    changed.
    """

    rows: AdaptedRows
    embeddings: Mapping[int, LoRAWeights]
    """Weights for input embeddings, by the indices of `rows`, of the adapters that add to input
    embeddings."""
    of_experts: frozenset[int]
    """Indices of the adapters that add to experts."""

    @property
    def need_modules(self) -> bool:
        """Whether the batch must run module by module, because recorded programs do not support its
        adapters.
        """
        return bool(self.embeddings or self.of_experts)

    def adapt(self, layer: AdaptedLayer, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' contribution to the output of a layer (`LaunchAdapters.adapt`)."""
        return get_ops().add_low_rank(y, x, layer, self.rows)

    def adapt_heads(self, layer: LoRAHeads, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' contribution to the outputs of heads (`LaunchAdapters.adapt_heads`)."""
        return get_ops().add_low_rank(y, x, layer, self.rows)

    def adapt_embeddings(self, table: AdaptedLayer, ids: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' contribution to the input embeddings
        (`LaunchAdapters.adapt_embeddings`).
        """
        for number, part in self.embeddings.items():
            chosen = (self.rows.of_rows == number).nonzero().flatten()
            added = part.a[:, ids[chosen]].T.float() @ part.b.T.float()
            y[chosen] = (y[chosen].float() + added).to(y.dtype)
        return y

    def adapt_experts(
        self,
        layer: AdaptedExperts,
        single: SingleExperts,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Add the adapters' contribution to the output of experts. Only tokens whose adapter
        changes experts are computed again, each by its own experts.
        """
        if not self.of_experts:
            return y
        numbers = torch.tensor(sorted(self.of_experts), dtype=torch.int32)
        rows = torch.isin(self.rows.of_rows, numbers).nonzero().flatten()
        adapters, x, ids, weights = self.select(rows), x[rows], ids[rows], weights[rows]
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number, expert in enumerate(layer.experts):
            tokens, choices = (ids == layer.first_expert + number).nonzero(as_tuple=True)
            if len(tokens):
                own, weight = adapters.select(tokens), weights[tokens, choices, None]
                given = _inputs_of(single, x[tokens], weight)
                result = _run_expert(own, single, number, expert, given).float()
                total.index_add_(
                    0, tokens, result if single.options.scales_inputs else result * weight
                )
        y[rows] = total.to(y.dtype)
        return y

    def select(self, tokens: Tensor) -> "RaggedAdapters":
        """Select the adapters of some tokens."""
        return replace(self, rows=replace(self.rows, of_rows=self.rows.of_rows[tokens]))


class HostSlots:
    """Slots of adapters in host memory. Each slot refers to one adapter.

    Args:
        adapted: layers that adapters can change.
        num_slots: number of adapters in use at the same time.
        dtype: dtype of the inputs of layers.
    """

    def __init__(self, adapted: AdaptedLayers, num_slots: int, dtype: torch.dtype) -> None:
        self._adapted = adapted
        self._dtype = dtype
        self.adapters: list[HostAdapter | None] = [None] * num_slots
        """Loaded adapter by slot."""

    def prepare(self, parts: Sequence[LoRAWeights | None], pause: Pause = no_pause) -> HostAdapter:
        """Prepare an adapter for the kernels."""
        adapted = self._adapted
        layers = [layer for layer in adapted.layers if layer is not adapted.embedding]
        prepared = get_ops().prepare_adapter(layers, parts, self._dtype, pause)
        changes = adapted.change_head(parts), adapted.change_experts(parts)
        return HostAdapter(prepared, adapted.embedding_of(parts), *changes)

    def put(self, slot: int, prepared: HostAdapter) -> None:
        """Put an adapter into a slot."""
        self.adapters[slot] = prepared

    def of_tokens(self, slots: Tensor) -> RaggedAdapters:
        """Return the adapters of a batch.

        Args:
            slots: [T] int32, slot of each token; -1: none.
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
        """Clear a slot."""
        self.adapters[slot] = None


# ---- launches of a fixed shape --------------------------------------------------------------


@dataclass(frozen=True)
class SlottedAdapters:
    """The adapters of T tokens, with S slots of rank R. Shapes do not depend on which token has
    which adapter.

    x is multiplied with the A of all slots, and the results for other slots than the token's become
    zero. So the slot index is data, and a batch takes a few large matmuls. Tokens without an
    adapter get the layer's own output.
    """

    slots: "DeviceSlots"
    is_own: Tensor
    """[T, S, 1] in the dtype of the weights: 1 for the slot of a token."""
    has_one: Tensor
    """[T, 1] bool: the token has an adapter."""

    def adapt(self, layer: AdaptedLayer, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' contribution to the output of a layer (`LaunchAdapters.adapt`)."""
        a, _ = self.slots.weights_of(layer)
        return self._add(layer, torch.mm(x.to(a.dtype), a.flatten(0, 1).t()), y)

    def adapt_heads(self, layer: LoRAHeads, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' contribution to the outputs of heads (`LaunchAdapters.adapt_heads`)."""
        a, b = self.slots.heads_of(layer)
        inner = torch.bmm(x.transpose(0, 1).to(a.dtype), a.flatten(1, 2).mT)
        inner = inner.unflatten(2, a.shape[1:3]) * self.is_own
        added = torch.bmm(inner.flatten(2, 3), b.flatten(1, 2)).transpose(0, 1).to(y.dtype)
        added = F.pad(added, (0, y.shape[2] - added.shape[2]))
        return torch.where(self.has_one.unsqueeze(1), y + added, y)

    def adapt_embeddings(self, table: AdaptedLayer, ids: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' contribution to the input embeddings
        (`LaunchAdapters.adapt_embeddings`).
        """
        a, _ = self.slots.weights_of(table)
        return self._add(table, a.flatten(0, 1).index_select(1, ids).t(), y)

    def adapt_experts(
        self,
        layer: AdaptedExperts,
        single: SingleExperts,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Add the adapters' contribution to the output of experts. All tokens are computed again by
        all experts, and tokens with an adapter keep the result.
        """
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        choices = choices_of(len(layer.experts), ids, weights, layer.first_expert)
        for number, (expert, choice) in enumerate(zip(layer.experts, choices, strict=True)):
            is_other, weight = choice
            result = _run_expert(self, single, number, expert, _inputs_of(single, x, weight))
            if single.options.scales_inputs:
                weight = (~is_other).any(-1, keepdim=True).float()
            total += weight * result
        return torch.where(self.has_one, total.to(y.dtype), y)

    def select(self, tokens: Tensor) -> "SlottedAdapters":
        """Select the adapters of some tokens."""
        return SlottedAdapters(
            self.slots, self.is_own.index_select(0, tokens), self.has_one.index_select(0, tokens)
        )

    def _add(self, layer: AdaptedLayer, inner: Tensor, y: Tensor) -> Tensor:
        """Add to y the contribution that follows from x times the A of all slots, [T, S * P *
        R].
        """
        a, b = self.slots.weights_of(layer)
        inner = inner.unflatten(1, a.shape[:2]) * self.is_own
        rank = self.slots.rank
        sums = [
            torch.mm(inner[:, :, i * rank : (i + 1) * rank].flatten(1, 2), part.flatten(0, 1))
            for i, part in enumerate(b)
        ]
        added = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
        return torch.where(self.has_one, y + added.to(y.dtype), y)


class DeviceSlots:
    """The weights of adapters on a device, stacked, at fixed addresses.

    P projections of a layer, S slots. The G experts of an expert layer are also stacked, so that
    the number of writes does not grow with them; G of any other layer is 1.

    Args:
        adapted: layers that adapters can change; the projections of each cover all of its outputs,
            in order.
        num_slots: S.
        rank: R, the largest rank of an adapter; smaller ones are padded with zeros.
        dtype: dtype of the weights.
        device: device of the weights.
        end: ends the part that is compiled together: called before and after the writes of an
            adapter.

    Attributes:
        a: weights a for each stack [G, S, P * R, in_features].
        b: weights b for each stack and projection [G, S, R, size].
    """

    def __init__(
        self,
        adapted: AdaptedLayers,
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        end: Callable[[], None],
    ) -> None:
        self._num_parts = adapted.num_parts
        self._stacks = [[adapted.layers[n] for n in numbers] for numbers in adapted.stacks()]
        self._where: dict[int, tuple[int, int]] = {}
        """Number of a layer -> its stack, and the index in it."""
        self._zeros: dict[tuple[int, ...], Tensor] = {}
        """Zeros for adapters that do not change a stack, by the shape of the stack, in host
        memory."""
        self._dtype, self._device, self._end = dtype, device, end
        self.rank = rank
        self.a: list[Tensor] = []
        self.b: list[list[Tensor]] = []
        for number, stack in enumerate(self._stacks):
            layer = stack[0]
            assert all(each.parts == layer.parts for each in stack)
            self._where |= {each.number: (number, index) for index, each in enumerate(stack)}
            ends = [offset + size for offset, size in layer.parts]
            assert [0, *ends[:-1]] == [offset for offset, _ in layer.parts], layer
            sizes = len(stack), num_slots
            shape = (*sizes, len(layer.parts) * rank, layer.in_features)
            self.a.append(torch.zeros(shape, dtype=dtype, device=device))
            self.b.append(
                [
                    torch.zeros((*sizes, rank, size), dtype=dtype, device=device)
                    for _, size in layer.parts
                ]
            )
        self._numbers = torch.arange(num_slots, dtype=torch.int32).to(device)

    @property
    def num_bytes(self) -> int:
        """Number of bytes on the device."""
        tensors = [*self.a, *(part for parts in self.b for part in parts)]
        return sum(tensor.nbytes for tensor in tensors)

    def weights_of(self, layer: AdaptedLayer) -> tuple[Tensor, list[Tensor]]:
        """Return A [S, P * R, in_features] of a layer, and B [S, R, size] of each projection."""
        stack, index = self._where[layer.number]
        return self.a[stack][index], [each[index] for each in self.b[stack]]

    def heads_of(self, layer: LoRAHeads) -> tuple[Tensor, Tensor]:
        """Return A [H, S, R, in_features] and B [H, S, R, out_features] of heads, which form one
        stack.
        """
        stack, _ = self._where[layer.heads[0].number]
        (b,) = self.b[stack]
        return self.a[stack], b

    def prepare(self, parts: Sequence[LoRAWeights | None], pause: Pause = no_pause) -> list[Tensor]:
        """Prepare an adapter: for each stack, a [G, P * R, in_features], then b [G, R, size] of
        each projection.
        """
        found = []
        for stack, a, b in zip(self._stacks, self.a, self.b, strict=True):
            own = [[parts[layer.first_part + i] for i in range(len(b))] for layer in stack]
            is_changed = any(part is not None for each in own for part in each)
            first, *others = (self._host_zeros(each, is_changed) for each in (a, *b))
            for number, index in product(range(len(stack)), range(len(b))):
                pause()
                part = own[number][index]
                if part is not None:
                    size = len(part.a)
                    first[number, index * self.rank : index * self.rank + size] = part.a
                    others[index][number, :size] = part.b.T
            found += [first, *others]
        return found

    def _host_zeros(self, target: Tensor, is_new: bool) -> Tensor:
        """Return zeros for one slot of a stack, on the host. If `is_new` is False, they are shared
        and must not be written to.
        """
        # Use the shape and not a view of the target: another thread calls this, and the device
        # would record the view among its operators.
        shape = (target.shape[0], *target.shape[2:])
        if is_new:
            return torch.zeros(shape, dtype=self._dtype)
        if shape not in self._zeros:
            self._zeros[shape] = torch.zeros(shape, dtype=self._dtype)
        return self._zeros[shape]

    def put(self, slot: int, prepared: list[Tensor]) -> None:
        """Write an adapter to a slot. All adapters need the same writes, so these are compiled
        once.
        """
        self._end()  # run earlier operations first: they belong to other graphs
        index = torch.tensor([slot]).to(self._device)
        targets = [t for a, b in zip(self.a, self.b, strict=True) for t in (a, *b)]
        for target, source in zip(targets, prepared, strict=True):
            # Write to the tensor itself: on a card, a write through a view would copy all slots.
            target.index_copy_(1, index, source.to(self._device)[:, None])
        self._end()

    def clear(self, slot: int) -> None:
        """Do nothing: the memory of a slot is never freed, and no token reads it."""

    def warm_up(self) -> None:
        """Compile the operators of `put`. No slot may be in use."""
        self.put(0, self.prepare([None] * self._num_parts))

    def of_tokens(self, slots: Tensor) -> SlottedAdapters:
        """Return the adapters of a batch.

        Args:
            slots: [T] int32 on the device, slot of each token; -1: none.
        """
        is_own = (slots[:, None] == self._numbers).to(self._dtype)
        return SlottedAdapters(self, is_own[:, :, None], (slots >= 0)[:, None])
