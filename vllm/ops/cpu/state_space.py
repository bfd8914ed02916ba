"""Layers with recurrent state on the C++ kernels: one token of each sequence."""

from collections.abc import Mapping
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
    """Run the Mamba-2 scan over one token of each sequence; see `NativeOps.scan_tokens`.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: an index of a state is out of range.
    """
    num_rows, num_heads, head_size, state_size = states.shape
    num_sequences, num_groups = len(rows), b.shape[1]
    _check_states(states, num_groups)
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
    dense = _dense(given)
    y = torch.empty(num_sequences, num_heads, head_size, dtype=torch.float32)
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
    _check_row(bad, rows, num_rows)
    return y


def delta_tokens(
    kernels: Any,
    states: Tensor,
    rows: Tensor,
    is_new: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logs: Tensor,
    beta: Tensor,
) -> Tensor:
    """Run the delta rule over one token of each sequence; see `NativeOps.delta_tokens`.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: an index of a state is out of range.
    """
    num_rows, num_heads, value_size, key_size = states.shape
    num_sequences, num_groups = len(rows), k.shape[1]
    _check_states(states, num_groups)
    fadings = (key_size,) if logs.dim() == 3 else ()
    shared, of_heads = (num_sequences, num_groups, key_size), (num_sequences, num_heads)
    dense = _dense(
        {
            "states": (states, torch.float32, tuple(states.shape)),
            "rows": (rows, torch.int64, (num_sequences,)),
            "is_new": (is_new, torch.bool, (num_sequences,)),
            "q": (q, torch.float32, shared),
            "k": (k, torch.float32, shared),
            "v": (v, torch.float32, (*of_heads, value_size)),
            "logs": (logs, torch.float32, (*of_heads, *fadings)),
            "beta": (beta, torch.float32, of_heads),
        }
    )
    dense[6] = dense[6].exp()
    y = torch.empty(*of_heads, value_size, dtype=torch.float32)
    bad = kernels.delta_tokens(
        *(tensor.data_ptr() for tensor in dense),
        y.data_ptr(),
        num_sequences,
        num_rows,
        num_heads,
        value_size,
        num_groups,
        key_size,
        *(fadings or (1,)),
        torch.get_num_threads(),
    )
    _check_row(bad, rows, num_rows)
    return y


def _check_states(states: Tensor, num_groups: int) -> None:
    num_heads = states.shape[1]
    if num_heads % num_groups:
        raise ValueError(
            f"the number of heads ({num_heads}) must be a multiple of the number of groups "
            f"({num_groups})"
        )
    if not states.is_contiguous():
        raise ValueError("the recurrent states must be dense")


def _dense(given: Mapping[str, tuple[Tensor, torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Check dtypes and shapes of tensors, and return the tensors in dense memory."""
    for name, (tensor, dtype, shape) in given.items():
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_cpu:
            raise ValueError(
                f"{name} must be {dtype} {list(shape)} on cpu, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )
    return [tensor.contiguous() for tensor, _, _ in given.values()]


def _check_row(bad: int, rows: Tensor, num_rows: int) -> None:
    """Raise the error about the sequence that a kernel has refused; do nothing for -1."""
    if bad >= 0:
        raise IndexError(
            f"rows[{bad}] must be one of the {num_rows} recurrent states, got {rows[bad]}"
        )
