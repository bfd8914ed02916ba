"""A router that chooses groups of experts, and then experts of these groups."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen."""

    num_experts: int
    top_k: int
    score: str
    """Of each expert, from the product of its row with the token: softmax or sigmoid."""
    num_groups: int = 1
    """Groups of equally many experts."""
    top_groups: int = 1
    """Groups that a token may choose from."""
    has_bias: bool = False
    """Choices are by score plus a bias of each expert; groups are ranked by their two best experts
    then, and by the best one without it. Weights are scores in both cases."""
    is_normalized: bool = False
    """The weights of the chosen experts sum to 1 before they are scaled."""
    scale: float = 1.0
    """Multiplies the weights."""


class GroupedRouter(nn.Module):
    """Chooses the experts of each token, in float32.

    DeepSeek-V2 (arXiv 2405.04434, section 2.1.3) and DeepSeek-V3 (arXiv 2412.19437, section 2.1.2:
    load is balanced by a bias instead of a loss).

    Args:
        hidden_size: features of x.
        routing: how.
    """

    weight: nn.Parameter
    """[num_experts, hidden_size] float32"""
    e_score_correction_bias: nn.Parameter | None
    """[num_experts] float32"""

    def __init__(self, hidden_size: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        weight = torch.empty(routing.num_experts, hidden_size, dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        bias = torch.empty(routing.num_experts, dtype=torch.float32) if routing.has_bias else None
        self.register_parameter(
            "e_score_correction_bias",
            None if bias is None else nn.Parameter(bias, requires_grad=False),
        )

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> (ids [T, k] int64, weights [T, k] float32)."""
        routing = self.routing
        logits = F.linear(x.float(), self.weight)
        scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = scores + self.e_score_correction_bias
        if routing.top_groups < routing.num_groups:
            choice = self._within_groups(choice)
        ids = choice.topk(routing.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if routing.is_normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * routing.scale

    def _within_groups(self, choice: Tensor) -> Tensor:
        """Minus infinity for the experts of other groups than the best ones."""
        routing = self.routing
        groups = choice.unflatten(-1, (routing.num_groups, -1))
        best = groups.topk(2 if routing.has_bias else 1, dim=-1).values.sum(-1)
        chosen = best.topk(routing.top_groups, dim=-1).indices  # [T, top_groups]
        index = torch.arange(routing.num_groups, device=choice.device)
        is_chosen = (chosen.unsqueeze(-1) == index).any(1)  # [T, num_groups]
        return groups.masked_fill(~is_chosen.unsqueeze(-1), float("-inf")).flatten(-2)
