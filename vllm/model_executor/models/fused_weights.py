"""Splits checkpoint tensors that contain several of our layers, such as one for query, key and
value.

A family defines which output features belong to which part. The format knows where these features
are in a tensor, be it a weight or a tensor of a quantized weight (`CheckpointTensor.picked`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from vllm.config import ModelArch
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor, Features, NamedTensors

JOINED_EXPERTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),  # for experts without a gate projection
    "down_proj": ("down_proj",),
}
"""Parameter of transformers 5 with the matrices of all experts -> matrices of one, by rows."""


NUMBERED_MATRICES = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
"""Names of the matrices of an MLP in Mixtral and others -> our names."""


class FusedParts(NamedTuple):
    """The layers that a fused layer of a checkpoint consists of."""

    sizes: Mapping[str, int]
    """Name of each layer -> its output features in a group."""
    num_groups: int = 1
    """Groups that are stored one after another, each with some features of every layer."""


FusedLayers = Mapping[str, Callable[[ModelArch], FusedParts]]
"""Name of a fused layer -> function that returns its parts."""


def split_parts(
    name: str, source: CheckpointTensor, fused: str, parts: FusedParts
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the parts of the fused layer `fused`; see `split_sizes_of_groups`."""
    return split_sizes_of_groups(name, source, fused, parts.sizes, parts.num_groups)


def split_features(
    name: str, source: CheckpointTensor, fused: str, sizes: Mapping[str, int]
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the parts of a fused layer whose output features are stored one part after another.

    Args:
        name: name of a tensor of the layer, with `fused` in it.
        source: the tensor.
        fused: the substring of the name that is replaced.
        sizes: replacement of `fused` -> output features of that part.
    """
    total = sum(sizes.values())
    return _split(name, source, fused, sizes, total, total)


def split_groups(
    name: str,
    source: CheckpointTensor,
    fused: str,
    heads: Mapping[str, int],
    head_size: int,
    num_groups: int,
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the parts of a fused layer that is stored in groups, each with some heads of every
    part.

    Args:
        name: name of a tensor of the layer, with `fused` in it.
        source: the tensor.
        fused: the substring of the name that is replaced.
        heads: replacement of `fused` -> heads of that part in a group.
        head_size: features of a head.
        num_groups: number of groups.
    """
    sizes = {part: count * head_size for part, count in heads.items()}
    return split_sizes_of_groups(name, source, fused, sizes, num_groups)


def split_sizes_of_groups(
    name: str, source: CheckpointTensor, fused: str, sizes: Mapping[str, int], num_groups: int
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the parts of a fused layer that is stored in groups; heads may have different sizes.

    Args:
        name: name of a tensor of the layer, with `fused` in it.
        source: the tensor.
        fused: the substring of the name that is replaced.
        sizes: replacement of `fused` -> output features of that part in a group.
        num_groups: number of groups.
    """
    group = sum(sizes.values())
    return _split(name, source, fused, sizes, group, num_groups * group)


def _split(
    name: str,
    source: CheckpointTensor,
    fused: str,
    sizes: Mapping[str, int],
    group: int,
    total: int,
) -> Iterator[tuple[str, CheckpointTensor]]:
    start = 0
    for part, size in sizes.items():
        features = Features(total, group, start, size)
        yield name.replace(fused, part), replace(source, features=features)
        start += size


def add_one_to_norms(name: str, source: CheckpointTensor) -> NamedTensors:
    """Add 1 to the weight of a norm; return other tensors unchanged."""
    if name.endswith("norm.weight"):
        source = source.mapped(_plus_one)
    return ((name, source),)


def _plus_one(weight: Tensor) -> Tensor:
    return weight.float() + 1


def experts_in(name: str, source: CheckpointTensor, num_experts: int) -> range:
    """Return the indices of the experts in a tensor.

    Args:
        name: name of the tensor.
        source: the tensor, [experts, ...], of matrices or biases.
        num_experts: number of experts of the model.

    Raises:
        WeightLoadError: the tensor has another number of experts.
    """
    if len(source.shape) < 2 or source.shape[0] != num_experts:
        raise WeightLoadError(
            f"tensor {name} has shape {list(source.shape)} in the checkpoint, the model needs "
            f"{num_experts} experts in dimension 0"
        )
    return range(num_experts)


def split_by_expert(
    parent: str, source: CheckpointTensor, parts: dict[str, tuple[int, int]], experts: Iterable[int]
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the matrices of each expert from a tensor with all experts.

    Args:
        parent: beginning of the names, up to `experts`.
        source: [E, rows, columns].
        parts: name of a matrix -> (its first row, its number of rows).
        experts: experts from `experts_in`.
    """
    for expert in experts:
        matrix = source.narrow(0, expert, 1).mapped(lambda x: x[0])
        for name, (first, count) in parts.items():
            yield f"{parent}experts.{expert}.{name}.weight", matrix.narrow(0, first, count)


def split_joined_experts(name: str, source: CheckpointTensor) -> NamedTensors:
    """Split a tensor with all experts of a layer in the format of transformers 5.

    Return other tensors unchanged.
    """
    parent, _, joined = name.rpartition("experts.")
    parts = JOINED_EXPERTS.get(joined)
    if parts is None or len(source.shape) != 3:
        return ((name, source),)
    size = source.shape[1] // len(parts)
    rows = {part: (index * size, size) for index, part in enumerate(parts)}
    return split_by_expert(parent, source, rows, range(source.shape[0]))


def split_transposed_experts(
    name: str, source: CheckpointTensor
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the matrices of each expert from a tensor [experts, in, out].

    Args:
        name: name of the tensor, which ends with a key of `JOINED_EXPERTS`.
        source: the tensor.
    """
    parent, _, joined = name.rpartition(".")
    parts = JOINED_EXPERTS[joined]
    for expert in range(source.shape[0]):
        matrix = source.narrow(0, expert, 1).mapped(lambda x: x[0].T)
        size = matrix.shape[0] // len(parts)
        for index, part in enumerate(parts):
            yield f"{parent}.{expert}.{part}.weight", matrix.narrow(0, index * size, size)


def qkv_parts(arch: ModelArch) -> FusedParts:
    """Return the query, key and value projections, stored one after another."""
    kv_size = arch.num_kv_heads * arch.head_size
    return FusedParts(
        {"q_proj": arch.num_heads * arch.head_size, "k_proj": kv_size, "v_proj": kv_size}
    )


def qkv_groups(arch: ModelArch) -> FusedParts:
    """Return the query, key and value projections, stored by key/value heads.

    For each key/value head there are its queries, its key and its value.
    """
    group, size = arch.num_heads // arch.num_kv_heads, arch.head_size
    sizes = {"q_proj": group * size, "k_proj": size, "v_proj": size}
    return FusedParts(sizes, arch.num_kv_heads)


def gate_up_parts(arch: ModelArch) -> FusedParts:
    """Return the gate and up projections of an MLP, stored one after another."""
    return FusedParts({"gate_proj": arch.intermediate_size, "up_proj": arch.intermediate_size})
