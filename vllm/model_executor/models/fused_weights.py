"""Checkpoint layers that hold several of ours, such as one for query, key and value.

A family says which output features belong to which part. Where they are in a tensor of the layer, a
weight or what a format stores in place of it, is known to the format (`Source.picked`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from vllm.config import ModelArch
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import Features, Source


def split_features(
    name: str, source: Source, fused: str, sizes: Mapping[str, int]
) -> Iterator[tuple[str, Source]]:
    """The parts of a layer whose output features are those of one part after the other.

    Args:
        name: of a tensor of the layer, with `fused` in it.
        source: the tensor.
        fused: what is replaced in the name.
        sizes: what takes its place -> output features of the part.
    """
    total = sum(sizes.values())
    return _split(name, source, fused, sizes, total, total)


def split_groups(
    name: str,
    source: Source,
    fused: str,
    heads: Mapping[str, int],
    head_size: int,
    num_groups: int,
) -> Iterator[tuple[str, Source]]:
    """The parts of a layer whose output features are groups, each with some heads of every part.

    Args:
        name: of a tensor of the layer, with `fused` in it.
        source: the tensor.
        fused: what is replaced in the name.
        heads: what takes its place -> heads of that part in a group.
        head_size: features of a head.
        num_groups: of all features.
    """
    sizes = {part: count * head_size for part, count in heads.items()}
    return split_sizes_of_groups(name, source, fused, sizes, num_groups)


def split_sizes_of_groups(
    name: str, source: Source, fused: str, sizes: Mapping[str, int], num_groups: int
) -> Iterator[tuple[str, Source]]:
    """Split a layer as `split_groups`, into parts whose heads are of different sizes.

    Args:
        name, source, fused, num_groups: as there.
        sizes: replacement of `fused` -> output features of that part in a group.
    """
    group = sum(sizes.values())
    return _split(name, source, fused, sizes, group, num_groups * group)


def _split(
    name: str, source: Source, fused: str, sizes: Mapping[str, int], group: int, total: int
) -> Iterator[tuple[str, Source]]:
    start = 0
    for part, size in sizes.items():
        features = Features(total, group, start, size)
        yield name.replace(fused, part), replace(source, features=features)
        start += size


def split_qkv_groups(arch: ModelArch, name: str, source: Source) -> Iterable[tuple[str, Source]]:
    """A tensor of `qkv_proj` that has query, key and value of one key/value head after the other;
    other tensors as they are."""
    if ".qkv_proj." not in name:
        return ((name, source),)
    heads = qkv_heads(arch)
    return split_groups(name, source, "qkv_proj", heads, arch.head_size, arch.num_kv_heads)


def experts_in(name: str, source: Source, num_experts: int) -> range:
    """The experts that have a matrix, or a bias, each in a tensor.

    Args:
        name: of the tensor.
        source: the tensor, [experts, ...].
        num_experts: of the model.

    Raises:
        WeightLoadError: the tensor is of another number of experts.
    """
    if len(source.shape) < 2 or source.shape[0] != num_experts:
        raise WeightLoadError(
            f"tensor {name} has shape {list(source.shape)} in the checkpoint, the model needs "
            f"{num_experts} experts in dimension 0"
        )
    return range(num_experts)


def qkv_sizes(arch: ModelArch) -> dict[str, int]:
    """Rows of the query, key and value projection."""
    kv_size = arch.num_kv_heads * arch.head_size
    return {"q_proj": arch.num_heads * arch.head_size, "k_proj": kv_size, "v_proj": kv_size}


def qkv_heads(arch: ModelArch) -> dict[str, int]:
    """Query, key and value heads that belong to one key/value head."""
    return {"q_proj": arch.num_heads // arch.num_kv_heads, "k_proj": 1, "v_proj": 1}
