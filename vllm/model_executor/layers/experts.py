"""A mixture of experts: gated MLPs of which each token uses a few, and the router that chooses.

Shazeer et al. 2017 (arXiv 1701.06538). How the weights are stored is the method's; what is computed
is `Ops.moe`.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from vllm.distributed import TPGroup, divide
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.slice import ExpertSlice
from vllm.model_executor.layers.weight_method import MethodLayer, WeightMethod
from vllm.ops import get_ops
from vllm.ops.interface import SILU_EXPERTS, ExpertOptions, Routing


class ExpertsMethod(WeightMethod["Experts"]):
    """How the weights of all experts of a layer are stored and applied."""

    @abstractmethod
    def apply(self, layer: "Experts", x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As `Experts.forward`, before the sum over ranks."""


class DenseExperts(ExpertsMethod):
    """Two dense parameters of the model's dtype, [E, 2 * I, hidden] and [E, hidden, I]."""

    def create_weights(self, layer: "Experts") -> None:
        experts, size, hidden = layer.num_experts, layer.intermediate_size, layer.hidden_size
        gate_up = torch.empty(experts, 2 * size, hidden)
        layer.gate_up = nn.Parameter(gate_up, requires_grad=False)
        layer.down = nn.Parameter(torch.empty(experts, hidden, size), requires_grad=False)
        layer.slices["gate_up"], layer.slices["down"] = {}, {}
        total = size * layer.tp.size
        for expert in range(experts):
            for name, place, dim, offset in (
                ("gate_proj", "gate_up", 0, 0),
                ("up_proj", "gate_up", 0, size),
                ("down_proj", "down", 1, 0),
            ):
                layer.slices[place][f"experts.{expert}.{name}"] = ExpertSlice(
                    dim, offset, size, total, tensor="weight", expert=expert
                )

    def apply(self, layer: "Experts", x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return get_ops().moe(
            *(x, ids, weights, layer.gate_up, layer.down, layer.gate_up_bias, layer.bias_of_sum()),
            layer.options,
        )


class Experts(MethodLayer):
    """E gated MLPs, each split over ranks; a module of this name, `experts`, is in the checkpoint.

    Args:
        num_experts: E.
        hidden_size: features of x.
        intermediate_size: of one expert, over all ranks.
        tp: the ranks that share the layer.
        options: what an expert computes between its products.
        has_bias: both products of an expert have one.

    Shape: x [T, hidden], ids [T, k] int64, weights [T, k] float32 -> [T, hidden]

    Raises:
        ValueError: intermediate_size cannot be split evenly.
    """

    own_parameters = ("gate_up_bias", "down_bias")

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: nn.Parameter | None
    """[E, 2 * I]"""
    down_bias: nn.Parameter | None
    """[E, hidden]"""
    method: ExpertsMethod

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        tp: TPGroup,
        options: ExpertOptions = SILU_EXPERTS,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = divide(intermediate_size, tp.size)
        """Of this rank."""
        self.tp = tp
        self.options = options
        self.register_parameter("gate_up_bias", None)
        self.register_parameter("down_bias", None)
        if has_bias:
            self._create_biases(intermediate_size)
        self.use_method(DenseExperts())

    def _create_biases(self, total_size: int) -> None:
        experts, size, hidden = self.num_experts, self.intermediate_size, self.hidden_size
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * size), requires_grad=False)
        self.down_bias = nn.Parameter(torch.empty(experts, hidden), requires_grad=False)
        self.slices["gate_up_bias"], self.slices["down_bias"] = {}, {}
        parts = {
            "gate_proj": ("gate_up_bias", 0, size, total_size, 1),
            "up_proj": ("gate_up_bias", size, size, total_size, 1),
            "down_proj": ("down_bias", 0, hidden, hidden, self.tp.size),  # whole on every rank
        }
        for expert in range(experts):
            for name, (place, offset, part_size, total, replicas) in parts.items():
                self.slices[place][f"experts.{expert}.{name}"] = ExpertSlice(
                    0, offset, part_size, total, replicas, "bias", expert=expert
                )

    def bias_of_sum(self) -> Tensor | None:
        """`down_bias` as this rank applies it: the sum over ranks must contain it once."""
        return self.down_bias if self.tp.rank == 0 else None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.tp.all_reduce(self.method.apply(self, x, ids, weights))


class Router(ColumnParallelLinear):
    """Chooses the experts of each token: those with the largest logits.

    Args:
        hidden_size: features of x.
        num_experts: E.
        top_k: k.
        routing: how much a chosen expert counts.
        bias: whether there is one, added to the logits.

    Shape: x [T, hidden] -> (ids [T, k] int64, weights [T, k] float32)
    """

    keeps_precision = True

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        routing: Routing,
        bias: bool = False,
    ) -> None:
        super().__init__(hidden_size, {"": num_experts}, TPGroup(), bias=bias)
        self.top_k = top_k
        self.routing = routing

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token, and how much each of them counts."""
        return get_ops().route(self.forward(x), self.top_k, self.routing)
