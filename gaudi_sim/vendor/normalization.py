"""Simulates `habana_frameworks.torch.hpex.normalization`."""

import torch
from torch import Tensor

__all__ = ["FusedRMSNorm"]


class FusedRMSNorm:
    """RMS norm: x * rsqrt(mean(x^2) + eps) * gamma over the last dimension."""

    @staticmethod
    def apply(
        data_in: Tensor,
        gamma: Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
        /,
    ) -> Tensor:
        """Compute the RMS norm in fp32; the result has the wider dtype of the two tensors."""
        out: Tensor = torch.ops.hpu.rms_norm(data_in, gamma, eps)[0]
        return out
