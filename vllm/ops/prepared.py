"""Interfaces of weights in the layout of a device: the operations of each kind."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from vllm.ops.expert_options import NO_BIASES, ExpertBiases, ExpertOptions


class PreparedWeight(Protocol):
    """A weight of a linear layer in the layout of a device.

    If it has parameters, it is an `nn.Module`.
    """

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x [..., in_features] @ weight.T + bias -> [..., out_features] of x's dtype."""
        ...


class PreparedTable(PreparedWeight, Protocol):
    """The weight of an output head, or of embeddings, in the layout of a device."""

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows `ids` [N] int64 of the weight, [N, in_features]."""
        ...


class PreparedExperts(Protocol):
    """The weights of experts in the layout of a device."""

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Compute the experts of each token; see `NativeOps.moe`."""
        ...


@runtime_checkable
class ExpertMatmuls(Protocol):
    """The two matmuls of experts, computed for one expert at a time."""

    def multiply_gate_up(self, expert: int, x: Tensor) -> Tensor:
        """Multiply x [n, hidden] with gate and up of one expert -> [n, 2 * I], gate then up; new.

        `expert` is the index on this rank.
        """
        ...

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        """Multiply x [n, I] with down of one expert -> [n, hidden], new."""
        ...


@dataclass(frozen=True)
class SingleExperts:
    """Computes the experts of a layer, one expert and one matmul at a time, with biases."""

    matmuls: ExpertMatmuls
    options: ExpertOptions
    """Computation between the matmuls, and where the weight of a choice applies."""
    biases: ExpertBiases = NO_BIASES
    """Biases as this rank adds them."""

    def gate_up(self, expert: int, x: Tensor) -> Tensor:
        """Compute gate and up of one expert with bias: [n, hidden] -> [n, 2 * I], new.

        `expert` is the index on this rank.
        """
        y = self.matmuls.multiply_gate_up(expert, x)
        return y if self.biases.gate_up is None else y + self.biases.gate_up[expert]

    def down(self, expert: int, x: Tensor) -> Tensor:
        """Compute down of one expert with bias: [n, I] -> [n, hidden], new."""
        y = self.matmuls.multiply_down(expert, x)
        return y if self.biases.down is None else y + self.biases.down[expert]


class PreparedHeads(Protocol):
    """A matrix [I, O] for each of H heads, in the layout of a device.

    If it has parameters, it is an `nn.Module`.
    """

    def multiply(self, x: Tensor, appended: Tensor | None = None) -> Tensor:
        """Multiply each head with its matrix.

        Args:
            x: [T, H, I]; each head is dense, but heads need not be adjacent.
            appended: [T, H, R], concatenated after the result of each head.

        Returns:
            [T, H, O], or [T, H, O + R]; new and dense.
        """
        ...

    def dense(self) -> Tensor:
        """Return the dense matrices [H, I, O]."""
        ...
