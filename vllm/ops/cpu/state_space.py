"""Layers with recurrent state on the C++ kernels: one token of each sequence."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm.ops.native.delta_rule import DeltaTokens
from vllm.ops.native.state_space import ScannedTokens, TokenStates


def scan_tokens(kernels: Any, at: TokenStates, tokens: ScannedTokens) -> Tensor:
    """Run the Mamba-2 scan over one token of each sequence; see `NativeOps.scan_tokens`.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: an index of a state is out of range.
    """
    num_rows, num_heads, head_size, state_size = at.states.shape
    num_sequences, num_groups = len(at.rows), tokens.b.shape[1]
    shared, of_heads = (num_sequences, num_groups, state_size), (num_sequences, num_heads)
    fading = (tokens.steps * tokens.decay).exp()
    given = {
        "x": (tokens.x, (*of_heads, head_size)),
        "steps": (tokens.steps, of_heads),
        "fading": (fading, of_heads),
        "b": (tokens.b, shared),
        "c": (tokens.c, shared),
    }
    dense = _dense(at, num_groups, given)
    y = torch.empty(*of_heads, head_size, dtype=torch.float32)
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
    _check_row(bad, at.rows, num_rows)
    return y


def delta_tokens(kernels: Any, at: TokenStates, tokens: DeltaTokens) -> Tensor:
    """Run the delta rule over one token of each sequence; see `NativeOps.delta_tokens`.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: an index of a state is out of range.
    """
    num_rows, num_heads, value_size, key_size = at.states.shape
    num_sequences, num_groups = len(at.rows), tokens.k.shape[1]
    fadings = (key_size,) if tokens.logs.dim() == 3 else ()
    shared, of_heads = (num_sequences, num_groups, key_size), (num_sequences, num_heads)
    given = {
        "q": (tokens.q, shared),
        "k": (tokens.k, shared),
        "v": (tokens.v, (*of_heads, value_size)),
        "logs": (tokens.logs, (*of_heads, *fadings)),
        "beta": (tokens.beta, of_heads),
    }
    dense = _dense(at, num_groups, given)
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
    _check_row(bad, at.rows, num_rows)
    return y


def _dense(
    at: TokenStates, num_groups: int, given: Mapping[str, tuple[Tensor, tuple[int, ...]]]
) -> list[Tensor]:
    """Check states, indices and float32 tensors, and return all of them in dense memory."""
    num_heads, num_sequences = at.states.shape[1], (len(at.rows),)
    if num_heads % num_groups:
        raise ValueError(
            f"the number of heads ({num_heads}) must be a multiple of the number of groups "
            f"({num_groups})"
        )
    if not at.states.is_contiguous():
        raise ValueError("the recurrent states must be dense")
    named = {
        "states": (at.states, torch.float32, tuple(at.states.shape)),
        "rows": (at.rows, torch.int64, num_sequences),
        "is_new": (at.is_new, torch.bool, num_sequences),
        **{name: (tensor, torch.float32, shape) for name, (tensor, shape) in given.items()},
    }
    for name, (tensor, dtype, shape) in named.items():
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_cpu:
            raise ValueError(
                f"{name} must be {dtype} {list(shape)} on cpu, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )
    return [tensor.contiguous() for tensor, _, _ in named.values()]


def _check_row(bad: int, rows: Tensor, num_rows: int) -> None:
    """Raise the error about the sequence that a kernel has refused; do nothing for -1."""
    if bad >= 0:
        raise IndexError(
            f"rows[{bad}] must be one of the {num_rows} recurrent states, got {rows[bad]}"
        )
