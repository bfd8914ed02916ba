"""Round the weight of a linear layer: to the nearest value, by GPTQ, or with AWQ scales.

Works on matrices only, independent of files and models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_DAMPING = 0.01
_BLOCK = 128
"""Columns of GPTQ whose errors are added to the others at once."""
_NUM_RATIOS = 20


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values that a weight is rounded to."""

    bits: int
    group_size: int
    """Inputs that share a scale; -1: all."""
    is_symmetric: bool

    def size_of(self, num_inputs: int) -> int:
        """Return the number of inputs in a group of a layer."""
        return num_inputs if self.group_size == -1 else self.group_size

    def fits(self, num_outputs: int, num_inputs: int) -> bool:
        """Return whether the features of a layer fill whole groups and whole 32-bit words."""
        is_whole = num_inputs * self.bits % 32 == 0 and num_outputs * self.bits % 32 == 0
        return is_whole and num_inputs % self.size_of(num_inputs) == 0

    def scales_of(self, group: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales, which fit into float16, and zero points for groups [..., inputs].

        A zero point is at least 1, because the first version of the GPTQ format stores it minus
        one.
        """
        steps = 2**self.bits - 1
        if self.is_symmetric:
            scales = group.abs().amax(-1) * 2 / steps
            zeros = torch.full_like(scales, 2 ** (self.bits - 1))
        else:
            least = group.amin(-1).clamp(max=0)
            scales = (group.amax(-1).clamp(min=0) - least) / steps
            zeros = -least
        scales = scales.half().float()
        scales = torch.where(scales == 0, 1.0, scales)
        if not self.is_symmetric:
            zeros = (zeros / scales).round().clamp(1, steps)
        return scales, zeros

    def round(self, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Round a weight to the nearest quantized values. Scales and zero points broadcast to its
        shape.
        """
        return ((weight / scales).round() + zeros).clamp(0, 2**self.bits - 1)


@dataclass(frozen=True)
class Rounded:
    """A quantized weight [out, in]."""

    numbers: Tensor
    """[out, in] uint8."""
    scales: Tensor
    """[G, out] float32."""
    zeros: Tensor
    """[G, out] uint8."""
    groups: Tensor
    """[in] int32: the group of each input."""

    def dequantize(self) -> Tensor:
        """Return the dequantized weight, [out, in] float32."""
        scales, zeros = (x.T[:, self.groups.long()] for x in (self.scales, self.zeros))
        return (self.numbers.float() - zeros.float()) * scales


def round_to_nearest(weight: Tensor, grid: Grid) -> Rounded:
    """Round every value of a weight separately to the nearest quantized value."""
    size = grid.size_of(weight.shape[1])
    grouped = weight.float().unflatten(1, (-1, size))
    scales, zeros = grid.scales_of(grouped)
    numbers = grid.round(grouped, scales[..., None], zeros[..., None]).flatten(1)
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // size
    return Rounded(numbers.to(torch.uint8), scales.T, zeros.T.to(torch.uint8), groups)


def round_by_gptq(weight: Tensor, hessian: Tensor, grid: Grid, *, by_activation: bool) -> Rounded:
    """Round a weight column by column; the remaining columns compensate for the error (GPTQ;
    Frantar et al. 2022, arXiv 2210.17323).

    Args:
        weight: [out, in].
        hessian: [in, in], Hessian of the squared error of the outputs: x.T @ x of the inputs.
        grid: values to round to.
        by_activation: begin with the columns with the largest inputs ("act-order").
    """
    num_in = weight.shape[1]
    size = grid.size_of(num_in)
    left, hessian = weight.float().clone(), hessian.double().clone()
    diagonal = hessian.diagonal()
    unused = diagonal == 0  # inputs that were always 0
    diagonal[unused] = 1
    left[:, unused] = 0
    order = torch.arange(num_in)
    if by_activation:
        order = diagonal.argsort(descending=True, stable=True)
    left, hessian = left[:, order], hessian[order][:, order]
    hessian.diagonal().add_(_DAMPING * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    numbers = torch.empty_like(left)
    all_scales, all_zeros = [], []
    scales = zeros = torch.empty(0)
    block = size if 32 <= size <= 2 * _BLOCK else _BLOCK
    for start in range(0, num_in, block):
        end = min(start + block, num_in)
        errors = torch.zeros(len(left), end - start)
        for column in range(start, end):
            if column % size == 0:
                scales, zeros = grid.scales_of(left[:, column : column + size])
                all_scales.append(scales)
                all_zeros.append(zeros)
            numbers[:, column] = grid.round(left[:, column], scales, zeros)
            rounded = (numbers[:, column] - zeros) * scales
            error = (left[:, column] - rounded) / factor[column, column]
            left[:, column:end] -= error[:, None] * factor[column, column:end]
            errors[:, column - start] = error
        left[:, end:] -= errors @ factor[start:end, end:]
    restored, groups = torch.empty_like(numbers), torch.empty(num_in, dtype=torch.int32)
    restored[:, order] = numbers
    groups[order] = torch.arange(num_in, dtype=torch.int32) // size
    zeros = torch.stack(all_zeros).to(torch.uint8)
    return Rounded(restored.to(torch.uint8), torch.stack(all_scales), zeros, groups)


def input_scales(weights: Sequence[Tensor], inputs: Tensor, grid: Grid) -> Tensor:
    """Return factors [in] for the inputs of layers with which rounding changes the outputs least.

    Weights are multiplied by the factors before they are rounded, and inputs divided (AWQ; Lin et
    al. 2023, arXiv 2306.00978, section 3.2). So the weights of large inputs are represented more
    exactly.

    Args:
        weights: [out, in] of all layers that have these inputs.
        inputs: [tokens, in], sample of inputs.
        grid: values to which weights are rounded.
    """
    inputs = inputs.float()
    size = inputs.abs().mean(0).clamp(min=1e-6)
    wanted = [inputs @ weight.float().T for weight in weights]
    best, least = torch.ones_like(size), float("inf")
    for step in range(_NUM_RATIOS):
        scales = size ** (step / _NUM_RATIOS)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(min=1e-4)
        loss = 0.0
        for weight, outputs in zip(weights, wanted, strict=True):
            rounded = round_to_nearest(weight.float() * scales, grid).dequantize() / scales
            loss += (inputs @ rounded.T - outputs).square().mean().item()
        if loss < least:
            best, least = scales, loss
    return best
