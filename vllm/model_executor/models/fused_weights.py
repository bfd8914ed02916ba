"""Checkpoint tensors that hold several weights of ours, such as one for query, key and value."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor

from vllm.config import ModelArch
from vllm.model_executor.layers.slice import Source


def split_rows(
    name: str, source: Source, fused: str, sizes: Mapping[str, int]
) -> Iterator[tuple[str, Source]]:
    """The parts of a tensor whose rows are those of one part after the other.

    Args:
        name: of the tensor, with `fused` in it.
        source: the tensor, [sum of sizes, ...].
        fused: what is replaced in the name.
        sizes: what takes its place -> rows of the part.
    """
    start = 0
    for part, size in sizes.items():
        yield name.replace(fused, part), source.rows(start, size)
        start += size


def split_groups(
    name: str, source: Source, fused: str, heads: Mapping[str, int], head_size: int
) -> Iterator[tuple[str, Source]]:
    """The parts of a tensor whose rows are groups, each with some heads of every part.

    Args:
        name: of the tensor, with `fused` in it.
        source: the tensor, [groups * heads of a group * head_size, ...].
        fused: what is replaced in the name.
        heads: what takes its place -> heads of that part in a group.
        head_size: rows of a head.
    """
    in_group, start = sum(heads.values()), 0
    for part, count in heads.items():
        pick = partial(_pick, in_group=in_group, start=start, count=count, head_size=head_size)
        yield name.replace(fused, part), source.mapped(pick)
        start += count


def split_qkv_groups(arch: ModelArch, name: str, source: Source) -> Iterable[tuple[str, Source]]:
    """A tensor of `qkv_proj` that has query, key and value of one key/value head after the other;
    other tensors as they are."""
    if ".qkv_proj." not in name:
        return ((name, source),)
    return split_groups(name, source, "qkv_proj", qkv_heads(arch), arch.head_size)


def _pick(tensor: Tensor, in_group: int, start: int, count: int, head_size: int) -> Tensor:
    groups = tensor.unflatten(0, (-1, in_group, head_size))
    return groups[:, start : start + count].flatten(0, 2)


def qkv_sizes(arch: ModelArch) -> dict[str, int]:
    """Rows of the query, key and value projection."""
    kv_size = arch.num_kv_heads * arch.head_size
    return {"q_proj": arch.num_heads * arch.head_size, "k_proj": kv_size, "v_proj": kv_size}


def qkv_heads(arch: ModelArch) -> dict[str, int]:
    """Query, key and value heads that belong to one key/value head."""
    return {"q_proj": arch.num_heads // arch.num_kv_heads, "k_proj": 1, "v_proj": 1}
