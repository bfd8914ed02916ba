"""MXFP4 checkpoints of GPT-OSS: the experts in four bits, all other layers dense.

The model joins the blocks and scales of an expert (`Mxfp4Source`). The experts keep their four bits
if the device can multiply with them; otherwise they are dequantized while they are loaded.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, Index, ParamTarget
from vllm.model_executor.layers.stored.stored_experts import StoredExperts
from vllm.model_executor.layers.stored.stored_linear import StoredLinear, add_parameter, on_host
from vllm.model_executor.quantization.float_groups import E8M0_NAN, GROUPS
from vllm.model_executor.quantization.interface import Quantization
from vllm.ops.stored_weight import Mxfp4Weight

_DENSE_NAME = "down_proj"
"""Name of a dense weight of all experts of a layer."""
_GROUP = GROUPS["MXFP4"]
"""Inputs that share a scale."""
_SMALLEST_PART = 8
"""Inputs of a part of a group, where ranks share it."""


@dataclass(frozen=True)
class Mxfp4Source(CheckpointTensor):
    """A matrix [out_features, in_features] in MXFP4; reading it gives dequantized values."""

    weight: Mxfp4Weight | None = None


def mxfp4_source(blocks: Tensor, scales: Tensor) -> Mxfp4Source:
    """Join blocks [out_features, B, 16] and scales [out_features, B] to a matrix."""
    weight = Mxfp4Weight(blocks=blocks, scales=scales)

    def read(index: Index) -> Tensor:
        return weight.dequantize()[index]

    return Mxfp4Source(weight.shape, read, weight=weight)


class MXFP4(Quantization):
    """The quantization format of GPT-OSS: experts in MXFP4, every other layer dense."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        del settings  # not needed: the names of the tensors also show which modules are dense

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        """Return the weight method of experts.

        None if a rank would have odd parts of groups; then the experts are dequantized. Also None
        for dense experts: a fine-tuned model may still have the settings of the original one.
        """
        if self._is_dense(name):
            return None
        sizes = layer.intermediate_size, layer.hidden_size
        return StoredExperts(name) if all(size % _SMALLEST_PART == 0 for size in sizes) else None

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        if ".experts." not in name or self._is_dense(name.partition(".experts.")[0] + ".experts"):
            return None
        return Mxfp4Linear(name)

    def _is_dense(self, experts: str) -> bool:
        """Return whether the checkpoint has dense weights of the experts of this name."""
        names = (experts, *self.names.of_module(experts))
        return any(self.names.has_tensor(f"{name}.{_DENSE_NAME}") for name in names)


class Mxfp4Linear(StoredLinear):
    """One MXFP4 matrix of an expert.

    A group that is divided over ranks becomes smaller groups with the same scale.
    """

    def create_parameters(self, layer: ParallelLinear) -> None:
        num_out, num_in = layer.output_size, layer.input_size
        self.part = math.gcd(num_in, _GROUP)
        for name, columns in (("blocks", num_in // 2), ("scales", num_in // self.part)):
            add_parameter(layer, name, torch.empty(num_out, columns, dtype=torch.uint8))
            layer.slices[name] = {}
        # `blocks` represents the whole tensor when the loader asks for its shape.
        layer.slices["blocks"] = {
            part: replace(slice_, tensor="weight") for part, slice_ in layer.feature_slices.items()
        }

    def load(self, target: ParamTarget, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        slice_ = target.slice
        assert slice_ is not None
        scales = target.module.get_parameter("scales")
        expected = list(scales.shape)
        expected[1] *= self.part
        expected[slice_.dim] = slice_.total
        weight = source.weight if isinstance(source, Mxfp4Source) else None
        if weight is None or list(source.shape) != expected:
            raise WeightLoadError(
                f"tensor {name} has shape {list(source.shape)} in the checkpoint, but the model "
                f"needs {expected} in MXFP4"
            )
        for param, stored, group in (
            (target.param, weight.blocks.flatten(1), 2),
            (scales, weight.scales.repeat_interleave(_GROUP // self.part, dim=1), self.part),
        ):
            part = CheckpointTensor(stored.shape, stored.__getitem__)
            slice_.in_groups(group).copy(param, part, tp)

    def stored_weight(self, layer: ParallelLinear) -> Mxfp4Weight:
        return Mxfp4Weight(
            blocks=on_host(layer, "blocks").unflatten(1, (-1, self.part // 2)),
            scales=on_host(layer, "scales"),
        )


def check_mxfp4(name: str, blocks: Tensor, scales: Tensor) -> None:
    """Check the shapes and dtypes of blocks [..., B, 16] with scales [..., B].

    Args:
        name: name of the weight, for errors.
        blocks: tensor of the checkpoint.
        scales: tensor of the checkpoint.

    Raises:
        WeightLoadError: they do not fit each other, or a scale is NaN.
    """
    is_bytes = blocks.dtype == scales.dtype == torch.uint8
    if not is_bytes or blocks.shape != (*scales.shape, 16):
        raise WeightLoadError(
            f"{name}: MXFP4 blocks are {blocks.dtype} {list(blocks.shape)} and scales "
            f"{scales.dtype} {list(scales.shape)}; they must be uint8, with 16 bytes of blocks "
            f"for each scale"
        )
    if bool((scales == E8M0_NAN).any()):
        raise WeightLoadError(
            f"{name}_scales contains {E8M0_NAN}, which is NaN: the file is damaged"
        )
