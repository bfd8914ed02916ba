"""Scales of an fp8 KV cache on the device, and the conversion of what is written and read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.ops import get_ops


@dataclass(frozen=True)
class CacheScale:
    """The scale of one tensor of a layer.

    A tensor and not a number: graphs that differ in their numbers would be compiled apart.
    """

    scale: Tensor
    """[1] float32: what stored numbers are multiplied by."""
    inverse: Tensor
    """[1] float32: what new ones are multiplied by."""

    @classmethod
    def on(cls, device: torch.device, scale: float) -> "CacheScale":
        """The scale on a device."""
        numbers = (torch.tensor([x], dtype=torch.float32) for x in (scale, 1 / scale))
        return cls(*(number.to(device) for number in numbers))

    def store(self, new: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values in the dtype of the cache."""
        return get_ops().to_fp8(new, self.inverse, dtype)

    def read(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """What is in the cache, in the dtype of the queries."""
        return get_ops().from_fp8(stored, self.scale, dtype)


@dataclass(frozen=True)
class CacheScales:
    """Those of a layer."""

    key: CacheScale
    value: CacheScale
