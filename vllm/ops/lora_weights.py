"""Low-rank weights that LoRA adapters add to linear layers, in the format of the operators.

Knows tensors and indices of projections; knows no files, names or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class LoRAWeights:
    """The weights that an adapter adds to one projection: y += (x @ a.T) @ b.T."""

    a: Tensor
    """[r, in_features]"""
    b: Tensor
    """[size, r], multiplied by the scale of the adapter."""


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer that adapters can change, with the projections that are packed in it."""

    number: int
    """Index of the layer among the layers of its model."""
    first_part: int
    """Index of the layer's first projection among the projections of all layers; the others
    follow."""
    in_features: int
    parts: tuple[tuple[int, int], ...]
    """(first output feature, output features) of each projection."""

    @property
    def out_features(self) -> int:
        """Number of output features that an adapter may change, from the first on."""
        return max(offset + size for offset, size in self.parts)


@dataclass(frozen=True)
class LoRAHeads:
    """Matrices of heads that adapters can change, one for each head."""

    heads: Sequence[AdaptedLayer]
    """One projection each, with consecutive indices and equal sizes."""

    @property
    def first_part(self) -> int:
        """Index of the projection of the first head."""
        return self.heads[0].first_part

    @property
    def in_features(self) -> int:
        """Input features of a head."""
        return self.heads[0].in_features

    @property
    def out_features(self) -> int:
        """Output features of a head."""
        return self.heads[0].out_features


@dataclass(frozen=True)
class AdaptedExpert:
    """The two matmuls of an expert that adapters can change."""

    gate_up: AdaptedLayer
    down: AdaptedLayer


@dataclass(frozen=True)
class AdaptedExperts:
    """The experts of a layer that adapters can change, on this rank."""

    experts: Sequence[AdaptedExpert]
    first_expert: int
    """Index of this rank's first expert among all experts; the others follow."""


class PreparedAdapter(Protocol):
    """A LoRA adapter in the layout of a device."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        ...


@dataclass(frozen=True)
class AdaptedRows:
    """The adapter of each of T tokens."""

    adapters: Sequence[PreparedAdapter | None]
    """Adapters prepared by the same `NativeOps`; None: no token uses this index."""
    of_rows: Tensor
    """[T] int32 on the host: index into `adapters`; -1: the row has none."""


@dataclass(frozen=True)
class PlainAdapter:
    """The projections of an adapter as plain tensors."""

    parts: Sequence[LoRAWeights | None]
    """Weights of the projections, by their numbers; None: the adapter does not change this
    projection."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(part.a.nbytes + part.b.nbytes for part in self.parts if part is not None)
