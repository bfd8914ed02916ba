"""A router that first chooses groups of experts, and then experts in these groups."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm.distributed import TPGroup
from vllm.model_executor.layers.experts import check_top_k
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.ops import get_ops
from vllm.ops.expert_options import RoutingOptions


@dataclass(frozen=True)
class Routing:
    """Rules by which experts are chosen."""

    num_experts: int
    options: RoutingOptions
    has_bias: bool = False
    """Choices are by score plus a bias of each expert, see `NativeOps.route`."""


class GroupedRouter(ColumnParallelLinear):
    """Chooses the experts of each token by groups, computed in float32.

    DeepSeek-V2 (arXiv 2405.04434, section 2.1.3) and DeepSeek-V3 (arXiv 2412.19437, section 2.1.2:
    a bias balances the load instead of a loss).

    Args:
        hidden_size: features of x.
        routing: rules by which experts are chosen.

    Raises:
        ConfigError: k is not from 1 to the number of experts.
    """

    own_parameters = ("bias", "e_score_correction_bias")
    keeps_precision = True
    weight_dtype = torch.float32

    e_score_correction_bias: nn.Parameter | None
    """[num_experts] float32"""

    def __init__(self, hidden_size: int, routing: Routing) -> None:
        check_top_k(routing.num_experts, routing.options.top_k)
        super().__init__(hidden_size, {"": routing.num_experts}, TPGroup())
        self.options = routing.options
        bias = torch.empty(routing.num_experts, dtype=torch.float32) if routing.has_bias else None
        self.register_parameter(
            "e_score_correction_bias",
            None if bias is None else nn.Parameter(bias, requires_grad=False),
        )

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for x [T, hidden]: (ids [T, k] int64, weights [T, k] float32)."""
        return get_ops().route(self.forward(x.float()), self.options, self.e_score_correction_bias)
