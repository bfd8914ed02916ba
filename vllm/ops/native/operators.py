"""Define every device-dependent operator: its contract, and the reference in plain torch for any
device, as simple as possible.

Never optimised. Norms and softmax are computed in float32 for any dtype. The implementations of
devices, `cpu` (csrc) and `hpu` (bridge), derive from `NativeOps` and override what they can do
faster; the platform chooses one at start. Knows tensors, but no model, request, scheduler or
device.

In shapes, T is the number of tokens of one forward pass. Float tensors of one call have one dtype
unless a line says otherwise. Tokens may be strided (a slice of a packed QKV tensor): only the
dimensions after the first have to be dense.

An index out of range raises IndexError if the host can see it (on the CPU); on a device its effect
is undefined.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.ops.native.adapters import NativeAdapters
from vllm.ops.native.attention import NativeAttention
from vllm.ops.native.delta_rule import NativeDeltaRule
from vllm.ops.native.experts import NativeExperts
from vllm.ops.native.state_space import NativeScans
from vllm.ops.prepared import PreparedHeads, PreparedTable, PreparedWeight
from vllm.ops.stored_weight import Fp8Weight, StoredWeight


class DenseWeight(nn.Module):
    """A quantized weight that was dequantized."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T + bias; see `PreparedWeight`."""
        return F.linear(x, self.weight, bias)


class DenseHeads(nn.Module):
    """Matrices of heads, [H, I, O]."""

    def __init__(self, matrices: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrices.contiguous(), requires_grad=False)

    def multiply(self, x: Tensor, appended: Tensor | None = None) -> Tensor:
        """Multiply each head with its matrix; see `PreparedHeads`."""
        out = torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)
        return out if appended is None else torch.cat((out, appended), dim=-1)

    def dense(self) -> Tensor:
        """Return the matrices [H, I, O]."""
        return self.weight


def is_rounding_inputs(weight: StoredWeight) -> TypeGuard[Fp8Weight]:
    """Return whether inputs must be rounded to FP8 for matmuls with this weight."""
    return isinstance(weight, Fp8Weight) and weight.rounds_inputs and weight.input_scale is not None


class RoundedInputs:
    """A `PreparedWeight` whose inputs are rounded to FP8 with one static scale.

    For devices without FP8 matmuls. Every dtype of models represents FP8 values exactly, and the
    scale is multiplied into the scales of the weight. So the result equals an FP8 matmul, except
    for the order of the sums.

    Args:
        weight: one for which `is_rounding_inputs` is true.
        ops: operators of the device.
        dtype: data type of the inputs.
    """

    def __init__(self, weight: Fp8Weight, ops: "NativeOps", dtype: torch.dtype) -> None:
        assert weight.input_scale is not None
        self._ops = ops
        self._inverse_scale = 1 / weight.input_scale
        self._largest = int(weight.largest)
        scales = weight.scales * weight.input_scale
        plain = replace(weight, scales=scales, input_scale=None, rounds_inputs=False)
        self._weight = ops.prepare_weight(plain, dtype)

    @property
    def weight(self) -> PreparedWeight:
        """The weight that multiplies the rounded inputs."""
        return self._weight

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T + bias after rounding x; see `PreparedWeight`."""
        rounded = self._ops.round_to_fp8(x, self._inverse_scale, self._largest)
        return self._weight.linear(rounded, bias)


class NativeOps(NativeAdapters, NativeAttention, NativeDeltaRule, NativeExperts, NativeScans):
    """Every operator in torch. They change no argument except caches.

    Stateless: the same object is used by every layer and forward pass. Operators run under
    `torch.inference_mode()`; none of them supports autograd.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: int = 0) -> Tensor:
        """Divide every vector by its root mean square, then multiply by the weight.

        All of it is done in float32 and rounded once, as Gemma, OLMo 2 and GPT-OSS were trained.
        Llama rounds before it multiplies as well, which only adds to the error.

        Args:
            x: [..., hidden]. A head norm passes [T, H, D]. Not changed.
            weight: [hidden].
            eps: added to the mean of squares.
            offset: added to the weight: 1 if the checkpoint stores weights minus 1.

        Returns:
            A new dense tensor, shape and dtype of x.

        Raises:
            ValueError: weight does not have the size of the last dimension of x.
        """
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}")
        x_float = x.float()
        normed = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
        scale = weight.float() + offset if offset else weight.float()
        return (normed * scale).to(x.dtype)

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Compute `new_residual = x + residual`, and `rms_norm` of it, in one pass.

        May write both results over x and residual: the caller must only use the returned tensors
        afterwards.

        Args:
            x: [T, hidden], the output of the previous layer.
            residual: [T, hidden].
            weight: [hidden].
            eps: added to the mean of squares.
            offset: offset; see `rms_norm`.

        Returns:
            (normed, new_residual), both [T, hidden]. The sum is rounded to the dtype of x
            before it is normalized, as an unfused model does.

        Raises:
            ValueError: the shapes or dtypes do not fit each other.
        """
        if x.shape != residual.shape or x.dtype != residual.dtype:
            raise ValueError(
                f"residual ({residual.dtype} {list(residual.shape)}) must match x ({x.dtype} "
                f"{list(x.shape)})"
            )
        new_residual = x + residual
        return self.rms_norm(new_residual, weight, eps, offset), new_residual

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Shift and scale every vector to mean 0 and variance 1, then apply weight and bias.

        All of it is done in float32 and rounded once.

        Args:
            x: [..., hidden]. Not changed.
            weight: [hidden]; for x [T, H, hidden] also [H, hidden], one per head; None: 1.
            bias: [hidden]; None: 0.
            eps: added to the variance.

        Returns:
            A new dense tensor, shape and dtype of x.

        Raises:
            ValueError: weight or bias do not have the sizes of the last dimensions of x.
        """
        is_by_head = weight is not None and weight.dim() == 2
        by_row = x.shape[-1:]
        for operand, sizes in ((weight, x.shape[1:] if is_by_head else by_row), (bias, by_row)):
            if operand is not None and operand.shape != sizes:
                raise ValueError(
                    f"weight or bias {list(operand.shape)} does not fit x {list(x.shape)}"
                )
        if weight is None or not is_by_head:
            return F.layer_norm(x, by_row, weight, bias, eps)
        normed = F.layer_norm(x.float(), by_row, eps=eps) * weight.float()
        return (normed if bias is None else normed + bias.float()).to(x.dtype)

    def scale_rows(self, x: Tensor, factor: Tensor, is_gate: bool = False) -> Tensor:
        """Multiply x by one value per token.

        Args:
            x: [T, ...]. Not changed.
            factor: [T, 1].
            is_gate: multiply by the sigmoid of the factor, rounded to the dtype of x.

        Returns:
            A new dense tensor, shape and dtype of x.

        Raises:
            ValueError: factor does not have one value per token.
        """
        if factor.shape != (len(x), 1):
            raise ValueError(f"factor must be [{len(x)}, 1], got {list(factor.shape)}")
        factor = factor.sigmoid() if is_gate else factor
        return x * factor.view(-1, *[1] * (x.dim() - 1))

    @property
    def fp8_max(self) -> float:
        """The largest e4m3 value on this device."""
        return torch.finfo(torch.float8_e4m3fn).max

    def to_fp8(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute x * factor, rounded to nearest and limited to the range of the device; NaN is
        kept.

        Args:
            x: any shape.
            factor: [1] float32.
            dtype: one of `attention_options.FP8_DTYPES`.
        """
        largest = self.fp8_max if dtype == torch.float8_e4m3fn else torch.finfo(dtype).max
        return (x.float() * factor).clamp(-largest, largest).to(dtype)

    def from_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute x * scale in `dtype`.

        Args:
            x: tensor of one of `attention_options.FP8_DTYPES`, any shape.
            scale: [1] float32.
            dtype: data type of the result.
        """
        return (x.float() * scale).to(dtype)

    def round_to_fp8(self, x: Tensor, factor: float, largest: int) -> Tensor:
        """Round x * factor to the nearest values of e4m3, in the dtype of x; NaN is kept.

        Args:
            x: [..., N], bfloat16 or float32. Not changed.
            factor: multiplies x; rounded to float32.
            largest: the results are limited to [-largest, largest].

        Returns:
            A new dense tensor, shape and dtype of x.
        """
        scaled = (x.float() * factor).clamp(-largest, largest)
        return scaled.to(torch.float8_e4m3fn).to(x.dtype)

    def prepare_weight(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedWeight:
        """Convert a quantized weight to the layout of the device.

        Args:
            weight: weight on the host. Must not be used afterwards.
            dtype: data type of the inputs.

        Returns:
            The weight, on the host; if it is a module, it can be moved to the device.

        Raises:
            ValueError: the device cannot multiply with it; the message says why.
        """
        if is_rounding_inputs(weight):
            return RoundedInputs(weight, self, dtype)
        return DenseWeight(weight.dequantize().to(dtype))

    def prepare_heads(self, matrices: Tensor) -> PreparedHeads:
        """Convert matrices, one for each head, to the layout of the device.

        Args:
            matrices: [H, I, O], on the device. Not changed.
        """
        return DenseHeads(matrices)

    def prepare_table(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedTable | None:
        """Convert the quantized weight of embeddings or of an output head to the layout of the
        device.

        For the arguments see `prepare_weight`.

        Returns:
            None: the device has no kernel for it; it has to be dequantized.
        """
        return None

    def rows_of_part(
        self, embed: Callable[[Tensor], Tensor], ids: Tensor, first_id: int, num_rows: int
    ) -> Tensor:
        """Look up rows of a table that is split over ranks; ids of other ranks give zeros.

        Args:
            embed: looks up rows of this rank's part by their indices in it, [T] -> [T, W].
            ids: [T] int64, in the whole table.
            first_id: first id of this part.
            num_rows: number of rows of this part.

        Returns:
            [T, W], zeros for ids of other parts.
        """
        local_ids = ids - first_id
        is_elsewhere = (local_ids < 0) | (local_ids >= num_rows)
        rows = embed(local_ids.masked_fill(is_elsewhere, 0))
        return rows.masked_fill(is_elsewhere[:, None], 0.0)
