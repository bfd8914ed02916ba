"""Activations of MLPs in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


class NativeActivations:
    """The activations of `NativeOps`."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Compute `silu(x[..., :I]) * x[..., I:]`, the activation of a gated MLP.

        Args:
            x: [..., 2 * I]: gate, then up. Not changed.

        Returns:
            [..., I], new and dense.

        Raises:
            ValueError: the last dimension is odd.
        """
        gate, up = _gate_and_up(x)
        return F.silu(gate) * up

    def gelu(self, x: Tensor, is_tanh: bool) -> Tensor:
        """Compute GELU: x times the probability that a standard normal value is below x.

        arXiv 1606.08415.

        Args:
            x: [..., N]. Not changed.
            is_tanh: use the tanh approximation.

        Returns:
            A new dense tensor, shape and dtype of x.
        """
        return F.gelu(x, approximate="tanh" if is_tanh else "none")

    def quick_gelu(self, x: Tensor) -> Tensor:
        """Compute x * sigmoid(1.702 x), an approximation of GELU (arXiv 1606.08415).

        Args:
            x: [..., N]. Not changed.

        Returns:
            A new dense tensor, shape and dtype of x.
        """
        return x * torch.sigmoid(1.702 * x)

    def squared_relu(self, x: Tensor) -> Tensor:
        """Compute the squares of positive elements, and 0 for all others (arXiv 2109.08668).

        Args:
            x: [..., N]. Not changed.

        Returns:
            A new dense tensor, shape and dtype of x.
        """
        return F.relu(x).square()

    def xielu(self, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        # In float32 and without softplus and expm1, which Gaudi does not support.
        """Compute xIELU (Huang and Schlag 2024, arXiv 2411.13010).

        p x^2 + x / 2 for positive elements, and n (e^x - 1 - x) + x / 2 for the others.

        Args:
            x: [..., N]. Not changed.
            alpha_p: [1]: p is its softplus.
            alpha_n: [1]: n is its softplus plus 1 / 2.

        Returns:
            A new dense tensor, shape and dtype of x.
        """
        p, n = (alpha.float().exp().add(1.0).log() for alpha in (alpha_p, alpha_n))
        y = x.float()
        below = (y.clamp(max=-1e-6).exp() - 1.0 - y) * (n + 0.5)
        return (torch.where(y > 0, p * y * y, below) + 0.5 * y).to(x.dtype)

    def gelu_and_mul(self, x: Tensor, is_tanh: bool) -> Tensor:
        """Compute `gelu(x[..., :I]) * x[..., I:]`, the activation of a gated MLP.

        Args:
            x: [..., 2 * I]: gate, then up. Not changed.
            is_tanh: use the tanh approximation of gelu.

        Returns:
            [..., I], new and dense.

        Raises:
            ValueError: the last dimension is odd.
        """
        gate, up = _gate_and_up(x)
        return F.gelu(gate, approximate="tanh" if is_tanh else "none") * up

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Compute cap * tanh(x / cap), which is between -cap and cap (Gemma 2; arXiv 2408.00118).

        Args:
            x: any shape. Not changed.
            cap: above 0.

        Returns:
            A new dense tensor, shape and dtype of x; rounded after each of the three operations.
        """
        return torch.tanh(x / cap) * cap


def _gate_and_up(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1] % 2:
        raise ValueError(f"the last dimension of x must be even (gate and up), got {x.shape[-1]}")
    gate, up = x.chunk(2, dim=-1)
    return gate, up
