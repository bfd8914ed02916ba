"""The ranks that share a layer. A group of one needs no process group and does no work."""

from dataclasses import dataclass

import torch
from torch import Tensor


def divide(total: int, parts: int) -> int:
    """`total / parts`, which must be whole.

    Raises:
        ValueError: it is not; names both numbers.
    """
    if total % parts:
        raise ValueError(f"{total} cannot be split evenly over {parts} ranks")
    return total // parts


@dataclass(frozen=True)
class TPGroup:
    """Tensor-parallel group as one rank sees it."""

    rank: int = 0
    size: int = 1
    process_group: "torch.distributed.ProcessGroup | None" = None
    """None: the default group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks; in place when there are several."""
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] of each rank -> [..., n * size], in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=-1)
