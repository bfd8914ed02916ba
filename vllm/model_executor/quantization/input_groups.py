"""The groups of inputs of a layer that share a scale, from the view of one rank."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm.config.quantization.settings_error import SettingsError, setting
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, Slice, whole


@dataclass(frozen=True, kw_only=True)
class InputGroups:
    """Groups of equal size in the checkpoint.

    The inputs of a rank may begin or end inside a group.
    """

    name: str
    """Name of the layer, for errors."""
    size: int
    """Inputs of a group in the checkpoint."""
    total: int
    """Groups in the checkpoint."""
    count: int
    """Groups of which this rank has scales."""
    first_input: int
    """Index of the first input of this rank."""
    num_inputs: int
    """Number of inputs of this rank."""

    @classmethod
    def of_layer(
        cls, name: str, group_size: int, layer: ParallelLinear, is_ordered: bool = False
    ) -> "InputGroups":
        """Compute the groups of a layer on this rank.

        Args:
            name: name of the layer.
            group_size: inputs of a group; -1: all.
            layer: the layer, which may be split over ranks.
            is_ordered: the inputs of a group need not be neighbours (act-order).

        Raises:
            ConfigError: groups do not divide the inputs of the layer.
        """
        num_inputs = layer.input_size
        split = (s for s in layer.feature_slices.values() if s.dim == 1)
        total_inputs = next((s.total for s in split), num_inputs)
        size = total_inputs if group_size == -1 else group_size
        if total_inputs % size:
            raise SettingsError(
                f"{setting('group_size')} is {size}, which does not divide the {total_inputs} "
                f"input features of {name}"
            )
        total = total_inputs // size
        is_split = total_inputs != num_inputs
        is_shared = is_split and (is_ordered or num_inputs % size != 0)
        return cls(
            name=name,
            size=size,
            total=total,
            count=total if is_shared or total == 1 else num_inputs // size,
            first_input=layer.tp.rank * num_inputs if is_split else 0,
            num_inputs=num_inputs,
        )

    @property
    def is_split(self) -> bool:
        """Whether the inputs of the layer are split over ranks."""
        return self.num_inputs != self.size * self.total

    @property
    def has_all(self) -> bool:
        """Whether a rank stores the scales of all groups, although it has only some of the
        inputs.
        """
        return self.is_split and self.count == self.total

    def slice_of(self, slice_: Slice, dim: int, layer: ParallelLinear) -> Slice:
        """Return the slice for scales whose dimension `dim` are the groups.

        Args:
            slice_: slice of the features of a part of the layer.
            dim: 0 or 1; the other dimension are the outputs.
            layer: layer that has the parts.
        """
        if slice_.dim == 0:
            return replace(slice_, dim=1 - dim)
        if self.has_all:
            return whole(dim, 0, self.count, layer.tp)
        return Slice(dim, 0, self.count, self.total)

    def neighbours(self) -> Tensor:
        """Return the group of each input of this rank if groups are neighbours, [inputs] int32."""
        inputs = torch.arange(self.first_input, self.first_input + self.num_inputs)
        return (inputs // self.size).int()

    def checked(self, name: str, source: CheckpointTensor) -> CheckpointTensor:
        """Return the stored group of each input of the layer (g_idx), [1, inputs].

        Raises:
            WeightLoadError: the tensor has another number of dimensions.

        Reading raises:
            WeightLoadError: the groups are not the expected number of groups of equal size.
        """
        if len(source.shape) != 1:
            raise WeightLoadError(
                f"tensor {name} has shape {list(source.shape)}, but it must have one dimension"
            )

        def check(numbers: Tensor) -> Tensor:
            if not numbers.is_meta:
                least, most = int(numbers.min()), int(numbers.max())
                sizes = torch.zeros(0)
                if least >= 0 and most < self.total:
                    sizes = numbers.long().bincount(minlength=self.total)
                if not len(sizes) or bool((sizes != self.size).any()):
                    raise WeightLoadError(
                        f"tensor {name} has group indices from {least} to {most}; by group_size "
                        f"in config.json it must name each of {self.total} groups {self.size} "
                        "times"
                    )
            return numbers[None]

        return source.mapped(check)

    def of_inputs(self, rows: Tensor | None) -> "tuple[Tensor | None, Tensor | None]":
        """Return which scales of this rank belong to which of its inputs.

        Args:
            rows: [parts, inputs], g_idx of each part of a packed layer; None: groups are
                neighbours.

        Returns:
            (the group of each input, [inputs] int32; None: neighbours in groups of equal size, the
            checkpoint's groups to which these indices refer, [groups] int64; None: all of the rank)

        Raises:
            WeightLoadError: the parts differ.
            ConfigError: the inputs of groups are not neighbours, and the settings do not say so.
        """
        if rows is not None and bool((rows != rows[0]).any()):
            raise WeightLoadError(
                f"the parts of {self.name} have different g_idx; they run as one layer, so their "
                f"inputs must have the same order"
            )
        neighbours = self.neighbours()
        groups = neighbours if rows is None else rows[0]
        is_plain = torch.equal(groups, neighbours)
        if not self.has_all:
            if self.is_split and not is_plain:
                raise SettingsError(
                    f"the inputs of {self.name} are ordered by activation (g_idx), but "
                    f"{setting('desc_act')} is not true: set it, or use tensor_parallel_size 1"
                )
            return (None if is_plain else groups), None
        kept, numbered = groups.unique(return_inverse=True)
        is_even = self.num_inputs % self.size == 0
        return (None if is_plain and is_even else numbered.int()), kept.long()
