"""A mixture of experts: gated MLPs of which each token uses a few, and the router that chooses.

Shazeer et al. 2017 (arXiv 1701.06538). The weight method decides how weights are stored;
`NativeOps.moe` computes.
"""

from abc import abstractmethod
from copy import copy
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.config.parallel import sizes_that_fit
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.slice import ExpertSlice, SlicedModule
from vllm.model_executor.layers.weight_method import MethodLayer, WeightMethod
from vllm.ops import get_ops
from vllm.ops.expert_options import (
    SILU_EXPERTS,
    ExpertBiases,
    ExpertOptions,
    Routing,
    RoutingOptions,
)
from vllm.ops.prepared import ExpertMatmuls


class ExpertsMethod(WeightMethod["Experts"]):
    """Storage format of the weights of all experts of a layer, and the operations with them."""

    @abstractmethod
    def apply(self, layer: "Experts", x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute what `Experts.forward` returns, before the sum over ranks."""

    @abstractmethod
    def matmuls(self, layer: "Experts") -> ExpertMatmuls | None:
        """Return the matmuls of single experts, without biases.

        None if the loaded weights can only run all experts at once.
        """


class _DenseMatmuls:
    """Computes single experts with dense parameters (implements `ExpertMatmuls`)."""

    def __init__(self, layer: "Experts") -> None:
        self._gate_up, self._down = layer.gate_up, layer.down

    def multiply_gate_up(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self._gate_up[expert])

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self._down[expert])


class DenseExperts(ExpertsMethod):
    """Experts as two dense parameters in the model's dtype.

    Gated: [E, 2 * I, hidden] and [E, hidden, I]. Without gates: [E, I, hidden] and [E, hidden, I].
    """

    def create_weights(self, layer: "Experts") -> None:
        ids, size, hidden = layer.built_ids, layer.intermediate_size, layer.hidden_size
        width = layer.options.first_width(size)
        gate_up = torch.empty(len(ids), width, hidden)
        layer.gate_up = nn.Parameter(gate_up, requires_grad=False)
        layer.down = nn.Parameter(torch.empty(len(ids), hidden, size), requires_grad=False)
        layer.slices["gate_up"], layer.slices["down"] = {}, {}
        total = size * layer.tp.size
        for index, expert in enumerate(ids):
            for name, place, dim, offset in (
                ("gate_proj", "gate_up", 0, 0),
                ("up_proj", "gate_up", 0, width - size),
                ("down_proj", "down", 1, 0),
            )[-len(layer.options.parts) :]:
                layer.slices[place][f"experts.{expert}.{name}"] = ExpertSlice(
                    dim, offset, size, total, tensor="weight", expert=index
                )

    def finish(self, layer: "Experts") -> None:
        get_ops().expect_experts(layer.options)

    def apply(self, layer: "Experts", x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return get_ops().moe(
            *(x, ids, weights, layer.gate_up, layer.down, layer.biases, layer.options)
        )

    def matmuls(self, layer: "Experts") -> ExpertMatmuls | None:
        return _DenseMatmuls(layer)


class Experts(MethodLayer):
    """E expert MLPs, gated unless the options say otherwise; the module is named `experts`.

    Each expert is split over the ranks, or each rank has some whole experts
    (`TPGroup.has_whole_experts`).

    Args:
        num_experts: E.
        hidden_size: features of x.
        intermediate_size: size of one expert, over all ranks.
        tp: the ranks that share the layer.
        options: what an expert computes between its matmuls.
        has_bias: both matmuls of an expert have a bias; gated experts only.

    Shape: x [T, hidden], ids [T, k] int64, weights [T, k] float32 -> [T, hidden]

    Raises:
        ConfigError: intermediate_size cannot be split evenly, or there are fewer experts than ranks
            although each rank must have whole experts.
    """

    own_parameters = ("gate_up_bias", "down_bias")

    gate_up: nn.Parameter
    """[E, 2 * I, hidden], gate then up; [E, I, hidden] for experts without gates."""
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
        self.hidden_size = hidden_size
        self.group = tp
        """The ranks over which results are added up."""
        self.tp = TPGroup() if tp.has_whole_experts else tp
        """The ranks that share an expert."""
        self.expert_ids = _ids_of_rank(num_experts, tp)
        """Ids of the experts of this rank."""
        self.built_ids = self.expert_ids
        """Ids of the experts that have parameters: all, or fewer in a plan of memory, until the
        layer is finished."""
        names = (str(expert) for expert in range(num_experts) if expert not in self.expert_ids)
        self.elsewhere = frozenset(names)
        if intermediate_size % self.tp.size:
            fitting = sizes_that_fit(lambda size: intermediate_size % size == 0, 2 * tp.size)
            raise ConfigError(
                f"tensor_parallel_size ({tp.size}) must divide the {intermediate_size} "
                f"intermediate features of an expert. {fitting}; or set enable_expert_parallel, "
                f"which does not split experts"
            )
        self.intermediate_size = intermediate_size // self.tp.size
        """Intermediate features of an expert on this rank."""
        first = self.expert_ids.start if self.elsewhere else options.first_expert
        self.options = replace(options, first_expert=first)
        self.register_parameter("gate_up_bias", None)
        self.register_parameter("down_bias", None)
        if has_bias:
            assert options.has_gate
            self._create_biases(intermediate_size)
        self.use_method(DenseExperts())

    def _create_biases(self, total_size: int) -> None:
        ids, size, hidden = self.expert_ids, self.intermediate_size, self.hidden_size
        self.gate_up_bias = nn.Parameter(torch.empty(len(ids), 2 * size), requires_grad=False)
        self.down_bias = nn.Parameter(torch.empty(len(ids), hidden), requires_grad=False)
        self.slices["gate_up_bias"], self.slices["down_bias"] = {}, {}
        parts = {
            "gate_proj": ("gate_up_bias", 0, size, total_size, 1),
            "up_proj": ("gate_up_bias", size, size, total_size, 1),
            # Not split: every rank has the whole bias.
            "down_proj": ("down_bias", 0, hidden, hidden, self.tp.size),
        }
        for index, expert in enumerate(ids):
            for name, (place, offset, part_size, total, replicas) in parts.items():
                self.slices[place][f"experts.{expert}.{name}"] = ExpertSlice(
                    0, offset, part_size, total, replicas, "bias", expert=index
                )

    @property
    def biases(self) -> ExpertBiases:
        """Return the biases that this rank adds; only rank 0 adds `down_bias`, since ranks are
        summed.
        """
        return ExpertBiases(self.gate_up_bias, self.down_bias if self.tp.rank == 0 else None)

    def of_first(self, count: int) -> "Experts":
        """Return a layer of the first `count` experts of this one, before it is finished.

        It shares their parameters, and may be finished without changes to this layer.
        """
        part = _copied(self)
        part.method = copy(self.method)
        part.expert_ids = part.built_ids = self.expert_ids[:count]
        for name, param in self.named_parameters(recurse=False):
            part.register_parameter(name, nn.Parameter(param[:count], requires_grad=False))
        for name in map(str, self.built_ids[count:]):
            part._modules.pop(name, None)
        return part

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.group.all_reduce(self.method.apply(self, x, ids, weights))


_Module = TypeVar("_Module", bound=nn.Module)


def _copied(module: _Module) -> _Module:
    """Copy a tree of modules, but not its tensors."""
    new = copy(module)
    new._parameters, new._buffers = dict(module._parameters), dict(module._buffers)
    new._modules = {name: part and _copied(part) for name, part in module._modules.items()}
    if isinstance(new, SlicedModule):
        new.slices = dict(new.slices)
    return new


def _ids_of_rank(num_experts: int, tp: TPGroup) -> range:
    """Return the ids of the experts of this rank; ranks differ by at most one expert."""
    if not tp.has_whole_experts:
        return range(num_experts)
    if num_experts < tp.size:
        raise ConfigError(
            f"enable_expert_parallel: the model has {num_experts} experts per layer, but each of "
            f"the {tp.size} ranks needs at least one. Lower tensor_parallel_size to {num_experts} "
            "or less, or leave enable_expert_parallel out"
        )
    return range(num_experts * tp.rank // tp.size, num_experts * (tp.rank + 1) // tp.size)


def check_top_k(num_experts: int, top_k: int) -> None:
    """Check that a layer has at least `top_k` experts.

    Raises:
        ConfigError: `top_k` is not from 1 to `num_experts`.
    """
    if not 1 <= top_k <= num_experts:
        raise ConfigError(
            "config.json: num_experts_per_tok (or top_k_experts) must be from 1 to the number of "
            f"experts (num_experts, num_local_experts or n_routed_experts), got {top_k} of "
            f"{num_experts}. Correct the file, or give other values with hf_overrides"
        )


class Router(ColumnParallelLinear):
    """Chooses the experts of each token: the ones with the largest logits.

    Args:
        hidden_size: features of x.
        num_experts: E.
        top_k: k, experts of each token.
        routing: how the weights of the chosen experts are computed.
        bias: whether a bias is added to the logits.
        tolerance: tolerance; see `RoutingOptions`.

    Shape: x [T, hidden] -> (ids [T, k] int64, weights [T, k] float32)

    Raises:
        ConfigError: k is not from 1 to E.
    """

    keeps_precision = True

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        routing: Routing,
        bias: bool = False,
        tolerance: float = 0.0,
    ) -> None:
        check_top_k(num_experts, top_k)
        super().__init__(hidden_size, {"": num_experts}, TPGroup(), bias=bias)
        self.options = RoutingOptions(top_k=top_k, weights=routing, tolerance=tolerance)

    def choose(self, x: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the ids of the experts of each token, and their weights.

        Args:
            x: [T, hidden]
            scales: scales; see `NativeOps.route`.
        """
        return get_ops().route(self.forward(x), self.options, scales=scales)
