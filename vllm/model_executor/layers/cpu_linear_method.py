"""Linear layers of the CPU with packed weights: dense while they are loaded, packed afterwards.

Packing is in place, or layer by layer, so that the model is never in memory twice. Knows no
files and no families of models.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.linear import ParallelLinear, UnquantizedLinear
from vllm.ops.cpu.linear import PackedWeight, WeightFormat, can_pack

StoredAs = Literal["dense", "int8", "int4"]
"""Format of a packed weight; dense is the model's dtype."""

_FORMATS: dict[StoredAs, tuple[WeightFormat | None, ...]] = {
    # In order of preference: the size of a layer may rule one out.
    "dense": (None,),
    "int8": (WeightFormat.INT8, None),
    "int4": (WeightFormat.INT4, WeightFormat.INT8, None),
}


class CPULinear(UnquantizedLinear):
    """A weight [output_size, input_size] that `pack` rearranges or quantizes once it is loaded.

    Until then, and where the kernels cannot take it, the layer works as an unquantized one. One
    object serves one layer.
    """

    def __init__(self, stored_as: StoredAs = "dense") -> None:
        self.stored_as = stored_as
        self.packed: PackedWeight | None = None

    def pack(self, layer: ParallelLinear) -> None:
        """Move the layer's weight into the packed form; the parameter is gone afterwards."""
        self.packed = _pack(layer.weight.data, self.stored_as)
        if self.packed is not None:
            del layer.weight
            layer.slices.pop("weight", None)

    def apply(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is None:
            return super().apply(layer, x, bias)
        if not x.is_contiguous() and x.dim() != 2:
            x = x.contiguous()
        return self.packed.linear(x, bias)


class PackedEmbedding(nn.Module):
    """Token embeddings read from the packed weight of the output head.

    Shape: ids [T] int64 -> [T, embedding_dim]
    """

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = packed
        self.dtype = dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.packed.rows(input_ids, self.dtype)


class PackedLMHead(nn.Module):
    """The output head of one rank over a packed weight.

    Shape: [N, embedding_dim] -> [N, num_embeddings]
    """

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.packed.linear(hidden_states)


@torch.no_grad()
def pack_layer(layer: ParallelLinear, stored_as: StoredAs) -> int:
    """Pack the weight of one layer as `pack_weights` does; the bytes of what is packed by it.

    Called layer by layer while a model is loaded, it keeps the peak of memory at the packed
    weights and one dense layer.
    """
    if type(layer.method) is UnquantizedLinear:
        layer.method = CPULinear(stored_as)
    if not isinstance(layer.method, CPULinear) or layer.method.packed is not None:
        return 0
    layer.method.pack(layer)
    return layer.method.packed.num_bytes if layer.method.packed else 0


@torch.no_grad()
def pack_weights(model: nn.Module, stored_as: StoredAs = "dense") -> int:
    """Pack the weights of every linear layer and output head of a loaded model, on the CPU.

    A layer that has a `CPULinear` already keeps the format that it was given; one of another
    method is left alone. Output heads, and the embeddings that share their weight, are stored in
    int8 where layers are int8 or int4. What the kernels cannot take stays dense.

    Args:
        model: whose parameters are filled and no longer needed by anyone else.
        stored_as: format of the layers that have no quantization.

    Returns:
        Bytes of packed weights.
    """
    num_bytes = 0
    head_stored_as: StoredAs = "dense" if stored_as == "dense" else "int8"
    for layer in [m for m in model.modules() if isinstance(m, ParallelLinear)]:
        num_bytes += pack_layer(layer, stored_as)
        if isinstance(layer.method, CPULinear) and layer.method.stored_as != "dense":
            head_stored_as = "int8"
    # Heads last: they are the largest, and quantized layers have given memory back by now.
    for name, head in list(model.named_modules()):
        if isinstance(head, ParallelLMHead) and head.tp.size == 1:
            num_bytes += _pack_head(model, name, head, head_stored_as)
    return num_bytes


def _pack_head(model: nn.Module, name: str, head: ParallelLMHead, stored_as: StoredAs) -> int:
    weight = head.weight
    packed = _pack(weight.data, stored_as)
    if packed is None:
        return 0
    for path, module in list(_sharing(model, weight)):
        is_head = path == name
        replacement = PackedLMHead(packed) if is_head else PackedEmbedding(packed, weight.dtype)
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replacement)
        del module.weight
    return packed.num_bytes


def _sharing(model: nn.Module, weight: nn.Parameter) -> Iterator[tuple[str, nn.Module]]:
    """Embeddings and heads with this very parameter, by their paths."""
    for path, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding) and module.weight is weight:
            yield path, module


def _pack(weight: Tensor, stored_as: StoredAs) -> PackedWeight | None:
    """The weight in the first format that it fits; None: in none."""
    for weight_format in _FORMATS[stored_as]:
        if can_pack(weight, weight_format):
            if weight_format is None:
                return PackedWeight.pack(weight)
            return PackedWeight.quantize(weight, weight_format)
    return None
