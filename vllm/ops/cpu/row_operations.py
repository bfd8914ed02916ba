"""Runs one operation of csrc/cpu/row_operations.h on tensors.

A kernel gets raw addresses, so everything it relies on is checked here: shapes, dtypes, strides,
device.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from vllm.ops.cpu.library import packer
from vllm.ops.expert_options import ONE_GROUP, ExpertGroups, Routing

_DENSE = torch.contiguous_format

_num_threads = torch.get_num_threads


_FIELDS = (
    "kind x y out weight bias table scales num_rows num_heads head_size x_stride y_stride "
    "out_stride option top_k num_groups top_groups scalar second_scalar"
)


class RowOperations:
    """Calls row operations for one dtype by their names.

    Args:
        kernels: the kernels of the dtype.
    """

    def __init__(self, kernels: Any) -> None:
        self._run = kernels.row_operation
        self._kinds = {kind.name: int(kind) for kind in kernels.OperationKind}
        self._pack = packer(kernels.RowTensors, _FIELDS)

    def __call__(
        self,
        kind: str,
        x: Tensor,
        y: Tensor | None = None,
        *,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        is_gated: bool = False,
        in_place: bool = False,
        factor: Tensor | None = None,
        table: Tensor | None = None,
        scales: Tensor | None = None,
        top_k: int = 0,
        groups: ExpertGroups = ONE_GROUP,
        option: int = 0,
        scalar: float = 0.0,
        second_scalar: float = 0.0,
    ) -> Tensor:
        """Run an operation and return its result.

        Args:
            kind: the name of the operation.
            x: [..., N], dense; or [T, N] or [T, H, N] with strided rows.
            y: the second operand, dense, of the shape of x. An operation may write there.
            weight: [N]; for x [T, H, N] also [H, N], one per head.
            bias: [N].
            is_gated: the result has N / 2 elements in its last dimension instead of N.
            in_place: the result may be written over x.
            factor: [T, 1], dense: a second operand with one value for each x[t].
            table, scales: float32, dense, only for `route`: bias and scales of `NativeOps.route`.
            top_k: if not 0, the result has this many choices for each token, see `choices_in`.
            groups: groups of experts, for `route`.
            option: documented in csrc/cpu/program_args.h.
            scalar, second_scalar: documented in csrc/cpu/program_args.h.

        Raises:
            ValueError: shapes, dtypes, strides or devices do not fit.
        """
        shape = x.shape
        size = shape[-1]
        if factor is not None:
            y, (rows, heads, stride) = _check_factor(factor, x), _strided(x)
        elif x.is_contiguous() and (weight is None or weight.dim() == 1):
            rows, heads, stride = x.numel() // size, 1, size
        else:
            rows, heads, stride = _strided(x)
        if factor is None and y is not None:
            if y.shape != shape or y.dtype != x.dtype or not y.is_cpu:
                refuse_pair("the second operand", y, "x", x)
            if not y.is_contiguous():
                refuse_strides("the second operand", y)
        if weight is not None:
            sizes = shape[1:] if weight.dim() == 2 else (size,)
            _check_operand("weight", weight, tuple(sizes), x)
        if bias is not None:
            _check_operand("bias", bias, (size,), x)
        out_stride = heads * size
        if is_gated:
            out_stride = size = gated_size(size)
            out = x.new_empty(*shape[:-1], size)  # new_empty is twice as fast as torch.empty
        elif in_place:
            out, out_stride = x, stride
        elif top_k:
            out_stride = choice_width(top_k, x.dtype)
            out = x.new_empty(rows, out_stride)
        else:
            out = torch.empty_like(x, memory_format=_DENSE)
        operands = self._pack(
            self._kinds[kind],
            x.data_ptr(),
            0 if y is None else y.data_ptr(),
            out.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if table is None else table.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            rows,
            heads,
            size,
            stride,
            heads * size if factor is None else 1,
            out_stride,
            option,
            top_k,
            groups.num_groups,
            groups.top_groups,
            scalar,
            second_scalar,
        )
        self._run(operands, _num_threads())
        return out


ROUTINGS: dict[Routing, str] = {
    "softmax": "kSoftmax",
    "softmax_of_chosen": "kSoftmaxOfChosen",
    "sigmoid": "kSigmoid",
    "sigmoid_of_chosen": "kSigmoidOfChosen",
    "sparse_mixer": "kSparseMixer",
}
"""Names of the values of `Routing` in csrc/cpu/moe_args.h, which is the option of `route`."""


def choice_width(top_k: int, dtype: torch.dtype) -> int:
    """Return the elements that the choices of a token take: k 8-byte ids, then k 4-byte weights.

    They are padded to a multiple of 8 bytes.
    """
    return 8 * (top_k + (top_k + 1) // 2) // dtype.itemsize


def choices_in(rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Split the output of `route`, [T, choice_width], into ids [T, k] int64 and weights [T, k]
    float32.
    """
    return rows.view(torch.int64)[:, :top_k], rows.view(torch.float32)[:, 2 * top_k : 3 * top_k]


def gated_size(size: int) -> int:
    """Return the output size of a gated activation whose input has `size` elements: gate,
    then up.
    """
    if size % 2:
        raise ValueError(f"the last dimension of x must be even (gate and up), got {size}")
    return size // 2


def _check_factor(factor: Tensor, x: Tensor) -> Tensor:
    """Check that factor is dense [T, 1], of the dtype of x [T, ...]."""
    if factor.shape != (len(x), 1) or factor.dtype != x.dtype or not factor.is_cpu:
        refuse_pair("the factor", factor, "x", x)
    if not factor.is_contiguous():
        refuse_strides("the factor", factor)
    return factor


def _strided(x: Tensor) -> tuple[int, int, int]:
    """Return the number of tokens, the heads of a token, and the distance between tokens."""
    if x.dim() not in (2, 3):
        refuse_strides("x", x)
    check_rows("x", x)
    return x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.stride(0)


def check_rows(name: str, x: Tensor) -> None:
    """Check that x [R, C] or [R, C, D] is dense in all dimensions but the first."""
    stride, last = x.stride(), x.shape[-1]
    if stride[-1] != 1 or (x.dim() == 3 and stride[1] != last and x.shape[1] != 1):
        refuse_strides(name, x)


def _check_operand(name: str, weight: Tensor, sizes: tuple[int, ...], x: Tensor) -> None:
    """Check that weight is dense, of these sizes and the dtype of x."""
    if weight.shape != sizes or weight.dtype != x.dtype or not weight.is_cpu:
        refuse_pair(name, weight, "x", x)
    if not weight.is_contiguous():
        refuse_strides(name, weight)


def refuse_pair(name: str, x: Tensor, other_name: str, other: Tensor) -> NoReturn:
    raise ValueError(
        f"{name} ({x.dtype} {list(x.shape)} on {x.device}) must match {other_name} ({other.dtype} "
        f"{list(other.shape)} on {other.device})"
    )


def refuse_strides(name: str, x: Tensor) -> NoReturn:
    raise ValueError(f"{name} is not dense: shape {list(x.shape)}, strides {list(x.stride())}")
