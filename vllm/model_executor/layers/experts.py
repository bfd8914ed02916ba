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
        return get_ops().moe(x, ids, weights, layer.gate_up, layer.down)


class Experts(MethodLayer):
    """E gated MLPs, each split over ranks; a module of this name, `experts`, is in the checkpoint.

    Args:
        num_experts: E.
        hidden_size: features of x.
        intermediate_size: of one expert, over all ranks.
        tp: the ranks that share the layer.

    Shape: x [T, hidden], ids [T, k] int64, weights [T, k] float32 -> [T, hidden]

    Raises:
        ValueError: intermediate_size cannot be split evenly.
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    method: ExpertsMethod

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, tp: TPGroup
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = divide(intermediate_size, tp.size)
        """Of this rank."""
        self.tp = tp
        self.use_method(DenseExperts())

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.tp.all_reduce(self.method.apply(self, x, ids, weights))


class Router(ColumnParallelLinear):
    """Chooses the experts of each token: those with the largest logits.

    Args:
        hidden_size: features of x.
        num_experts: E.
        top_k: k.
        is_normalized: the weights of the chosen experts sum to 1; False: they are parts of a
            softmax over all.

    Shape: x [T, hidden] -> (ids [T, k] int64, weights [T, k] float32)
    """

    keeps_precision = True

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, is_normalized: bool) -> None:
        super().__init__(hidden_size, {"": num_experts}, TPGroup())
        self.top_k = top_k
        self.is_normalized = is_normalized

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token, and how much each of them counts."""
        logits = self.forward(x).float()
        values, ids = logits.topk(self.top_k, dim=-1)
        if self.is_normalized:
            return ids, values.softmax(-1)
        return ids, (values - logits.logsumexp(-1, keepdim=True)).exp()
