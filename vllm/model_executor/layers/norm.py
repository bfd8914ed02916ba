"""Norms: RMS norm, which can also add a residual, and layer norm."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor, nn

from vllm.distributed import TPGroup, divide
from vllm.model_executor.layers.slice import Slice, SlicedModule
from vllm.ops import get_ops


class RMSNorm(nn.Module):
    """Compute x / sqrt(mean(x^2) + eps) * (weight + offset) (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        size: size of the last dimension: the hidden size, or the head size for a norm of heads.
        eps: added to the mean of squares.
        offset: 1 if the checkpoint stores the weight minus 1, which keeps more digits than the
            rounded sum; else 0.

    Shape: [..., size] -> [..., size]. With a residual [T, size] the sum of both is normed, and the
    result is (normed, sum); x and residual may be overwritten.
    """

    weight: nn.Parameter

    def __init__(self, size: int, eps: float, offset: int = 0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return get_ops().rms_norm(x, self.weight, self.eps, self.offset)
        return get_ops().fused_add_rms_norm(x, residual, self.weight, self.eps, self.offset)


class PlainRMSNorm(nn.Module):
    """An `RMSNorm` without weights.

    Args:
        size: size of the last dimension.
        eps: added to the mean of squares.

    Shape: [..., size] -> [..., size]
    """

    ones: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("ones", torch.ones(size, device="cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return get_ops().rms_norm(x, self.ones, self.eps)


class SplitRMSNorm(SlicedModule):
    """An `RMSNorm` of features that are split over ranks; the mean is taken over all ranks.

    Args:
        size: features over all ranks.
        eps: added to the mean of squares.
        tp: the ranks that share the features.
        num_replicas: number of ranks that have the same features.

    Shape: [..., features of this rank] -> [..., features of this rank]
    """

    weight: nn.Parameter

    def __init__(self, size: int, eps: float, tp: TPGroup, num_replicas: int = 1) -> None:
        super().__init__()
        self.eps, self.tp = eps, tp
        self._num_summed = size * num_replicas
        local = divide(self._num_summed, tp.size)
        self.weight = nn.Parameter(torch.ones(local), requires_grad=False)
        self.slices["weight"] = {"": Slice(0, 0, local, size, num_replicas)}

    def forward(self, x: Tensor) -> Tensor:
        return SplitRMSNorm.of_each([self], [x])[0]

    @staticmethod
    def of_each(norms: "Sequence[SplitRMSNorm]", xs: Sequence[Tensor]) -> list[Tensor]:
        """Apply each norm to its tensor, with a single all-reduce for all of them.

        Args:
            norms: split over the same ranks.
            xs: one tensor for each norm, [..., features of this rank].
        """
        pairs = list(zip(norms, xs, strict=True))
        tp = norms[0].tp
        if tp.size == 1:
            return [get_ops().rms_norm(x, norm.weight, norm.eps) for norm, x in pairs]
        squares = torch.cat([x.float().square().sum(-1, keepdim=True) for x in xs], dim=-1)
        sums = tp.all_reduce(squares).split(1, dim=-1)
        return [norm._scaled(x, total) for (norm, x), total in zip(pairs, sums, strict=True)]

    def _scaled(self, x: Tensor, total: Tensor) -> Tensor:
        """Divide x by its root mean square, and multiply it by the weight.

        Args:
            x: [..., features of this rank].
            total: [..., 1] float32, sum of the squares over all ranks.
        """
        normed = x.float() * torch.rsqrt(total / self._num_summed + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016, arXiv 1607.06450).

    Args:
        size: size of the last dimension.
        eps: added to the variance.
        has_weight: False leaves weight and bias out.
        has_bias: False leaves the bias out.

    Shape: [..., size] -> [..., size]
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, size: int, eps: float = 1e-5, has_weight: bool = True, has_bias: bool = True
    ) -> None:
        super().__init__()
        self.eps = eps
        weight = nn.Parameter(torch.ones(size), requires_grad=False)
        bias = nn.Parameter(torch.zeros(size), requires_grad=False)
        self.register_parameter("weight", weight if has_weight else None)
        self.register_parameter("bias", bias if has_weight and has_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return get_ops().layer_norm(x, self.weight, self.bias, self.eps)


class HeadLayerNorm(SlicedModule):
    """A layer norm of each head, with separate weights for each head and no bias.

    Args:
        total_heads: over all ranks.
        head_size: D.
        eps: added to the variance.
        tp: the ranks that share the heads.
        num_replicas: number of ranks that have the same heads.

    Shape: [T, H, D] -> [T, H, D], H heads of this rank
    """

    weight: nn.Parameter

    def __init__(
        self, total_heads: int, head_size: int, eps: float, tp: TPGroup, num_replicas: int = 1
    ) -> None:
        super().__init__()
        self.eps = eps
        num_heads = divide(total_heads * num_replicas, tp.size)
        self.weight = nn.Parameter(torch.ones(num_heads, head_size), requires_grad=False)
        self.slices["weight"] = {"": Slice(0, 0, num_heads, total_heads, num_replicas)}

    def forward(self, x: Tensor) -> Tensor:
        return get_ops().layer_norm(x, self.weight, None, self.eps)
