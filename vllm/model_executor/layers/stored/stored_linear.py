"""Linear layers with weights of quantized checkpoints, multiplied by the device's kernels.

A format defines the checkpoint tensors and their meaning (`StoredWeight`); the device defines how
to multiply (`NativeOps.prepare_weight`). Independent of files, formats and model families.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm.config.quantization.settings_error import SettingsMismatch, setting
from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.embedding import DenseTable, EmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear, UnquantizedLinear
from vllm.model_executor.layers.slice import WORD_BITS, CheckpointTensor, ParamTarget, dtype_name
from vllm.model_executor.layers.stored.stored_scales import checked_scales
from vllm.model_executor.layers.stored.without_values import without_values
from vllm.ops import get_ops
from vllm.ops.native.operators import DenseWeight, RoundedInputs
from vllm.ops.prepared import PreparedTable, PreparedWeight
from vllm.ops.stored_weight import StoredWeight

SCALES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of scales."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a layer, as a quantization format stores it."""

    dtypes: tuple[torch.dtype, ...]
    """Data types that the tensor may have."""
    output_dim: int | None = 0
    """Dimension of the output features; None: the tensor is the same for all of them."""
    bits: int = WORD_BITS
    """Bits of an output feature, if features are packed into words along `output_dim`; 32: they are
    not packed."""


@dataclass(frozen=True)
class Kept:
    """Format and size of weights on the device, as shown in the log."""

    kind: str
    """Words of the log for the format in memory."""
    num_bytes: int


class KeepsPacked(LinearMethod):
    """A method that converts the weight of its layer to the layout of the device.

    Attributes:
        packed: the weight in the layout of the device; None until the layer is finished.
        stored_as: name of the checkpoint's format in the log; None: the layer is not logged.
        kept: format and bytes on the device, for the log; None until the layer is finished.
    """

    packed: PreparedWeight | None = None
    stored_as: str | None = None
    kept: Kept | None = None
    memory: Tensor | None = None
    """Memory of a weight without values; several layers share it."""

    def finish_like(self, layer: ParallelLinear, other: "KeepsPacked") -> None:
        """Give the layer uninitialised memory like a finished layer with the same shapes."""
        packed, device = other.packed, next(layer.parameters()).device
        layer.remove_weights()
        if isinstance(packed, nn.Module):
            packed = without_values(packed, device)
            layer.packed = packed
        else:
            assert other.kept is not None, "the other layer is finished"
            self.memory = torch.empty(other.kept.num_bytes, dtype=torch.uint8, device=device)
        self.packed, self.stored_as, self.kept = packed, other.stored_as, other.kept

    @property
    def is_dequantized(self) -> bool:
        return isinstance(self.packed, DenseWeight)

    def apply(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self.packed is not None, "the weights are not loaded"
        return apply_prepared(self.packed, x, bias)


class StoredLinear(KeepsPacked):
    """A linear weight in the format of the checkpoint until it is loaded, then in the device
    layout.

    Args:
        name: name of the module, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Return parameter name -> how the checkpoint stores it."""
        raise NotImplementedError(f"{type(self).__name__} must define how its tensors are loaded")

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        """Return a checkpoint tensor with its dimensions in the order of the parameter.

        It is called before this rank's part is selected; for the arguments see `load`.

        Raises:
            WeightLoadError: the tensor has the wrong shape or wrong values.
        """
        return source

    def load(self, target: ParamTarget, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        stored = self.stored_tensors()[target.param_name]
        dtypes = stored.dtypes
        if target.slice is None:  # a saved parameter of this rank, which is read unchanged
            dtypes = (*dtypes, target.param.dtype)
        if source.dtype not in (*dtypes, None):
            accepted = " or ".join(map(dtype_name, dtypes))
            raise SettingsMismatch(
                f"tensor {name} has the dtype {dtype_name(source.dtype)} in the checkpoint; by "
                f"{setting()} it must be {accepted}"
            )
        if target.slice is not None:
            source = self.arranged(target, name, source)
        elif stored.dtypes == SCALES:
            source = checked_scales(name, source)
        target.fill(name, source.picked(name, stored.output_dim, stored.bits), tp)

    @abstractmethod
    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        """Return the filled parameters of a layer as one quantized weight on the host.

        Raises:
            WeightLoadError: their values are wrong.
        """

    def create_weights(self, layer: ParallelLinear) -> None:
        self.dtype = torch.get_default_dtype()
        self.create_parameters(layer)

    @abstractmethod
    def create_parameters(self, layer: ParallelLinear) -> None:
        """Register the parameters of the format; `create_weights` calls it."""

    @torch.no_grad()
    def finish(self, layer: ParallelLinear) -> None:
        if layer.is_held:
            return
        weight = self.stored_weight(layer)
        self.packed = to_device_layout(layer, self.name, weight, self.dtype)
        kind = dtype_name(self.dtype) if self.is_dequantized else weight.kind
        self.kept = Kept(kind, bytes_of(self.packed))

    def dense_weight(self, layer: ParallelLinear, dtype: torch.dtype) -> Tensor:
        return self.stored_weight(layer).dequantize()


class StoredHead(EmbeddingMethod):
    """An output head that is stored like a linear layer, whose weight is the table.

    Args:
        linear: the weight method of that linear layer.
    """

    def __init__(self, linear: LinearMethod) -> None:
        # An output head has every attribute that the method reads of a linear layer.
        self.linear: Any = linear
        self.optional_parameters = linear.optional_parameters
        self.unused_tensors = linear.unused_tensors

    def create_weights(self, layer: VocabParallelEmbedding) -> None:
        self.linear.create_weights(layer)

    def load(self, target: ParamTarget, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        self.linear.load(target, name, source, tp)

    def fill_missing(self, target: ParamTarget) -> None:
        self.linear.fill_missing(target)

    def fill_indices(self, layer: VocabParallelEmbedding) -> None:
        self.linear.fill_indices(layer)

    def finish(self, layer: VocabParallelEmbedding) -> None:
        self.linear.finish(layer)

    @property
    def is_dequantized(self) -> bool:
        return self.linear.is_dequantized

    def embed(self, layer: VocabParallelEmbedding, ids: Tensor) -> Tensor:
        raise AssertionError(
            "this output head is not tied to the token embeddings, so it cannot be used to look "
            "up tokens"
        )

    def multiply(self, layer: VocabParallelEmbedding, hidden_states: Tensor) -> Tensor:
        return self.linear.apply(layer, hidden_states, None)


class StoredTable(DenseTable):
    """An embedding table that is stored like a linear layer, and the output head that shares it.

    It becomes dense after loading if the device has no kernel for it.

    Args:
        linear: the weight method of that linear layer.
    """

    def __init__(self, linear: StoredLinear) -> None:
        # An output head has every attribute that the method reads of a linear layer.
        self.linear: Any = linear
        self.packed: PreparedTable | None = None
        self.dense: nn.Parameter | None = None

    def create_weights(self, layer: VocabParallelEmbedding) -> None:
        self.linear.create_weights(layer)

    def load(self, target: ParamTarget, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        self.linear.load(target, name, source, tp)

    @torch.no_grad()
    def finish(self, layer: VocabParallelEmbedding) -> None:
        dtype = self.linear.dtype
        # A layer that shares the weights may already have done this.
        if self.packed is None and self.dense is None:
            weight, device = self.linear.stored_weight(layer), next(layer.parameters()).device
            self.packed = get_ops().prepare_table(weight, dtype)
            if self.packed is None:
                dense = weight.dequantize().to(device, dtype)
                self.dense = nn.Parameter(dense, requires_grad=False)
        layer.remove_weights()
        if self.dense is not None:
            layer.weight = self.dense

    @property
    def is_dequantized(self) -> bool:
        return self.dense is not None

    def embed(self, layer: VocabParallelEmbedding, ids: Tensor) -> Tensor:
        if self.packed is None:
            return super().embed(layer, ids)
        return self.packed.rows(ids, self.linear.dtype)

    def multiply(self, layer: VocabParallelEmbedding, hidden_states: Tensor) -> Tensor:
        if self.packed is None:
            return super().multiply(layer, hidden_states)
        return apply_prepared(self.packed, hidden_states, None)


class RoundedLinear(KeepsPacked, UnquantizedLinear):
    """A dense linear weight that is quantized once it is loaded.

    Args:
        name: name of the module, for errors.
        round_weight: quantizes a dense weight [output_size, input_size].
    """

    def __init__(self, name: str, round_weight: Callable[[Tensor], StoredWeight]) -> None:
        self.name = name
        self.round_weight = round_weight

    @torch.no_grad()
    def finish(self, layer: ParallelLinear) -> None:
        weight = on_host(layer, "weight")
        rounded = self.round_weight(weight)
        self.packed = to_device_layout(layer, self.name, rounded, weight.dtype)
        self.stored_as = dtype_name(weight.dtype)
        kind = self.stored_as if self.is_dequantized else rounded.kind
        self.kept = Kept(kind, bytes_of(self.packed))

    def finish_on_shapes(self, layer: ParallelLinear) -> bool:
        # Imported here, because only memory plans need it.
        from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

        weight = layer.get_parameter("weight")
        if weight.device.type == "cpu":
            # CPU kernels read the memory of their arguments, so fake tensors do not work.
            return False
        other = RoundedLinear(self.name, self.round_weight)
        try:
            with FakeTensorMode():
                fake = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
                rounded = self.round_weight(fake)
                other.packed = get_ops().prepare_weight(rounded, weight.dtype)
        except DataDependentOutputException:
            return False  # the memory layout depends on the values of the weight
        if not isinstance(other.packed, nn.Module):
            return False
        other.stored_as = dtype_name(weight.dtype)
        kind = other.stored_as if other.is_dequantized else rounded.kind
        other.kept = Kept(kind, bytes_of(other.packed))
        self.finish_like(layer, other)
        return True

    def dense_weight(self, layer: ParallelLinear, dtype: torch.dtype) -> Tensor:
        return self.round_weight(on_host(layer, "weight")).dequantize()


def to_device_layout(
    layer: ParallelLinear, name: str, weight: StoredWeight, dtype: torch.dtype
) -> PreparedWeight:
    """Replace the parameters of a layer by its weight in the layout of the device.

    Args:
        layer: whose parameters are filled.
        name: name of the layer, for errors.
        weight: the quantized weight that the parameters hold.
        dtype: data type of the layer's inputs.

    Raises:
        WeightLoadError: the device cannot multiply with it.
    """
    try:
        packed = get_ops().prepare_weight(weight, dtype)
    except ValueError as error:
        raise WeightLoadError(f"the weights of {name} cannot be used: {error}") from error
    device = next(layer.parameters()).device
    layer.remove_weights()
    if isinstance(packed, nn.Module):  # makes its tensors a part of the model
        layer.packed = packed.to(device)
    return packed


def bytes_of(packed: Any) -> int:
    """Return the bytes that a prepared weight, or prepared experts, take."""
    if isinstance(packed, RoundedInputs):
        return bytes_of(packed.weight)
    if isinstance(packed, nn.Module):
        return sum(param.nbytes for param in packed.parameters())
    return packed.num_bytes


def apply_prepared(packed: PreparedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x @ weight.T + bias for a prepared weight."""
    if not x.is_contiguous() and x.dim() != 2:
        x = x.contiguous()
    return packed.linear(x, bias)


def add_parameter(layer: ParallelLinear, name: str, values: Tensor) -> None:
    """Register a parameter of any dtype, without gradient."""
    layer.register_parameter(name, nn.Parameter(values, requires_grad=False))


def on_host(layer: ParallelLinear, name: str) -> Tensor:
    """Return a parameter of the layer, copied to the host if it is on a device."""
    return layer.get_parameter(name).data.cpu()
