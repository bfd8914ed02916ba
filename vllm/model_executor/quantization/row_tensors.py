"""Linear layers whose tensors have one row for each output feature, such as elements and scales.

A format declares its tensors (`RowTensor`); ranks and fused layers select their parts of all of
them in the same way. A group that is divided over ranks becomes smaller groups with the same scale.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import torch
from torch import Tensor

from vllm.config.quantization.settings_error import SettingsError, setting
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, Index, ParamTarget, Slice, whole
from vllm.model_executor.layers.stored.stored_linear import (
    SCALES,
    StoredLinear,
    StoredTensor,
    add_parameter,
    on_host,
)
from vllm.model_executor.layers.stored.stored_scales import checked_scales
from vllm.model_executor.quantization.grouped import layer_of

Of = Literal["inputs", "groups", "outputs", "layer"]
Check = Callable[[str, CheckpointTensor], CheckpointTensor]

BYTES = (torch.uint8,)
"""Dtype of tensors that hold several elements in a byte, or the bits of one."""


@dataclass(frozen=True, kw_only=True)
class RowTensor:
    """Describes one tensor of a layer, or of each part of a packed layer."""

    name: str
    """The end of the tensor's name in the checkpoint, after the name of the module."""
    dtypes: tuple[torch.dtype, ...]
    """Data types that the tensor may have in checkpoints."""
    attribute: str = ""
    """Name of the parameter; empty: the name of the tensor."""
    dtype: torch.dtype
    """Dtype of the parameter."""
    of: Of = "inputs"
    """[out_features, in_features * elements / size], [out_features, groups], [out_features], or
    [size]."""
    size: int = 1
    """Inputs in so many elements, or elements of a tensor of the layer."""
    elements: int = 1
    missing: float | None = None
    """Value if the checkpoint has no such tensor; None: it must be there."""
    check: Check | None = None
    """Makes of the name and the tensor one whose reading checks the values."""

    @property
    def param(self) -> str:
        """The name of the parameter."""
        return self.attribute or self.name.replace(".", "_")


def scale_tensor(
    name: str,
    of: Of = "groups",
    check: Check | None = checked_scales,
    size: int = 1,
    elements: int = 1,
) -> RowTensor:
    """Describe a tensor of scales or other factors. For the arguments see `RowTensor`."""
    scales = RowTensor(name=name, dtypes=SCALES, dtype=torch.float32, of=of, check=check)
    return replace(scales, size=size, elements=elements)


class RowsLinear(StoredLinear):
    """A linear layer that is stored in row tensors.

    Args:
        name: name of the module.
        tensors: the tensors of the layer.
        group: inputs of a group; -1: all.
        is_flat: a group may begin in one row and end in the next: the checkpoint has one column of
            values, in the order of the elements.
    """

    def __init__(
        self, name: str, tensors: Sequence[RowTensor], group: int, is_flat: bool = False
    ) -> None:
        super().__init__(name)
        self.tensors = {tensor.param: tensor for tensor in tensors}
        self.optional_parameters = tuple(t.param for t in tensors if t.missing is not None)
        self.group = group
        self.is_flat = is_flat
        self.part = 0
        """Inputs of a group as the parameters have it."""
        self.total_inputs = 0
        """Input features of all ranks together."""

    def create_parameters(self, layer: ParallelLinear) -> None:
        num_in, slices = layer.input_size, layer.feature_slices
        split = (slice_.total for slice_ in slices.values() if slice_.dim == 1)
        self.total_inputs = next(split, num_in)
        if self.group == -1:
            self.group = self.total_inputs
        if self.total_inputs % self.group and not self.is_flat:
            raise SettingsError(
                f"{setting()} has groups of {self.group} inputs, which do not divide the "
                f"{self.total_inputs} input features of {self.name}"
            )
        self.part = gcd(self.group, self.total_inputs, num_in)
        for tensor in self.tensors.values():
            self._check_fills(layer, tensor)
            shape = self._shape(layer, tensor)
            add_parameter(layer, tensor.param, torch.empty(shape, dtype=tensor.dtype))
            layer.slices[tensor.param] = {
                part: replace(self._slice(layer, tensor, number, slice_), tensor=tensor.name)
                for number, (part, slice_) in enumerate(slices.items())
            }

    def _check_fills(self, layer: ParallelLinear, tensor: RowTensor) -> None:
        if tensor.of == "inputs" and layer.input_size % tensor.size:
            raise ConfigError(
                f"{self.name} has {layer.input_size} input features on each rank, but each element "
                f"of {tensor.name} holds {tensor.size} of them, so a rank would need a part of an "
                "element. Use another tensor_parallel_size"
            )

    def _shape(self, layer: ParallelLinear, tensor: RowTensor) -> list[int]:
        num_out, num_in = layer.output_size, layer.input_size
        return {
            "inputs": [num_out, num_in // tensor.size * tensor.elements],
            "groups": [num_out, num_in // self.part],
            "outputs": [num_out],
            "layer": [len(layer.feature_slices), tensor.size],
        }[tensor.of]

    def _slice(self, layer: ParallelLinear, tensor: RowTensor, number: int, part: Slice) -> Slice:
        if tensor.of == "layer":
            return whole(0, number, 1, layer.tp)
        if tensor.of == "outputs":
            return part if part.dim == 0 else whole(0, 0, layer.output_size, layer.tp)
        size, elements = self.part, 1
        if tensor.of == "inputs":
            size, elements = tensor.size, tensor.elements
        if part.dim == 0:
            return part
        offset, count, total = (n // size * elements for n in (part.offset, part.size, part.total))
        return replace(part, offset=offset, size=count, total=total)

    def stored_tensors(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(tensor.dtypes, None if tensor.of == "layer" else 0)
            for name, tensor in self.tensors.items()
        }

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        tensor = self.tensors[target.param_name]
        if tensor.check is not None:
            source = tensor.check(name, source)
        if tensor.of == "layer":
            check_size(name, source, tensor.size)
            return source.mapped(lambda values: values.reshape(1, -1))
        if tensor.of == "outputs":
            return source.mapped(lambda values: values.reshape(-1))
        if tensor.of == "groups":
            in_parts = self.flat_parts if self.is_flat else self._in_parts
            return in_parts(target, name, source)
        return source

    def _in_parts(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        """Return the tensor with one column for each group of the parameter."""
        num_out, num_groups = self.features_of(target, source)[0], self.total_inputs // self.group
        if list(source.shape) != [num_out, num_groups]:
            raise WeightLoadError(
                f"tensor {name} has shape {list(source.shape)} in the checkpoint, but the layer "
                f"needs {[num_out, num_groups]}: a value for each {self.group} of its "
                f"{self.total_inputs} inputs"
            )
        repeats = self.group // self.part
        return source if repeats == 1 else source.mapped(lambda x: repeated(x, repeats))

    def flat_parts(
        self, target: ParamTarget, name: str, source: CheckpointTensor, repeats: int = 1
    ) -> CheckpointTensor:
        """Return values of groups that cross rows (`is_flat`), regrouped for the parameter.

        For the arguments see `arranged`; `repeats` is the number of groups that share a value.
        """
        num_out, num_in = self.features_of(target, source)
        num_groups = -(-num_out * num_in // self.group)
        check_size(name, source, -(-num_groups // repeats))

        def in_parts(values: Tensor) -> Tensor:
            of_groups = repeated(values.reshape(1, -1), repeats)[:, :num_groups]
            parts = repeated(of_groups, self.group // self.part)
            return parts[0, : num_out * num_in // self.part].view(num_out, -1)

        return source.mapped(in_parts)

    def features_of(self, target: ParamTarget, source: CheckpointTensor) -> tuple[int, int]:
        """Return (outputs, inputs) of the whole layer in the checkpoint."""
        assert target.slice is not None
        if source.features is not None:
            return source.features.total, self.total_inputs
        if self.tensors[target.param_name].of == "layer":
            layer = layer_of(target)
            part = list(layer.feature_slices.values())[target.slice.offset]
            return (part.total if part.dim == 0 else layer.output_size), self.total_inputs
        return target.slice.checkpoint_shape(target.param)[0], self.total_inputs

    def fill_missing(self, target: ParamTarget) -> None:
        assert target.slice is not None
        value = self.tensors[target.param_name].missing
        assert value is not None
        target.param.narrow(target.slice.dim, target.slice.offset, target.slice.size).fill_(value)

    def of_outputs(self, layer: ParallelLinear, param: str) -> Tensor:
        """Expand a per-part tensor of the layer to its outputs, [out_features, size]."""
        sizes = torch.tensor(self.part_sizes(layer))
        return on_host(layer, param).repeat_interleave(sizes, dim=0)

    def part_sizes(self, layer: ParallelLinear) -> list[int]:
        """Return the number of output features of each part of the layer on this rank."""
        slices = layer.feature_slices.values()
        return [each.size if each.dim == 0 else layer.output_size for each in slices]


def check_shape(name: str, source: CheckpointTensor, *accepted: Sequence[int]) -> None:
    """Check that a tensor has one of the accepted shapes.

    Raises:
        WeightLoadError: it has another shape.
    """
    if list(source.shape) not in [list(shape) for shape in accepted]:
        raise WeightLoadError(
            f"tensor {name} has shape {list(source.shape)} in the checkpoint, but the layer needs "
            f"{' or '.join(str(list(shape)) for shape in accepted)}"
        )


def check_size(name: str, source: CheckpointTensor, size: int) -> None:
    """Check that a tensor has `size` elements.

    Raises:
        WeightLoadError: it has another number of elements.
    """
    if source.shape.numel() != size:
        raise WeightLoadError(
            f"tensor {name} has shape {list(source.shape)} in the checkpoint, but the layer needs "
            f"{size} elements"
        )


def repeated(values: Tensor, repeats: int) -> Tensor:
    """Repeat each column, for any dtype: [R, N] -> [R, N * repeats]."""
    return values[..., None].expand(*values.shape, repeats).flatten(-2)


def checked(is_wrong: Callable[[Tensor], Tensor], what: str) -> Check:
    """Return a function for `RowTensor.check`, which checks values when they are read.

    Args:
        is_wrong: tells for each value whether it is wrong.
        what: description of the fault, for the error.
    """

    def check(name: str, source: CheckpointTensor) -> CheckpointTensor:
        def read(index: Index) -> Tensor:
            values = source.read(index)
            if not values.is_meta and bool(is_wrong(values).any()):
                raise WeightLoadError(f"tensor {name} contains {what}: the file is damaged")
            return values

        return replace(source, read=read, copy_to=None)

    return check


finite = checked(lambda values: ~values.isfinite(), "NaN or infinity")
"""Check of factors of any sign."""
