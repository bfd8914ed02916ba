"""Linear layers of integers with scales and zero points per group of inputs (GPTQ and AWQ)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from vllm.config.quantization.settings_error import SettingsError, SettingsMismatch, setting
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.slice import WORD_BITS, CheckpointTensor, ParamTarget, Slice, whole
from vllm.model_executor.layers.stored.stored_linear import (
    SCALES,
    StoredLinear,
    StoredTensor,
    add_parameter,
    on_host,
)
from vllm.model_executor.layers.stored.stored_scales import checked_scales, without_zero_scales
from vllm.model_executor.quantization.input_groups import InputGroups
from vllm.ops.stored_weight import GroupedWeight, pack_bits, unpack_awq, unpack_bits

_NARROW = 1024
"""A layer with fewer outputs is unpacked while it is loaded, as the outputs of its parts may not
fill the words of a checkpoint. Wider layers keep their words, which needs less memory."""


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """Storage layout of a layer with low-bit integer weights: bits, groups, zero points."""

    bits: int
    group_size: int
    """Inputs of a group; -1: all."""
    is_awq: bool = False
    """Words hold outputs of an input, in the order of AWQ; False: inputs of an output."""
    zero_offset: int = 0
    """Number that is added to stored zero points."""
    has_groups: bool = False
    """`g_idx` says which group an input is in."""
    is_ordered: bool = False
    """Whether the inputs of a group may be anywhere, instead of next to each other."""
    is_symmetric: bool = False
    """All zero points are half of the range; else they may be anything."""

    @property
    def middle(self) -> int:
        """The middle of the range of values, 2^(bits - 1)."""
        return 1 << self.bits - 1


class GroupedLinear(StoredLinear):
    """A linear layer with the tensors qweight, qzeros, scales and, for act-order, g_idx.

    Old checkpoints without act-order have no g_idx, and symmetric AWQ checkpoints need no qzeros.

    Args:
        name: name of the module.
        layout: layout of its tensors.
    """

    def __init__(self, name: str, layout: GroupLayout) -> None:
        super().__init__(name)
        self.layout = layout
        self.unpacks_weight = False
        """The parameter has a number in each element, not words."""
        has_implied_zeros = layout.is_awq and layout.is_symmetric
        optional = {"qzeros": has_implied_zeros, "g_idx": not layout.is_ordered}
        self.optional_parameters = tuple(name for name, is_so in optional.items() if is_so)

    def create_parameters(self, layer: ParallelLinear) -> None:
        layout, num_in, num_out = self.layout, layer.input_size, layer.output_size
        groups = self._groups_of(layer)
        parts = layer.feature_slices
        shape, qweight_type = [num_in, num_out], torch.uint8
        by_input = {part: transposed(s) for part, s in parts.items()}
        self.unpacks_weight = layout.is_awq and num_out < _NARROW
        if not self.unpacks_weight:
            packed_dim, qweight_type = 1 if layout.is_awq else 0, torch.int32
            shape[packed_dim] = num_words(self.name, layout.bits, shape[packed_dim])
            by_input = {
                part: in_words(self.name, layout.bits, s, packed_dim)
                for part, s in by_input.items()
            }
        add_parameter(layer, "qweight", torch.empty(shape, dtype=qweight_type))
        layer.slices["qweight"] = by_input
        by_group = {part: groups.slice_of(s, 0, layer) for part, s in parts.items()}
        for name, dtype in (("qzeros", torch.uint8), ("scales", torch.float32)):
            add_parameter(layer, name, torch.empty(groups.count, num_out, dtype=dtype))
            layer.slices[name] = by_group
        if layout.has_groups:
            add_parameter(layer, "g_idx", torch.empty(len(parts), num_in, dtype=torch.int32))
            layer.slices["g_idx"] = {
                part: whole(0, i, 1, layer.tp) if s.dim == 0 else s
                for i, (part, s) in enumerate(parts.items())
            }

    def _groups_of(self, layer: ParallelLinear) -> InputGroups:
        layout = self.layout
        return InputGroups.of_layer(self.name, layout.group_size, layer, layout.is_ordered)

    def stored_tensors(self) -> dict[str, StoredTensor]:
        words = (torch.int32,)
        has_words = self.layout.is_awq and not self.unpacks_weight
        return {
            "qweight": StoredTensor(words, 1, self.layout.bits if has_words else WORD_BITS),
            "qzeros": StoredTensor(words, 1),
            "scales": StoredTensor(SCALES, 1),
            "g_idx": StoredTensor((torch.int32, torch.int64), None),
        }

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        if target.param_name == "scales":
            return checked_scales(name, source)
        if target.param_name == "g_idx":
            return self._groups_of(layer_of(target)).checked(name, source)
        if target.param.dtype == torch.uint8:
            return in_numbers(target, name, source, self.layout.bits, self._unpacked)
        return source

    def _unpacked(self, words: Tensor) -> Tensor:
        """Unpack rows of words of output features, [R, W] -> [R, N]."""
        is_awq = self.layout.is_awq
        return unpack_awq(words) if is_awq else unpack_bits(words, self.layout.bits)

    def fill_missing(self, target: ParamTarget) -> None:
        assert target.slice is not None
        if target.param_name == "qzeros":
            part = target.slice
            target.param.narrow(part.dim, part.offset, part.size).fill_(self._stored_middle)
            return
        row = target.slice.offset if target.slice.dim == 0 else 0
        target.param[row].copy_(self._groups_of(layer_of(target)).neighbours())

    def fill_indices(self, layer: ParallelLinear) -> None:
        if self.layout.has_groups:
            layer.get_parameter("g_idx").copy_(self._groups_of(layer).neighbours())
        if self.layout.is_symmetric:
            zeros = layer.get_parameter("qzeros")
            zeros.copy_(torch.full(zeros.shape, self._stored_middle, dtype=zeros.dtype))

    @property
    def _stored_middle(self) -> int:
        """The middle of the range in the encoding of stored zero points."""
        return self.layout.middle - self.layout.zero_offset

    def stored_weight(self, layer: ParallelLinear) -> GroupedWeight:
        layout = self.layout
        qzeros, scales = on_host(layer, "qzeros"), on_host(layer, "scales")
        zeros = qzeros.to(torch.int16) + layout.zero_offset
        if layout.is_symmetric:
            # Zero points of padding, whose scale is 0, do not matter.
            check_symmetric(self.name, layout, zeros[scales != 0])
        g_idx = on_host(layer, "g_idx") if layout.has_groups else None
        groups, kept = self._groups_of(layer).of_inputs(g_idx)
        if kept is not None:
            scales, zeros = scales[kept], zeros[kept]
        words, is_awq = on_host(layer, "qweight"), layout.is_awq
        if self.unpacks_weight:
            words, is_awq = pack_bits(words.T, layout.bits).T.contiguous(), False
        weight = GroupedWeight(
            words=words, is_awq=is_awq, bits=layout.bits, scales=scales, zeros=zeros, groups=groups
        )
        return without_zero_scales(self.name, weight)


def check_symmetric(name: str, layout: GroupLayout, zeros: Tensor) -> None:
    """Check that all zero points of a symmetric layer are the middle of the range.

    Raises:
        WeightLoadError: they are not.
    """
    if bool((zeros == layout.middle).all()):
        return
    key, wrong = "sym", "either sym or checkpoint_format is wrong there"
    if layout.is_awq:
        key, wrong = "zero_point", "zero_point is wrong there, or qzeros in the checkpoint"
    raise SettingsMismatch(
        f"the zero points of {name} (qzeros) are from {int(zeros.min())} to {int(zeros.max())}, "
        f"but must be {layout.middle} by {setting(key)}: {wrong}"
    )


def layer_of(target: ParamTarget) -> ParallelLinear:
    """Return the layer of a parameter; an output head counts as a linear layer here."""
    layer: Any = target.module
    return cast(ParallelLinear, layer)


def in_numbers(
    target: ParamTarget,
    name: str,
    source: CheckpointTensor,
    bits: int,
    unpack: Callable[[Tensor], Tensor],
    dim: int = 1,
) -> CheckpointTensor:
    """Unpack a tensor of words, so that each output feature is an element of its own.

    Args:
        target: part of the parameter.
        name: name of the tensor, for errors.
        source: int32.
        bits: bits of one value.
        unpack: converts rows of words [R, W] to their values [R, N] uint8.
        dim: the dimension of the output features.

    Raises:
        WeightLoadError: the tensor has another shape.
    """
    assert target.slice is not None
    numbers = list(target.slice.checkpoint_shape(target.param))
    if source.features is not None:
        numbers[dim] = source.features.total
    words = list(numbers)
    words[dim] = -(-numbers[dim] * bits // WORD_BITS)
    if list(source.shape) != words:
        raise WeightLoadError(
            f"tensor {name} has shape {list(source.shape)} in the checkpoint, the model needs "
            f"{words}"
        )
    if dim == 1:
        return source.made(torch.Size(numbers), torch.uint8, unpack)
    return source.made(torch.Size(numbers), torch.uint8, lambda x: unpack(_rows_of(x.T)).T)


def _rows_of(words: Tensor) -> Tensor:
    """Return a contiguous copy whose last stride is 1, even for a single column."""
    return words.clone(memory_format=torch.contiguous_format)


def in_words(name: str, bits: int, slice_: Slice, packed_dim: int) -> Slice:
    """Convert a slice of features to a slice of 32-bit words if it is along the packed dimension.

    Raises:
        ConfigError: the features do not fill whole words.
    """
    if slice_.dim != packed_dim:
        return slice_
    offset, size, total = (
        num_words(name, bits, n) for n in (slice_.offset, slice_.size, slice_.total)
    )
    return replace(slice_, offset=offset, size=size, total=total)


def num_words(name: str, bits: int, num_features: int) -> int:
    """Return the number of 32-bit words that `num_features` values fill.

    Raises:
        ConfigError: the last word would not be full.
    """
    if num_features * bits % WORD_BITS:
        raise SettingsError(
            f"by {setting()} the weights have {bits} bits: {num_features} features of {name} do "
            "not fill whole 32-bit words, so the tensor cannot be unpacked"
        )
    return num_features * bits // WORD_BITS


def transposed(slice_: Slice) -> Slice:
    """Return the slice for a parameter with exchanged dimensions."""
    return replace(slice_, dim=1 - slice_.dim)
