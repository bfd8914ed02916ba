"""Linear layers of compressed-tensors with 2:4 sparsity (`sparse-24-bitmask`).

The two non-zero elements of each four are stored row by row, with one bit for each element that
tells whether it is stored. No device has kernels for them: they are expanded to the dtype of the
model, FP8 or int8.
"""

from typing import Literal

import torch
from torch import Tensor

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.slice import DENSE_DTYPES, CheckpointTensor, ParamTarget
from vllm.model_executor.layers.stored.stored_linear import on_host
from vllm.model_executor.layers.stored.stored_scales import without_nan, without_zero_scales
from vllm.model_executor.quantization.row_tensors import BYTES, RowsLinear, RowTensor, scale_tensor
from vllm.ops.stored_weight import DenseValues, Fp8Weight, Int8Weight, StoredWeight

Elements = Literal["dense", "fp8", "int8"]
"""Kinds of the values."""

_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class SparseLinear(RowsLinear):
    """A sparse linear layer with the tensors compressed, bitmask and (FP8, int8) weight_scale.

    Args:
        name: name of the module.
        elements: the kind of the values.
    """

    unused_tensors = ("shape", "input_scale")

    def __init__(self, name: str, elements: Elements) -> None:
        self.elements = elements
        dtype = _DTYPES.get(elements, torch.get_default_dtype())
        dtypes = DENSE_DTYPES if elements == "dense" else (dtype,)
        tensors = [
            RowTensor(name="compressed", dtypes=dtypes, dtype=dtype, size=2),
            RowTensor(name="bitmask", dtypes=BYTES, dtype=torch.uint8, size=8),
        ]
        if elements != "dense":
            tensors.append(scale_tensor("weight_scale"))
        super().__init__(name, tensors, -1)

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        if target.param_name == "weight_scale" and source.shape.numel() == 1:
            num_out = self.features_of(target, source)[0]
            source = source.mapped(lambda scale: scale.reshape(1, 1).expand(num_out, 1))
        return super().arranged(target, name, source)

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        values = self._inflated(on_host(layer, "compressed"), on_host(layer, "bitmask"))
        if self.elements == "dense":
            return DenseValues(values=values)
        scales = on_host(layer, "weight_scale")
        if self.elements == "int8":
            int8 = Int8Weight(numbers=values, scales=scales[:, 0])
            return without_zero_scales(self.name, int8)
        numbers = without_nan(self.name, values)
        fp8 = Fp8Weight(numbers=numbers, scales=scales, block_inputs=layer.input_size)
        return without_zero_scales(self.name, fp8)

    def _inflated(self, compressed: Tensor, bitmask: Tensor) -> Tensor:
        """Expand the stored values to all elements, [out_features, in_features]."""
        shifts = torch.arange(8, dtype=torch.uint8)
        is_kept = (bitmask[..., None] >> shifts & 1).flatten(1).bool()
        if bool((is_kept.unflatten(1, (-1, 4)).sum(-1) != 2).any()):
            raise WeightLoadError(
                f"the bitmask of {self.name} does not have two elements in each four: the file is "
                f"damaged"
            )
        is_byte = compressed.element_size() == 1
        kept = compressed.view(torch.int8) if is_byte else compressed
        values = torch.zeros(is_kept.shape, dtype=kept.dtype)
        values[is_kept] = kept.flatten()
        return values.view(compressed.dtype)
