"""Keep the scales of an FP8 KV cache on the device, and convert values that are written and
read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.errors import WeightLoadError
from vllm.ops import get_ops


def is_one_number(scales: Tensor) -> bool:
    """Return whether all heads have the same scale."""
    return bool((scales == scales[0]).all())


@dataclass(frozen=True)
class CacheScale:
    """The scale of the keys or values of a layer: one for all heads, or one per head.

    Scales are tensors and not Python numbers, because each Python number would be compiled as a
    separate graph.
    """

    scale: Tensor
    """[1] float32: factor on stored values."""
    inverse: Tensor
    """[1] float32: factor on new values before they are stored."""
    by_head: tuple[Tensor, Tensor] | None = None
    """Two tensors [G, 1] float32: additional factors of each head, on stored values and on new
    values; `scale` and `inverse` are 1 then. None: heads have one scale."""

    @classmethod
    def on(cls, device: torch.device, scales: Tensor) -> "CacheScale":
        """Copy the scales [G] to a device."""
        inverses = scales.reciprocal()
        if is_one_number(scales):
            return cls(scales[:1].clone().to(device), inverses[:1].to(device))
        by_head = (scales[:, None].clone().to(device), inverses[:, None].to(device))
        return cls(torch.ones(1).to(device), torch.ones(1).to(device), by_head)

    def put(self, scales: Tensor) -> None:
        """Use these scales [G] from now on.

        Raises:
            WeightLoadError: there was one scale for all heads, and now there are several, but the
                compiled code multiplies with one.
        """
        new = CacheScale.on(self.scale.device, scales)
        if self.by_head is None and new.by_head is not None:
            raise WeightLoadError(
                "the new checkpoint has a KV-cache scale for each head, but the engine was "
                "started with one for each layer. Restart it with the new checkpoint"
            )
        if self.by_head is None:
            self.scale.copy_(new.scale)
            self.inverse.copy_(new.inverse)
            return
        for ours, theirs in zip(self.by_head, (scales, scales.reciprocal()), strict=True):
            ours.copy_(theirs[:, None])

    def store(self, new: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert keys or values [..., G, D] to the dtype of the cache."""
        if self.by_head is not None:
            new = new.float() * self.by_head[1]
        return get_ops().to_fp8(new, self.inverse, dtype)

    def read(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert the content of the cache [..., G, D] to the dtype of the queries."""
        if self.by_head is None:
            return get_ops().from_fp8(stored, self.scale, dtype)
        numbers = get_ops().from_fp8(stored, self.scale, torch.float32)
        return (numbers * self.by_head[0]).to(dtype)


@dataclass(frozen=True)
class CacheScales:
    """The scales of the KV cache of a layer."""

    key: CacheScale
    value: CacheScale


@dataclass(frozen=True)
class PromptScales:
    """The scales of a layer whose prompts may run attention in FP8; each is one value for all
    heads.
    """

    query: CacheScale
    cache: CacheScales
    """Keys and values are rounded as they are for the cache."""
    weights: CacheScale
    """Scale of the weights of the softmax."""
