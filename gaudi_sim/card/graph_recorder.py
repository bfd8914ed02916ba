"""The operators of a captured graph, to run again on other data.

Replaying runs the operators, not the Python code that called them. Like a real captured graph, it
does not see changed attributes, but it sees weights that were changed in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gaudi_sim.card.args import leaves_of, map_leaves


@dataclass(frozen=True)
class _Slot:
    """A placeholder for a value that differs at each replay."""

    number: int


class _Entry:
    """One recorded operator: its operands, which may be slots, and the slots of its results."""

    __slots__ = ("_args", "_direct", "_kwargs", "_nested", "_op", "_results")

    def __init__(
        self,
        op: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        results: list[int | None],
    ) -> None:
        """Create an entry.

        Args:
            results: the slot of each leaf of the result; None if the leaf is an operand that is
                written in place.
        """
        self._op = op
        self._args = args
        self._results = results
        self._direct = [(i, x.number) for i, x in enumerate(args) if isinstance(x, _Slot)]
        self._nested = [i for i, x in enumerate(args) if not isinstance(x, _Slot) and _has_slot(x)]
        self._kwargs = (kwargs, _has_slot(kwargs))

    def run(self, values: list[Any]) -> None:
        """Run the operator on `values`, and store its result there."""

        def from_slot(x: Any) -> Any:
            return values[x.number] if isinstance(x, _Slot) else x

        args = self._args.copy()  # a copy, so that operands do not outlive the replay
        for i, number in self._direct:
            args[i] = values[number]
        for i in self._nested:
            args[i] = map_leaves(from_slot, args[i])
        kwargs, has_slot = self._kwargs
        result = self._op(*args, **(map_leaves(from_slot, kwargs) if has_slot else kwargs))
        leaves = (result,) if isinstance(result, torch.Tensor) else leaves_of(result)
        for slot, leaf in zip(self._results, leaves, strict=True):
            if slot is not None:
                values[slot] = leaf


class GraphRecorder:
    """Records operators until `end`; `replay` runs them again."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._entries: list[_Entry] = []
        self._slots: dict[int, int] = {}
        # Kept alive during recording, so that no id is used twice.
        self._keep: list[Any] = list(inputs)
        self._input_kinds = [(x.shape, x.dtype) for x in inputs]
        self._made: list[torch.Tensor] = []
        self._outputs: list[int | None] = []
        self._num_slots = 0
        for tensor in inputs:
            self._slot(tensor)

    def record(
        self,
        op: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        *,
        is_view: bool = False,
    ) -> None:
        """Add one operator with its operands and its result."""
        operands = leaves_of(args, kwargs)
        self._keep.append((operands, result))
        slotted_args, slotted_kwargs = map_leaves(self._to_slot, (list(args), kwargs))
        if is_view and not _has_slot(slotted_args):
            return  # a view of a weight is the same at each replay
        results: list[int | None] = []
        for leaf in leaves_of(result):
            is_new = torch.is_tensor(leaf) and all(leaf is not x for x in operands)
            results.append(self._slot(leaf) if is_new else None)
            if is_new and not is_view:
                self._made.append(leaf)
        self._entries.append(_Entry(op, slotted_args, slotted_kwargs, results))

    @property
    def made(self) -> list[torch.Tensor]:
        """The tensors that were made so far, except views; empty after `end`."""
        return list(self._made)

    def end(self, outputs: Sequence[torch.Tensor]) -> None:
        """Stop recording; a replay returns `outputs` in this order."""
        self._outputs = [self._slots.get(id(x)) for x in outputs]
        self._slots.clear()
        self._keep.clear()
        self._made.clear()

    def end_with_all(self) -> list[torch.Tensor]:
        """Stop recording; a replay returns all tensors that were made, except views."""
        made = list(self._made)
        self.end(made)
        return made

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Check that inputs have the shapes and dtypes of the capture.

        Raises:
            RuntimeError: an input has another shape or dtype than at capture.
        """
        kinds = [(x.shape, x.dtype) for x in inputs]
        if kinds != self._input_kinds:
            raise RuntimeError(
                f"a graph captured for {_describe(self._input_kinds)} cannot run {_describe(kinds)}"
            )

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the operators on `inputs`; an output that no operator makes is None.

        Raises:
            RuntimeError: an input has another shape or dtype than at capture.
        """
        self.check(inputs)
        values: list[Any] = [*inputs, *[None] * (self._num_slots - len(inputs))]
        for entry in self._entries:
            entry.run(values)
        return [None if slot is None else values[slot] for slot in self._outputs]

    def _to_slot(self, x: Any) -> Any:
        number = self._slots.get(id(x)) if torch.is_tensor(x) else None
        return x if number is None else _Slot(number)

    def _slot(self, tensor: torch.Tensor) -> int:
        """Return a new slot for `tensor`."""
        self._slots[id(tensor)] = self._num_slots
        self._num_slots += 1
        return self._num_slots - 1


def _has_slot(value: Any) -> bool:
    return any(isinstance(x, _Slot) for x in leaves_of(value))


def _describe(kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return str([(tuple(shape), dtype) for shape, dtype in kinds])
