"""The operators of a captured graph, to be run again on other data.

Replaying runs the operators, not the Python code that called them: like a captured graph, it does
not notice a changed attribute, but it sees weights that were changed in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm.platforms.habana.sim_args import leaves_of, map_leaves


@dataclass(frozen=True)
class _Slot:
    """Stands for a value that is another one at each replay."""

    number: int


class _Entry(NamedTuple):
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int | None]
    """The slot of each leaf of the result; None where it is an operand, written in place."""


class Tape:
    """Records operators between `begin` and `end`; `replay` runs them."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._entries: list[_Entry] = []
        self._slots: dict[int, int] = {}
        self._keep: list[Any] = list(inputs)  # while recording: an id must not be used twice
        self._input_kinds = [(tuple(x.shape), x.dtype) for x in inputs]
        self._outputs: list[int | None] = []
        self._num_slots = 0
        for tensor in inputs:
            self._slot(tensor)

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Add one operator with its operands and what it returned."""
        operands = leaves_of(args, kwargs)
        self._keep.append((operands, result))
        slotted_args, slotted_kwargs = map_leaves(self._to_slot, (args, kwargs))
        results: list[int | None] = []
        for leaf in leaves_of(result):
            is_new = torch.is_tensor(leaf) and all(leaf is not x for x in operands)
            results.append(self._slot(leaf) if is_new else None)
        self._entries.append(_Entry(op, slotted_args, slotted_kwargs, results))

    def end(self, outputs: Sequence[torch.Tensor]) -> None:
        """Stop recording; `outputs` are what a replay returns, in this order."""
        self._outputs = [self._slots.get(id(x)) for x in outputs]
        self._slots.clear()
        self._keep.clear()

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the operators on `inputs`; None stands for an output that nothing in it makes.

        Raises:
            RuntimeError: an input has another shape or type than at capture.
        """
        kinds = [(tuple(x.shape), x.dtype) for x in inputs]
        if kinds != self._input_kinds:
            raise RuntimeError(f"a graph captured for {self._input_kinds} cannot run {kinds}")
        values: list[Any] = [*inputs, *[None] * (self._num_slots - len(inputs))]

        def from_slot(x: Any) -> Any:
            return values[x.number] if isinstance(x, _Slot) else x

        for entry in self._entries:
            args, kwargs = map_leaves(from_slot, (entry.args, entry.kwargs))
            result = entry.op(*args, **kwargs)
            for slot, leaf in zip(entry.results, leaves_of(result), strict=True):
                if slot is not None:
                    values[slot] = leaf
        return [None if slot is None else values[slot] for slot in self._outputs]

    def _to_slot(self, x: Any) -> Any:
        number = self._slots.get(id(x)) if torch.is_tensor(x) else None
        return x if number is None else _Slot(number)

    def _slot(self, tensor: torch.Tensor) -> int:
        """A new slot for `tensor`."""
        self._slots[id(tensor)] = self._num_slots
        self._num_slots += 1
        return self._num_slots - 1
