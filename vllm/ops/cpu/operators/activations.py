"""Fuses activations of a program into the linear layers before them.

The linear layer activates its results while they are in registers; it rounds them first, so the
bits are the same.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vllm.ops.cpu.operators.recorder import Operation
from vllm.ops.cpu.symbols import Buffer, Rows


def activate_matmuls(
    operations: Sequence[Operation], result: Rows, taps: Sequence[Rows]
) -> list[Operation]:
    """Fuse GELU into the linear layer before it, if nothing else reads the layer's result.

    Args:
        operations: operations in the order of execution.
        result: result of the program.
        taps: further results.
    """
    uses: Counter[Buffer] = Counter(
        rows.buffer for o in operations for rows in {o.x, o.y, o.out} if rows is not None
    )
    uses.update(rows.buffer for rows in (result, *taps))
    found: list[Operation] = []
    for operation in operations:
        before = found[-1] if found else None
        if before is None or not _activates(operation, before) or uses[before.out.buffer] != 2:
            found.append(operation)
            continue
        numbers = before.numbers | {"option": operation.numbers["option"]}
        found[-1] = replace(before, out=operation.out, numbers=numbers)
    return found


def _activates(operation: Operation, before: Operation) -> bool:
    """Return whether an operation is the GELU of the whole result of the linear layer `before`."""
    x = operation.x
    return (
        operation.kind == "gelu"
        and before.kind == "linear"
        and x is not None
        and x.is_whole
        and x.buffer is before.out.buffer
        and x.dtype == before.out.dtype
        and not before.numbers.get("option", 0)
    )
