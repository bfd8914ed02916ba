"""Weights for the CPU kernels: dense while they are loaded, packed once a layer is complete.

Packing happens in place or layer by layer, so the model is never in memory twice. Independent of
file formats and model families.
"""

from typing import Literal

import torch
from torch import Tensor

from vllm.model_executor.layers.embedding import DenseTable, VocabParallelEmbedding
from vllm.model_executor.layers.experts import DenseExperts, Experts
from vllm.model_executor.layers.linear import ParallelLinear, UnquantizedLinear
from vllm.model_executor.layers.weight_method import MethodLayer
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.moe import PackedExperts
from vllm.ops.cpu.weights.weight_format import DENSE_FORMATS, WeightFormat, can_pack
from vllm.ops.prepared import ExpertMatmuls

StoredAs = Literal["dense", "int8", "int4"]
"""Format of a packed weight; dense is the model's dtype."""

_FORMATS: dict[StoredAs, tuple[WeightFormat | None, ...]] = {
    # In order of preference, because the size of a layer may rule out a format.
    "dense": (None,),
    "int8": (WeightFormat.INT8, None),
    "int4": (WeightFormat.INT4, WeightFormat.INT8, None),
}


class CPULinear(UnquantizedLinear):
    """A linear weight [output_size, input_size] that is packed or quantized once it is loaded.

    Until then, and if the kernels do not support it, the layer computes with the dense weight.
    """

    def __init__(self, stored_as: StoredAs = "dense") -> None:
        self.stored_as = stored_as
        self.packed: PackedWeight | None = None

    def finish(self, layer: ParallelLinear) -> None:
        self.packed = _pack(layer.weight.data, self.stored_as)
        if self.packed is not None:
            _remove_weight(layer)

    def finish_on_shapes(self, layer: ParallelLinear) -> bool:
        self.packed = _pack_shape(layer.weight.data, self.stored_as)
        if self.packed is not None:
            _remove_weight(layer)
        return True

    def apply(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is None:
            return super().apply(layer, x, bias)
        if not x.is_contiguous() and x.dim() != 2:
            x = x.contiguous()
        return self.packed.linear(x, bias)


class CPUExperts(DenseExperts):
    """Experts whose weights are packed or quantized once they are loaded.

    Until then, and if the kernels do not support them, they compute with dense weights.
    """

    def __init__(self, stored_as: StoredAs = "dense") -> None:
        self.stored_as = stored_as
        self.packed: PackedExperts | None = None

    def finish(self, layer: Experts) -> None:
        gate_up, down = layer.gate_up.data, layer.down.data
        for weight_format in self._formats(layer):
            self.packed = PackedExperts.pack(
                gate_up, down, weight_format, layer.biases, layer.options
            )
            del layer.gate_up, layer.down
            for name in ("gate_up", "down"):
                layer.slices.pop(name, None)

    def finish_on_shapes(self, layer: Experts) -> bool:
        half, down = layer.gate_up.data[0, : layer.intermediate_size], layer.down.data
        for weight_format in self._formats(layer):
            gates, ups, downs = (
                [_without_values(x, weight_format) for _ in range(len(down))]
                for x in (half, half, down[0])
            )
            gates = gates if layer.options.has_gate else ups
            self.packed = PackedExperts(gates, ups, downs, layer.biases, layer.options)
            del layer.gate_up, layer.down
        return True

    def _formats(self, layer: Experts) -> list["WeightFormat | None"]:
        """Return the format in which the kernels support the experts; empty if there is none."""
        parts = layer.gate_up.data[0, : layer.intermediate_size], layer.down.data[0]
        possible = _FORMATS[self.stored_as]
        return [each for each in possible if all(can_pack(part, each) for part in parts)][:1]

    def apply(self, layer: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.packed is None:
            return super().apply(layer, x, ids, weights)
        return self.packed.forward(x, ids, weights)

    def matmuls(self, layer: Experts) -> ExpertMatmuls | None:
        return super().matmuls(layer) if self.packed is None else self.packed


class PackedTable(DenseTable):
    """The table of an output head, shared with the input embedding if the two are tied.

    Until it is packed, and if the kernels do not support it, it is used as a dense table.
    """

    def __init__(self, stored_as: StoredAs = "dense") -> None:
        self.stored_as = stored_as
        self.packed: PackedWeight | None = None
        self.dtype: torch.dtype | None = None
        """Dtype of the rows that are looked up; None until the table is packed."""

    def finish(self, layer: VocabParallelEmbedding) -> None:
        if self.packed is None:  # a layer that shares the table may already have packed it
            self.dtype = layer.weight.dtype
            self.packed = _pack(layer.weight.data, self.stored_as)
        if self.packed is not None:
            _remove_weight(layer)

    def finish_on_shapes(self, layer: VocabParallelEmbedding) -> bool:
        if self.packed is None:
            self.dtype = layer.weight.dtype
            self.packed = _pack_shape(layer.weight.data, self.stored_as)
        if self.packed is not None:
            _remove_weight(layer)
        return True

    def embed(self, layer: VocabParallelEmbedding, ids: Tensor) -> Tensor:
        if self.packed is None:
            return super().embed(layer, ids)
        assert self.dtype is not None
        return self.packed.rows(ids, self.dtype)

    def multiply(self, layer: VocabParallelEmbedding, hidden_states: Tensor) -> Tensor:
        if self.packed is None:
            return super().multiply(layer, hidden_states)
        return self.packed.linear(hidden_states)


@torch.no_grad()
def _pack(weight: Tensor, stored_as: StoredAs) -> PackedWeight | None:
    """Pack the weight in the first format that supports it; None if no format does."""
    for weight_format in _FORMATS[stored_as]:
        if can_pack(weight, weight_format):
            if weight_format is None:
                return PackedWeight.pack(weight)
            return PackedWeight.quantize(weight, weight_format)
    return None


def _pack_shape(weight: Tensor, stored_as: StoredAs) -> PackedWeight | None:
    """Return an empty weight with the packed shape of `_pack`; None if no format supports it."""
    for weight_format in _FORMATS[stored_as]:
        if can_pack(weight, weight_format):
            return _without_values(weight, weight_format)
    return None


def _without_values(weight: Tensor, weight_format: WeightFormat | None) -> PackedWeight:
    wanted = weight_format or DENSE_FORMATS[weight.dtype]
    return PackedWeight(wanted, weight.shape, has_values=False)


def _remove_weight(layer: MethodLayer) -> None:
    del layer.weight
    layer.slices.pop("weight", None)
