"""What experts compute on the simulated card, in fp32."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def weights_of_experts(
    table: Tensor, router_weights: Tensor, first: int, last: int, *counts: int
) -> list[Tensor]:
    """Return the weight [tokens, 1] of each of the experts that were given.

    Args:
        counts: how many tensors there are of each list; as many as experts.
    """
    if set(counts) != {last - first + 1}:
        raise RuntimeError(f"{counts} weights and scales of experts {first} to {last}")
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
    """Sum what experts give for x, in its type; gate then up.

    Args:
        is_permuted: weights are as nn.Linear has them.
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
    """Sum what experts with biases and a clamped activation give for x, in its type; gate and up of
    each feature in turn."""
    out = torch.zeros_like(x, dtype=torch.float32)
    experts = zip(weights, gate_up, down, gate_up_bias, down_bias, strict=True)
    for weight, both, last, first_bias, second_bias in experts:
        first, second = (both.T, last.T) if is_permuted else (both, last)
        product = x.float() @ first.float() + first_bias.float()
        gate, up = product[..., ::2].clamp(max=limit), product[..., 1::2].clamp(-limit, limit)
        middle = gate * torch.sigmoid(alpha * gate) * (up + 1)
        out = out + weight * (middle @ second.float() + second_bias.float())
    return out.to(x.dtype)
