"""Linear layers that are split over the ranks of a group.

A layer knows how its features are packed and split. Its `LinearMethod` knows how the weight is
stored and multiplied: dense, or one of the quantization formats.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.distributed import TPGroup, divide
from vllm.model_executor.layers.slice import Slice, packed_slices
from vllm.model_executor.layers.weight_method import MethodLayer, WeightMethod


class LinearMethod(WeightMethod["ParallelLinear"]):
    """Storage format of the weight of a linear layer, and its matmul.

    `layer` gives the sizes: `input_size` and `output_size` of this rank, and `feature_slices`,
    whose dim says which of the two is split (0: output, 1: input).
    """

    @abstractmethod
    def apply(self, layer: "ParallelLinear", x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x [..., input_size] @ weight.T + bias -> [..., output_size]."""

    def dense_weight(self, layer: "ParallelLinear", dtype: torch.dtype) -> Tensor:
        """Return the dense weight [output_size, input_size]; called instead of `finish`.

        All parameters must be filled. The default multiplies the identity matrix in `dtype`, so it
        is only right for formats that do not round inputs.
        """
        device = next(layer.parameters()).device
        self.finish(layer)
        identity = torch.eye(layer.input_size, dtype=dtype).to(device)
        return self.apply(layer, identity, None).T


class UnquantizedLinear(LinearMethod):
    """One dense weight [output_size, input_size] in the model's dtype."""

    def create_weights(self, layer: "ParallelLinear") -> None:
        weight = torch.empty(layer.output_size, layer.input_size, dtype=layer.weight_dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.slices["weight"] = dict(layer.feature_slices)

    def apply(self, layer: "ParallelLinear", x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, layer.weight, bias)

    def dense_weight(self, layer: "ParallelLinear", dtype: torch.dtype) -> Tensor:
        return layer.weight


class ParallelLinear(MethodLayer):
    """Base class of column- and row-parallel layers: sizes, weight method, bias."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    method: LinearMethod

    keeps_precision: bool = False
    """Whether the weight keeps the model's dtype while other weights are stored in fewer bits."""

    is_of_head: bool = False
    """Whether the inputs of the layer are the hidden states whose logits are computed."""
    is_of_items: bool = False
    """Whether the layer runs once for each image or sound, outside of steps: adapters cannot change
    it."""
    is_shared: bool = False
    """Several layers of the model run it. Adapters cannot change it: they have a change for each of
    these layers."""

    def __init__(
        self, input_size: int, output_size: int, feature_slices: Mapping[str, Slice], tp: TPGroup
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.feature_slices = feature_slices
        self.tp = tp
        self.register_parameter("bias", None)
        self.use_method(UnquantizedLinear())

    def _create_bias(self) -> None:
        self.bias = nn.Parameter(torch.empty(self.output_size), requires_grad=False)

    def extra_repr(self) -> str:
        return f"{self.input_size} -> {self.output_size}, bias={self.bias is not None}"


class ColumnParallelLinear(ParallelLinear):
    """y = x @ W.T + b with the output features split over ranks.

    Args:
        input_size: features of x, whole on every rank.
        output_sizes: checkpoint module name -> output features over all ranks. Several names
            make one packed matmul, such as gate_proj and up_proj; "" is the layer's own name.
        tp: the ranks that share this layer.
        num_replicas: name -> ranks that share one shard (KV heads), when not 1.
        bias: whether every packed part has a bias.

    Shape: [..., input_size] -> [..., sum(split_sizes)]

    Raises:
        ValueError: a size cannot be split evenly.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Mapping[str, int],
        tp: TPGroup,
        num_replicas: Mapping[str, int] | None = None,
        bias: bool = False,
    ) -> None:
        slices = packed_slices(output_sizes, tp, num_replicas)
        sizes = [part.size for part in slices.values()]
        super().__init__(input_size, sum(sizes), slices, tp)
        self.split_sizes = sizes
        """Features of each packed part on this rank, in order."""
        if bias:
            self._create_bias()
            self.slices["bias"] = slices

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x, self.bias)


def whole_linear(
    input_size: int, size: int, tp: TPGroup, bias: bool = False
) -> ColumnParallelLinear:
    """Make a linear layer that is not split: every rank has all of its weight."""
    return ColumnParallelLinear(input_size, {"": size}, tp, {"": tp.size}, bias)


def dense_linear(input_size: int, size: int, tp: TPGroup) -> ColumnParallelLinear:
    """Make a `whole_linear` that is never quantized."""
    layer = whole_linear(input_size, size, tp)
    layer.keeps_precision = True
    return layer


class RowParallelLinear(ParallelLinear):
    """y = x @ W.T + b with the input features split over ranks; sums the partial results.

    Args:
        input_size: features of x over all ranks.
        output_size: features of y, whole on every rank.
        tp: the ranks that share this layer.
        bias: whether the layer has a bias; it is added once.

    Shape: [..., input_size / tp.size] -> [..., output_size]

    Raises:
        ValueError: input_size cannot be split evenly.
    """

    def __init__(self, input_size: int, output_size: int, tp: TPGroup, bias: bool = False) -> None:
        local_size = divide(input_size, tp.size)
        super().__init__(local_size, output_size, {"": Slice(1, 0, local_size, input_size)}, tp)
        if bias:
            self._create_bias()

    def forward(self, x: Tensor) -> Tensor:
        # The sum over ranks must contain the bias once, so only rank 0 adds it.
        bias = self.bias if self.tp.rank == 0 else None
        return self.tp.all_reduce(self.method.apply(self, x, bias))
