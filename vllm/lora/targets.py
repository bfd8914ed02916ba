"""Describe the projections of a checkpoint that adapters can change: their sizes, and the parts
that this rank needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm.lora.weights import source_of
from vllm.model_executor.layers.embedding import ParallelLMHead
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.latent import LatentUpProjection
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.slice import Slice
from vllm.ops.lora_weights import LoRAWeights

Layer = ParallelLinear | ParallelLMHead | Experts


@dataclass(frozen=True)
class Target:
    """One projection of the checkpoint that adapters can change."""

    number: int
    """Index of the projection among all that can be adapted."""
    layer: Layer
    part: Slice
    other_size: int
    """Size of the dimension that is not split."""

    @property
    def input_size(self) -> int:
        """Number of inputs over all ranks."""
        return self.part.total if self.part.dim == 1 else self.other_size

    @property
    def output_size(self) -> int:
        """Number of outputs over all ranks."""
        return self.part.total if self.part.dim == 0 else self.other_size

    def put(self, a: Tensor, b: Tensor, parts: list[LoRAWeights | None]) -> None:
        """Store the part of an adapter's weights that this rank needs in `parts`.

        Args:
            a: [r, input_size]
            b: [output_size, r], multiplied by the scale.
            parts: weights by the index of the projection. Changed.
        """
        for number, part in enumerate(self._parts(*self._of_rank(a, b)), self.number):
            parts[number] = part

    def _parts(self, a: Tensor, b: Tensor) -> Sequence[LoRAWeights]:
        return (LoRAWeights(a, b),)

    def _of_rank(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's slice of the dimension that is divided; padding is zero."""
        if self.layer.tp.size == 1:
            return a, b
        if self.part.dim == 1:
            return self._slice(a, torch.empty(len(a), self.part.size, dtype=a.dtype)), b
        return a, self._slice(b, torch.empty(self.part.size, b.shape[1], dtype=b.dtype))

    def _slice(self, whole: Tensor, part: Tensor) -> Tensor:
        replace(self.part, offset=0).copy(part, source_of(whole), self.layer.tp)
        return part


@dataclass(frozen=True)
class LatentTarget(Target):
    """The target `kv_b_proj`, whose halves multiply queries and the output of attention.

    B has, for each head, the rows of the key and then of the value. A query q of a head is
    multiplied with (B A).T, so there A and B swap roles: q (rows of B).T, and then A.
    """

    layer: LatentUpProjection

    def _parts(self, a: Tensor, b: Tensor) -> Sequence[LoRAWeights]:
        keys, values = b.unflatten(0, (-1, sum(self.layer.head_sizes))).split(
            self.layer.head_sizes, dim=1
        )
        last = a.T  # stored once, because it is the same for all heads
        return [
            *(LoRAWeights(key.T, last) for key in keys),
            *(LoRAWeights(a, value) for value in values),
        ]
