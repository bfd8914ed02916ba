"""The scan of state-space layers on the C++ kernels."""

from typing import Any

import torch
from torch import Tensor


def scan_tokens(
    kernels: Any,
    states: Tensor,
    rows: Tensor,
    is_new: Tensor,
    x: Tensor,
    steps: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
) -> Tensor:
    """See `Ops.scan_tokens`.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: a row is out of range.
    """
    num_rows, num_heads, head_size, state_size = states.shape
    num_sequences, num_groups = len(rows), b.shape[1]
    if num_heads % num_groups:
        raise ValueError(f"{num_heads} heads are not a multiple of {num_groups} groups")
    if not states.is_contiguous():
        raise ValueError("states are not dense")
    shared = (num_sequences, num_groups, state_size)
    fading = (steps * decay).exp()
    given = {
        "states": (states, torch.float32, tuple(states.shape)),
        "rows": (rows, torch.int64, (num_sequences,)),
        "is_new": (is_new, torch.bool, (num_sequences,)),
        "x": (x, torch.float32, (num_sequences, num_heads, head_size)),
        "steps": (steps, torch.float32, (num_sequences, num_heads)),
        "fading": (fading, torch.float32, (num_sequences, num_heads)),
        "b": (b, torch.float32, shared),
        "c": (c, torch.float32, shared),
    }
    for name, (tensor, dtype, shape) in given.items():
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_cpu:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; needed: "
                f"{dtype} {list(shape)} on cpu"
            )
    y = torch.empty(num_sequences, num_heads, head_size)
    dense = [tensor.contiguous() for tensor, _, _ in given.values()]
    bad = kernels.scan_tokens(
        *(tensor.data_ptr() for tensor in dense),
        y.data_ptr(),
        num_sequences,
        num_rows,
        num_heads,
        head_size,
        num_groups,
        state_size,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise IndexError(f"rows[{bad}] is {rows[bad]}, there are {num_rows} states")
    return y
