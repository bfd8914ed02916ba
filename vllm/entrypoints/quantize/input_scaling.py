"""Find the modules of a decoder layer that AWQ may scale: which module computes the inputs of which
layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from vllm.config.families import Family


@dataclass(frozen=True)
class ScaledPair:
    """A module whose outputs can be scaled, and all layers that read these outputs."""

    source: str
    targets: tuple[str, ...]


_EXPERT_UPS = ("mlp.experts.*.up_proj", "block_sparse_moe.experts.*.up_proj")


def pairs_of(family: Family, layer: nn.Module) -> Iterator[ScaledPair]:
    """Yield the scalable pairs of a transformers decoder layer, whose experts are linear layers."""
    names = [name.removesuffix(".weight") for name, _ in layer.named_parameters()]
    # Some versions of transformers keep all experts of Granite in one tensor, which cannot be
    # scaled here.
    has_other_experts = any(weight.dim() == 3 for weight in layer.parameters())
    for source, *patterns in family.awq_pairs:
        if has_other_experts and any(".experts." in pattern for pattern in patterns):
            continue
        targets = [n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns)]
        if source in names and targets:
            yield ScaledPair(source, tuple(targets))
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in _EXPERT_UPS):
            yield ScaledPair(name, (name.replace("up_proj", "down_proj"),))


def divide(family: Family, weight: Tensor, scales: Tensor) -> None:
    """Divide the outputs of a norm or a linear layer by scales, in place.

    Args:
        family: family of the model.
        weight: [features] of a norm, or [features, inputs].
        scales: [features]
    """
    if weight.dim() == 2:
        weight /= scales[:, None]
    elif family.norms_add_one:
        weight.add_(1).div_(scales).sub_(1)
    else:
        weight /= scales
