"""The computation of experts on the simulated card, in fp32."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def weights_of_experts(
    table: Tensor, router_weights: Tensor, first: int, last: int, *counts: int
) -> list[Tensor]:
    """Return the weight [tokens, 1] of each of the given experts.

    Args:
        table: expert ids of each token.
        router_weights: weights of these experts.
        first: id of the first expert given.
        last: id of the last expert given.
        counts: lengths of the lists of tensors; each must be the number of experts.
    """
    if set(counts) != {last - first + 1}:
        raise RuntimeError(
            f"each list of weights and scales must have one entry for each of the experts {first} "
            f"to {last}, got {counts} entries"
        )
    given = router_weights.float()
    return [
        given.masked_fill(table != expert, 0.0).sum(-1, keepdim=True)
        for expert in range(first, last + 1)
    ]


def silu_experts(
    x: Tensor,
    weights: Sequence[Tensor],
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    *,
    is_permuted: bool,
) -> Tensor:
    """Compute the weighted sum of silu experts for x, in its dtype; gates before ups.

    Args:
        x: inputs.
        weights: weights of the tokens, for each expert.
        gate_up: gate and up projections of each expert.
        down: down projections of each expert.
        is_permuted: weights have the layout of nn.Linear.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for weight, both, last in zip(weights, gate_up, down, strict=True):
        first, second = (both.T, last.T) if is_permuted else (both, last)
        gate, up = (x.float() @ first.float()).chunk(2, dim=-1)
        out = out + weight * ((F.silu(gate) * up) @ second.float())
    return out.to(x.dtype)


def biased_experts(
    x: Tensor,
    weights: Sequence[Tensor],
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_up_bias: Sequence[Tensor],
    down_bias: Sequence[Tensor],
    alpha: float,
    limit: float,
    *,
    is_permuted: bool,
) -> Tensor:
    """Compute the weighted sum of experts with biases and clamped activation; gates and ups
    alternate.

    The result has the dtype of x.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    experts = zip(weights, gate_up, down, gate_up_bias, down_bias, strict=True)
    for weight, both, last, first_bias, second_bias in experts:
        first, second = (both.T, last.T) if is_permuted else (both, last)
        product = x.float() @ first.float() + first_bias.float()
        gate, up = product[..., ::2].clamp(max=limit), product[..., 1::2].clamp(-limit, limit)
        middle = gate * torch.sigmoid(alpha * gate) * (up + 1)
        out = out + weight * (middle @ second.float() + second_bias.float())
    return out.to(x.dtype)
